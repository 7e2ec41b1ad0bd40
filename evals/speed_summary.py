"""What the observations of load say together: throughput against concurrency, and its knee."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strop.evals.observation import ARMS, Arm, Observation


@dataclass(frozen=True, slots=True)
class Level:
    """One Stack at one number of requests at once."""

    concurrency: int
    requests: int
    requests_per_s: float
    low: float
    """Ends of its 95 % interval."""
    high: float
    e2e_s: float
    """Mean time of a request."""
    in_time: float
    """Share of requests within the latency objective."""

    @property
    def in_time_per_s(self) -> float:
        """Goodput: requests a second that are answered within the objective."""
        return self.requests_per_s * self.in_time


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """Throughput of one Stack against concurrency."""

    arm: Arm
    levels: tuple[Level, ...]
    knee: int
    """The measured level with the largest throughput over latency."""
    knee_low: int
    """Ends of its 95 % interval, among the measured levels."""
    knee_high: int

    @property
    def best(self) -> Level:
        """The level with the highest goodput, or throughput where no request is in time."""
        return max(self.levels, key=lambda level: (level.in_time_per_s, level.requests_per_s))


def load_curves(
    observations: Iterable[Observation], samples: int = 2000, seed: int = 0
) -> dict[Arm, LoadCurve]:
    """Curve of each Stack from the observations `loaded_server_s` and `loaded_in_time`; empty without any.

    The knee is where throughput over latency is largest (Kleinrock, Power and deterministic rules of
    thumb for probabilistic problems in computer communications, ICC 1979): beyond it, doubling what
    is under way no longer brings a throughput 1.41 times as high. Intervals are of percentiles over
    resampled sessions, the same draw for all levels and both Stacks.
    """
    times: dict[int, list[Observation]] = {}
    in_time: dict[int, list[Observation]] = {}
    for one in observations:
        levels = [int(name[1:]) for name in one.slices if name[:1] == "c" and name[1:].isdecimal()]
        if one.metric in ("loaded_server_s", "loaded_in_time") and levels:
            group = times if one.metric == "loaded_server_s" else in_time
            group.setdefault(levels[0], []).append(one)
    if not times:
        return {}
    sessions = sorted({one.session for group in times.values() for one in group})
    count = len(sessions)
    drawn_BS = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=samples)
    weights_BS = np.vstack([np.ones((1, count), dtype=drawn_BS.dtype), drawn_BS])
    return {arm: _curve(arm, times, in_time, sessions, weights_BS) for arm in ARMS}


def _curve(
    arm: Arm,
    times: dict[int, list[Observation]],
    in_time: dict[int, list[Observation]],
    sessions: Sequence[str],
    weights_BS: NDArray[np.int64],
) -> LoadCurve:
    levels = sorted(times)
    place = {session: number for number, session in enumerate(sessions)}
    rates_LB = np.zeros((len(levels), len(weights_BS)))
    for row, level in enumerate(levels):
        sums_SP = np.zeros((len(sessions), 2))
        for one in times[level]:
            sums_SP[place[one.session]] += (1, _value(one, arm))
        requests_B, server_s_B = (weights_BS @ sums_SP).T
        # A draw without any session of this level says nothing of it.
        np.divide(requests_B, server_s_B, out=rates_LB[row], where=server_s_B > 0)
    # By Little's law latency is concurrency over throughput.
    power_LB = rates_LB**2 / np.array(levels)[:, None]
    knees_B = np.array(levels)[power_LB.argmax(axis=0)]
    ends = np.quantile(knees_B[1:], [0.025, 0.975], method="inverted_cdf")
    found = []
    for row, level in enumerate(levels):
        drawn = rates_LB[row, 1:][rates_LB[row, 1:] > 0]
        low, high = np.quantile(drawn, [0.025, 0.975]) if len(drawn) else (0.0, 0.0)
        rate = float(rates_LB[row, 0])
        good = [_value(one, arm) for one in in_time.get(level, ())]
        found.append(
            Level(
                concurrency=level,
                requests=len(times[level]),
                requests_per_s=rate,
                low=float(low),
                high=float(high),
                e2e_s=level / rate if rate else 0.0,
                in_time=float(np.mean(good)) if good else 0.0,
            )
        )
    return LoadCurve(arm, tuple(found), int(knees_B[0]), int(ends[0]), int(ends[1]))


def _value(one: Observation, arm: Arm) -> float:
    values = one.candidate if arm == "candidate" else one.reference
    return float(np.mean(values or (0.0,)))
