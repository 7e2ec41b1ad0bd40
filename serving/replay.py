"""Send sessions to a server, closed loop or at given arrival times, and sum up what came back."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import httpx
import numpy as np

from strop.serving.client import Outcome, send
from strop.serving.sessions import Session

MAX_OPEN_SESSIONS = 1024
"""Sessions that may run at once at given arrival times; more wait for a place."""

OnStart = Callable[[Session, int], None]
OnOutcome = Callable[[Session, int, Outcome], None]


async def replay(
    base_url: str,
    sessions: Iterable[Session],
    *,
    concurrency: int | None = None,
    arrivals: Iterable[float] | None = None,
    stop_after_s: float | None = None,
    on_start: OnStart = lambda *_: None,
    on_outcome: OnOutcome = lambda *_: None,
    timeout_s: float = 600,
    tenant: str | None = None,
) -> list[Outcome]:
    """Play sessions against `base_url`; returns the outcomes in the order in which they came.

    The turns of a session run one after the other, and a failed one ends its session. Sessions run
    side by side: `concurrency` at once, or each from its time in `arrivals` (seconds from the start;
    sessions beyond the last arrival are not played). After `stop_after_s` no request is started,
    those under way are waited for. `on_start(session, turn)` and `on_outcome(session, turn, outcome)`
    hear of each request as it goes and as its answer comes.
    `sessions` is drawn from as needed, so it may be endless. Cancelling closes every connection.
    """
    if (concurrency is None) == (arrivals is None):
        raise ValueError("give either concurrency or arrivals")
    if concurrency is not None and concurrency < 1:
        raise ValueError(f"a concurrency of {concurrency} would send nothing: give 1 or more")
    start = time.monotonic()
    deadline = start + stop_after_s if stop_after_s is not None else float("inf")
    outcomes: list[Outcome] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=MAX_OPEN_SESSIONS)
    async with httpx.AsyncClient(limits=limits, trust_env=False) as client, asyncio.TaskGroup() as running:

        async def play(session: Session) -> None:
            answers: list[Outcome] = []
            for turn in range(len(session.turns)):
                if time.monotonic() >= deadline:
                    return
                request = session.request(turn, answers)
                on_start(session, turn)
                outcome = await send(
                    client,
                    base_url,
                    request.endpoint,
                    request.body,
                    session=session.id,
                    tenant=tenant,
                    timeout_s=timeout_s,
                )
                outcomes.append(outcome)
                on_outcome(session, turn, outcome)
                if outcome.error is not None:
                    return
                answers.append(outcome)

        if arrivals is not None:
            await _at_arrivals(running, play, sessions, arrivals, start, deadline)
        else:
            waiting = iter(sessions)
            for _ in range(concurrency or 0):
                running.create_task(_one_after_other(play, waiting, deadline))
    return outcomes


async def _one_after_other(play: Callable, waiting: Iterator[Session], deadline: float) -> None:
    for session in waiting:
        if time.monotonic() >= deadline:
            return
        await play(session)


async def _at_arrivals(
    running: asyncio.TaskGroup,
    play: Callable,
    sessions: Iterable[Session],
    arrivals: Iterable[float],
    start: float,
    deadline: float,
) -> None:
    places = asyncio.Semaphore(MAX_OPEN_SESSIONS)
    for at_s, session in zip(arrivals, sessions, strict=False):
        await asyncio.sleep(min(start + at_s, deadline) - time.monotonic())
        if time.monotonic() >= deadline:
            return
        await places.acquire()
        running.create_task(play(session)).add_done_callback(lambda _: places.release())


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Summary:
    """What a replay measured. Seconds; rates are over the time from the first request to the last answer."""

    requests: int
    errors: int
    """Requests without a whole answer; the truncated ones are among them."""
    truncated: int
    wall_s: float
    ttft_s: Percentiles | None
    inter_token_s: Percentiles | None
    """Gaps between chunks of all streams. A chunk of a speculative step holds several tokens."""
    token_s: Percentiles | None
    """Seconds per output token after the first, one value a request: comparable across speculators."""
    e2e_s: Percentiles | None
    prompt_tokens: int
    output_tokens: int
    prompt_tok_s: float
    output_tok_s: float
    cached_share: float | None
    """Share of prompt tokens that came from the prefix cache, where the server says."""
    acceptance_length: float | None
    """Tokens per target step, the bonus token included; None without speculation."""


def summarise(outcomes: Sequence[Outcome]) -> Summary:
    """Sum up outcomes. Latencies are over whole answers only, so that a failing server does not look fast."""
    whole = [o for o in outcomes if o.error is None]
    wall_s = max((o.started_s + o.e2e_s for o in outcomes), default=0.0) - min(
        (o.started_s for o in outcomes), default=0.0
    )
    told = [o for o in whole if o.cached_tokens is not None]
    speculations = [o.speculation for o in whole if o.speculation is not None and o.speculation.steps]
    prompt_tokens, output_tokens = sum(o.prompt_tokens for o in whole), sum(o.output_tokens for o in whole)
    prompt_told = sum(o.prompt_tokens for o in told)
    return Summary(
        requests=len(outcomes),
        errors=len(outcomes) - len(whole),
        truncated=sum((o.error or "").startswith("truncated") for o in outcomes),
        wall_s=wall_s,
        ttft_s=_percentiles([o.ttft_s for o in whole if o.ttft_s is not None]),
        inter_token_s=_percentiles([gap for o in whole for gap in o.inter_token_s]),
        token_s=_percentiles(
            [
                (o.e2e_s - o.ttft_s) / (o.output_tokens - 1)
                for o in whole
                if o.ttft_s is not None and o.output_tokens > 1
            ]
        ),
        e2e_s=_percentiles([o.e2e_s for o in whole]),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prompt_tok_s=prompt_tokens / wall_s if wall_s else 0.0,
        output_tok_s=output_tokens / wall_s if wall_s else 0.0,
        cached_share=sum(o.cached_tokens or 0 for o in told) / prompt_told if prompt_told else None,
        acceptance_length=1 + sum(s.accepted for s in speculations) / sum(s.steps for s in speculations)
        if speculations
        else None,
    )


def _percentiles(values: list[float]) -> Percentiles | None:
    if not values:
        return None
    p50, p95, p99 = (float(v) for v in np.percentile(values, (50, 95, 99)))
    return Percentiles(p50, p95, p99)
