"""Speed: how long users wait for each of two Stacks, alone, under load, and as real traffic arrives.

Three ways of asking, each of both Stacks in turns, since two servers on one machine share its cores.
*Alone*: one request at a time, first with nothing in the prefix cache, then again with all of it.
*Loaded*: so many at once, in steady state. *Arriving*: at the times of a recorded trace, scaled to a
share of what the reference can do. What was sent to warm up is not counted, nor are the requests
that start a round of load.
"""

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from strop.evals import metrics
from strop.evals.observation import ARMS, Arm, Bench, EvalError, Finding, Metric, Observation, Side
from strop.evals.replay import Request, Server, select
from strop.evals.settings import EvalSettings
from strop.evals.speed_load import Asked, as_they_arrive, over_and_over, salt_for, steadily, window
from strop.serving.arrivals import ArrivalsError, load_arrivals
from strop.serving.client import Outcome
from strop.serving.settings import Section

Pair = dict[Arm, Outcome]

_TIMES: dict[str, tuple[str, Literal["ratio", "difference"], str]] = {
    "ttft_s": ("s", "ratio", "time to the first token"),
    "inter_token_s": ("s/token", "ratio", "time per output token after the first, mean of a request"),
    "stall_s": ("s", "ratio", "longest pause within an answer"),
    "e2e_s": ("s", "ratio", "time to the whole answer"),
    "queue_s": ("s", "difference", "time until the engine takes a request up"),
}
_WAYS = {
    "": ("one at a time and with a cold cache", ("ttft_s", "inter_token_s", "e2e_s")),
    "loaded_": ("at a given number of requests at once", ("ttft_s", "inter_token_s", "stall_s", "queue_s")),
    "arriving_": ("with the arrivals of a recorded trace", tuple(_TIMES)),
}


def _metrics() -> Iterator[Metric]:
    for way, (how, names) in _WAYS.items():
        for name in names:
            unit, compare, words = _TIMES[name]
            yield Metric(way + name, unit, "lower", compare, f"{words}, {how}")
        if way:
            words = f"share of requests answered within the latency objective, {how}"
            yield Metric(f"{way}in_time", "", "higher", "difference", words)
    yield Metric("warm_ttft_s", "s", "lower", "ratio", "time to the first token of a request asked again")
    words = "share of the prompt found in the prefix cache when a request is asked again"
    yield Metric("warm_cached_share", "", "higher", "difference", words)
    words = "time of the whole server per request (one over its throughput), at a given number at once"
    yield Metric("loaded_server_s", "s", "lower", "ratio", words)
    yield Metric("error", "", "lower", "difference", "share of requests without a whole answer")


