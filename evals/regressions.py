"""Requests that once failed: kept one file a case, bounded, and asked again of every candidate.

Cases come from three places: Findings of an evaluation, traces of failed or plainly faulty answers,
and what a candidate said that a canary took back. A case is known by what was asked and how it
failed, so that the same failure is kept once. It keeps the tenant, session and time of the request it
came from: deletion and retention treat it as the trace that it holds (`serving/deletion.py`).
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Literal

import orjson
from pydantic import Field

from strop.evals.failures import shown
from strop.evals.faults import Said, faults
from strop.evals.observation import Bench, EvalError, Finding, Metric, Observation, Side
from strop.evals.replay import Kind, Request, Server, kind_of, rebuild
from strop.evals.settings import EvalSettings
from strop.serving.client import Endpoint, Outcome
from strop.serving.deletion import REGRESSIONS
from strop.serving.home import home as strop_home
from strop.serving.home import write_atomic
from strop.serving.quality import flags
from strop.serving.settings import Section
from strop.serving.tombstones import epoch, read_tombstones
from strop.serving.traces import PROBE_TENANT, Choice, Trace

SEVERITY = {
    "race": 4,
    "error": 4,
    "empty": 3,
    "truncated": 3,
    "loop": 3,
    "garbage": 3,
    "premature_stop": 2,
    "language_switch": 2,
    "invalid_json": 2,
    "invalid_tool_call": 2,
}
"""Kinds of failure that an answer shows by itself, so that it can be asked again whether it still fails."""
MAX_CASES = 500
MAX_BYTES = 64 << 20
MAX_CASE_BYTES = 1 << 20
"""A larger request is not kept: it would take the place of many."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request that failed."""

    tenant: str
    session: str
    started_at: str
    """When the request it came from arrived, ISO 8601, UTC."""
    kind: str
    detail: str
    stack: str
    """Fingerprint of the Stack that failed it."""
    request_id: str
    noted_at: str
    slice: Kind
    endpoint: Endpoint
    body: dict[str, Any]
    """Everything but the model's name."""
    answer: str = ""
    """The beginning of what was answered."""
    expected: str = ""
    """The beginning of what the other Stack answered, where there was one."""

    @property
    def id(self) -> str:
        """SHA-256 of what was asked of whom and how it failed."""
        content = [self.kind, self.tenant, self.endpoint, self.body]
        return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()

    @property
    def request(self) -> Request:
        return Request(self.id, f"{self.tenant}/{self.session}", self.slice, self.endpoint, self.body)


def cases_of_findings(findings: Iterable[Finding], traces: Iterable[Trace]) -> Iterator[Case]:
    """Cases of those Findings that are of a kind that counts and of a request among `traces`."""
    by_id = {trace.request_id: trace for trace in traces}
    for finding in findings:
        trace = by_id.get(finding.request_id)
        if trace is None or finding.kind not in SEVERITY:
            continue
        body = {name: value for name, value in finding.body.items() if name not in ("model", "cache_salt")}
        yield _case(trace, finding.kind, finding.detail, finding.stack, body, finding.answer, finding.other)


def cases_of_traces(traces: Iterable[Trace]) -> Iterator[Case]:
    """Cases of traces whose server failed (status 500 and above) or whose answer is plainly faulty.

    strop's own requests are left out, and those that hold no content or are no requests to replay.
    """
    settings = EvalSettings()
    for trace in traces:
        if trace.tenant == PROBE_TENANT or 400 <= trace.status < 500:
            continue
        try:
            body = rebuild(trace, settings).body
        except (ValueError, AttributeError, TypeError):
            continue
        said = trace.choices[0].text[:2000] if trace.choices else ""
        for kind, detail in _failures_of(trace):
            yield _case(trace, kind, detail, trace.stack, body, said)


