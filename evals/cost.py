"""What traffic costs: on machines of one's own, and from an API that bills tokens.

No currency is known here: every amount is in that of the prices. Times are whole microseconds, so that
what is summed over hours is exactly what is summed over all.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from datetime import UTC, datetime

from strop.evals.settings import CostSettings
from strop.serving.quality import flags
from strop.serving.traces import Trace

HOUR_US = 3_600_000_000
_SECOND_US = 1_000_000


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a request costs and what it was for. Times in microseconds of Unix time."""

    started_us: int
    ended_us: int
    """When its answer was whole; when it began where that is not known."""
    session: str
    task: str
    """Equal for the same request sent again in its session."""
    input_tokens: int
    cached_tokens: int
    """Of the input tokens, those found in the prefix cache."""
    output_tokens: int
    succeeded: bool


def attempt(trace: Trace, succeeded: Callable[[Trace], bool] | None = None) -> Attempt:
    """A trace as an attempt at a task; it succeeds by `answered_well` unless another predicate is given."""
    started_us = _microseconds(trace.started_at)
    session = f"{trace.tenant}/{trace.session}"
    asked = f"{session}\0{trace.endpoint}\0{trace.messages or trace.request_id}\0{trace.format}"
    return Attempt(
        started_us=started_us,
        ended_us=started_us + max(0, round((trace.e2e_s or 0.0) * _SECOND_US)),
        session=session,
        task=hashlib.sha256(asked.encode(errors="replace")).hexdigest(),
        input_tokens=len(trace.prompt_token_ids),
        cached_tokens=min(trace.cached_tokens or 0, len(trace.prompt_token_ids)),
        output_tokens=sum(len(choice.token_ids) for choice in trace.choices),
        succeeded=(succeeded or answered_well)(trace),
    )


def answered_well(trace: Trace) -> bool:
    """Served without error, and neither empty, a loop, broken JSON nor a broken tool call."""
    return trace.status < 400 and trace.error is None and True not in astuple(flags(trace))


@dataclass(frozen=True, slots=True)
class Usage:
    """What happened in a stretch of time; stretches add up."""

    length_us: int = 0
    requests: int = 0
    """Those that began in it."""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    busy_us: int = 0
    """Time with at least one request under way."""
    under_way_us: int = 0
    """The same summed over requests."""

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(*(mine + others for mine, others in zip(astuple(self), astuple(other), strict=True)))

    @property
    def busy_share(self) -> float:
        return self.busy_us / self.length_us if self.length_us else 0.0

    @property
    def at_once(self) -> float:
        """Mean number of requests under way while any is; 0 if none ever is."""
        return self.under_way_us / self.busy_us if self.busy_us else 0.0

    def dedicated(self, prices: CostSettings) -> float:
        """Cost of the machines: they are paid whether busy or not."""
        return self.length_us / HOUR_US * prices.machines * (prices.price_per_hour or 0.0)

    def api(self, prices: CostSettings) -> float | None:
        """Cost of the same tokens from an API; None without its prices."""
        if prices.api_input is None or prices.api_output is None:
            return None
        cached = prices.api_input if prices.api_cached is None else prices.api_cached
        fresh = self.input_tokens - self.cached_tokens
        millionths = fresh * prices.api_input + self.cached_tokens * cached
        return (millionths + self.output_tokens * prices.api_output) / 1e6


def by_hour(attempts: Iterable[Attempt], start_us: int, end_us: int) -> dict[int, Usage]:
    """Usage in [start, end) by calendar hour (microseconds of its beginning), those without traffic too.

    A request counts where it began, and is under way in every hour that it touches.
    """
    known = sorted(attempts, key=lambda one: one.started_us)
    lengths_us = {
        hour: min(hour + HOUR_US, end_us) - max(hour, start_us)
        for hour in range(start_us - start_us % HOUR_US, end_us, HOUR_US)
    }
    counts = {hour: [0, 0, 0, 0] for hour in lengths_us}
    busy_us, under_way_us = dict.fromkeys(lengths_us, 0), dict.fromkeys(lengths_us, 0)
    for one in known:
        if start_us <= one.started_us < end_us:
            count = counts[one.started_us - one.started_us % HOUR_US]
            of_one = (1, one.input_tokens, one.cached_tokens, one.output_tokens)
            count[:] = map(sum, zip(count, of_one, strict=True))
        for hour, length_us in _hours_of(one.started_us, one.ended_us, start_us, end_us):
            under_way_us[hour] += length_us
    for begin, end in _merged((one.started_us, one.ended_us) for one in known):
        for hour, length_us in _hours_of(begin, end, start_us, end_us):
            busy_us[hour] += length_us
    found = {}
    for hour, length_us in lengths_us.items():
        requests, inputs, cached, outputs = counts[hour]
        found[hour] = Usage(length_us, requests, inputs, cached, outputs, busy_us[hour], under_way_us[hour])
    return found