class Speed(Section):
    metrics: ClassVar[tuple[Metric, ...]] = tuple(_metrics())

    name: Literal["speed"] = "speed"
    seconds: float = Field(default=600, gt=0)
    """Time for all of it and both Stacks, divided over what is asked; a request under way is waited for."""
    concurrency: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(1, 2, 4, 8, 16), min_length=1)
    """Requests at once, level by level; 1 is what the requests asked alone give."""
    arrivals: tuple[Path, ...] = ()
    """Recorded traces (`*.jsonl` of Mooncake, `*.csv` of Azure, plain or `.gz`) whose arrival times are played."""
    load: float = Field(default=0.7, gt=0)
    """Rate of those arrivals over the highest throughput of the reference."""
    ttft_objective_s: float = Field(default=2.0, gt=0)
    """Longest time to the first token that is in time; this and the next are those of MLPerf Inference's
    server scenario for Llama 2 70B."""
    itl_objective_s: float = Field(default=0.2, gt=0)
    """Longest mean time per output token that is in time."""
    max_requests: int = Field(default=48, ge=2)
    """Held-out requests to draw from, in whole sessions; under load they come round again."""
    max_output_tokens: int = Field(default=64, ge=2)
    """Cap on an answer's tokens."""
    warmup_requests: int = Field(default=2, ge=0)
    """Requests sent to each Stack beforehand and not counted."""
    request_timeout_s: float = Field(default=120, gt=0)
    """Longest time one request may take before it counts as failed."""

    async def observe(self, bench: Bench) -> AsyncIterator[Observation | Finding]:
        """Ask both servers in turns until the time is over.

        Observations under load have the level as slice (`c1`, `c4`; `all` is over all levels), those of
        arrivals the trace, those asked alone the kind of traffic. Raises EvalError if there is nothing to ask or a trace of
        arrivals cannot be read.
        """
        choice = EvalSettings(
            max_requests=self.max_requests,
            max_output_tokens=self.max_output_tokens,
            warmup_requests=self.warmup_requests,
            seed=bench.seed,
        )
        requests, warmup = select(bench.traces, choice)
        if not requests:
            raise EvalError("No held-out trace can be asked again: none was answered and holds its prompt.")
        try:
            arrivals = {_name(path): load_arrivals(path) for path in self.arrivals}
        except ArrivalsError as error:
            raise EvalError(f"{error}. Name another file in `arrivals`, or none.") from None
        run = _Run(self, bench, requests, uuid.uuid4().hex)
        await run.warm_up(warmup)
        levels = [level for level in sorted(set(self.concurrency)) if level > 1]
        parts = [4.0, *(3.0 for _ in levels), *(4.0 for _ in arrivals)]
        async for seen in run.alone(run.share(parts, 0)):
            yield seen
        if run.given_up:
            return
        for number, level in enumerate(levels):
            async for seen in run.loaded(level, number, run.share(parts, 1 + number)):
                yield seen
        for number, (name, trace) in enumerate(arrivals.items(), 1 + len(levels)):
            rate = self.load * await run.capacity(max(self.concurrency))
            seconds = run.share(parts, number)
            for segment in range(_SEGMENTS):
                # Some time is left for those under way when the last has come.
                each_s = 0.8 * seconds / len(ARMS) / _SEGMENTS
                times_s = window(trace, segment * _STEP, max(2, round(rate * each_s)), each_s)
                async for seen in run.arriving(name, segment, times_s):
                    yield seen


_SEGMENTS = 2
"""Stretches of a trace that are played, each to both Stacks, the other one first."""
_STEP = 997
"""Arrivals between the beginnings of two stretches."""
_FINDINGS = 3
"""Failures a way of asking and Stack that are shown; all are counted."""
_GIVE_UP_AFTER = 3


