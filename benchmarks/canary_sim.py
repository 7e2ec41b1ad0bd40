"""Does the canary take back what is worse, and leave alone what is not?

Simulated canaries: sessions of a few requests, resembling each other within a session and not
between sessions; heavy-tailed times; failures and faults that gather in some sessions. They are
judged by the functions that judge real ones, as the sessions grow. An equal candidate must not be taken back
for harm; candidates with one planted regression must not be promoted. False alarms are counted up
to the deadline, whether or not the candidate would have been promoted before. Traffic with long
sessions, all of them open from the beginning to the end, is the hardest case for the intervals,
which are exact only for sessions that no longer change.

Keys of the last line: false_alarm_rate (equal candidates taken back for harm), missed (share of
all candidates with a regression that were promoted), requests_to_detect (median requests of the
candidate until it was taken back for harm, by regression), and besides: detected and missed_by
regression (what is neither was taken back at the deadline), false_alarm_rate_long_sessions,
equal_promoted and faster_promoted with the median requests that took, all this with the default
min_requests; small and medium (the same with 12 and 300), canaries.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from strop.serving.canary import (
    METRICS,
    SLOW_QUANTILE,
    champions_a_block,
    is_harm,
    is_within,
    sessions_needed,
    tolerance,
)
from strop.serving.sequential import Blocks
from strop.serving.settings import CanarySettings

Floats = NDArray[np.float64]
DEADLINE_REQUESTS = 3000
LOOKS = 60
CHUNK = 25
SMALL, MEDIUM = 12, 300
RATES = {"error": 0.005, "empty": 0.002, "loop": 0.01, "invalid_json": 0.02, "invalid_tool_call": 0.02}
EVERY_THIRD = {"invalid_json": 0, "invalid_tool_call": 1}
"""Kinds of sessions: a third asks for JSON, another third offers tools."""


@dataclass(frozen=True)
class Traffic:
    mean_turns: float
    most_turns: int
    gap: float
    """Mean time between the turns of a session; one of the candidate's sessions begins in each unit of time."""
    sessions: int
    together: bool = False
    """All sessions begin at once."""


@dataclass(frozen=True)
class Regression:
    name: str = "none"
    rates: tuple[tuple[str, float], ...] = ()
    """Added to the rates of failures and faults."""
    token_ratio: float = 1.0
    acceptance_ratio: float = 1.0
    p95_ratio: float = 1.0


