"""How sure we may be of a ratio between two Stacks that answered the same requests."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Totals:
    """Per-request parts of a metric that is a quotient of sums: seconds over tokens, tokens over steps.

    A mean over requests has `over` equal to one.
    """

    amount: ArrayLike
    over: ArrayLike = 1.0

    @property
    def value(self) -> float:
        amount, over = np.broadcast_arrays(np.asarray(self.amount, float), np.asarray(self.over, float))
        return float(amount.sum() / over.sum())


@dataclass(frozen=True, slots=True)
class Ratio:
    """Candidate over champion with the ends of its confidence interval."""

    ratio: float
    low: float
    high: float


def paired_ratio(
    champion: Totals,
    candidate: Totals,
    sessions: ArrayLike,
    samples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Ratio:
    """Ratio of the two metrics [one entry a request] and its interval by a paired cluster bootstrap.

    Whole sessions are resampled, since the turns of a session share their prompt and resemble each
    other, and both Stacks' values of a request stay together, so that what is common to both cancels.
    The interval is the bootstrap-t of the log ratio with its linearised standard error (Efron and
    Tibshirani, An Introduction to the Bootstrap, 1993, section 12.5; Cameron, Gelbach and Miller 2008
    for clusters), which keeps its coverage with few sessions and skewed latencies, where percentiles
    are too narrow.

    Raises ValueError for fewer than two sessions or a total that is not positive.
    """
    labels, cluster = np.unique(np.asarray(sessions), return_inverse=True)
    count = len(labels)
    if count < 2:
        raise ValueError(f"An interval needs at least 2 sessions, got {count}. Collect more traffic.")
    parts = (candidate.amount, candidate.over, champion.amount, champion.over)
    per_request = np.stack([np.broadcast_to(np.asarray(p, float), cluster.shape) for p in parts], axis=1)
    per_session_SP = np.zeros((count, 4))
    np.add.at(per_session_SP, cluster, per_request)
    totals_P = per_session_SP.sum(axis=0)
    if not (np.isfinite(totals_P).all() and (totals_P > 0).all()):
        raise ValueError(f"The totals of a ratio must be positive and finite, got {totals_P.tolist()}.")

    log_ratio = float(_log_ratio(totals_P))
    weights_BS = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=samples)
    error = float(_standard_error(per_session_SP, np.ones((1, count)), totals_P[None])[0])
    if error == 0:
        return Ratio(float(np.exp(log_ratio)), float(np.exp(log_ratio)), float(np.exp(log_ratio)))
    totals_BP = weights_BS @ per_session_SP
    usable = (totals_BP > 0).all(axis=1)
    weights_BS, totals_BP = weights_BS[usable], totals_BP[usable]
    errors_B = _standard_error(per_session_SP, weights_BS, totals_BP)
    spread = errors_B > error * _DEGENERATE
    pivots_B = (_log_ratio(totals_BP[spread]) - log_ratio) / errors_B[spread]
    tail = (1 - confidence) / 2
    upper, lower = np.quantile(pivots_B, [tail, 1 - tail])
    # Two or three sessions may leave the interval practically open; it stays a number that JSON can hold.
    reach = np.clip(np.array([-lower, -upper]) * error, -_OPEN, _OPEN)
    low, high = np.exp(log_ratio + reach)
    return Ratio(float(np.exp(log_ratio)), float(low), float(high))


# A resample that drew one session many times over has no spread, hence no pivot.
_DEGENERATE = 1e-6
_OPEN = 30.0


def _log_ratio(totals: Floats) -> Any:
    logs = np.log(totals)
    return (logs[..., 0] - logs[..., 1]) - (logs[..., 2] - logs[..., 3])


def _standard_error(per_session_SP: Floats, weights_BS: NDArray[Any], totals_BP: Floats) -> Floats:
    count = len(per_session_SP)
    share_BSP = per_session_SP[None] / totals_BP[:, None, :]
    influence_BS = (share_BSP[..., 0] - share_BSP[..., 1]) - (share_BSP[..., 2] - share_BSP[..., 3])
    return np.sqrt(count / (count - 1) * (weights_BS * influence_BS**2).sum(axis=1))