@dataclass(slots=True)
class _Run:
    part: Speed
    bench: Bench
    requests: list[Request]
    salt: str
    started: float = field(default_factory=time.monotonic)
    throughput: float = 0.0
    """Highest of the reference so far, requests a second."""
    shown: dict[tuple[str, Arm], int] = field(default_factory=dict)
    given_up: bool = False
    """Whether one of the servers failed so many requests in a row that no more are sent."""

    @property
    def left_s(self) -> float:
        return max(0.0, self.started + self.part.seconds - time.monotonic())

    def share(self, parts: Sequence[float], number: int) -> float:
        """Seconds for part `number`: what is left, divided as `parts` say among it and those after it."""
        return self.left_s * parts[number] / sum(parts[number:])

    def say(self, text: str) -> None:
        self.bench.progress(1 - self.left_s / self.part.seconds, text)

    async def warm_up(self, warmup: Sequence[Request]) -> None:
        self.say(f"warming up both servers with {len(warmup)} requests")
        for request in warmup:
            for side in self.bench.sides:
                await self._ask(side, request, f"{self.salt}-warmup")

    async def alone(self, seconds: float) -> AsyncIterator[Observation | Finding]:
        ends = time.monotonic() + seconds
        measured = failed_in_a_row = 0
        for number, request in enumerate(self.requests):
            asked = Asked(f"alone/{request.request_id}", request, f"{self.salt}-alone")
            if asked.id in self.bench.done:
                continue
            self.given_up = failed_in_a_row >= _GIVE_UP_AFTER
            if (time.monotonic() >= ends and measured >= 2) or self.given_up:
                break
            cold: Pair = {
                side.arm: await self._ask(side, request, asked.salt) for side in self._order(number)
            }
            self._learn(1, [cold])
            for seen in self._compare(asked, cold, "", (request.kind,)):
                yield seen
            if 1 in self.part.concurrency:
                for seen in self._compare(asked, cold, "loaded_", ("c1",), concurrency=1):
                    yield seen
            measured += 1
            failed_in_a_row = failed_in_a_row + 1 if _failed(cold) else 0
            if not _failed(cold):
                again = _first_token_of(request)
                warm: Pair = {
                    side.arm: await self._ask(side, again, asked.salt) for side in self._order(number)
                }
                for seen in self._warm(asked, warm):
                    yield seen
            self.say(f"{measured} requests asked alone")

    async def loaded(self, level: int, number: int, seconds: float) -> AsyncIterator[Observation | Finding]:
        name = f"c{level}"
        if any(id_.startswith(f"{name}/") for id_ in self.bench.done):
            return
        found: dict[Arm, dict[str, Outcome]] = {}
        # Who went first alone was the reference, so the candidate goes first here.
        for side in self._order(number + 1):
            self.say(f"{level} requests at once to the {side.arm}")
            asked = over_and_over(self.requests, name, self.salt)
            found[side.arm] = await steadily(
                side, asked, level, seconds / len(ARMS), self.part.request_timeout_s
            )
        # Sent in the same order to both, so what both were sent is a beginning of that order.
        both = found["reference"].keys() & found["candidate"].keys()
        sent = islice(over_and_over(self.requests, name, self.salt), 1_000_000)
        pairs = []
        for asked in sent:
            if len(pairs) == len(both):
                break
            if asked.id in both:
                pairs.append((asked, {arm: found[arm][asked.id] for arm in ARMS}))
        self._learn(level, [pair for _, pair in pairs])
        for asked, pair in pairs:
            for seen in self._compare(asked, pair, "loaded_", (name,), concurrency=level):
                yield seen

    async def arriving(
        self, name: str, segment: int, times_s: Sequence[float]
    ) -> AsyncIterator[Observation | Finding]:
        place = f"{name}-{segment}"
        asked = list(islice(over_and_over(self.requests, place, self.salt), len(times_s)))
        if asked[0].id in self.bench.done:
            return
        found: dict[Arm, dict[str, Outcome]] = {}
        for side in self._order(segment):
            self.say(f"{len(asked)} requests as in {name} to the {side.arm}")
            found[side.arm] = await as_they_arrive(side, asked, times_s, self.part.request_timeout_s)
        for one in asked:
            if all(one.id in found[arm] for arm in ARMS):
                pair: Pair = {arm: found[arm][one.id] for arm in ARMS}
                for seen in self._compare(one, pair, "arriving_", (name,)):
                    yield seen

    async def capacity(self, level: int) -> float:
        """Requests a second that the reference can do; measured now if no level was (a run taken up again)."""
        if not self.throughput:
            self.say("measuring how much the reference can do")
            asked = over_and_over(self.requests, "capacity", self.salt)
            found = await steadily(
                self.bench.reference, asked, level, self.left_s / 10, self.part.request_timeout_s
            )
            self._learn(level, [{"reference": outcome} for outcome in found.values()])
        # A server that answered nothing is asked all the same, so that its failures are seen.
        return self.throughput or 1.0

    def _learn(self, level: int, pairs: Sequence[Pair]) -> None:
        whole = [pair["reference"].e2e_s for pair in pairs if not pair["reference"].error]
        if whole:
            self.throughput = max(self.throughput, level * len(whole) / sum(whole))

    def _order(self, number: int) -> tuple[Side, Side]:
        return self.bench.sides if number % 2 == 0 else (self.bench.candidate, self.bench.reference)

    async def _ask(self, side: Side, request: Request, salt: str) -> Outcome:
        server = Server(side.url, side.model, salt_for(side, salt))
        return await server.answer(self.bench.client, request, self.part.request_timeout_s)

    def _compare(
        self, asked: Asked, pair: Pair, way: str, slices: tuple[str, ...], concurrency: int | None = None
    ) -> Iterator[Observation | Finding]:
        """All that one request tells, asked this `way`."""
        if not (way == "loaded_" and concurrency == 1):  # Those are the requests asked alone once more.
            yield self._observation("error", asked, slices, {a: float(bool(pair[a].error)) for a in ARMS})
            yield from self._findings(asked, pair, way)
        if way:
            in_time: dict[Arm, float] = {arm: float(self._in_time(pair[arm])) for arm in ARMS}
            yield self._observation(f"{way}in_time", asked, slices, in_time)
        if _failed(pair):
            return
        for name in _WAYS[way][1]:
            yield from self._both(way + name, asked, slices, {a: _VALUES[name](pair[a]) for a in ARMS})
        if concurrency is not None:
            server_s: dict[Arm, float] = {arm: pair[arm].e2e_s / concurrency for arm in ARMS}
            yield self._observation("loaded_server_s", asked, slices, server_s)

    def _warm(self, asked: Asked, pair: Pair) -> Iterator[Observation]:
        if _failed(pair):
            return
        slices = (asked.request.kind,)
        yield from self._both("warm_ttft_s", asked, slices, {a: pair[a].ttft_s for a in ARMS})
        yield from self._both("warm_cached_share", asked, slices, {a: _cached_share(pair[a]) for a in ARMS})

    def _both(
        self, metric: str, asked: Asked, slices: tuple[str, ...], values: dict[Arm, float | None]
    ) -> Iterator[Observation]:
        """Nothing where one of the answers does not show the metric."""
        shown: dict[Arm, float] = {arm: value for arm, value in values.items() if value is not None}
        if len(shown) == len(ARMS):
            yield self._observation(metric, asked, slices, shown)

    def _observation(
        self, metric: str, asked: Asked, slices: tuple[str, ...], values: dict[Arm, float]
    ) -> Observation:
        session = asked.request.session
        return Observation(metric, asked.id, session, slices, (values["candidate"],), (values["reference"],))

    def _findings(self, asked: Asked, pair: Pair, way: str) -> Iterator[Finding]:
        for side in self.bench.sides:
            error = pair[side.arm].error
            key: tuple[str, Arm] = (way, side.arm)
            if error is None or self.shown.get(key, 0) >= _FINDINGS:
                continue
            self.shown[key] = self.shown.get(key, 0) + 1
            body = {**asked.request.body, "model": side.model}
            detail = f"No whole answer to {asked.id}: {error[:500]}"
            yield Finding("failed", side.arm, side.stack.fingerprint, asked.id, detail, body)

    def _in_time(self, outcome: Outcome) -> bool:
        if outcome.error or outcome.ttft_s is None:
            return False
        per_token_s = metrics.inter_token_s(outcome)
        return outcome.ttft_s <= self.part.ttft_objective_s and (
            per_token_s is None or per_token_s <= self.part.itl_objective_s
        )


_VALUES = {
    "ttft_s": lambda outcome: outcome.ttft_s,
    "inter_token_s": metrics.inter_token_s,
    "stall_s": lambda outcome: max(outcome.inter_token_s, default=None),
    "e2e_s": lambda outcome: outcome.e2e_s,
    "queue_s": lambda outcome: outcome.queue_s,
}


def _failed(pair: Pair) -> bool:
    return any(outcome.error for outcome in pair.values())


def _cached_share(outcome: Outcome) -> float | None:
    if outcome.cached_tokens is None or not outcome.prompt_tokens:
        return None
    return outcome.cached_tokens / outcome.prompt_tokens


def _first_token_of(request: Request) -> Request:
    """The same prompt, with one token to answer: all that is asked of a warm cache."""
    kept = {name: value for name, value in request.body.items() if name != "min_tokens"}
    return replace(request, body={**kept, "max_tokens": 1})


def _name(path: Path) -> str:
    return path.name.split(".")[0]
