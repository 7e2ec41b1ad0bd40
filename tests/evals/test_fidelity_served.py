"""Fidelity of real servers: the same Stack, and one with a scaled layer and another chat template."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import numpy as np
import pytest

from strop.evals.fidelity import Fidelity
from strop.evals.observation import Arm, Bench, Finding, Observation, Side
from strop.evals.parity import PARITY_BOUND
from strop.serving.client import send
from strop.serving.engine import cores_of_replica, engine_command, engine_environment
from strop.serving.process import Child, free_port
from strop.serving.stack import Stack
from strop.serving.traces import Choice, Trace

pytestmark = pytest.mark.slow

SCALED = "model.layers.1.mlp.down_proj.weight"


def copy_of(model: Path, folder: Path, scales: dict[str, float], template: str | None = None) -> Path:
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, scale in scales.items():
        tensors[name] *= scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@dataclass(frozen=True)
class Served:
    stack: Stack
    url: str

    def side(self, arm: Arm) -> Side:
        return Side(arm, self.stack, self.url)


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    folder = tmp_path_factory.mktemp("fidelity")
    # Of equally likely tokens no error could be seen: the final norm makes larger logits.
    peaked = {"model.norm.weight": 40.0}
    template = (tiny_model / "chat_template.jinja").read_text()
    models = {
        "right": copy_of(tiny_model, folder / "right", peaked),
        "planted": copy_of(
            tiny_model,
            folder / "planted",
            {**peaked, SCALED: 1.2},
            template.replace("assistant\n", "assistant:\n"),
        ),
    }
    args = {"max-model-len": 1024, "max-num-seqs": 4, "enforce-eager": True, "max-logprobs": -1}
    with ExitStack() as stack:
        started: dict[str, Served] = {}
        children = {}
        for number, (name, model) in enumerate(models.items()):
            built, port = Stack.build(model, "tiny", engine_args=dict(args)), free_port()
            children[name] = Child.start(
                name,
                engine_command(built, "127.0.0.1", port, capture=False),
                folder / f"{name}.log",
                engine_environment(built, 1, cores_of_replica(number, 2), None),
            )
            stack.callback(children[name].stop)
            started[name] = Served(built, f"http://127.0.0.1:{port}")
        for name, child in children.items():
            child.wait_until_answers(f"{started[name].url}/health", 240)
        yield started


@pytest.fixture(scope="module")
def heldout(served: dict[str, Served]) -> list[Trace]:
    """Answers that the right server gave."""

    async def ask(number: int, client: httpx.AsyncClient) -> Trace:
        messages = [
            {"role": "user", "content": f"Write a list of {number} answers in JSON or print hello world."}
        ]
        body = {
            "model": "tiny",
            "messages": messages,
            "max_tokens": 48,
            "seed": number,
            "return_token_ids": True,
        }
        outcome = await send(client, served["right"].url, "chat", body, session=f"s{number}")
        assert outcome.error is None and outcome.token_ids and outcome.prompt_token_ids
        return Trace(
            request_id=f"r{number}",
            started_at=datetime(2026, 3, 1, tzinfo=UTC) + timedelta(seconds=number),
            tenant="default",
            session=f"s{number}",
            stack=served["right"].stack.fingerprint,
            endpoint="chat",
            stream=True,
            model="tiny",
            sampling="{}",
            format=None,
            messages=json.dumps(messages),
            prompt_token_ids=outcome.prompt_token_ids,
            choices=[Choice(0, outcome.token_ids, outcome.text, "length")],
            status=200,
        )

    async def run() -> list[Trace]:
        async with httpx.AsyncClient(trust_env=False) as client:
            return [await ask(number, client) for number in range(6)]

    return asyncio.run(run())


@dataclass
class Seen:
    observations: list[Observation]
    findings: list[Finding]

    def mean(self, metric: str, arm: str = "candidate") -> float:
        return float(np.mean([v for o in self.observations if o.metric == metric for v in getattr(o, arm)]))


def measure(reference: Side, candidate: Side, heldout: list[Trace], cache: Path, k: int) -> Seen:
    async def run() -> list[Observation | Finding]:
        async with httpx.AsyncClient(trust_env=False) as client:
            bench = Bench(reference, candidate, heldout, client, cache, lambda done, text: None)
            return [seen async for seen in Fidelity(top_logprobs=k).observe(bench)]

    seen = asyncio.run(run())
    return Seen([s for s in seen if isinstance(s, Observation)], [s for s in seen if isinstance(s, Finding)])


@pytest.mark.parametrize("k", [20, -1])
def test_planted_weights_and_template_are_seen_and_the_same_stack_is_not(
    served: dict[str, Served], heldout: list[Trace], tmp_path: Path, k: int
) -> None:
    right, planted = served["right"], served["planted"]
    same = measure(right.side("reference"), right.side("candidate"), heldout, tmp_path, k)
    other = measure(right.side("reference"), planted.side("candidate"), heldout, tmp_path, k)
    for seen in (same, other):
        assert {o.metric for o in seen.observations} == {metric.name for metric in Fidelity.metrics}
        assert seen.mean("error") == 0
        assert seen.mean("parity_kl") < PARITY_BOUND["float32"]
        assert not [f for f in seen.findings if f.kind not in ("far_token", "template_differs")]
        assert seen.mean("greedy_is_argmax") == 1
        assert seen.mean("outside_nucleus") == 0
    assert same.mean("kl") < 1e-6
    assert same.mean("prompt_same") == 1
    assert same.mean("top1_agreement") == 1
    assert other.mean("kl") > 1e-4
    assert other.mean("prompt_same") == 0
    assert [f for f in other.findings if f.kind == "template_differs"]
    assert all(np.isfinite([v for o in other.observations for v in o.candidate]))


def test_an_engine_with_other_weights_than_its_manifest_says_is_not_at_parity(
    served: dict[str, Served], heldout: list[Trace], tmp_path: Path
) -> None:
    claims = Side("candidate", served["right"].stack, served["planted"].url)
    seen = measure(served["right"].side("reference"), claims, heldout[:2], tmp_path, 20)
    assert seen.mean("parity_kl") > 1e-4
