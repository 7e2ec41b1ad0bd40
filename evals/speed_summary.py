"""What the observations of speed say together: quantiles, throughput against concurrency, and its knee."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strop.evals.observation import ARMS, Arm, Metric, Observation
from strop.evals.statistics import Ratio, Totals, paired_quantile_ratio, paired_ratio

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Summed:
    """One metric of one slice: mean and quantiles of both Stacks, and the ratio of each with its interval."""

    metric: str
    slice: str
    requests: int
    reference: dict[str, float]
    """`mean`, `p50`, `p95`, `p99`, in the metric's unit."""
    candidate: dict[str, float]
    ratios: dict[str, Ratio]
    """Candidate over reference where that is what counts; what there is too little data for is not in it."""


def quantiles(
    observations: Iterable[Observation], metrics: Sequence[Metric], samples: int = 2000, seed: int = 0
) -> tuple[Summed, ...]:
    """Mean and quantiles of every time that is compared as a ratio or in seconds, by slice, `all` first."""
    wanted = {metric.name: metric.compare == "ratio" for metric in metrics if metric.unit}
    groups: dict[tuple[str, str], list[Observation]] = {}
    for one in observations:
        if one.metric in wanted and one.reference is not None:
            for slice_ in ("all", *one.slices):
                groups.setdefault((one.metric, slice_), []).append(one)
    order = [metric.name for metric in metrics]
    ordered = sorted(groups.items(), key=lambda group: (order.index(group[0][0]), group[0][1] != "all"))
    found = []
    for (metric, name), group in ordered:
        enough = len({one.session for one in group}) >= _SESSIONS
        ratios = _ratios(group, samples, seed) if enough and wanted[metric] else {}
        candidate = [float(np.mean(one.candidate)) for one in group]
        reference = [float(np.mean(one.reference or ())) for one in group]
        found.append(Summed(metric, name, len(group), _of(reference), _of(candidate), ratios))
    return tuple(found)


_SESSIONS = 5
"""With fewer, resampling sessions says nothing of how much they differ."""


def _ratios(group: Sequence[Observation], samples: int, seed: int) -> dict[str, Ratio]:
    candidate = [float(np.mean(one.candidate)) for one in group]
    reference = [float(np.mean(one.reference or ())) for one in group]
    sessions = [one.session for one in group]
    ratios: dict[str, Ratio] = {}
    for quantile, share in {"mean": None, **QUANTILES}.items():
        try:
            if share is None:
                totals = Totals(reference), Totals(candidate)
                ratios[quantile] = paired_ratio(*totals, sessions, samples=samples, seed=seed)
            else:
                ratios[quantile] = paired_quantile_ratio(
                    reference, candidate, sessions, share, samples=samples, seed=seed
                )
        except ValueError:
            continue
    return ratios


def _of(values: Sequence[float]) -> dict[str, float]:
    found = np.quantile(values, list(QUANTILES.values()), method="inverted_cdf")
    return {"mean": float(np.mean(values)), **dict(zip(QUANTILES, map(float, found), strict=True))}


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
