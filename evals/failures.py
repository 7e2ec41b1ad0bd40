"""The part `failures`: what goes plainly wrong in answers, what changes from run to run, what leaks."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from strop.evals import determinism, leakage
from strop.evals.faults import Fault, FaultKind, Said, faults, said
from strop.evals.observation import Bench, Finding, Metric, Observation, Side
from strop.evals.replay import Request, Server, select
from strop.evals.settings import EvalSettings
from strop.serving.client import Outcome
from strop.serving.settings import Section
from strop.serving.traces import Trace

_WORDS: dict[FaultKind, str] = {
    "error": "share of requests that failed",
    "empty": "share of answers with neither text nor a tool call",
    "truncated": "share of answers that broke off or ended before their limit",
    "loop": "share of answers that repeat themselves over and over",
    "premature_stop": "share of answers that stopped far too soon or inside of a block",
    "garbage": "share of answers with characters that went wrong",
    "language_switch": "share of answers in a script that nobody asked for",
}
FAULTS: tuple[Metric, ...] = tuple(
    Metric(name, "", "lower", "difference", words) for name, words in _WORDS.items()
)
_SHOWN = 2000
"""Characters of an answer that a Finding keeps."""


class Failures(Section):
    metrics: ClassVar[tuple[Metric, ...]] = (*FAULTS, *determinism.METRICS, *leakage.METRICS)

    name: Literal["failures"] = "failures"
    max_requests: int = Field(default=64, ge=1)
    """Held-out requests whose answers are looked at, in whole sessions."""
    max_output_tokens: int = Field(default=512, ge=2)
    """Cap on the tokens of an answer: a loop needs room to be seen."""
    concurrency: int = Field(default=4, ge=1)
    """Requests to each Stack at a time while answers are looked at."""
    repeated_requests: int = Field(default=8, ge=0)
    """Requests that are asked again alone, in a batch and on every replica; 0 leaves that out."""
    repeated_tokens: int = Field(default=64, ge=1)
    """Cap on the tokens of those."""
    batch: int = Field(default=8, ge=2)
    """Requests in a batch."""
    leak_rounds: int = Field(default=2, ge=0)
    """Rounds of marked prompts that are searched in each other's answers; 0 leaves that out."""
    leak_at_once: int = Field(default=8, ge=2)
    """Marked prompts sent at the same time."""
    request_timeout_s: float = Field(default=300, gt=0)
    """Longest time one request may take before it counts as failed."""
    seconds: float = Field(default=600, gt=0)
    """Time for all of it; after six tenths no further answer is looked at, after nine none is asked again."""

    async def observe(self, bench: Bench) -> AsyncIterator[Observation | Finding]:
        """What leaks first, then faults of answers, then what changes from run to run.

        Raises EvalError if the noise of a Stack's dtype is not known.
        """
        started = time.monotonic()
        async for seen in leakage.observe_leaks(
            bench, self.leak_rounds, self.leak_at_once, self.request_timeout_s
        ):
            yield seen
        settings = EvalSettings(max_requests=self.max_requests, max_output_tokens=self.max_output_tokens)
        requests, _ = select(bench.traces, settings.model_copy(update={"seed": bench.seed}))
        share = 0.6 if self.repeated_requests else 0.9
        async for seen in self._observe_answers(bench, requests, started + share * self.seconds):
            yield seen
        copies = determinism.greedy_copies(requests, self.repeated_requests, self.repeated_tokens)
        ends = started + 0.9 * self.seconds
        async for seen in determinism.observe_repeats(
            bench, copies, self.batch, ends, self.request_timeout_s
        ):
            yield seen
        bench.progress(1.0, f"answers to {len(requests)} requests looked at")

    async def _observe_answers(
        self, bench: Bench, requests: Sequence[Request], ends: float
    ) -> AsyncIterator[Observation | Finding]:
        recorded = {trace.request_id: trace for trace in bench.traces}
        left = [request for request in requests if request.request_id not in bench.done]
        for start in range(0, len(left), self.concurrency):
            if start and time.monotonic() > ends:
                return
            part = left[start : start + self.concurrency]
            bench.progress(0.1 + 0.5 * start / len(left), f"{start} of {len(left)} answers looked at")
            outcomes = await asyncio.gather(
                *(
                    Server(side.url, side.model).answer(bench.client, request, self.request_timeout_s)
                    for request in part
                    for side in bench.sides
                )
            )
            for number, request in enumerate(part):
                reference, candidate = outcomes[2 * number : 2 * number + 2]
                for seen in seen_in(bench, request, recorded[request.request_id], reference, candidate):
                    yield seen


def seen_in(
    bench: Bench, request: Request, trace: Trace, reference: Outcome, candidate: Outcome
) -> list[Observation | Finding]:
    """Faults of two answers to one request; of one that only one Stack answered, the error is all that counts."""
    recorded = recorded_answer(trace, request)
    here = faults(request.body, candidate, [*_whole(reference), *recorded])
    there = faults(request.body, reference, [*_whole(candidate), *recorded])
    both = reference.error is None and candidate.error is None
    seen: list[Observation | Finding] = [
        Observation(
            name,
            request.request_id,
            request.session,
            (request.kind,),
            (_has(name, candidate, here),),
            (_has(name, reference, there),),
        )
        for name in _WORDS
        if both or name in ("error", "truncated")
    ]
    pairs = ((bench.reference, there, reference, candidate), (bench.candidate, here, candidate, reference))
    seen += [
        finding_of(side, request, fault, own, other) for side, found, own, other in pairs for fault in found
    ]
    return seen


def recorded_answer(trace: Trace, request: Request) -> list[Said]:
    """What was answered when the request was made, if that is known; cut as the replayed one is."""
    choice = next((choice for choice in trace.choices if choice.text or choice.tool_calls), None)
    if choice is None:
        return []
    tokens = min(len(choice.token_ids), request.body["max_tokens"])
    text = choice.text + (choice.tool_calls or "")
    return [Said(text, tokens, choice.finish_reason in ("stop", "tool_calls"))]


def finding_of(side: Side, request: Request, fault: Fault, own: Outcome, other: Outcome) -> Finding:
    return Finding(
        kind=fault.kind,
        arm=side.arm,
        stack=side.stack.fingerprint,
        request_id=request.request_id,
        detail=fault.detail,
        body={**request.body, "model": side.model},
        answer=shown(own),
        other=shown(other),
    )


def shown(outcome: Outcome) -> str:
    """The beginning of what was answered, or why nothing was."""
    calls = "".join(
        f"\n{call['function']['name']}({call['function']['arguments']})" for call in outcome.tool_calls
    )
    return ((outcome.text + calls) or outcome.error or "")[:_SHOWN]


def _whole(outcome: Outcome) -> list[Said]:
    return [said(outcome)] if outcome.error is None else []


def _has(kind: str, outcome: Outcome, found: Sequence[Fault]) -> float:
    # An answer that broke off failed, too.
    failed = kind == "error" and outcome.error is not None
    return float(failed or any(fault.kind == kind for fault in found))
