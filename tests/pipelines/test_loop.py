"""The loop's skeleton with the engine left out: what is done, in which order, and only once."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from strop.evals.observation import Side
from strop.evals.proposal import Budget, Candidate, Declined
from strop.evals.verdict import Comparison, Gate, Verdict
from strop.pipelines import loop as loop_module
from strop.pipelines.loop import STAGES, LoopError, learners, run_loop
from strop.pipelines.progress import Board
from strop.pipelines.registry import Registry
from strop.pipelines.settings import LoopSettings, Settings
from strop.serving.cluster import FleetUnavailable
from strop.serving.redaction import without_content
from strop.serving.settings import ServingSettings
from strop.serving.stack import Speculator, Stack
from strop.serving.traces import TraceSet, TraceStore


class _Fleet:
    """Stands in for the fleet actor where no engine is wanted."""

    def add(self, *_: object) -> str:
        return "http://unused"

    def remove(self, *_: object) -> None:
        pass


class _World:
    """Counts what the loop's outside was asked to do, and fails where told to."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.fail_at: str | None = None
        self.passes = True
        self.declines = False

    def enter(self, name: str) -> None:
        self.calls[name] += 1
        if self.fail_at == name:
            self.fail_at = None
            raise KeyboardInterrupt

    def propose(
        self, champion: Stack, traces: TraceSet, budget: Budget, progress: Callable[..., None]
    ) -> Any:
        self.enter("learn")
        if self.declines:
            return Declined("stub", "traffic unchanged")
        drafter = Speculator(method="ngram", draft_tokens=3)
        return Candidate(
            champion.model_copy(update={"speculator": drafter}), "stub", {"acceptance_length": 2.0}, 1.0
        )

    def judge(self, champion: Side, candidate: Side, *_: object) -> Verdict:
        self.enter("judge")
        ratio = 0.5 if self.passes else 1.2
        comparison = Comparison(
            metric="e2e_s", unit="s", slice="all", requests=20, champion=1.0, candidate=ratio,
            ratio=ratio, ratio_low=ratio - 0.1, ratio_high=ratio + 0.1, better="lower",
        )  # fmt: skip
        return Verdict(
            champion=champion.stack.fingerprint, candidate=candidate.stack.fingerprint, passed=self.passes,
            summary="planted", comparisons=(comparison,), losslessness=None,
            gates=(Gate(name="faster", passed=self.passes, detail="planted"),),
        )  # fmt: skip


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> _World:
    world = _World()

    class Stub:
        name = "stub"
        propose = staticmethod(world.propose)

    @contextmanager
    def no_fleet(*_: object) -> Iterator[object]:
        yield _Fleet()

    @contextmanager
    def leased(*_: object) -> Iterator[str]:
        yield "http://unused"

    def nobody(_: object) -> object:
        raise FleetUnavailable("none")

    def record(*arguments: Any) -> Path:
        world.enter("record")
        return Path("report.html")

    monkeypatch.setattr(loop_module, "learners", lambda _: [Stub()])
    monkeypatch.setattr(loop_module, "judge", world.judge)
    monkeypatch.setattr(loop_module, "side_in", lambda _, arm, stack: Side(arm, stack, "http://unused"))
    monkeypatch.setattr(loop_module, "temporary_fleet", no_fleet)
    monkeypatch.setattr(loop_module, "leased", leased)
    monkeypatch.setattr(loop_module, "connect", nobody)
    monkeypatch.setattr(loop_module, "write_report", record)
    return world


@pytest.fixture
def settings(tiny_model: Path) -> Settings:
    return Settings(
        model=str(tiny_model),
        serving=ServingSettings(dtype="float32"),
        loop=LoopSettings(min_requests=10),
    )


@pytest.fixture
def traffic(home: Path, settings: Settings, make_trace: Callable[..., Any]) -> Path:
    """A home whose champion has served 30 requests of 10 sessions."""
    from strop.pipelines.deployment import plain_stack

    stack = plain_stack(settings)
    stack.save(home / "stacks" / stack.fingerprint[:16] / "stack.json")
    TraceStore(home / "traces").append(
        [make_trace(i, session=f"s{i // 3}", stack=stack.fingerprint) for i in range(30)]
    )
    return home


def _run(settings: Settings, home: Path) -> Any:
    return run_loop(settings, home, Board(dict(STAGES), home))


def test_a_better_candidate_becomes_champion(settings: Settings, traffic: Path, world: _World) -> None:
    result = _run(settings, traffic)
    assert result.outcome == "promoted"
    registry = Registry(traffic, settings.experiment)
    champion = registry.stack("champion")
    assert champion.speculator is not None
    assert registry.loops()[0]["outcome"] == "promoted"


