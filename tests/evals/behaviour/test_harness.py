"""The real lm-evaluation-harness against two played servers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from strop.evals.behaviour import harness
from strop.evals.observation import Bench, Observation, Side
from strop.serving.hardware import Hardware
from strop.serving.stack import Artifact, Engine, Stack

from ..conftest import served

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {max_gen_toks: 8, until: []}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


class Adds:
    """Answers sums, or says one too many from `wrong_from` on."""

    def __init__(self, wrong_from: int) -> None:
        self.wrong_from = wrong_from

    async def chat(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        left, _, right = body["messages"][-1]["content"].split()
        answer = int(left) + int(right) + (int(left) >= self.wrong_from)
        message = {"role": "assistant", "content": str(answer)}
        return web.json_response({"choices": [{"index": 0, "message": message}]})

    completions = chat


def test_tasks_of_ones_own_are_scored_on_both_sides(tmp_path: Path) -> None:
    rows = [{"question": f"{n} + 3", "answer": str(n + 3)} for n in range(6)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sums.yaml").write_text(TASK.replace("FILE", str(tmp_path / "sums.jsonl")))
    stack = Stack(
        served_model="m",
        model=Artifact(location="/nowhere", files={"model.safetensors": "0"}),
        engine=Engine(version="vllm 0", dtype="float32"),
        hardware=Hardware(device="cpu", name="x", isa="avx2"),
    )
    options = harness.LmEval(tasks=("sums",), include_path=tmp_path, endpoint="chat", concurrency=2)

    async def observed() -> list[Observation]:
        async with served(Adds(99)) as here, served(Adds(4)) as there, httpx.AsyncClient() as client:
            sides = Side("reference", stack, here), Side("candidate", stack, there)
            bench = Bench(*sides, [], client, tmp_path, lambda done, text: None)
            return [one async for one in harness.observe(options, bench)]

    seen = {one.request_id: (one.reference, one.candidate) for one in asyncio.run(observed())}
    assert seen == {f"lm_eval/sums/{n}": ((1.0,), (float(n < 4),)) for n in range(6)}
