"""Behaviour of a real vLLM server."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from strop.evals.behaviour.part import Behaviour
from strop.evals.observation import Bench, Finding, Observation, Side
from strop.serving.engine import cores_of_replica, engine_command, engine_environment
from strop.serving.process import Child, free_port
from strop.serving.stack import Stack

pytestmark = pytest.mark.slow
DATA = Path(__file__).parents[4] / "shared" / "data"


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    folder = tmp_path_factory.mktemp("engine")
    args = {"max-model-len": 2048, "max-num-seqs": 8, "enforce-eager": True, "dtype": "float32"}
    tools = {"enable-auto-tool-choice": True, "tool-call-parser": "hermes"}
    stack = Stack.build(tiny_model, "tiny", engine_args={**args, **tools})
    port = free_port()
    child = Child.start(
        "engine",
        engine_command(stack, "127.0.0.1", port, capture=False),
        folder / "engine.log",
        engine_environment(stack, 1, cores_of_replica(0, 1), None),
    )
    try:
        child.wait_until_answers(f"http://127.0.0.1:{port}/health", 240)
        yield Side("reference", stack, f"http://127.0.0.1:{port}")
    finally:
        child.stop()


def test_a_stack_compared_with_itself_shows_no_difference(served: Side, tmp_path: Path) -> None:
    async def observe() -> list[Observation | Finding]:
        async with httpx.AsyncClient() as client:
            other = Side("candidate", served.stack, served.url)
            bench = Bench(served, other, [], client, tmp_path, lambda done, text: None)
            # Its tokenizer makes a token of nearly every letter.
            data = DATA if DATA.is_dir() else None
            part = Behaviour(tasks=2, max_tokens=24, data=data, context_lengths=(512, 1024))
            return [each async for each in part.observe(bench)]

    found = asyncio.run(observe())
    observations = [each for each in found if isinstance(each, Observation)]
    assert [each for each in found if isinstance(each, Finding)] == []
    assert all(each.reference == each.candidate for each in observations)
    by_metric = {each.metric for each in observations}
    assert {"error", "instructions_kept", "retrieval_right"} <= by_metric
    assert all(each.candidate == (0.0,) for each in observations if each.metric == "error")
    if DATA.is_dir():
        assert {
            "json_valid",
            "humaneval_pass",
            "tool_call_right",
            "no_call_right",
            "stream_agrees",
        } <= by_metric
