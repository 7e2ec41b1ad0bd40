"""A rollout's canary over a real store of traces; the fleet is a stand-in that remembers its weights."""

import math
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strop.serving.rollout import Event, Rollout, roll_out
from strop.serving.settings import CanarySettings
from strop.serving.stack import Speculator, Stack
from strop.serving.traces import TraceStore


class _Fleet:
    def __init__(self) -> None:
        self.shares: dict[str, float] = {}
        self.pools: list[str] = []

    def add(self, stack: Stack, _lease_s: float | None = None) -> str:
        self.pools.append(stack.fingerprint)
        return "http://127.0.0.1:1"

    def route(self, shares: dict[str, float]) -> None:
        self.shares = shares

    def remove(self, stack: Stack) -> None:
        self.pools = [p for p in self.pools if p != stack.fingerprint]

    def renew(self, _stack: Stack, _lease_s: float | None) -> None: ...

    def status(self) -> Any:
        replicas = [SimpleNamespace(alive=True, restarts=0)]
        pools = [SimpleNamespace(fingerprint=p, replicas=replicas, prefill=[]) for p in self.pools]
        return SimpleNamespace(pools=pools)


@pytest.fixture
def stacks(tiny_model: Path) -> tuple[Stack, Stack]:
    champion = Stack.build(tiny_model, "tiny")
    return champion, champion.model_copy(update={"speculator": Speculator(method="ngram", draft_tokens=2)})


def _roll_out(
    stacks: tuple[Stack, Stack],
    folder: Path,
    make_trace,
    deadline_s: float,
    requests: int,
    **of_candidate: Any,
) -> tuple[Rollout, _Fleet, list[tuple[float, str]]]:
    """Each Stack serves `requests` requests after the canary began, in two files a second apart."""
    fleet, store, seen = _Fleet(), TraceStore(folder), []

    def serve(batch: int) -> None:
        from datetime import UTC, datetime

        for stack, changes in zip(stacks, ({}, of_candidate), strict=True):
            store.append(
                [
                    make_trace(
                        started_at=datetime.now(UTC),
                        session=f"{batch}-{n}",
                        stack=stack.fingerprint,
                        **changes,
                    )
                    for n in range(requests // 2)
                ]
            )

    def on_event(event: Event) -> None:
        if event.event == "canary":
            serve(0)
            threading.Timer(1.0, serve, [1]).start()

    result = roll_out(
        fleet, *stacks,  # type: ignore[arg-type]
        store=store, check=lambda *_: [], warm=[], on_event=on_event,
        on_evidence=lambda share, text: seen.append((share, text)),
        settings=CanarySettings(share=0.5, min_requests=12, deadline_s=deadline_s),
    )  # fmt: skip
    return result, fleet, seen


def test_a_sound_candidate_takes_over(stacks, tmp_path: Path, make_trace) -> None:
    result, fleet, seen = _roll_out(stacks, tmp_path, make_trace, 30, 14)
    assert result.promoted and fleet.shares == {stacks[1].fingerprint: 1.0}
    assert fleet.pools == [stacks[1].fingerprint]
    assert seen[0] == (
        pytest.approx(7 / 12),
        "7 live requests to the candidate, 7 to the champion; at least 12 each are needed",
    )
    assert "14 live requests against 14, no harm" in next(
        e.detail for e in result.events if e.event == "evidence"
    )


def test_a_failing_candidate_is_taken_back_before_the_deadline(stacks, tmp_path: Path, make_trace) -> None:
    failing = {"status": 500, "choices": [], "error": "engine died"}
    result, fleet, _ = _roll_out(stacks, tmp_path, make_trace, 30, 40, **failing)
    assert not result.promoted and "100.0% of its requests failed" in result.reason
    assert fleet.shares == {stacks[0].fingerprint: 1.0} and fleet.pools == [stacks[0].fingerprint]


def test_too_little_traffic_by_the_deadline_is_taken_back(stacks, tmp_path: Path, make_trace) -> None:
    result, fleet, _ = _roll_out(stacks, tmp_path, make_trace, 2.5, 6)
    assert not result.promoted and "not enough evidence within" in result.reason
    assert "6 live requests to the candidate" in result.reason
    assert fleet.shares == {stacks[0].fingerprint: 1.0}


def test_the_candidate_stays_in_the_fleet_however_long_its_check_takes(
    stacks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real lease of half a second, and a check of two."""

    class Leasing(_Fleet):
        ends = math.inf

        def add(self, stack: Stack, lease_s: float | None = None) -> str:
            if lease_s:
                self.ends = time.monotonic() + lease_s
            return super().add(stack, lease_s)

        def renew(self, _stack: Stack, lease_s: float | None) -> None:
            assert time.monotonic() < self.ends, "the lease was over"
            self.ends = math.inf if lease_s is None else time.monotonic() + lease_s

    def check(*_: str) -> list[str]:
        time.sleep(2)
        return [] if time.monotonic() < fleet.ends else ["the candidate was stopped meanwhile"]

    fleet = Leasing()
    monkeypatch.setattr("strop.serving.rollout.LEASE_S", 0.5)
    result = roll_out(
        fleet, *stacks,  # type: ignore[arg-type]
        store=TraceStore(tmp_path), check=check, warm=[], settings=CanarySettings(), canary=False,
    )  # fmt: skip
    assert result.promoted, result.reason


def test_traces_of_a_file_are_given_once(tmp_path: Path, make_trace) -> None:
    store, seen = TraceStore(tmp_path), set()
    traces = [make_trace(n) for n in range(4)]
    store.append(traces[:2])
    moment = traces[0].started_at
    assert [t.request_id for t in store.fresh(moment, "ab" * 32, seen)] == ["r0", "r1"]
    torn = tmp_path / "day=2026-03-01" / f"stack_id={'ab' * 8}" / "x.parquet"
    torn.write_bytes(b"PAR1")
    assert list(store.fresh(moment, "ab" * 32, seen)) == []
    torn.unlink()
    store.append(traces[2:])
    assert [t.request_id for t in store.fresh(moment, "ab" * 32, seen)] == ["r2", "r3"]
    assert len(seen) == 2
