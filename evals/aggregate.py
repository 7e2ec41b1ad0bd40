"""From observations to measurements: one number a metric, slice and statistic, with its interval.

Intervals treat sessions as independent and keep everything within a session together, for both Stacks
alike; `intervals` has how.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from strop.evals.intervals import Arm, Paired, compared, mean_interval, quantile_interval
from strop.evals.observation import Metric, Observation

Statistic = Literal["mean", "median", "p95", "p99", "max"]
STATISTICS: tuple[Statistic, ...] = get_args(Statistic)
ALL = "all"
_SHARES = {"median": 0.5, "p95": 0.95, "p99": 0.99}


class Broken(ValueError):
    """An observation that cannot be summed up; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One statistic of one metric over the requests of a slice, for both Stacks."""

    metric: Metric
    slice: str
    statistic: Statistic
    reference: float | None
    """None for a level."""
    candidate: float
    estimate: float
    """The candidate's level, its difference from the reference's, or its ratio to it."""
    samples: int
    """Sessions."""
    requests: int
    data: Paired = field(repr=False, compare=False)

    def interval(self, confidence: float) -> tuple[float, float]:
        """Ends that are each wrong with at most (1 - confidence) / 2; infinite where an end is open.

        Nothing bounds the largest value there can be: above the largest seen, its interval is open.
        """
        if self.statistic in _SHARES:
            low, high = quantile_interval(self.data, _SHARES[self.statistic], confidence)
            return (max(low, 0.0) if self._is_positive else low), high
        if self.statistic == "mean":
            return mean_interval(self.data, confidence, is_share(self.metric, self.data))
        if self.data.reference is None:
            return self.candidate, math.inf
        return (0.0 if self.data.kind == "ratio" else -math.inf), math.inf

    @property
    def _is_positive(self) -> bool:
        return self.data.kind != "difference" and all(arm.values.min() >= 0 for arm in self.data.arms)


def is_share(metric: Metric, data: Paired) -> bool:
    """Whether it is a share, so that 0 and 1 bound its values: without a unit, and none lies beyond."""
    within = all(arm.values.min() >= 0 and arm.values.max() <= 1 for arm in data.arms)
    return metric.unit == "" and metric.compare != "ratio" and within


@dataclass(frozen=True, slots=True)
class Aggregate:
    """All observations, by metric; measurements are made of them when they are asked for."""

    metrics: dict[str, Metric]
    observations: dict[str, list[Observation]]
    _made: dict[tuple[str, str, str], Measurement | None] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, metrics: Iterable[Metric], observations: Iterable[Observation]) -> "Aggregate":
        """Observations by metric. Raises Broken for one whose metric is not among `metrics`, or with bad values."""
        known = {metric.name: metric for metric in metrics}
        found: dict[str, list[Observation]] = {name: [] for name in known}
        for observation in observations:
            check(known, observation)
            found[observation.metric].append(observation)
        return cls(known, found)

    def slices(self, metric: str) -> list[str]:
        """Slices that hold some but not all of the metric's requests, the largest first."""
        counts: dict[str, int] = {}
        for observation in self.observations[metric]:
            for name in set(observation.slices) - {ALL}:
                counts[name] = counts.get(name, 0) + 1
        part = [name for name in counts if counts[name] < len(self.observations[metric])]
        return sorted(part, key=lambda name: (-counts[name], name))

    def measure(self, metric: str, slice_: str = ALL, statistic: Statistic = "mean") -> Measurement | None:
        """The measurement; None if no observation shows it."""
        key = (metric, slice_, statistic)
        if key not in self._made:
            chosen = [o for o in self.observations.get(metric, ()) if slice_ == ALL or slice_ in o.slices]
            self._made[key] = _measure(self.metrics[metric], slice_, statistic, chosen) if chosen else None
        return self._made[key]

    def each(self) -> Iterator[Measurement]:
        """What a report shows: every mean over all and each slice, and where values vary what else there is."""
        for metric in self.metrics:
            for slice_ in (ALL, *self.slices(metric)):
                for statistic in STATISTICS:
                    measurement = self.measure(metric, slice_, statistic)
                    if measurement and (statistic == "mean" or not _only_counts(measurement.data)):
                        yield measurement


def check(metrics: dict[str, Metric], observation: Observation) -> None:
    """Raises Broken unless the observation is of a known metric and its values can be compared."""
    metric = metrics.get(observation.metric)
    where = f"Observation of {observation.metric!r} on request {observation.request_id!r}"
    if metric is None:
        raise Broken(f"{where}: its part does not declare such a metric.")
    if metric.compare != "level" and observation.reference is None:
        raise Broken(f"{where}: a {metric.compare} needs the reference's value.")
    for value in (*observation.candidate, *(observation.reference or ())):
        if not math.isfinite(value):
            raise Broken(f"{where}: {value} is not a number to take a mean of.")


def _measure(
    metric: Metric, slice_: str, statistic: Statistic, observations: Sequence[Observation]
) -> Measurement | None:
    paired = metric.compare != "level"
    # An answer that shows nothing on one side is left out on both.
    shown = [o for o in observations if o.candidate and (o.reference or not paired)]
    if not shown:
        return None
    number: dict[str, int] = {}
    sessions = [number.setdefault(o.session, len(number)) for o in shown]
    candidate = _arm([o.candidate for o in shown], sessions)
    reference = _arm([o.reference or () for o in shown], sessions) if paired else None
    data = Paired(metric.compare, len(number), candidate, reference)
    ours = statistic_of(candidate, statistic)
    theirs = statistic_of(reference, statistic) if reference else None
    return Measurement(
        metric=metric,
        slice=slice_,
        statistic=statistic,
        reference=theirs,
        candidate=ours,
        estimate=compared(metric.compare, ours, theirs),
        samples=len(number),
        requests=len({o.request_id for o in shown}),
        data=data,
    )


def _arm(values: Sequence[tuple[float, ...]], sessions: Sequence[int]) -> Arm:
    sizes = [len(each) for each in values]
    return Arm(np.concatenate([np.asarray(v, float) for v in values]), np.repeat(sessions, sizes))


def statistic_of(arm: Arm, statistic: Statistic) -> float:
    if statistic == "mean":
        return arm.mean
    return float(arm.values.max()) if statistic == "max" else arm.quantile(_SHARES[statistic])


def _only_counts(data: Paired) -> bool:
    """Whether every value is 0 or 1, of which only the mean says anything."""
    return all(np.isin(arm.values, (0.0, 1.0)).all() for arm in data.arms)
