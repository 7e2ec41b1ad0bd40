"""The plugin inside vLLM: what it loads, what it computes, and that it never keeps an engine from serving."""

import asyncio
import runpy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.kernels import vllm_plugin
from strop.kernels.bundle import activation, load_library, write_library

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "kernel_engine.py"


@pytest.fixture(scope="module")
def manifest(objects: Path) -> Path:
    return write_library(objects / "library")


def test_nothing_is_loaded_for_a_stack_without_kernels(monkeypatch: pytest.MonkeyPatch):
    def never(_: Path) -> None:
        raise AssertionError("loaded")

    monkeypatch.delenv(vllm_plugin.VARIABLE, raising=False)
    monkeypatch.setattr(vllm_plugin, "load_library", never)
    vllm_plugin.register()


@pytest.mark.slow
def test_an_engine_serves_without_kernels_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    from vllm.model_executor.layers import utils

    stock = utils.dispatch_cpu_unquantized_gemm
    (tmp_path / "kernels.json").write_text("{}")
    monkeypatch.setenv(vllm_plugin.VARIABLE, str(tmp_path / "kernels.json"))
    with caplog.at_level("ERROR", vllm_plugin.logger.name):
        vllm_plugin.logger.addHandler(caplog.handler)
        vllm_plugin.register()
        vllm_plugin.logger.removeHandler(caplog.handler)
    assert "vLLM serves with its own" in caplog.text and str(tmp_path) in caplog.text
    assert utils.dispatch_cpu_unquantized_gemm is stock


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_are_packed_if_that_changes_nothing(manifest: Path, dtype: torch.dtype):
    from strop.kernels import vllm_linear

    load_library(manifest)
    weight = torch.randn(40, 64).to(torch.bfloat16).to(dtype)
    layer = torch.nn.Linear(64, 40, bias=False)
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    vllm_linear.dispatch(layer, remove_weight=True)
    x, before = torch.randn(3, 64).to(dtype), activation()[0].calls
    y = layer.cpu_linear(x, layer.weight, None)  # type: ignore[operator]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert torch.allclose(y, torch.nn.functional.linear(x, weight), atol=tolerance, rtol=tolerance)
    assert activation()[0].calls == before + 1

    layer.weight = torch.nn.Parameter(torch.randn(40, 64), requires_grad=False)
    vllm_linear.dispatch(layer, remove_weight=False)
    x = torch.randn(3, 64)
    y = layer.cpu_linear(x, layer.weight, None)  # type: ignore[operator]
    assert torch.allclose(y, torch.nn.functional.linear(x, layer.weight), atol=1e-5)
    assert activation()[0].calls == before + 1


@pytest.mark.slow
@pytest.mark.parametrize("int4", [False, True])
def test_a_server_computes_what_the_weights_say(tiny_model: Path, manifest: Path, tmp_path: Path, int4: bool):
    benchmark: dict[str, Any] = runpy.run_path(str(BENCHMARK))
    benchmark["ENGINE"]["enforce-eager"] = True
    model = benchmark["write_int4"](tiny_model, tmp_path / "int4") if int4 else tiny_model
    with ExitStack() as stack:
        arm = benchmark["_start"]("ours", model, "float32", True, manifest, tmp_path, stack)
        before = benchmark["_activation"](arm)[0]
        reference = benchmark["_reference"](tiny_model, int4)
        kl = asyncio.run(benchmark["_divergence"](arm, tiny_model, reference))
        after = benchmark["_activation"](arm)[0]
    assert before["sha256"] and after["calls"] >= before["calls"] + 4 * 4 + 1
    assert after["refusals"] == 0
    assert 0 <= kl < 1e-6
