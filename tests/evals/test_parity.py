"""Parity of an engine, played by the tiny model in torch, with its own weights computed offline."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from scipy.special import log_softmax

from strop.evals.observation import Bench, Finding, Observation, Side
from strop.evals.parity import PARITY_BOUND, TEXTS, parity
from strop.serving.hardware import Hardware
from strop.serving.stack import Artifact, Engine, Stack


class TorchEngine:
    """Serves the weights of a folder; `scale` multiplies one layer as an engine that lost a scale would."""

    def __init__(self, folder: Path, scale: float = 1.0):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.torch = torch
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            self.model.model.layers[1].mlp.down_proj.weight *= scale

    def answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        prompt = body["prompt"]
        ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        choice: dict[str, Any] = {"text": "", "prompt_token_ids": ids, "token_ids": [2]}
        if k := body.get("prompt_logprobs"):
            with self.torch.inference_mode():
                rows = log_softmax(self.model(self.torch.tensor([ids])).logits[0].double().numpy(), axis=1)
            entries: list[dict[str, Any] | None] = [None]
            for token, row in zip(ids[1:], rows, strict=False):
                order = np.argsort(-row)
                rank = {int(i): place for place, i in enumerate(order, 1)}
                told = {token, *map(int, order[:k])}
                entries.append(
                    {str(i): {"logprob": float(row[i]), "rank": rank[i], "decoded_token": "x"} for i in told}
                )
            choice["prompt_logprobs"] = entries
        return httpx.Response(200, json={"choices": [choice]})


@pytest.fixture(scope="module")
def peaked_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with larger logits: of equally likely tokens no error could be seen."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("peaked") / "model"
    shutil.copytree(tiny_model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] *= 40
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def stack_of(folder: Path, **changes: Any) -> Stack:
    return Stack(
        served_model="tiny",
        model=Artifact.of(folder),
        engine=Engine(version="vllm 0.32.0", dtype="float32"),
        hardware=Hardware(device="cpu", name="test", isa="avx2"),
    ).model_copy(update=changes)


def measure(engine: TorchEngine | None, stack: Stack, cache: Path) -> tuple[list[Observation], list[Finding]]:
    def answer(request: httpx.Request) -> httpx.Response:
        return engine.answer(request) if engine else httpx.Response(500, text="down")

    async def run() -> list[Observation | Finding]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            bench = Bench(
                reference=Side("reference", stack, "http://reference"),
                candidate=Side("candidate", stack, "http://candidate"),
                traces=(),
                client=client,
                cache=cache,
                progress=lambda done, text: None,
            )
            return [seen async for seen in parity(bench, 20, 30)]

    seen = asyncio.run(run())
    return [s for s in seen if isinstance(s, Observation)], [s for s in seen if isinstance(s, Finding)]


def kl(observations: list[Observation]) -> float:
    return float(np.mean([v for o in observations if o.metric == "parity_kl" for v in o.candidate]))


def test_an_engine_that_computes_its_weights_is_at_parity(
    peaked_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, stack = TorchEngine(peaked_model), stack_of(peaked_model)
    observations, findings = measure(engine, stack, tmp_path)
    assert not findings
    assert kl(observations) < 1e-5
    assert {v for o in observations if o.metric == "parity_top1" for v in o.candidate} == {1.0}
    assert len(observations) == 2 * len(TEXTS)
    monkeypatch.setattr("strop.evals.parity._compute", None)
    again, _ = measure(engine, stack, tmp_path)
    assert kl(again) == pytest.approx(kl(observations), abs=1e-6)


def test_an_engine_that_lost_a_scale_is_found(peaked_model: Path, tmp_path: Path) -> None:
    observations, findings = measure(TorchEngine(peaked_model, scale=2.0), stack_of(peaked_model), tmp_path)
    assert kl(observations) > PARITY_BOUND["float32"]
    (finding,) = findings
    assert finding.kind == "parity"
    assert "may have loaded the checkpoint wrong" in finding.detail
    assert finding.body["prompt_logprobs"] == 20


@pytest.mark.parametrize("why", ["format", "weights", "absent", "adapters", "server"])
def test_what_cannot_be_compared_is_said(peaked_model: Path, tmp_path: Path, why: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(peaked_model, folder)
    if why == "format":
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "strange"}
        (folder / "config.json").write_text(json.dumps(config))
    if why == "weights":
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        del tensors["model.layers.2.mlp.up_proj.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stack = stack_of(folder)
    if why == "adapters":
        stack = stack.model_copy(update={"adapters": (stack.model,)})
    if why == "absent":
        shutil.rmtree(folder)
    engine = None if why == "server" else TorchEngine(peaked_model)
    observations, findings = measure(engine, stack, tmp_path / "cache")
    assert not observations
    (finding,) = findings
    assert finding.kind == "no_parity"
    expected = {
        "format": "does not know the quantisation of model",
        "weights": "finds no weights for model.layers.2.mlp.up_proj",
        "absent": "is not on this machine",
        "adapters": "has adapters",
        "server": "HTTP 500: down",
    }
    assert expected[why] in finding.detail