SHORT = Traffic(mean_turns=4, most_turns=10, gap=10, sessions=DEADLINE_REQUESTS // 4)
LONG = Traffic(mean_turns=60, most_turns=60, gap=1, sessions=60, together=True)
EQUAL = Regression()
FASTER = Regression("30 % faster", token_ratio=0.7)
REGRESSIONS = (
    Regression("acceptance -20 %", acceptance_ratio=0.8),
    Regression("p95 +25 %", p95_ratio=1.25),
    Regression("errors +2 points", rates=(("error", 0.02),)),
    Regression("invalid JSON +5 points", rates=(("invalid_json", 0.05),)),
)


@dataclass
class Side:
    """Requests of one Stack in many canaries, `[canaries, sessions, turns]`; running sums by metric."""

    done_NST: Floats
    """When a request is done; infinite where a session has fewer."""
    begun_S: Floats
    e2e_NST: Floats
    sums: dict[str, tuple[Floats, Floats]]
    """Running amount and `over` of each session, with a leading 0."""

    @classmethod
    def draw(
        cls, rng: np.random.Generator, traffic: Traffic, worse: Regression, count: int, per_unit: int
    ) -> "Side":
        sessions, turns = traffic.sessions * per_unit, traffic.most_turns
        shape = (count, sessions, turns)
        begun_S = np.zeros(sessions) if traffic.together else np.arange(sessions) / per_unit
        length_NS = np.minimum(rng.geometric(1 / traffic.mean_turns, (count, sessions)), turns)
        if traffic.together:
            length_NS[:] = turns
        waits = rng.exponential(traffic.gap, shape)
        waits[..., 0] = 0
        done_NST = begun_S[:, None] + waits.cumsum(axis=-1)
        done_NST[np.arange(turns) >= length_NS[..., None]] = np.inf

        def alike(between: float, within: float) -> Floats:
            return rng.normal(0, between, (count, sessions, 1)) + rng.normal(0, within, shape)

        own = alike(0.5, 0.6)
        # Beyond one sigma the tail is stretched until the p95, at 1.645 sigma of 0.78, is what was planted.
        stretch = np.log(worse.p95_ratio) / (1.645 * 0.78 - 0.78)
        own = np.where(own > 0.78, own + stretch * (own - 0.78), own)
        hiccup = np.where(rng.random(shape) < 0.01, 4.0, 1.0)
        tokens = np.ceil(rng.lognormal(4.5, 0.6, shape))
        token_s = 0.02 * worse.token_ratio * np.exp(alike(0.25, 0.2))
        steps = tokens / (2.2 * worse.acceptance_ratio * np.exp(alike(0.15, 0.1)))
        e2e_NST = 2.0 * np.exp(own) * hiccup * worse.token_ratio**0.7
        parts = {
            "token_s": (token_s * tokens, tokens),
            "e2e_s": (e2e_NST, np.ones(shape)),
            "steps_per_token": (steps, tokens),
        }
        for name, rate in RATES.items():
            rate += dict(worse.rates).get(name, 0.0)
            chance = rng.beta(rate * 4, (1 - rate) * 4, (count, sessions, 1))
            parts[name] = ((rng.random(shape) < chance).astype(float), np.ones(shape))
        sums = {name: (_running(amount), _running(over)) for name, (amount, over) in parts.items()}
        return cls(done_NST, begun_S, e2e_NST, sums)

    def done(self, moment: float) -> NDArray[np.intp]:
        """How many requests of each session that has begun are done by then, `[canaries, sessions]`."""
        begun = int(np.searchsorted(self.begun_S, moment, "right"))
        return (self.done_NST[:, :begun] <= moment).sum(axis=-1)

    def values(self, name: str, done_NS: NDArray[np.intp]) -> Floats:
        """`[canaries, sessions]` of a metric, of the sessions that it applies to."""
        begun = done_NS.shape[1]
        amount_NS, over_NS = (
            np.take_along_axis(part[:, :begun], done_NS[..., None], axis=-1)[..., 0]
            for part in self.sums[name]
        )
        quotient_NS = amount_NS / over_NS
        if name in EVERY_THIRD:
            return quotient_NS[:, EVERY_THIRD[name] :: 3]
        return quotient_NS if name in RATES else np.log(quotient_NS)


def _running(values_NST: Floats) -> Floats:
    return np.concatenate([np.zeros((*values_NST.shape[:2], 1)), values_NST.cumsum(axis=-1)], axis=-1)


@dataclass(frozen=True)
class Outcomes:
    """Of many canaries; requests are the candidate's, infinite where it did not happen before the deadline."""

    harm_N: Floats
    promoted_N: Floats

    @property
    def false_alarm_rate(self) -> float:
        return float(np.isfinite(self.harm_N).mean())

    @property
    def promoted(self) -> NDArray[np.bool_]:
        return np.isfinite(self.promoted_N) & (self.promoted_N < self.harm_N)

    @property
    def detected(self) -> NDArray[np.bool_]:
        return np.isfinite(self.harm_N) & ~self.promoted


def simulate(
    traffic: Traffic, worse: Regression, sizes: list[int], canaries: int, seed: int
) -> dict[int, Outcomes]:
    """The same canaries with each of `sizes` as `min_requests`, all else by default."""
    per_unit = champions_a_block(CanarySettings())
    harm: list[Floats] = []
    promoted: dict[int, list[Floats]] = {size: [] for size in sizes}
    for chunk in range(-(-canaries // CHUNK)):
        rng = np.random.default_rng([seed, chunk])
        champion = Side.draw(rng, traffic, EQUAL, CHUNK, per_unit)
        candidate = Side.draw(rng, traffic, worse, CHUNK, 1)
        harm_N, promoted_by_size = _play(champion, candidate, sizes, per_unit)
        harm.append(harm_N)
        for size, promoted_N in promoted_by_size.items():
            promoted[size].append(promoted_N)
    harm_N = np.concatenate(harm)[:canaries]
    return {size: Outcomes(harm_N, np.concatenate(times)[:canaries]) for size, times in promoted.items()}


def _play(
    champion: Side, candidate: Side, sizes: list[int], per_unit: int
) -> tuple[Floats, dict[int, Floats]]:
    """Requests of the candidate when it was first seen to do harm, and when it could be promoted, by size."""
    count, settings = len(candidate.done_NST), CanarySettings()
    harm_N = np.full(count, np.inf)
    promoted = {size: np.full(count, np.inf) for size in sizes}
    last = np.quantile(candidate.done_NST[np.isfinite(candidate.done_NST)], 0.99)
    for moment in np.geomspace(0.5, last, LOOKS):
        ours_NS, theirs_NS = candidate.done(moment), champion.done(moment)
        ours_N, theirs_N = ours_NS.sum(axis=1), theirs_NS.sum(axis=1)
        is_within_N = np.ones(count, bool)
        for metric, ours, theirs in _values(candidate, champion, ours_NS, theirs_NS):
            blocks = Blocks.of(metric.kind, ours, theirs, per_unit)
            difference, accepted = ours.mean(axis=1) - theirs.mean(axis=1), tolerance(metric, settings)
            must_be_shown = len(blocks) >= sessions_needed(metric, settings)
            first = is_harm(blocks, difference, accepted) & np.isinf(harm_N)
            harm_N[first] = ours_N[first]
            is_within_N &= is_within(metric, blocks, difference, accepted, must_be_shown)
        for size, promoted_N in promoted.items():
            ready = is_within_N & (ours_N >= size) & (theirs_N >= size) & np.isinf(promoted_N)
            promoted_N[ready & (ours_N < harm_N)] = ours_N[ready & (ours_N < harm_N)]
    return harm_N, promoted


def _values(
    candidate: Side, champion: Side, ours_NS: NDArray[np.intp], theirs_NS: NDArray[np.intp]
) -> Iterator[tuple]:
    turns = np.arange(candidate.done_NST.shape[-1])
    done = [turns < counts[..., None] for counts in (ours_NS, theirs_NS)]
    e2e = [
        side.e2e_NST[:, : counts.shape[1]] for side, counts in ((candidate, ours_NS), (champion, theirs_NS))
    ]
    slow_N = np.array(
        [
            np.quantile(np.concatenate([e2e[0][n][done[0][n]], e2e[1][n][done[1][n]]]), SLOW_QUANTILE)
            for n in range(len(ours_NS))
        ]
    )
    for metric in METRICS:
        if metric.name == "slow":
            yield (
                metric,
                *(
                    ((times > slow_N[:, None, None]) & mask).sum(axis=-1) / mask.sum(axis=-1)
                    for times, mask in zip(e2e, done, strict=True)
                ),
            )
        else:
            ours, theirs = candidate.values(metric.name, ours_NS), champion.values(metric.name, theirs_NS)
            if ours.shape[1] and theirs.shape[1]:
                yield metric, ours, theirs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the canaries")
    parser.add_argument(
        "--canaries",
        type=int,
        default=1000,
        help="with an equal candidate; a fifth of it for each other kind",
    )
    parser.add_argument("--seed", type=int, default=30_000)
    arguments = parser.parse_args()
    equal_canaries = arguments.canaries // 10 if arguments.quick else arguments.canaries
    canaries = max(CHUNK, equal_canaries // 5)
    began = time.perf_counter()
    default = CanarySettings().min_requests
    sizes = [SMALL, MEDIUM, default]

    runs: dict[str, dict[int, Outcomes]] = {}
    for number, (name, traffic, worse, n) in enumerate(
        [
            ("equal", SHORT, EQUAL, equal_canaries),
            ("equal, long sessions", LONG, EQUAL, equal_canaries),
            (FASTER.name, SHORT, FASTER, canaries),
            *((worse.name, SHORT, worse, canaries) for worse in REGRESSIONS),
        ]
    ):
        runs[name] = simulate(traffic, worse, sizes, n, arguments.seed + number)

    table = Table(
        "candidate", "min_requests", "promoted", "at request", "taken back for harm", "at request", "at the deadline",
        title=f"{equal_canaries} canaries with an equal candidate, {canaries} of each other kind",
    )  # fmt: skip
    for name, outcomes in runs.items():
        for size, found in outcomes.items():
            table.add_row(
                name,
                str(size),
                f"{found.promoted.mean():.1%}",
                _median(found.promoted_N[found.promoted]),
                f"{found.detected.mean():.1%}",
                _median(found.harm_N[found.detected]),
                f"{(~found.promoted & ~found.detected).mean():.1%}",
            )
    Console(width=120).print(table)

    def figures(size: int) -> dict[str, object]:
        of = {worse.name: runs[worse.name][size] for worse in REGRESSIONS}
        equal, faster = runs["equal"][size], runs[FASTER.name][size]
        return {
            "false_alarm_rate": equal.false_alarm_rate,
            "missed": round(float(np.mean([o.promoted.mean() for o in of.values()])), 4),
            "requests_to_detect": {n: _whole(o.harm_N[o.detected]) for n, o in of.items()},
            "detected": {n: round(float(o.detected.mean()), 4) for n, o in of.items()},
            "missed_by": {n: round(float(o.promoted.mean()), 4) for n, o in of.items()},
            "false_alarm_rate_long_sessions": runs["equal, long sessions"][size].false_alarm_rate,
            "equal_promoted": round(float(equal.promoted.mean()), 4),
            "equal_requests": _whole(equal.promoted_N[equal.promoted]),
            "faster_promoted": round(float(faster.promoted.mean()), 4),
            "faster_requests": _whole(faster.promoted_N[faster.promoted]),
        }

    print(
        json.dumps(
            {
                **figures(default),
                "small": figures(SMALL),
                "medium": figures(MEDIUM),
                "canaries": equal_canaries,
                "seconds": round(time.perf_counter() - began, 1),
            }
        )
    )


def _whole(requests_N: Floats) -> int | None:
    return int(np.median(requests_N)) if len(requests_N) else None


def _median(requests_N: Floats) -> str:
    return str(_whole(requests_N) or "")


if __name__ == "__main__":
    main()