def test_a_slower_candidate_is_refused_and_the_champion_stays(
    settings: Settings, traffic: Path, world: _World
) -> None:
    world.passes = False
    assert _run(settings, traffic).outcome == "refused"
    registry = Registry(traffic, settings.experiment)
    assert all("champion" not in v.aliases and "challenger" not in v.aliases for v in registry.versions())


def test_a_learner_may_decline(settings: Settings, traffic: Path, world: _World) -> None:
    world.declines = True
    result = _run(settings, traffic)
    assert (result.outcome, result.reason) == ("no candidate", "stub: traffic unchanged")
    assert world.calls["judge"] == 0


def test_too_little_traffic_ends_at_collect(settings: Settings, traffic: Path, world: _World) -> None:
    few = settings.model_copy(update={"loop": LoopSettings(min_requests=31)})
    result = _run(few, traffic)
    assert result.outcome == "no candidate" and "31 are needed" in result.reason
    assert world.calls["learn"] == 0


def test_the_next_loop_learns_from_newer_traffic_only(
    settings: Settings, traffic: Path, world: _World
) -> None:
    assert _run(settings, traffic).outcome == "promoted"
    assert _run(settings, traffic).outcome == "no candidate"
    assert world.calls["learn"] == 1


@pytest.mark.parametrize("stage", ["learn", "judge", "record"])
def test_an_interrupted_loop_resumes_and_repeats_no_finished_stage(
    settings: Settings, traffic: Path, world: _World, stage: str
) -> None:
    world.fail_at = stage
    with pytest.raises(KeyboardInterrupt):
        _run(settings, traffic)
    result = _run(settings, traffic)
    assert result.outcome == "promoted"
    assert world.calls == {"learn": 1, "judge": 1, "record": 1} | {stage: 2}
    assert len(Registry(traffic, settings.experiment).loops()) == 1


def test_held_out_sessions_are_newer_and_not_learned_from(
    settings: Settings, traffic: Path, world: _World
) -> None:
    result = _run(settings, traffic)
    folder = traffic / "loops" / result.loop
    train, heldout = list(TraceSet(folder / "train")), list(TraceSet(folder / "heldout"))
    assert {t.session for t in train}.isdisjoint(t.session for t in heldout)
    assert max(t.started_at for t in train) < min(t.started_at for t in heldout)
    assert len(train) + len(heldout) == 30


def test_what_was_kept_for_its_interest_is_learned_from_and_not_judged_on(
    settings: Settings, traffic: Path, world: _World
) -> None:
    kept = [
        replace(t, kept_for="low acceptance")
        for t in TraceStore(traffic / "traces").scan()
        if t.session < "s9"
    ]
    for path in TraceStore(traffic / "traces").files():
        path.unlink()
    newer = [replace(t, kept_for=None, session="s9", request_id=f"n{i}", started_at=t.started_at + timedelta(1))
             for i, t in enumerate(kept[:4])]  # fmt: skip
    TraceStore(traffic / "traces").append([*kept, *newer])
    folder = traffic / "loops" / _run(settings, traffic).loop
    assert {t.kept_for for t in TraceSet(folder / "train")} == {"low acceptance"}
    assert {t.request_id for t in TraceSet(folder / "heldout")} == {t.request_id for t in newer}


def test_traffic_without_content_ends_in_a_loop_without_candidate(
    settings: Settings, traffic: Path, world: _World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = [without_content(t) for t in TraceStore(traffic / "traces").scan()]
    for path in TraceStore(traffic / "traces").files():
        path.unlink()
    TraceStore(traffic / "traces").append(bare)
    monkeypatch.setattr(loop_module, "learners", learners)
    result = _run(settings, traffic)
    assert result.outcome == "no candidate" and "only 0 output tokens" in result.reason


def test_a_torn_trace_file_costs_only_itself(settings: Settings, traffic: Path, world: _World) -> None:
    torn = next((traffic / "traces").glob("day=*/stack_id=*/*.parquet")).with_name("000000-torn.parquet")
    torn.write_bytes(b"PAR1 cut short")
    assert _run(settings, traffic).outcome == "promoted"
    assert (traffic / "traces" / "quarantine" / torn.name).is_file()


def test_two_loops_at_once_are_refused(settings: Settings, traffic: Path, world: _World) -> None:
    from strop.pipelines.loop import _one_at_a_time

    with _one_at_a_time(traffic), pytest.raises(LoopError, match="Another loop"):
        _run(settings, traffic)
