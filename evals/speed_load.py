"""Load to measure under: so many requests at once for a while, or requests as a recorded trace came in."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from strop.evals.observation import Side
from strop.evals.replay import Request
from strop.serving.arrivals import Arrival, scaled
from strop.serving.client import Outcome
from strop.serving.replay import replay
from strop.serving.sessions import Session, Turn
from strop.serving.traces import PROBE_TENANT


@dataclass(frozen=True, slots=True)
class Asked:
    """One sending of a request; the same for both Stacks."""

    id: str
    request: Request
    salt: str
    """What the server cached under another salt does not count for this one."""

    def session(self, side: Side) -> Session:
        """A session of its own, so that nothing of it waits for an earlier turn: the turns are recorded."""
        body = {**self.request.body, "model": side.model, "cache_salt": salt_for(side, self.salt)}
        messages = tuple(body.pop("messages", ()))
        turn = Turn(self.request.kind, messages, body, self.request.endpoint, continues=False)
        return Session(self.id, (turn,))


def salt_for(side: Side, salt: str) -> str:
    """Both Stacks may be one server, compared with itself: neither finds what the other left."""
    return f"{salt}-{side.arm}"


def over_and_over(requests: Sequence[Request], name: str, salt: str) -> Iterator[Asked]:
    """The requests endlessly, each time round with another salt: as cold as the first time."""
    for cycle in count():
        again = f"#{cycle}" if cycle else ""
        for request in requests:
            yield Asked(f"{name}/{request.request_id}{again}", request, f"{salt}-{name}{again}")


async def steadily(
    side: Side, asked: Iterator[Asked], concurrency: int, seconds: float, timeout_s: float
) -> dict[str, Outcome]:
    """Keep `concurrency` requests under way; outcomes by id of those sent within `seconds`, in that order.

    The first request of each client is left out, since they all start at once, and further ones are
    sent until the last that counts is answered: each that counts ran among `concurrency`, so that by
    Little's law the throughput is `concurrency` over the mean time of a request. At least
    `concurrency` are counted. A server that fails so many in a row and three more is given up.
    """
    started = time.monotonic()
    sent = failed_in_a_row = 0
    counted: dict[str, Outcome | None] = {}
    over = asyncio.Event()

    def late() -> bool:
        return time.monotonic() - started >= seconds or len(counted) >= _MOST

    def on_start(session: Session, turn: int) -> None:
        nonlocal sent
        sent += 1
        if sent > concurrency and (not late() or len(counted) < concurrency):
            counted[session.id] = None

    def on_outcome(session: Session, turn: int, outcome: Outcome) -> None:
        nonlocal failed_in_a_row
        if session.id in counted:
            counted[session.id] = outcome
        failed_in_a_row = failed_in_a_row + 1 if outcome.error else 0
        gone = failed_in_a_row >= concurrency + 3
        if gone or (late() and len(counted) >= concurrency and None not in counted.values()):
            over.set()

    playing = asyncio.create_task(
        replay(
            side.url,
            (one.session(side) for one in asked),
            concurrency=concurrency,
            on_start=on_start,
            on_outcome=on_outcome,
            timeout_s=timeout_s,
            tenant=PROBE_TENANT,
        )
    )
    waiting = asyncio.create_task(over.wait())
    try:
        await asyncio.wait([playing, waiting], return_when=asyncio.FIRST_COMPLETED)
        if playing.done():
            playing.result()
    finally:
        playing.cancel()
        waiting.cancel()
        await asyncio.gather(playing, waiting, return_exceptions=True)
    return {id_: outcome for id_, outcome in counted.items() if outcome is not None}


_MOST = 5000
"""Requests that are counted in a round: a server that turns them away at once is asked very fast."""


async def as_they_arrive(
    side: Side, asked: Sequence[Asked], times_s: Sequence[float], timeout_s: float
) -> dict[str, Outcome]:
    """Send each request at its time in seconds, however many are under way; outcomes by id."""
    outcomes = await replay(
        side.url,
        [one.session(side) for one in asked],
        arrivals=times_s,
        timeout_s=timeout_s,
        tenant=PROBE_TENANT,
    )
    return {outcome.session: outcome for outcome in outcomes}


def window(arrivals: Sequence[Arrival], start: int, requests: int, seconds: float) -> list[float]:
    """Times of so many arrivals from number `start` on (round the end), scaled to come in `seconds`.

    What is kept of the trace is how arrivals bunch together; the rate is chosen.
    """
    requests = min(requests, len(arrivals))
    start %= len(arrivals) - requests + 1
    chosen = arrivals[start : start + requests]
    first = chosen[0].at_s
    recorded_s = chosen[-1].at_s - first
    if recorded_s == 0:
        return [0.0] * requests
    wanted_s = seconds * (requests - 1) / requests
    return list(scaled((replace(a, at_s=a.at_s - first) for a in chosen), recorded_s / wanted_s))
