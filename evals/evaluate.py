"""Two served Stacks in, one Evaluation out: run a suite's parts, sum up what they saw, decide its gates."""

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from strop.evals.aggregate import ALL, Aggregate, Broken, Measurement, check
from strop.evals.evaluation import Curve, Evaluation, Figure, GateResult, Ran, Shown
from strop.evals.gates import Decision, decide, verdict
from strop.evals.journal import Journal, PartRun, Recorded, Seen
from strop.evals.observation import Bench, EvalError, Finding, Metric, Observation, Side
from strop.evals.proposal import Progress
from strop.evals.speed_summary import load_curves
from strop.evals.suite import Plan, Planned
from strop.evals.summary import summarise
from strop.serving.home import home, locked, write_atomic
from strop.serving.stack import Stack, canonical_json
from strop.serving.traces import Trace

CONFIDENCE = 0.95
GRACE = 1.25
"""A part that plans its own time is ended when it takes so much longer than its seconds."""
FINDINGS = 400
"""Most findings that an Evaluation keeps, evenly over their kinds; the journal has all of them."""
TEXT = 8000
"""Characters of an answer that an Evaluation keeps."""
CURVE = 101


def identity(reference: Stack, candidate: Stack, plan: Plan, traces: Sequence[Trace]) -> str:
    """Of the evaluation: equal for the same Stacks, parts with their options, and requests in order."""
    digest = hashlib.sha256()
    for trace in traces:
        digest.update(trace.request_id.encode() + b"\n")
    whole = [reference.fingerprint, candidate.fingerprint, plan.digest, digest.hexdigest()]
    return hashlib.sha256(canonical_json(whole)).hexdigest()[:16]


def evaluate(
    reference: Side,
    candidate: Side,
    traces: Sequence[Trace],
    plan: Plan,
    folder: Path,
    progress: Progress = lambda done, text: None,
) -> Evaluation:
    """Run the suite against both servers, or go on where a run with the same folder was cut short.

    `traces` is held-out traffic with content, oldest first. The journal and `evaluation.json` lie in
    `folder`. Both servers must be quiet if the suite measures speed. A part that can say nothing
    leaves its gates without data; a server that fails is an observation. Raises EvalError if another
    evaluation is at work in the folder or its journal is broken.
    """
    try:
        with locked(folder / "lock", wait=False):
            return _evaluate(reference, candidate, traces, plan, folder, progress)
    except BlockingIOError:
        raise EvalError(f"Another evaluation is at work in {folder}. Wait for it.") from None


def is_finished(plan: Plan, folder: Path) -> bool:
    """Whether every part of the plan has been asked in `folder`. Raises EvalError for a broken journal."""
    if not (folder / "journal.jsonl").is_file():
        return False
    recorded = Journal(folder / "journal.jsonl").parts()
    runs = [_of(recorded, planned).run for planned in plan.parts]
    return all(run is not None and not run.problem for run in runs)


def findings_of(folder: Path) -> list[Finding]:
    """All findings that the journal in `folder` holds. Raises EvalError for a broken journal."""
    return [f for recorded in Journal(folder / "journal.jsonl").parts().values() for f in recorded.findings]


def _evaluate(
    reference: Side,
    candidate: Side,
    traces: Sequence[Trace],
    plan: Plan,
    folder: Path,
    progress: Progress,
) -> Evaluation:
    journal = Journal(folder / "journal.jsonl")
    started_at = journal.begin(time.time())
    before, total = 0.0, sum(planned.seconds for planned in plan.parts)
    for planned in plan.parts:
        share = planned.seconds / total

        def report(done: float, text: str, before: float = before, share: float = share) -> None:
            progress(before + share * min(1.0, max(0.0, done)), text)

        recorded = journal.resume(planned.part.name)
        if recorded.run is None or recorded.run.problem:
            bench = _bench(reference, candidate, traces, recorded, planned, report)
            asyncio.run(_run(planned, plan.metrics, bench, journal))
        before += share
    progress(1.0, "summing up")
    evaluation = summed_up(
        reference.stack, candidate.stack, plan, journal, len(traces), folder.name, started_at
    )
    write_atomic(folder / "evaluation.json", evaluation.model_dump_json(indent=1))
    return evaluation


def _bench(
    reference: Side,
    candidate: Side,
    traces: Sequence[Trace],
    recorded: Recorded,
    planned: Planned,
    report: Progress,
) -> Callable[[httpx.AsyncClient], Bench]:
    cache = home() / "cache" / "evals"
    cache.mkdir(parents=True, exist_ok=True)
    return lambda client: Bench(
        reference=reference,
        candidate=candidate,
        traces=traces,
        client=client,
        cache=cache,
        progress=lambda done, text: report(done, f"{planned.part.name}: {text}"),
        done=recorded.requests,
    )


async def _run(
    planned: Planned,
    metrics: dict[str, Metric],
    bench_with: Callable[[httpx.AsyncClient], Bench],
    journal: Journal,
) -> None:
    name = planned.part.name
    started = time.monotonic()
    ended, problem = False, ""
    async with httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_connections=None)) as client:
        bench = bench_with(client)
        requests = set(bench.done)
        limit = asyncio.timeout(planned.seconds * (GRACE if planned.plans else 1))
        try:
            async with limit:
                async for seen in planned.part.observe(bench):
                    if isinstance(seen, Observation):
                        check(metrics, seen)
                    requests.add(seen.request_id)
                    journal.saw(name, seen)
        except TimeoutError:
            if not limit.expired():
                raise
            ended = True
        except (EvalError, Broken) as error:
            problem = str(error)
    journal.finish(PartRun(name, time.monotonic() - started, len(requests), ended, problem))


