"""Building and loading: what the verifier, the benchmarks and vLLM all rest on."""

import multiprocessing
from pathlib import Path

import pytest
import torch

from strop.kernels.build import BuildError, Source, build, load

ADD = """
#include "kernel.h"
STROP_KERNEL add(const DLTensor* const* in, int n_in, DLTensor* const* out, int n_out) {
  if (n_in != 2 || n_out != 1 || !is_f32(in[0]) || in[0]->ndim != 2) return 1;
  const DLTensor *a = in[0], *b = in[1];
  for (int64_t i = 0; i < a->shape[0]; i++)
    for (int64_t j = 0; j < a->shape[1]; j++)
      data<float>(out[0])[i * out[0]->strides[0] + j * out[0]->strides[1]] =
          data<float>(a)[i * a->strides[0] + j * a->strides[1]] +
          data<float>(b)[i * b->strides[0] + j * b->strides[1]];
  return 0;
}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("objects")


def test_a_kernel_is_built_once_and_sees_strides(folder: Path):
    source = Source("add", ADD)
    path = build(source, folder)
    stamp = path.stat().st_mtime_ns
    assert build(source, folder) == path and path.stat().st_mtime_ns == stamp
    a, b = torch.randn(3, 5), torch.randn(5, 3).t()
    out = torch.full((3, 5), torch.nan)
    assert load(path, "add")([a, b], [out]) == 0
    assert torch.equal(out, a + b)


def test_a_kernel_may_refuse(folder: Path):
    add = load(build(Source("add", ADD), folder), "add")
    half = torch.zeros(2, 2, dtype=torch.bfloat16)
    assert add([half, half], [half]) == 1


def test_what_decides_the_object_decides_the_digest():
    digests = {
        Source("add", ADD).digest,
        Source("sub", ADD).digest,
        Source("add", ADD + " ").digest,
        Source("add", ADD, ("-DX=1",)).digest,
        Source("add", ADD, ("-march=x86-64-v4",)).digest,
    }
    assert len(digests) == 5


def test_the_compilers_words_are_in_the_error(folder: Path):
    before = set(folder.iterdir())
    with pytest.raises(BuildError, match="undeclared_thing"):
        build(Source("bad", "int bad() { return undeclared_thing; }"), folder)
    assert {p for p in set(folder.iterdir()) - before if not p.name.endswith(".lock")} == set()


def test_a_compile_that_does_not_end_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("strop.kernels.build.TIME_LIMIT_S", 0.5)
    endless = "template <int N> struct F { static constexpr int v = F<N-1>::v + F<N-2>::v; };"
    slow = "constexpr long f(long n) { return n < 2 ? n : f(n - 1) + f(n - 2); } static_assert(f(60) > 0);"
    with pytest.raises(BuildError, match="within"):
        build(Source("slow", endless + slow, ("-fconstexpr-ops-limit=2147483647",)), folder)


def test_two_processes_build_the_same_object(folder: Path):
    source = Source("add", ADD + "// at once\n")
    with multiprocessing.get_context("fork").Pool(2) as pool:
        first, second = pool.starmap(build, [(source, folder)] * 2)
    assert first == second and load(first, "add")([torch.ones(1, 1)] * 2, [torch.zeros(1, 1)]) == 0


def test_a_function_that_is_not_there(folder: Path):
    path = build(Source("add", ADD), folder)
    with pytest.raises(BuildError, match="subtract"):
        load(path, "subtract")


def test_a_tensor_that_has_no_name_in_the_interface(folder: Path):
    add = load(build(Source("add", ADD), folder), "add")
    with pytest.raises(TypeError, match="meta"):
        add([torch.zeros(2, 2, device="meta")] * 2, [torch.zeros(2, 2)])
