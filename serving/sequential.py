"""Evidence that may be looked at as often as one likes: e-values and the intervals they make.

The unit is a session. Sessions of the two Stacks are compared in blocks of one of the candidate's
and k of the champion's, which appeared at about the same time. Each function here returns the log of a product
of one factor a block, averaged over a few bets, whose expectation is at most 1 if the claim it
tests is true. Ville's inequality (1939) then bounds the chance that it *ever* reaches 1/alpha by
alpha, whenever one looks and for whatever reason one stops.

Whether they are equal at all: then which of the k + 1 sessions of a block was the candidate's says
nothing, and the factor exp(b x) / mean over the block of exp(b x_j) has expectation exactly 1,
given the values, whatever their distribution and however heavy its tail (Koning, arXiv 2310.01153;
Pérez-Ortiz, Lardy, de Heide and Grünwald, E-statistics, group invariance and anytime-valid testing,
Annals of Statistics 52, 2024). This is the sharpest test here, and it tests nothing but equality.

By how much, for ratios (times, acceptance length; values are logs): the same with the candidate's
values shifted, which takes the two Stacks to differ by a constant factor.

By how much, for shares of requests (errors, invalid JSON): the difference of a block lies in
[-1, 1], and nothing is assumed but that its mean is the same in every block. The factors are the
bets of Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting, JRSS B 86
(2024).

Intervals are all the values not rejected (Howard, Ramdas, McAuliffe and Sekhon, Time-uniform,
nonparametric, nonasymptotic confidence sequences, Annals of Statistics 49, 2021).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Side = Literal["above", "below"]
Kind = Literal["share", "ratio"]

SHARE_BETS = np.array([0.12, 0.24, 0.48, 0.95])
"""Stakes as fractions of what a block may lose; 1 would lose everything at the worst block."""
TILTS = np.array([0.5, 1.0, 2.0, 4.0, 8.0])
"""Bets that larger values are the candidate's, per unit; the best is the effect over the variance."""
SESSION_SPREAD = 0.5
"""Standard deviation of a session's log time that the size of a canary is reckoned with."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sessions that are compared, in order of appearance: shares in [0, 1], or logs."""

    kind: Kind
    candidate_B: Floats
    """`[..., blocks]`"""
    champion_BK: Floats
    """`[..., blocks, k]`"""

    @classmethod
    def of(cls, kind: Kind, candidate: Floats, champion: Floats, k: int) -> "Blocks":
        """The first sessions `[..., n]` of each side that fill whole blocks of 1 and `k`."""
        count = min(candidate.shape[-1], champion.shape[-1] // k)
        whole = champion[..., : count * k]
        return cls(kind, candidate[..., :count], whole.reshape(*whole.shape[:-1], count, k))

    def __len__(self) -> int:
        return self.candidate_B.shape[-1]


def pair_up(candidate: Sequence[int], champion: Sequence[int], k: int) -> tuple[list[int], list[list[int]]]:
    """Which sessions make a block: indices of the candidate's, and of the champion's `k` for each.

    Takes the looks at which sessions appeared, in order. A block is made as soon as it can be, of the
    newest sessions that are left, so that a Stack with more than its share is not compared with a
    time long ago; and once made it stays, whatever comes later.
    """
    ours: list[int] = []
    theirs: list[int] = []
    blocks: list[tuple[int, list[int]]] = []
    arrivals = [(look, 0, i) for i, look in enumerate(champion)] + [
        (look, 1, i) for i, look in enumerate(candidate)
    ]
    for _, is_ours, index in sorted(arrivals):
        (ours if is_ours else theirs).append(index)
        if ours and len(theirs) >= k:
            blocks.append((ours.pop(), theirs[-k:]))
            del theirs[-k:]
    return [own for own, _ in blocks], [others for _, others in blocks]


def log_evidence_of_more(blocks: Blocks) -> Floats:
    """Log e-value `[...]` that the two are not equal: the candidate's values are the larger ones."""
    if len(blocks) == 0:
        return np.zeros(blocks.candidate_B.shape[:-1])
    return _log_mean_exp(_tilt_steps(blocks, 0.0, "above").sum(axis=-2))


def log_evidence(blocks: Blocks, at: float, side: Side) -> Floats:
    """Log e-value `[...]` that the candidate minus the champion is above (or below) `at`.

    `at` is a difference of shares within (-1, 1), or the log of a ratio.
    """
    if len(blocks) == 0:
        return np.zeros(blocks.candidate_B.shape[:-1])
    steps_BL = _share_steps(blocks, at, side) if blocks.kind == "share" else _tilt_steps(blocks, at, side)
    return _log_mean_exp(steps_BL.sum(axis=-2))


def interval(blocks: Blocks, alpha_low: float, alpha_high: float) -> tuple[float, float]:
    """Ends of the always-valid interval of one comparison: each is wrong with at most its alpha, ever.

    -1 or 1 (for logs: minus or plus infinity) where the blocks do not bound that side yet.
    """

    def rejected(side: Side, alpha: float) -> Callable[[float], bool]:
        return lambda at: float(log_evidence(blocks, at, side)) >= math.log(1 / alpha)

    is_share = blocks.kind == "share"
    far = 1 - 1e-9 if is_share else 20.0
    low = _boundary(rejected("above", alpha_low), -far, far)
    high = _boundary(rejected("below", alpha_high), far, -far)
    open_end = 1.0 if is_share else math.inf
    return -open_end if low is None else low, open_end if high is None else high


def sessions_to_show(kind: Kind, tolerance: float, alpha: float, k: int, base: float) -> float:
    """Candidate's sessions after which equal Stacks can be expected to exclude a regression of `tolerance`.

    For shares: when a share of `base` of single-request sessions fails on both sides. For ratios
    (`tolerance` is a log): when a session's log has the spread `SESSION_SPREAD`. Infinite for a
    tolerance of nothing.
    """
    if tolerance <= 0:
        return math.inf
    if kind == "ratio":
        variance = SESSION_SPREAD**2 * (1 + 1 / k)
        growth = min(tolerance**2 / (2 * variance), math.log(k + 1))
        return math.log(len(TILTS) / alpha) / growth
    failing_K = np.arange(k + 1)
    chance_K = np.array([math.comb(k, j) * base**j * (1 - base) ** (k - j) for j in failing_K])
    growth_L = np.zeros(len(SHARE_BETS))
    for own, chance in ((0.0, 1 - base), (1.0, base)):
        beyond_K = (tolerance - (own - failing_K / k)) / (1 - tolerance)
        growth_L += chance * chance_K @ np.log1p(beyond_K[:, None] * SHARE_BETS)
    growth = float(growth_L.max())
    return math.log(len(SHARE_BETS) / alpha) / growth if growth > 0 else math.inf


def _share_steps(blocks: Blocks, at: float, side: Side) -> Floats:
    difference_B = blocks.candidate_B - blocks.champion_BK.mean(axis=-1)
    # How far a block lies beyond `at`, in units of the most that it may lie short of it.
    beyond_B = (difference_B - at) / (1 + at) if side == "above" else (at - difference_B) / (1 - at)
    return np.log1p(beyond_B[..., None] * SHARE_BETS)


def _tilt_steps(blocks: Blocks, at: float, side: Side) -> Floats:
    tilts_L = TILTS if side == "above" else -TILTS
    # Only differences within a block count: with the candidate at 0, no exponent needs its value.
    gaps_BK = blocks.champion_BK - (blocks.candidate_B - at)[..., None]
    exponents_BKL = gaps_BK[..., None] * tilts_L
    peak_BL = np.maximum(exponents_BKL.max(axis=-2), 0)
    total_BL = np.exp(exponents_BKL - peak_BL[..., None, :]).sum(axis=-2) + np.exp(-peak_BL)
    return math.log(gaps_BK.shape[-1] + 1) - peak_BL - np.log(total_BL)


def _log_mean_exp(values_L: Floats) -> Floats:
    peak = values_L.max(axis=-1)
    return peak + np.log(np.exp(values_L - peak[..., None]).mean(axis=-1))


def _boundary(rejected: Callable[[float], bool], start: float, end: float) -> float | None:
    """Where values cease to be rejected on the way from `start` to `end`; None if `start` is not."""
    if not rejected(start):
        return None
    for _ in range(50):
        middle = (start + end) / 2
        start, end = (middle, end) if rejected(middle) else (start, middle)
    return end
