"""Speed of a real engine against itself."""

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from strop.evals.aggregate import Aggregate
from strop.evals.observation import Bench, Finding, Observation, Side
from strop.evals.speed import Speed
from strop.evals.speed_summary import load_curves
from strop.serving.engine import cores_of_replica, engine_command, engine_environment
from strop.serving.process import Child, free_port
from strop.serving.stack import Stack
from strop.serving.traces import Trace


@pytest.mark.slow
def test_an_engine_is_as_fast_as_itself(
    tiny_model: Path, tmp_path: Path, make_trace: Callable[..., Trace]
) -> None:
    """Everything is measured, also what only the engine knows: its queue and its prefix cache."""
    args = {"max-model-len": 1024, "max-num-seqs": 2, "enforce-eager": True}
    stack = Stack.build(tiny_model, "tiny", engine_args=args)
    arrivals = tmp_path / "azure.csv"
    start = datetime(2026, 3, 1, tzinfo=UTC)
    rows = [f"{start + timedelta(seconds=n // 3):%Y-%m-%d %H:%M:%S.%f},10,10\n" for n in range(60)]
    arrivals.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))
    traces = [
        make_trace(
            number,
            sampling='{"temperature":0,"max_tokens":12,"ignore_eos":true}',
            messages=json.dumps([{"role": "user", "content": f"{number} question " * 40}]),
        )
        for number in range(24)
    ]
    port = free_port()
    child = Child.start(
        "engine",
        engine_command(stack, "127.0.0.1", port),
        tmp_path / "engine.log",
        engine_environment(
            stack, 1, cores_of_replica(0, 1), {"root": str(tmp_path / "traces"), "stack": stack.fingerprint}
        ),
    )
    url = f"http://127.0.0.1:{port}"
    part = Speed(seconds=24, concurrency=(1, 4), arrivals=(arrivals,), warmup_requests=2)

    async def main() -> list[Observation | Finding]:
        async with httpx.AsyncClient(trust_env=False) as client:
            sides = Side("reference", stack, url), Side("candidate", stack, url)
            bench = Bench(*sides, traces, client, tmp_path, lambda done, text: None)
            return [seen async for seen in part.observe(bench)]

    try:
        child.wait_until_answers(f"{url}/health", 240)
        seen = asyncio.run(main())
    finally:
        child.stop()
    assert not [one for one in seen if isinstance(one, Finding)]
    observations = [one for one in seen if isinstance(one, Observation)]
    assert {one.metric for one in observations} == {metric.name for metric in part.metrics}
    aggregate = Aggregate.of(part.metrics, observations)
    tokens = aggregate.measure("inter_token_s")
    assert tokens and tokens.requests >= 8 and tokens.estimate == pytest.approx(1, abs=0.4)
    crowded, alone = (
        aggregate.measure("loaded_queue_s", "c4"),
        aggregate.measure("loaded_queue_s", "c1", "median"),
    )
    assert crowded and alone and crowded.candidate > alone.candidate
    # The cache keeps whole blocks only.
    assert min(one.candidate[0] for one in observations if one.metric == "warm_cached_share") > 0.4
    curves = load_curves(observations, samples=200)
    assert [level.concurrency for level in curves["candidate"].levels] == [1, 4]
