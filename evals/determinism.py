"""Whether a server says the same again: alone, in a batch with others, and on every replica.

Greedy answers should be the same tokens each time. Where they part, the server is asked for both
tokens' log-probabilities after the common prefix (`losslessness`): other rows in the batch change
the order of sums, so that two tokens whose gap is within the noise of the dtype are a tie. Anything
else is a race: a wrong answer that comes and goes. So is every difference between two runs of one
request alone, since then nothing has changed the order of sums.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import httpx

from strop.evals.losslessness import compare_outputs, tie_bound
from strop.evals.observation import Arm, Bench, EvalError, Finding, Metric, Observation, Side
from strop.evals.replay import Pair, Request, Server
from strop.evals.verdict import OutputDifference
from strop.serving.client import Outcome

METRICS = (
    Metric("repeats_same", "", "higher", "difference", "share of greedy requests answered alike twice, alone"),
    Metric("batch_same", "", "higher", "difference", "share of greedy requests answered alike in a batch"),
    Metric("replica_same", "", "higher", "level", "share of greedy requests answered alike by every replica"),
    Metric("race", "", "lower", "difference", "share of greedy requests whose answers part beyond a numeric tie"),
)  # fmt: skip
PREFIX = "repeat-"
"""How the request ids of this look begin; the id of the trace follows."""

How = Literal["alone", "batch", "replica"]
_WORDS: dict[How, str] = {
    "alone": "asked again, alone",
    "batch": "in a batch",
    "replica": "on another replica",
}


@dataclass(frozen=True, slots=True)
class Parted:
    """Two answers of one Stack to one request that are not the same."""

    how: How
    where: str
    answer: Outcome
    other: Outcome
    difference: OutputDifference | None
    """None where the second was not answered at all."""

    @property
    def race(self) -> bool:
        return self.how == "alone" or self.difference is None or not self.difference.tie

    def words(self, bound: float) -> str:
        if self.difference is None:
            return f"answered alone, failed {self.where}: {self.other.error}"
        gap = self.difference.logprob_gap
        known = "the server gave no gap" if gap is None else f"a gap of {gap:.3g} nats, ties reach {bound:g}"
        kind = "race" if self.race else "numeric tie"
        return (
            f"{self.where} it says token {self.difference.candidate_token} instead of "
            f"{self.difference.champion_token} at position {self.difference.position} ({known}): {kind}"
        )


@dataclass(frozen=True, slots=True)
class Repeats:
    """What one Stack did with one request."""

    answer: Outcome
    asked: frozenset[How]
    """In which ways it was asked again."""
    parted: tuple[Parted, ...]

    def same(self, how: How) -> bool | None:
        return None if how not in self.asked else all(parted.how != how for parted in self.parted)

    @property
    def race(self) -> bool:
        return any(parted.race for parted in self.parted)


def greedy_copies(requests: Sequence[Request], count: int, tokens: int) -> list[Request]:
    """The first requests at temperature 0 and with at most so many tokens, named for this look."""
    copies = [request.made_greedy() for request in requests[:count]]
    return [
        replace(
            copy,
            request_id=PREFIX + copy.request_id,
            body={**copy.body, "max_tokens": min(tokens, copy.body["max_tokens"])},
        )
        for copy in copies
    ]


async def observe_repeats(
    bench: Bench, requests: Sequence[Request], batch: int, timeout_s: float
) -> AsyncIterator[Observation | Finding]:
    """Put greedy requests to both Stacks again and again; nobody else may ask the servers meanwhile.

    Raises EvalError if the noise of a Stack's dtype is not known.
    """
    left = [request for request in requests if request.request_id not in bench.done]
    if not left:
        return
    found: dict[Arm, list[Repeats | None]] = {}
    for side in bench.sides:
        try:
            tie_bound(side.stack.engine.dtype)
        except ValueError as error:
            raise EvalError(str(error)) from None
        bench.progress(0.5 if side.arm == "reference" else 0.75, f"asking the {side.arm} the same again")
        found[side.arm] = await repeats(bench.client, side, left, batch, timeout_s)
    for request, reference, candidate in zip(left, found["reference"], found["candidate"], strict=True):
        for side, one in zip(bench.sides, (reference, candidate), strict=True):
            for parted in one.parted if one else ():
                yield _finding(side, request, parted)
        for observation in _observations(request, reference, candidate):
            yield observation


async def repeats(
    client: httpx.AsyncClient, side: Side, requests: Sequence[Request], batch: int, timeout_s: float
) -> list[Repeats | None]:
    """What one Stack does with each request; None for one that it did not answer even the first time."""
    # Alone means one replica: two may have gone to two.
    homes = side.replicas or (side.url,)

    async def ask(request: Request, url: str, salt: str) -> Outcome:
        # Each run computes its prompt anew: one that finds it in the cache computes in another order.
        server = Server(url, side.model, f"{request.request_id}-{salt}")
        return await server.answer(client, request, timeout_s)

    first = [await ask(request, homes[0], "1") for request in requests]
    runs: list[list[tuple[How, str, Outcome]]] = [[] for _ in requests]
    for number, request in enumerate(requests):
        if first[number].error is None:
            runs[number].append(("alone", _WORDS["alone"], await ask(request, homes[0], "2")))
            for place, url in enumerate(homes[1:], 1):
                where = f"on replica {place}"
                runs[number].append(("replica", where, await ask(request, url, f"replica-{place}")))
    for start in range(0, len(requests), batch):
        # The last one, if it would be alone, is asked with those before it.
        part = range(start if start + 1 < len(requests) else max(0, start + 1 - batch), len(requests))[:batch]
        if len(part) < 2:
            continue
        outcomes = await asyncio.gather(*(ask(requests[n], homes[0], "batch") for n in part))
        for number, outcome in zip(part, outcomes, strict=True):
            if number >= start and first[number].error is None:
                runs[number].append(("batch", f"in a batch of {len(part)}", outcome))
    return [
        await _compared(client, side, homes[0], request, answer, others)
        for request, answer, others in zip(requests, first, runs, strict=True)
    ]


async def _compared(
    client: httpx.AsyncClient,
    side: Side,
    url: str,
    request: Request,
    answer: Outcome,
    others: Sequence[tuple[How, str, Outcome]],
) -> Repeats | None:
    if answer.error is not None:
        return None
    server, parted = Server(url, side.model), []
    for how, where, other in others:
        if other.error is not None:
            parted.append(Parted(how, where, answer, other, None))
            continue
        pair = Pair(request, answer, other)
        found = await compare_outputs(client, server, side.stack.engine.dtype, [pair])
        parted += [Parted(how, where, answer, other, difference) for difference in found.differences]
    return Repeats(answer, frozenset(how for how, _, _ in others), tuple(parted))


def _observations(
    request: Request, reference: Repeats | None, candidate: Repeats | None
) -> list[Observation]:
    if candidate is None:
        return []
    found = []
    same = candidate.same("replica")
    if same is not None:
        found.append(_observation("replica_same", request, float(same), None))
    if reference is None:
        return found
    ways: tuple[tuple[str, How], ...] = (("repeats_same", "alone"), ("batch_same", "batch"))
    for name, how in ways:
        here, there = candidate.same(how), reference.same(how)
        if here is not None and there is not None:
            found.append(_observation(name, request, float(here), float(there)))
    found.append(_observation("race", request, float(candidate.race), float(reference.race)))
    return found


def _observation(name: str, request: Request, candidate: float, reference: float | None) -> Observation:
    there = None if reference is None else (reference,)
    return Observation(name, request.request_id, request.session, (request.kind,), (candidate,), there)


def _finding(side: Side, request: Request, parted: Parted) -> Finding:
    return Finding(
        kind="race" if parted.race else "tie",
        arm=side.arm,
        stack=side.stack.fingerprint,
        request_id=request.request_id.removeprefix(PREFIX),
        detail=parted.words(tie_bound(side.stack.engine.dtype)),
        body={**request.body, "model": side.model},
        answer=parted.answer.text[:2000],
        other=parted.other.text[:2000],
    )
