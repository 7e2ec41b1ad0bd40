"""Intervals of means and quantiles over sessions that hold with few sessions and when nothing happened.

The unit is a session; its requests, and their tokens, stay together. The method is *one more session*:
every session gets a random weight, and one more, which was not seen, is put at the worst place there
can be; the ends of the interval are quantiles over many such draws.

Where values are bounded, the worst place is their bound. For shares of single requests that is the
exact interval of Clopper and Pearson: 0 of n leaves 1 - alpha^(1/n). In general it is the bound of
Gaffke (Three test statistics for a nonparametric one-sided hypothesis on the mean of a nonnegative
variable, Mathematical Methods of Statistics 14, 2005), which has no proof but no known counterexample
either (Phan, Thomas and Learned-Miller, Towards practical mean bounds for small samples, ICML 2021).
For quantiles it is that bound of the share of values below each value; where the sessions cannot bound
a quantile, the end is open (it takes 300 sessions to bound a p99 of which they saw nothing).

Values without a bound have no worst place. The session that was not seen then lies beyond the furthest
one seen, the further the fewer there are, as simulation with lognormal sessions of up to sigma 1.5 asks
for (`benchmarks/eval_quick.py --statistics-only`). So it does, less far, for shares of many values a
session, of tokens, if the sessions differ at all.

Ratios of means take the bootstrap-t (`statistics.paired_ratio`), a little wider with few sessions.
Ends are infinite where the sessions leave them open.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from strop.evals.statistics import Totals, paired_ratio

Floats = NDArray[np.float64]
Kind = Literal["level", "difference", "ratio"]

DRAWS = 8192
QUANTILE_DRAWS = 2000
CHUNK = 1 << 21
"""Weights held at once where every value has its own."""
MANY = 4
"""Values a session from which on a share is one of many, whose sessions show how far another may be."""
REACH, REACH_OF_SHARES = 40.0, 12.0
"""Of n sessions, the one not seen lies up to 1 + REACH / n times as far from the mean as the furthest seen,"""
UNSEEN = 0.02
"""and at least so far, in the metric's own unit;"""
UNSEEN_RATIO = 1.25
"""for ratios, at least by this factor."""


@dataclass(frozen=True, slots=True)
class Arm:
    """Values of one Stack `[values]` and the session of each, counted from 0."""

    values: Floats
    session: NDArray[np.int64]

    def totals(self, sessions: int) -> Floats:
        """Sum and number of values of each session `[2, sessions]`."""
        found = np.empty((2, sessions))
        found[0] = np.bincount(self.session, self.values, minlength=sessions)
        found[1] = np.bincount(self.session, minlength=sessions)
        return found

    @property
    def mean(self) -> float:
        return float(self.values.mean())

    def quantile(self, share: float) -> float:
        """The smallest value that at least `share` of the values do not exceed."""
        return float(np.quantile(self.values, share, method="inverted_cdf"))


@dataclass(frozen=True, slots=True)
class Paired:
    """The same sessions' values under both Stacks; `reference` is None for a level."""

    kind: Kind
    sessions: int
    candidate: Arm
    reference: Arm | None

    @property
    def arms(self) -> tuple[Arm, ...]:
        return (self.candidate,) if self.reference is None else (self.candidate, self.reference)


def compared(kind: Kind, candidate: float, reference: float | None) -> float:
    """The level, difference or ratio of two values; a ratio to nothing is 1 or infinite."""
    if kind == "level" or reference is None:
        return candidate
    if kind == "difference":
        return candidate - reference
    if reference == 0:
        return 1.0 if candidate == 0 else math.copysign(math.inf, candidate)
    return candidate / reference


def mean_interval(data: Paired, confidence: float, bounded: bool) -> tuple[float, float]:
    """Interval of a mean, or of the difference or ratio of two; `bounded`: of values from 0 to 1."""
    if data.kind == "ratio":
        return _mean_ratio(data, confidence)
    weights_BS, unseen_B = _weights(data.sessions, DRAWS)
    mean_B, extra_B, beyond_S = _weighted_means(data.candidate, weights_BS, unseen_B)
    least = 0.0 if min(arm.values.min() for arm in data.arms) >= 0 else -math.inf
    most, centre = 1.0 if bounded else math.inf, data.candidate.mean
    if data.reference is not None:
        other_B, _, other_S = _weighted_means(data.reference, weights_BS, unseen_B)
        mean_B, beyond_S, centre = mean_B - other_B, beyond_S - other_S, centre - data.reference.mean
        least = -most
    far = math.inf
    if not bounded or len(data.candidate.values) >= MANY * data.sessions:
        far = 1 + (REACH_OF_SHARES if bounded else REACH) / data.sessions
    below = _reach(-float(beyond_S.min()), centre - least, far)
    above = _reach(float(beyond_S.max()), most - centre, far)
    if data.sessions < 2:
        below, above = centre - least, most - centre
    return _ends(mean_B - extra_B * below, mean_B + extra_B * above, confidence)


def quantile_interval(data: Paired, share: float, confidence: float) -> tuple[float, float]:
    """Interval of a quantile, or of the difference or ratio of two over the same sessions."""
    weights_BS, unseen_B = _weights(data.sessions, QUANTILE_DRAWS)
    if data.reference is None:
        return _quantile_ends(data.candidate, weights_BS, unseen_B, share, (1 - confidence) / 2)
    low_B, high_B = _weighted_quantiles(data.candidate, weights_BS, unseen_B, share)
    other_low_B, other_high_B = _weighted_quantiles(data.reference, weights_BS, unseen_B, share)
    if data.kind == "difference":
        return _ends(low_B - other_high_B, high_B - other_low_B, confidence)
    # Ratios are of values that are not negative: an unseen session lies at 0 or at infinity.
    with np.errstate(divide="ignore", invalid="ignore"):
        least_B = np.nan_to_num(np.maximum(low_B, 0) / other_high_B, nan=0.0, posinf=math.inf)
        most_B = np.nan_to_num(high_B / np.maximum(other_low_B, 0), nan=math.inf, posinf=math.inf)
    return _ends(least_B, most_B, confidence)