def _failures_of(trace: Trace) -> Iterator[tuple[str, str]]:
    if trace.status >= 500:
        yield "error", f"status {trace.status}: {(trace.error or '')[:300]}"
        return
    found = flags(trace)
    for kind in ("empty", "loop", "invalid_json", "invalid_tool_call"):
        if getattr(found, kind):
            yield kind, f"{kind.replace('_', ' ')} in live traffic"


def _case(
    trace: Trace,
    kind: str,
    detail: str,
    stack: str,
    body: dict[str, Any],
    answer: str,
    expected: str = "",
) -> Case:
    return Case(
        tenant=trace.tenant,
        session=trace.session,
        started_at=trace.started_at.astimezone(UTC).isoformat(),
        kind=kind,
        detail=detail,
        stack=stack,
        request_id=trace.request_id,
        noted_at=datetime.now(UTC).isoformat(),
        slice=kind_of(trace),
        endpoint="completions" if "prompt" in body else "chat",
        body=body,
        answer=answer,
        expected=expected,
    )


def remember(
    home: Path, cases: Iterable[Case], max_cases: int = MAX_CASES, max_bytes: int = MAX_BYTES
) -> int:
    """Keep cases, then let go of the least severe and oldest until all fit; returns how many are new.

    Cases of what was deleted are not kept. Raises OSError if the disk refuses.
    """
    root, new = home / REGRESSIONS, 0
    with epoch(home / "traces"):
        deleted = read_tombstones(home / "traces")
        for case in cases:
            path = root / f"{case.id}.json"
            started = datetime.fromisoformat(case.started_at)
            if path.exists() or deleted.cover(case.tenant, case.session, started):
                continue
            content = orjson.dumps(asdict(case))
            if len(content) <= MAX_CASE_BYTES:
                write_atomic(path, content)
                new += 1
    _bound(root, max_cases, max_bytes)
    return new


def remember_evaluation(home: Path, findings: Iterable[Finding], traces: Iterable[Trace]) -> int:
    """Keep what an evaluation found, to be asked of every candidate from now on; returns how many are new."""
    return remember(home, cases_of_findings(findings, traces))


def kept_cases(home: Path) -> list[Case]:
    """All cases, the most severe and newest first; files that are none are passed over."""
    found = [case for path in sorted((home / REGRESSIONS).glob("*.json")) if (case := _read(path))]
    return sorted(found, key=_worth, reverse=True)


def _worth(case: Case) -> tuple[int, str]:
    return SEVERITY.get(case.kind, 0), case.noted_at


_FIELDS = {f.name for f in fields(Case)}


def _read(path: Path) -> Case | None:
    try:
        values = orjson.loads(path.read_bytes())
        case = Case(**{name: value for name, value in values.items() if name in _FIELDS})
        plain = all(isinstance(getattr(case, name), str) for name in _FIELDS - {"body"})
        whole = plain and isinstance(case.body, dict) and case.kind in SEVERITY and case.id == path.stem
        return case if whole else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _bound(root: Path, max_cases: int, max_bytes: int) -> None:
    sized = []
    for path in root.glob("*.json"):
        try:
            case, size = _read(path), path.stat().st_size
        except OSError:
            continue  # Deleted meanwhile.
        sized.append((_worth(case) if case else (-1, ""), size, path))
    count, total = len(sized), sum(size for _, size, _ in sized)
    for _, size, path in sorted(sized):
        if count <= max_cases and total <= max_bytes:
            return
        path.unlink(missing_ok=True)
        count, total = count - 1, total - size


