"""The loop: collect, learn, judge, roll out, record. Read it from `run_loop` downwards.

Every stage is a child run in MLflow that is finished when its output is logged. A loop that was
interrupted anywhere is resumed by calling `run_loop` again: finished stages are read back, the
half-done one starts again from what its own folder holds.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from strop.evals.evaluate import findings_of
from strop.evals.evaluation import load_evaluation
from strop.evals.judge import judge, plan_for
from strop.evals.proposal import Budget, Candidate, Declined, Learner
from strop.evals.regressions import cases_of_traces, remember, remember_evaluation
from strop.evals.verdict import Verdict
from strop.pipelines.deployment import (
    champion_of,
    checker,
    remember_taken_back,
    serving_stack,
    temporary_fleet,
    warm_prompts,
)
from strop.pipelines.eval_report import write
from strop.pipelines.evaluating import side_in
from strop.pipelines.progress import Board
from strop.pipelines.recording import write_report
from strop.pipelines.registry import LoopJournal, Registry
from strop.pipelines.settings import Settings
from strop.serving.cluster import FleetUnavailable, RemoteFleet, connect, leased
from strop.serving.journal import recover
from strop.serving.rollout import Rollout, roll_out
from strop.serving.stack import Stack
from strop.serving.traces import PROBE_TENANT, Trace, TraceSet, TraceStore, split_by_session
from strop.speculators.learner import SpeculatorLearner

STAGES = {"collect": 20.0, "learn": 480.0, "judge": 240.0, "rollout": 120.0, "record": 20.0}
"""Stages in order, with the seconds expected of each before there is experience."""


class LoopError(RuntimeError):
    """The loop cannot run; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class LoopResult:
    loop: str
    outcome: str
    """`promoted`, `refused`, `taken back` or `no candidate`."""
    reason: str
    report: Path | None
    verdict: Verdict | None


def learners(settings: Settings) -> list[Learner]:
    """Every lever the loop pulls, in order. A new lever is one more entry."""
    return [SpeculatorLearner(settings.speculators)]