def summed_up(
    reference: Stack,
    candidate: Stack,
    plan: Plan,
    journal: Journal,
    traces: int,
    id_: str,
    started_at: float,
) -> Evaluation:
    """The Evaluation of what a journal holds."""
    recorded = journal.parts()
    seen: list[Seen] = [each for planned in plan.parts for each in _of(recorded, planned).seen]
    aggregate = Aggregate.of(plan.metrics.values(), (s for s in seen if isinstance(s, Observation)))
    decisions = decide(plan.gates, aggregate)
    answer = verdict(decisions)
    parts = tuple(_ran(planned.part.name, _of(recorded, planned)) for planned in plan.parts)
    if answer == "passed" and any(part.problem for part in parts):
        # What a part could not say may be what would have failed.
        answer = "not enough data"
    gates = tuple(_gate(decision) for decision in decisions)
    findings = [each for each in seen if isinstance(each, Finding)]
    differences = reference.diff(candidate)
    return Evaluation(
        id=id_,
        suite=plan.name,
        verdict=answer,
        summary=summarise(answer, gates, parts, findings, differences),
        reference=_manifest(reference),
        candidate=_manifest(candidate),
        differences=differences,
        started_at=started_at,
        seconds=sum(part.seconds for part in parts),
        traces=traces,
        parts=parts,
        gates=gates,
        figures=tuple(figure(m, m.interval(CONFIDENCE), CONFIDENCE) for m in aggregate.each()),
        findings=_shown(findings),
        curves=tuple(_curves(aggregate)),
        load=tuple(load_curves(s for s in seen if isinstance(s, Observation)).values()),
    )


def figure(measurement: Measurement, interval: tuple[float, float], confidence: float) -> Figure:
    metric = measurement.metric
    estimate, low, high = (v if math.isfinite(v) else None for v in (measurement.estimate, *interval))
    return Figure(
        metric=metric.name,
        unit=metric.unit,
        words=metric.words,
        better=metric.better,
        compare=metric.compare,
        slice=measurement.slice,
        statistic=measurement.statistic,
        reference=measurement.reference,
        candidate=measurement.candidate,
        estimate=estimate,
        low=low,
        high=high,
        confidence=confidence,
        samples=measurement.samples,
        requests=measurement.requests,
    )


def _of(recorded: dict[str, Recorded], planned: Planned) -> Recorded:
    return recorded.get(planned.part.name, Recorded())


def _ran(name: str, recorded: Recorded) -> Ran:
    run = recorded.run or PartRun(name, 0.0, len(recorded.requests), problem="It was not finished.")
    return Ran(
        name=name,
        seconds=run.seconds,
        requests=run.requests,
        observations=len(recorded.observations),
        findings=len(recorded.findings),
        ended=run.ended,
        problem=run.problem,
    )


def _gate(decision: Decision) -> GateResult:
    gate, measurement = decision.gate, decision.measurement
    confidence = 2 * gate.confidence - 1
    return GateResult(
        metric=gate.metric,
        slice=decision.slice,
        statistic=gate.statistic,
        side="at least" if gate.at_most is None else "at most",
        bound=gate.bound,
        confidence=gate.confidence,
        min_samples=gate.min_samples,
        required=gate.must_pass,
        answer=decision.answer,
        figure=figure(measurement, (decision.low, decision.high), confidence) if measurement else None,
    )


def _shown(findings: Sequence[Finding]) -> tuple[Shown, ...]:
    by_kind: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        by_kind.setdefault((finding.kind, finding.arm), []).append(finding)
    kept: list[Finding] = []
    for turn in range(max((len(each) for each in by_kind.values()), default=0)):
        kept += [each[turn] for each in by_kind.values() if turn < len(each)]
    return tuple(_kept(finding) for finding in kept[:FINDINGS])


def _kept(finding: Finding) -> Shown:
    return Shown(
        kind=finding.kind,
        arm=finding.arm,
        stack=finding.stack,
        request_id=finding.request_id,
        detail=_whole(finding.detail[:TEXT]),
        body=_whole(finding.body),
        answer=_whole(finding.answer[:TEXT]),
        other=_whole(finding.other[:TEXT]),
    )


def _whole(value: Any) -> Any:
    """The same without halves of characters, which no file of UTF-8 can hold."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_whole(key): _whole(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(item) for item in value]
    return value


def _curves(aggregate: Aggregate) -> Iterable[Curve]:
    for name, metric in aggregate.metrics.items():
        measured = aggregate.measure(name, ALL, "median") if metric.compare == "ratio" else None
        if measured and measured.data.reference and measured.requests > 1:
            shares = np.linspace(0, 1, CURVE)
            ours, theirs = measured.data.candidate.values, measured.data.reference.values
            yield Curve(
                metric=name,
                reference=tuple(np.quantile(theirs, shares).tolist()),
                candidate=tuple(np.quantile(ours, shares).tolist()),
            )


def _manifest(stack: Stack) -> dict[str, Any]:
    return {**stack.model_dump(mode="json"), "fingerprint": stack.fingerprint}