class Regressions(Section):
    """The part `regressions`: what once failed is asked again."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            "regression_fails", "", "lower", "difference", "share of once failed requests that fail again"
        ),
    )

    name: Literal["regressions"] = "regressions"
    max_cases: int = Field(default=100, ge=1)
    """Cases that are asked again, the most severe and newest first."""
    concurrency: int = Field(default=4, ge=1)
    """Cases at a time."""
    request_timeout_s: float = Field(default=300, gt=0)
    """Longest time one request may take before it counts as failed."""

    async def observe(self, bench: Bench) -> AsyncIterator[Observation | Finding]:
        """Ask both Stacks every kept case; one that only the candidate fails is a Finding.

        Requests of `bench.traces` that failed are kept first. Raises EvalError if they cannot be.
        """
        try:
            remember(strop_home(), cases_of_traces(bench.traces))
        except OSError as error:
            raise EvalError(
                f"Requests that failed cannot be kept in {strop_home() / REGRESSIONS}: {error}"
            ) from None
        cases = [c for c in kept_cases(strop_home())[: self.max_cases] if c.id not in bench.done]
        for start in range(0, len(cases), self.concurrency):
            part = cases[start : start + self.concurrency]
            bench.progress(start / len(cases), f"{start} of {len(cases)} requests that once failed")
            failed = await asyncio.gather(
                *(self._fails(bench, side, case) for case in part for side in bench.sides)
            )
            for number, case in enumerate(part):
                (there, theirs), (here, ours) = failed[2 * number : 2 * number + 2]
                yield Observation(
                    "regression_fails",
                    case.id,
                    case.request.session,
                    (case.slice, case.kind),
                    (float(here is not None),),
                    (float(there is not None),),
                )
                if here is not None and there is None:
                    yield _finding(bench.candidate, case, here, ours, theirs)
        bench.progress(1.0, f"{len(cases)} requests that once failed")

    async def _fails(self, bench: Bench, side: Side, case: Case) -> tuple[str | None, Outcome]:
        """How a Stack fails a case now, in words, and its answer."""
        # Both runs of a race compute their prompts anew, as where it was found.
        salts = (f"{case.id}-first", f"{case.id}-again") if case.kind == "race" else (None,)
        url = (side.replicas or (side.url,))[0]
        answer, *more = [
            await Server(url if salt else side.url, side.model, salt).answer(
                bench.client, case.request, self.request_timeout_s
            )
            for salt in salts
        ]
        for again in more:
            both = answer.error is None and again.error is None
            if both and (again.token_ids, again.text) != (answer.token_ids, answer.text):
                return "the same request, asked twice, was answered differently", answer
        return failure_of(case, answer), answer


def failure_of(case: Case, outcome: Outcome) -> str | None:
    """How an answer fails the case it is to: in the way it once did, or by no answer at all; None if it does not."""
    expected = []
    if case.expected and outcome.text:
        tokens = round(len(case.expected) * outcome.output_tokens / len(outcome.text))
        expected = [Said(case.expected, tokens, case.kind == "premature_stop")]
    for fault in faults(case.body, outcome, expected):
        if fault.kind == case.kind or outcome.error is not None:
            return fault.detail
    if case.kind in ("invalid_json", "invalid_tool_call") and getattr(
        flags(_as_trace(case, outcome)), case.kind
    ):
        return case.kind.replace("_", " ")
    return None


def _as_trace(case: Case, outcome: Outcome) -> Trace:
    """What quality is read from; numbers and times do not matter to it."""
    calls = orjson.dumps(outcome.tool_calls).decode() if outcome.tool_calls else None
    return Trace(
        request_id=case.request_id,
        started_at=datetime.fromisoformat(case.started_at),
        tenant=case.tenant,
        session=case.session,
        stack=case.stack,
        endpoint=case.endpoint,
        stream=True,
        model="",
        sampling="{}",
        format=orjson.dumps(case.body).decode(),
        messages="asked",
        prompt_token_ids=[],
        choices=[Choice(0, outcome.token_ids or [], outcome.text, outcome.finish_reason, calls)],
        status=outcome.status,
    )


def _finding(side: Side, case: Case, failure: str, ours: Outcome, theirs: Outcome) -> Finding:
    return Finding(
        kind="regression",
        arm=side.arm,
        stack=side.stack.fingerprint,
        request_id=case.request_id,
        detail=f"fails again as {case.stack[:12]} once did ({case.kind}: {case.detail}): {failure}",
        body={**case.body, "model": side.model},
        answer=shown(ours),
        other=shown(theirs),
    )
