"""The folder of kernels, torch's operator over them, and what a process says it runs."""

import json
from pathlib import Path

import pytest
import torch

from strop.kernels.bundle import LibraryError, activation, load_library, write_library
from strop.kernels.linear import pack_bf16, pack_int4, pack_int8, quantise_int4, quantise_int8


@pytest.fixture(scope="module")
def manifest(objects: Path) -> Path:
    path = write_library(objects / "library")
    load_library(path)
    return path


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
def test_the_operator_runs_the_kernel_and_what_it_refuses_without(manifest: Path, kind: str):
    weight = torch.randn(20, 64).to(torch.bfloat16)
    if kind == "bf16":
        packed, exact = pack_bf16(weight), weight.double()
    elif kind == "int8":
        values, scale = quantise_int8(weight)
        packed, exact = pack_int8(values, scale), values.double() * scale.double()[:, None]
    else:
        values, scale = quantise_int4(weight, 32)
        exact = values.double() * scale.double().repeat_interleave(32, 1)
        packed = pack_int4(values, scale)
    x, bias = torch.randn(2, 3, 64), torch.randn(20)
    for given in (x, x[0], x[0, 0], x.half(), x.transpose(0, 1), x[0].t().contiguous().t()):
        before = activation()[0]
        y = torch.ops.strop_kernels.linear(given, packed.weight, packed.scale, bias, 20)
        after = activation()[0]
        expected = given.double() @ exact.t() + bias.double()
        tolerance = 1e-5 if given.dtype == torch.float32 else 2e-3
        assert y.dtype == given.dtype and y.shape == expected.shape
        assert ((y.double() - expected).abs() <= tolerance * (1 + expected.abs())).all()
        taken = given.dtype == torch.float32 and given.is_contiguous()
        assert (after.calls - before.calls, after.refusals - before.refusals) == (int(taken), int(not taken))


def test_the_operator_stays_in_a_compiled_graph(manifest: Path):
    packed = pack_bf16(torch.randn(20, 64).to(torch.bfloat16))

    @torch.compile(fullgraph=True, dynamic=True, backend="eager")
    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.strop_kernels.linear(x * 2, packed.weight, None, None, 20) + 1

    for rows in (1, 5, 30):
        x = torch.randn(rows, 64)
        expected = torch.ops.strop_kernels.linear(x * 2, packed.weight, None, None, 20) + 1
        assert torch.equal(layer(x), expected)


def test_a_process_says_which_object_it_runs(manifest: Path):
    shipped = {k["sha256"] for k in json.loads(manifest.read_text())["kernels"]}
    assert activation()[0].sha256 in shipped


@pytest.mark.parametrize("how", ["changed", "missing", "edited"])
def test_what_was_not_verified_is_not_loaded(manifest: Path, tmp_path: Path, how: str):
    for path in manifest.parent.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    content = json.loads(manifest.read_text())
    kernel = tmp_path / content["kernels"][0]["file"]
    before = activation()[0].sha256
    for one in content["kernels"]:
        # Another object than the one that is loaded.
        one["sha256"] = "0" * 64 if how == "changed" else one["sha256"][::-1]
    if how == "missing":
        kernel.unlink()
    (tmp_path / manifest.name).write_text(json.dumps(content) if how != "edited" else "{}")
    with pytest.raises(LibraryError):
        load_library(tmp_path / manifest.name)
    assert activation()[0].sha256 == before