def _merged(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Spans in order of their beginnings, those that touch put together."""
    now: tuple[int, int] | None = None
    for begin, end in spans:
        if now is not None and begin <= now[1]:
            now = (now[0], max(now[1], end))
            continue
        if now is not None:
            yield now
        now = (begin, end)
    if now is not None:
        yield now


def _hours_of(begin: int, end: int, start_us: int, end_us: int) -> Iterator[tuple[int, int]]:
    begin, end = max(begin, start_us), min(end, end_us)
    while begin < end:
        hour = begin - begin % HOUR_US
        yield hour, min(end, hour + HOUR_US) - begin
        begin = hour + HOUR_US


@dataclass(frozen=True, slots=True)
class Bill:
    """What a window of time cost, and per what was got for it. None where there is nothing to divide by."""

    usage: Usage
    sessions: int
    tasks: int
    """Requests, the same one sent again in its session counted once."""
    completed_tasks: int
    """Those of which an attempt succeeded."""
    completed_sessions: int
    """Sessions whose last attempt succeeded."""
    cost: float
    per_request: float | None
    """Failed attempts are requests, too."""
    per_session: float | None
    per_completed_task: float | None
    """All attempts are paid for, failed and repeated ones as well."""
    per_completed_session: float | None
    api_cost: float | None
    api_per_completed_task: float | None


def bill(
    attempts: Sequence[Attempt],
    start_us: int,
    end_us: int,
    prices: CostSettings,
    sample_rate: float = 1.0,
) -> Bill:
    """The bill of [start, end). `sample_rate`: share of sessions that were recorded, counts are scaled by it.

    Of a window that begins in the middle of a session the session's part in it counts.
    """
    usage = sum(by_hour(attempts, start_us, end_us).values(), Usage())
    within = sorted(
        (one for one in attempts if start_us <= one.started_us < end_us), key=lambda one: one.started_us
    )
    last = {one.session: one.succeeded for one in within}
    tasks = {one.task for one in within}
    completed = {one.task for one in within if one.succeeded}
    cost, api = usage.dedicated(prices), usage.api(prices)

    def per(amount: float | None, number: int) -> float | None:
        return amount * sample_rate / number if amount is not None and number else None

    return Bill(
        usage=usage,
        sessions=len(last),
        tasks=len(tasks),
        completed_tasks=len(completed),
        completed_sessions=sum(last.values()),
        cost=cost,
        per_request=per(cost, usage.requests),
        per_session=per(cost, len(last)),
        per_completed_task=per(cost, len(completed)),
        per_completed_session=per(cost, sum(last.values())),
        api_cost=None if api is None else api / sample_rate,
        # Both the amount and the number are of the sample.
        api_per_completed_task=None if api is None or not completed else api / len(completed),
    )


@dataclass(frozen=True, slots=True)
class HourOfDay:
    """A mean hour that begins at this hour of the day, UTC."""

    hour: int
    seen: float
    """How many of them the window holds; parts count as parts."""
    requests: float
    busy_share: float
    at_once: float
    dedicated: float
    """Cost of the hour on machines of one's own."""
    api: float | None
    """Cost of its tokens from the API; None without prices, or if the hour was never seen."""
    break_even_requests: float | None
    """Requests in the hour, of its mean size, from which on the machines are cheaper."""

    @property
    def dedicated_is_cheaper(self) -> bool | None:
        return None if self.api is None else self.dedicated < self.api


def by_hour_of_day(
    hours: dict[int, Usage], prices: CostSettings, sample_rate: float = 1.0
) -> tuple[HourOfDay, ...]:
    """24 mean hours of the hours of `by_hour`."""
    of_day = [Usage() for _ in range(24)]
    for hour, usage in hours.items():
        of_day[hour // HOUR_US % 24] += usage
    return tuple(_mean_hour(number, usage, prices, sample_rate) for number, usage in enumerate(of_day))


def _mean_hour(number: int, usage: Usage, prices: CostSettings, sample_rate: float) -> HourOfDay:
    seen = usage.length_us / HOUR_US
    api = usage.api(prices)
    return HourOfDay(
        hour=number,
        seen=seen,
        requests=usage.requests / seen / sample_rate if seen else 0.0,
        busy_share=usage.busy_share,
        at_once=usage.at_once,
        dedicated=prices.machines * (prices.price_per_hour or 0.0),
        api=api / seen / sample_rate if api is not None and seen else None,
        break_even_requests=break_even(usage, prices),
    )


def break_even(usage: Usage, prices: CostSettings) -> float | None:
    """Requests an hour from which on machines of one's own are cheaper than the API.

    At the mean size of the requests there were; None without any, or where the API costs nothing.
    """
    api = usage.api(prices)
    if not api or not usage.requests:
        return None
    return prices.machines * (prices.price_per_hour or 0.0) / (api / usage.requests)


def served_per_hour(usage: Usage) -> float | None:
    """Requests an hour that were served while any was under way: at least this much can be."""
    return usage.requests * HOUR_US / usage.busy_us if usage.busy_us else None


@dataclass(frozen=True, slots=True)
class Payback:
    """What a promotion cost to produce, and what it saves."""

    cost: float
    saved_per_day: float
    days: float | None
    """Until it has paid for itself; None if it saves nothing."""


def payback(
    produced_s: float, saved_server_s: float, requests_per_day: float, prices: CostSettings
) -> Payback:
    """Seconds of one machine that a loop took, against seconds of the deployment saved per request.

    A saving is worth money where machines can be given back or would have to be added.
    """
    price_per_s = (prices.price_per_hour or 0.0) / 3600
    cost = produced_s * price_per_s
    saved = saved_server_s * requests_per_day * prices.machines * price_per_s
    saved_s = saved_server_s * requests_per_day * prices.machines
    return Payback(cost, saved, produced_s / saved_s if saved_s > 0 else None)


def _microseconds(moment: datetime) -> int:
    since = moment.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * _SECOND_US + since.microseconds