def _reach(furthest: float, bound: float, far: float) -> float:
    """How far from the mean the unseen session lies: `far` times the furthest seen, at most at the bound of
    the values, and there if none was seen away from the mean."""
    if math.isinf(far) or (furthest <= 1e-12 and math.isfinite(bound)):
        return max(0.0, bound)
    return min(max(0.0, bound), max(UNSEEN, far * furthest))


def _mean_ratio(data: Paired, confidence: float) -> tuple[float, float]:
    assert data.reference is not None
    ours, theirs = data.candidate.totals(data.sessions), data.reference.totals(data.sessions)
    try:
        found = paired_ratio(
            Totals(*theirs),
            Totals(*ours),
            np.arange(data.sessions),
            samples=2 * QUANTILE_DRAWS,
            confidence=confidence,
        )
    except ValueError:
        return 0.0, math.inf  # One session, or totals of nothing, which no ratio can be made of.
    # The largest share of other sessions of which that many may have shown none.
    unseen = 1 - ((1 - confidence) / 2) ** (1 / data.sessions)
    wider, floor = 1 + 2 / data.sessions, unseen * math.log(UNSEEN_RATIO)
    below, above = math.log(found.ratio / found.low), math.log(found.high / found.ratio)
    return (
        found.ratio * math.exp(-max(floor, wider * below)),
        found.ratio * math.exp(min(700.0, max(floor, wider * above))),
    )


def _weighted_means(arm: Arm, weights_BS: Floats, unseen_B: Floats) -> tuple[Floats, Floats, Floats]:
    """For each draw the mean, with the unseen session at the mean of all, and that session's weight in
    it; for each session, by how much a weight of its own moves the mean."""
    sums_S, sizes_S = arm.totals(weights_BS.shape[1])
    extra_B = unseen_B * sizes_S.mean()
    over_B = weights_BS @ sizes_S + extra_B
    mean_B = (weights_BS @ sums_S + extra_B * arm.mean) / over_B
    return mean_B, extra_B / over_B, (sums_S - arm.mean * sizes_S) / sizes_S.mean()


def _quantile_ends(
    arm: Arm, weights_BS: Floats, unseen_B: Floats, share: float, tail: float
) -> tuple[float, float]:
    """The values below which enough of the draws have `share` of their weight: what `_ends` makes of
    `_weighted_quantiles`, without a weight for every value and draw."""
    order = np.argsort(arm.values, kind="stable")
    values_V, session_V = arm.values[order], arm.session[order]
    sessions = weights_BS.shape[1]
    sizes_S = np.bincount(session_V, minlength=sessions)
    extra_B = unseen_B * sizes_S.mean()
    wanted_B = share * (weights_BS @ sizes_S + extra_B) * (1 - 1e-12)

    def draws_reached(number: int, more_B: Floats | float) -> float:
        below_S = np.bincount(session_V[:number], minlength=sessions)
        return float((weights_BS @ below_S + more_B >= wanted_B).mean())

    least = bisect_left(range(len(values_V) + 1), tail, key=lambda k: draws_reached(k, extra_B))
    most = bisect_left(range(len(values_V) + 1), 1 - tail, key=lambda k: draws_reached(k, 0.0))
    low = float(values_V[least - 1]) if least else -math.inf
    return low, float(values_V[most - 1]) if most <= len(values_V) else math.inf


def _weighted_quantiles(
    arm: Arm, weights_BS: Floats, unseen_B: Floats, share: float
) -> tuple[Floats, Floats]:
    """Quantile of the weighted values of each draw, with the unseen session below or above all of them."""
    order = np.argsort(arm.values, kind="stable")
    values_V, session_V = arm.values[order], arm.session[order]
    size = len(values_V) / weights_BS.shape[1]
    values_low, values_high = np.append(-math.inf, values_V), np.append(values_V, math.inf)
    low_B, high_B = np.empty(len(weights_BS)), np.empty(len(weights_BS))
    step = max(1, CHUNK // len(values_V))
    for start in range(0, len(weights_BS), step):
        rows = slice(start, start + step)
        below_BV = np.cumsum(weights_BS[rows][:, session_V], axis=1)
        extra_B1 = size * unseen_B[rows, None]
        wanted_B1 = share * (below_BV[:, -1:] + extra_B1) * (1 - 1e-12)
        low_B[rows] = values_low[(below_BV + extra_B1 < wanted_B1).sum(axis=1) + (extra_B1 < wanted_B1)[:, 0]]
        high_B[rows] = values_high[(below_BV < wanted_B1).sum(axis=1)]
    return low_B, high_B


def _ends(low_B: Floats, high_B: Floats, confidence: float) -> tuple[float, float]:
    """Ends that are each passed by at most their half of what is not covered."""
    tail = (1 - confidence) / 2
    low = float(np.quantile(low_B, tail, method="lower"))
    return low, float(np.quantile(high_B, 1 - tail, method="higher"))


@lru_cache(maxsize=8)
def _weights(sessions: int, draws: int) -> tuple[Floats, Floats]:
    drawn = np.random.default_rng(sessions).exponential(size=(draws, sessions + 1))
    return drawn[:, :sessions], drawn[:, sessions]