def run_loop(
    settings: Settings,
    home: Path,
    board: Board,
    live_traffic: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> LoopResult:
    """Run one loop, or resume the one that was interrupted.

    With a fleet running (`strop serve`) the candidate is rolled out in it; without one, champion and
    candidate are started for the judge alone and a promotion takes effect at the next `strop serve`.
    `live_traffic` is entered while the canary runs, for demonstrations and tests that bring clients.
    Raises LoopError, SuiteError, RegistryError or StackError; what finished before stays finished.
    """
    with _one_at_a_time(home):
        registry = Registry(home, settings.experiment)
        journal = registry.unfinished()
        if journal:
            journal.reopen()
        else:
            champion = serving_stack(settings, home, registry)
            registry.ensure(champion)
            # A suite that cannot be used is said now, not after the training.
            plan_for(champion, champion, settings.evals)
            journal = registry.begin(
                datetime.now(UTC).strftime("loop-%Y%m%d-%H%M%S"), {"strop.champion": champion.fingerprint}
            )
        loop = _Loop(settings, home, registry, journal, board, live_traffic)
        try:
            return loop.run()
        except BaseException:
            journal.interrupted()
            raise


@dataclass(slots=True)
class _Loop:
    settings: Settings
    home: Path
    registry: Registry
    journal: LoopJournal
    board: Board
    live_traffic: Callable[[], AbstractContextManager[object]]

    @property
    def folder(self) -> Path:
        return self.home / "loops" / self.journal.loop

    def run(self) -> LoopResult:
        champion = self.registry.stack(self.journal.tags()["strop.champion"])
        collected = self.stage("collect", lambda: self.collect(champion))
        learned = self.stage("learn", lambda: self.learn(champion, collected))
        judged = self.stage("judge", lambda: self.judge(champion, learned))
        rolled = self.stage("rollout", lambda: self.roll_out(champion, judged))
        outcome, reason = _outcome(collected, learned, judged, rolled)
        recorded = self.stage("record", lambda: self.record(champion, outcome, reason))
        self.journal.end(outcome)
        verdict = Verdict.model_validate(judged["verdict"]) if judged.get("verdict") else None
        return LoopResult(self.journal.loop, outcome, reason, Path(recorded["report"]), verdict)

    def stage(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Do a stage once: a finished one is read back from MLflow."""
        finished = self.journal.output(name)
        if finished is not None:
            self.board.skip(name, "already done")
            return finished
        child = self.journal.start(name)
        started = time.monotonic()
        try:
            with self.board.stage(name):
                output = work()
        except BaseException as error:
            self.journal.fail(child, f"{type(error).__name__}: {error}")
            raise
        metrics = {"seconds": time.monotonic() - started, **output.get("metrics", {})}
        self.journal.finish(child, output, metrics)
        return output

    # -- collect --------------------------------------------------------------------------

    def collect(self, champion: Stack) -> dict[str, Any]:
        """Freeze the traffic since the last loop that learned, split into train and a newer held-out part."""
        root = self.home / "traces"
        recover(root)
        since = self._learned_until()
        same_model = self._stacks_with(champion.numerics)
        torn: list[str] = []
        found = TraceStore(root).scan(
            lambda t: (
                t.tenant != PROBE_TENANT and t.stack in same_model and (since is None or t.started_at > since)
            ),
            lambda path, reason: torn.append(f"{path.name}: {reason}"),
        )
        traces, failed = list[Trace](), list[Trace]()
        for trace in found:
            (traces if trace.status == 200 else failed).append(trace)
        remember(self.home, cases_of_traces(failed))
        train, heldout = split_by_session(traces, self.settings.loop.heldout_share)
        # What was kept for its interest teaches, and would make the judge see another traffic than there is.
        heldout = [t for t in heldout if t.kept_for is None]
        needed = self.settings.loop.min_requests
        output: dict[str, Any] = {
            "requests": len(traces),
            "enough": len(traces) >= needed and bool(train) and bool(heldout),
            "reason": f"{len(traces)} new requests since the last loop, {needed} are needed",
            "torn_files": torn,
            "counts": [_count("train", train), _count("heldout", heldout)],
            "until": max((t.started_at for t in traces), default=datetime.now(UTC)).isoformat(),
            "metrics": {"train_requests": len(train), "heldout_requests": len(heldout)},
        }
        if output["enough"]:
            output["train"] = TraceSet.create(self.folder / "train", train).digest
            output["heldout"] = TraceSet.create(self.folder / "heldout", heldout).digest
            self.board.update(
                1.0, f"{len(train)} requests to learn from, {len(heldout)} newer ones to judge on"
            )
        else:
            self.board.update(1.0, output["reason"])
        return output

    def _learned_until(self) -> datetime | None:
        for loop in self.registry.loops():
            if loop["outcome"] in ("promoted", "refused", "taken back"):
                collected = LoopJournal(self.registry, loop["loop"], loop["run_id"]).output("collect")
                if collected:
                    return datetime.fromisoformat(collected["until"])
        return None

    def _stacks_with(self, numerics: str) -> set[str]:
        """Fingerprints of the known Stacks whose answers are the champion's answers."""
        known = (Stack.from_json(p.read_text()) for p in (self.home / "stacks").glob("*/stack.json"))
        return {stack.fingerprint for stack in known if stack.numerics == numerics}

    # -- learn ----------------------------------------------------------------------------

    def learn(self, champion: Stack, collected: dict[str, Any]) -> dict[str, Any]:
        """Ask every learner for a candidate."""
        results: list[dict[str, Any]] = []
        if not collected["enough"]:
            return {"results": results}
        pulled = learners(self.settings)
        for number, learner in enumerate(pulled):
            budget = Budget(
                self.folder / learner.name, 60 * self.settings.loop.budget_minutes / (len(pulled) - number)
            )
            budget.folder.mkdir(parents=True, exist_ok=True)

            def progress(done: float, text: str, number: int = number) -> None:
                self.board.update((number + done) / len(pulled), text)

            started = time.monotonic()
            proposal = learner.propose(champion, TraceSet(self.folder / "train"), budget, progress)
            results.append(_as_result(proposal, time.monotonic() - started))
        return {"results": results}

    # -- judge ----------------------------------------------------------------------------

    def judge(self, champion: Stack, learned: dict[str, Any]) -> dict[str, Any]:
        """Replay the held-out requests to champion and candidates; the best that passed is the challenger."""
        candidates = [Stack.from_json(r["stack"]) for r in learned["results"] if r["stack"]]
        if not candidates:
            return {"verdict": None, "candidate": None}
        heldout = sorted(TraceSet(self.folder / "heldout"), key=lambda trace: trace.started_at)
        judged: list[tuple[Stack, Verdict]] = []
        with self._fleet(champion) as fleet:
            fleet.add(champion)
            for candidate in candidates:
                folder = self.folder / "evaluation" / candidate.fingerprint[:16]
                self.board.update(0.02, "starting the candidate's replicas")
                with leased(fleet, candidate):
                    verdict = judge(
                        side_in(fleet, "reference", champion),
                        side_in(fleet, "candidate", candidate),
                        heldout,
                        self.settings.evals,
                        folder,
                        self.board.update,
                    )
                self._keep(folder, heldout)
                judged.append((candidate, verdict))
                if not verdict.passed:
                    fleet.remove(candidate)
        passed = [(c, v) for c, v in judged if v.passed]
        best, verdict = min(passed or judged, key=lambda pair: _time_ratio(pair[1]))
        number = self.registry.register(best, self.journal.run_id, self.journal.loop)
        if verdict.passed:
            self.registry.set_alias("challenger", number)
        self.board.update(1.0, verdict.summary)
        return {
            "candidate": best.to_json(),
            "version": number,
            "verdict": verdict.model_dump(mode="json"),
            "metrics": _metrics(verdict),
        }

    def _keep(self, folder: Path, heldout: list[Trace]) -> None:
        """The suite's report, and what failed in it: every candidate from now on is asked that."""
        evaluation = load_evaluation(folder)
        if evaluation:
            write(evaluation, folder, self.settings.cost)
            remember_evaluation(self.home, findings_of(folder), heldout)

    # -- roll out -------------------------------------------------------------------------

    def roll_out(self, champion: Stack, judged: dict[str, Any]) -> dict[str, Any]:
        """Replace the champion in the running fleet, if the Verdict allows."""
        if not judged["verdict"] or not judged["verdict"]["passed"]:
            return {"rollout": None}
        candidate = Stack.from_json(judged["candidate"])
        candidate.verify()
        try:
            fleet = connect(self.home)
        except FleetUnavailable:
            self.registry.promote(judged["version"])
            result = Rollout(True, "no fleet is running, so it takes effect at the next `strop serve`", [])
            return {"rollout": result.to_dict()}
        if champion_of(fleet).fingerprint == candidate.fingerprint:
            # Cut over to before an interruption; what is left is to say so.
            result = Rollout(True, "the candidate serves all traffic", [])
        else:
            since = datetime.now(UTC)
            with self.live_traffic():
                result = roll_out(
                    fleet,
                    champion,
                    candidate,
                    store=TraceStore(self.home / "traces"),
                    check=checker(champion, candidate, TraceSet(self.folder / "heldout")),
                    warm=warm_prompts(TraceSet(self.folder / "heldout")),
                    settings=self.settings.serving.canary,
                    on_event=lambda e: self.board.update(_EVENTS.get(e.event, 0.9), f"{e.event}: {e.detail}"),
                    on_evidence=lambda seen, text: self.board.update(0.55 + 0.25 * seen, f"canary: {text}"),
                )
            if not result.promoted:
                remember_taken_back(self.home, candidate, since)
        if result.promoted:
            self.registry.promote(judged["version"])
        return {"rollout": result.to_dict()}

    # -- record ---------------------------------------------------------------------------

    def record(self, champion: Stack, outcome: str, reason: str) -> dict[str, Any]:
        """Write the report and log it with the loop's run."""
        path = write_report(self.journal, champion, outcome, reason, self.settings, self.home)
        return {"report": str(path)}

    @contextmanager
    def _fleet(self, champion: Stack) -> Iterator[RemoteFleet]:
        """The running fleet, or one that lives as long as the judge needs it."""
        try:
            yield connect(self.home)
            return
        except FleetUnavailable:
            pass
        self.board.update(0.0, "starting the champion's replicas")
        with temporary_fleet(self.settings, self.home, champion) as fleet:
            yield fleet


_EVENTS = {
    "start": 0.1,
    "check": 0.4,
    "warm": 0.5,
    "canary": 0.55,
    "evidence": 0.8,
    "cut over": 0.9,
    "drained": 1.0,
}


def _outcome(
    collected: dict[str, Any], learned: dict[str, Any], judged: dict[str, Any], rolled: dict[str, Any]
) -> tuple[str, str]:
    if not collected["enough"]:
        return "no candidate", collected["reason"]
    if not judged["candidate"]:
        return "no candidate", "; ".join(f"{r['learner']}: {r['declined']}" for r in learned["results"])
    if not judged["verdict"]["passed"]:
        return "refused", judged["verdict"]["summary"]
    rollout = rolled["rollout"]
    return ("promoted" if rollout["promoted"] else "taken back"), rollout["reason"]


def _as_result(proposal: Candidate | Declined, seconds: float) -> dict[str, Any]:
    if isinstance(proposal, Declined):
        return {"learner": proposal.learner, "declined": proposal.reason, "stack": None, "cost_s": seconds}
    values = asdict(proposal)
    return {
        "learner": proposal.learner,
        "declined": None,
        "stack": proposal.stack.to_json(),
        "cost_s": proposal.cost_s,
        "expects": values["expects"],
        "notes": values["notes"],
    }


def _time_ratio(verdict: Verdict) -> float:
    ratios = [c.ratio for c in verdict.comparisons if (c.metric, c.slice) == ("e2e_s", "all")]
    return ratios[0] if ratios else float("inf")


def _metrics(verdict: Verdict) -> dict[str, float]:
    overall = [c for c in verdict.comparisons if c.slice == "all"]
    return {
        f"{c.metric}.{side}": getattr(c, side) for c in overall for side in ("champion", "candidate", "ratio")
    }


def _count(split: str, traces: list[Trace]) -> dict[str, Any]:
    return {
        "split": split,
        "requests": len(traces),
        "sessions": len({(t.tenant, t.session) for t in traces}),
        "output_tokens": sum(len(t.output_token_ids) for t in traces),
    }


@contextmanager
def _one_at_a_time(home: Path) -> Iterator[None]:
    lock = home / "run" / "loop.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LoopError(
                f"Another loop is running with {home} (`strop loop status` shows it), or traces are being deleted."
            ) from None
        yield
    finally:
        os.close(fd)
