"""Whether a server says the same again: alone, in a batch with others, and on every replica.

Greedy answers should be the same tokens each time. Where they part, the server is asked for both
tokens' log-probabilities after the common prefix (`losslessness`): other rows in the batch change
the order of sums, so that two tokens whose gap is within the noise of the dtype are a tie. Anything
else is a race: a wrong answer that comes and goes. So is every difference between two runs of one
request alone, since then nothing has changed the order of sums.
"""

import asyncio
import time
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
            return f"answered once, failed {self.where}: {self.other.error}"
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
    bench: Bench, requests: Sequence[Request], batch: int, ends: float, timeout_s: float
) -> AsyncIterator[Observation | Finding]:
    """Put greedy requests to both Stacks again and again; nobody else may ask the servers meanwhile.

    After `ends` (of `time.monotonic`) no further request is begun, if two were. Raises EvalError if the
    noise of a Stack's dtype is not known.
    """
    left = [request for request in requests if request.request_id not in bench.done]
    if not left:
        return
    for side in bench.sides:
        try:
            tie_bound(side.stack.engine.dtype)
        except ValueError as error:
            raise EvalError(str(error)) from None
    asked: dict[Arm, list[_Asked]] = {side.arm: [] for side in bench.sides}
    for number, request in enumerate(left):
        if number >= 2 and time.monotonic() > ends:
            break
        bench.progress(0.6 + 0.3 * number / len(left), f"{number} of {len(left)} requests asked again")
        for side in bench.sides:
            asked[side.arm].append(await _asked_alone(bench.client, side, request, timeout_s))
    for side in bench.sides:
        await _ask_in_batches(bench.client, side, asked[side.arm], batch, timeout_s)
    for pair in zip(*(asked[side.arm] for side in bench.sides), strict=True):
        found = [
            await _compared(bench.client, side, one) for side, one in zip(bench.sides, pair, strict=True)
        ]
        for side, one in zip(bench.sides, found, strict=True):
            for parted in one.parted if one else ():
                yield _finding(side, pair[0].request, parted)
        for observation in _observations(pair[0].request, *found):
            yield observation


@dataclass(frozen=True, slots=True)
class _Asked:
    """The answers of one Stack to one request: the first, and each later one with how and where it was asked."""

    request: Request
    first: Outcome
    again: list[tuple[How, str, Outcome]]


def _homes(side: Side) -> tuple[str, ...]:
    # Alone means one replica: through a router, two requests may go to two.
    return side.replicas or (side.url,)


async def _ask(
    client: httpx.AsyncClient, side: Side, request: Request, url: str, run: str, timeout_s: float
) -> Outcome:
    # Each run computes its prompt anew: one that finds it in the cache computes in another order.
    return await Server(url, side.model, f"{request.request_id}-{run}").answer(client, request, timeout_s)


async def _asked_alone(client: httpx.AsyncClient, side: Side, request: Request, timeout_s: float) -> _Asked:
    home, *others = _homes(side)
    one = _Asked(request, await _ask(client, side, request, home, "first", timeout_s), [])
    if one.first.error is None:
        again = await _ask(client, side, request, home, "again", timeout_s)
        one.again.append(("alone", "when asked again alone", again))
        for place, url in enumerate(others, 1):
            answer = await _ask(client, side, request, url, f"replica-{place}", timeout_s)
            one.again.append(("replica", f"on replica {place}", answer))
    return one


async def _ask_in_batches(
    client: httpx.AsyncClient, side: Side, asked: Sequence[_Asked], batch: int, timeout_s: float
) -> None:
    """Add to each what it was answered among others; batches are as even as can be, and never of one."""
    parts = max(1, min(-(-len(asked) // batch), len(asked) // 2))
    for number in range(parts):
        part = asked[len(asked) * number // parts : len(asked) * (number + 1) // parts]
        if len(part) < 2:
            return
        url = _homes(side)[0]
        answers = await asyncio.gather(
            *(_ask(client, side, one.request, url, "batch", timeout_s) for one in part)
        )
        for one, answer in zip(part, answers, strict=True):
            if one.first.error is None:
                one.again.append(("batch", f"in a batch of {len(part)}", answer))


async def _compared(client: httpx.AsyncClient, side: Side, asked: _Asked) -> Repeats | None:
    """None for a request that was not answered even the first time."""
    if asked.first.error is not None:
        return None
    server, parted = Server(_homes(side)[0], side.model), []
    for how, where, other in asked.again:
        if other.error is not None:
            parted.append(Parted(how, where, asked.first, other, None))
            continue
        pair = Pair(asked.request, asked.first, other)
        found = await compare_outputs(client, server, side.stack.engine.dtype, [pair])
        parted += [Parted(how, where, asked.first, other, difference) for difference in found.differences]
    return Repeats(frozenset(how for how, _, _ in asked.again), tuple(parted))


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
