"""Gates: what must be shown of a candidate, and what is concluded when it cannot be shown.

A gate passes when the whole interval of its measurement lies within its bound, fails when it lies
wholly beyond it, and is undecided ("not enough data") otherwise.

What is controlled. *That a bad candidate passes*: all gates must pass, so a candidate that is at or
beyond the bound of any one of them passes with at most that gate's 1 - confidence, however many gates
there are (an intersection-union test: Berger, Multiparameter hypothesis testing and acceptance
sampling, Technometrics 24, 1982); no correction is needed. *That a good candidate fails*: one gate
that fails is enough, and there may be dozens of slices, so the failures of one evaluation are found by
the step-down method of Holm (A simple sequentially rejective multiple test procedure, Scandinavian
Journal of Statistics 6, 1979): with at most 1 - confidence any of them is found wrongly. Half of that
goes to the gates that must pass and half to the others, so that many slices do not blunt the gates.

A gate on every slice (`slice: "*"`) looks for harm that an average hides. It can fail, and does not
have to pass: small slices would never show it. So it is with `required: false`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from strop.evals.aggregate import ALL, Aggregate, Measurement, Statistic
from strop.serving.settings import Section

Answer = Literal["passed", "failed", "not enough data"]
EACH = "*"
MIN_SAMPLES = 12


class Gate(Section):
    """One bound on a measurement."""

    metric: str
    """Name of a metric of one of the suite's parts; `strop eval suites` lists them."""
    slice: str = ALL
    """Kind of traffic: `all`, a slice by name, or `*`: each by itself, which may fail and need not pass."""
    statistic: Statistic = "mean"
    """Of the values: `mean`, `median`, `p95` or `p99`."""
    at_most: float | None = Field(default=None, allow_inf_nan=False)
    """Largest level, difference from the reference or ratio to it that is accepted."""
    at_least: float | None = Field(default=None, allow_inf_nan=False)
    """Smallest one that is accepted; a gate has one of the two."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """A candidate that is at the bound passes with at most 1 - this."""
    min_samples: int = Field(default=MIN_SAMPLES, ge=1)
    """With fewer sessions nothing is concluded."""
    required: bool | None = None
    """Whether it has to pass. One that has not looks for harm: it can fail. None: all but those of `*`."""

    @model_validator(mode="after")
    def _has_one_bound_that_can_be_shown(self) -> "Gate":
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError("a gate has either at_most or at_least")
        if self.statistic == "max":
            raise ValueError(
                "no sample bounds the largest value there can be; use p99, or a share of requests"
            )
        return self

    @property
    def must_pass(self) -> bool:
        return self.slice != EACH if self.required is None else self.required

    @property
    def bound(self) -> float:
        bound = self.at_least if self.at_most is None else self.at_most
        assert bound is not None
        return bound

    @property
    def words(self) -> str:
        """The gate in one line: `kl mean of all at most 0.1`."""
        side = "at least" if self.at_most is None else "at most"
        where = "each slice" if self.slice == EACH else self.slice
        return f"{self.metric}, {self.statistic} of {where}, {side} {self.bound:g}"

    def within(self, low: float, high: float) -> bool:
        return high <= self.bound if self.at_most is not None else low >= self.bound

    def beyond(self, low: float, high: float) -> bool:
        return low > self.bound if self.at_most is not None else high < self.bound


@dataclass(frozen=True, slots=True)
class Decision:
    """A gate's answer on one slice."""

    gate: Gate
    slice: str
    answer: Answer
    measurement: Measurement | None
    low: float
    """Ends that are each wrong with at most 1 - confidence; infinite where open."""
    high: float


def decide(gates: Sequence[Gate], aggregate: Aggregate) -> tuple[Decision, ...]:
    """Every gate's answer, one a slice for those on each slice."""
    asked = [
        (gate, slice_, aggregate.measure(gate.metric, slice_, gate.statistic))
        for gate in gates
        for slice_ in (aggregate.slices(gate.metric) if gate.slice == EACH else [gate.slice])
    ]
    tested = {n: (gate, m) for n, (gate, _, m) in enumerate(asked) if m and m.samples >= gate.min_samples}
    required = {n: each for n, each in tested.items() if each[0].must_pass}
    watched = {n: each for n, each in tested.items() if n not in required}
    families = [family for family in (required, watched) if family]
    failed = set[int]().union(*(_failed(family, len(families)) for family in families))
    return tuple(
        _decision(gate, slice_, measurement, number in tested, number in failed)
        for number, (gate, slice_, measurement) in enumerate(asked)
    )


def verdict(decisions: Sequence[Decision]) -> Answer:
    """What the decisions come to: one failure fails, and everything required must have passed."""
    if any(decision.answer == "failed" for decision in decisions):
        return "failed"
    required = [decision for decision in decisions if decision.gate.must_pass]
    passed = bool(required) and all(decision.answer == "passed" for decision in required)
    return "passed" if passed else "not enough data"


def _failed(tested: dict[int, tuple[Gate, Measurement]], families: int) -> set[int]:
    """Holm's method: those beyond their bounds at the level over the number left, again until there are none."""
    left, failed = dict(tested), set[int]()
    while left:
        found = {
            number
            for number, (gate, measurement) in left.items()
            if gate.beyond(*_ends(measurement, (1 - gate.confidence) / (families * len(left))))
        }
        if not found:
            break
        failed |= found
        left = {number: each for number, each in left.items() if number not in found}
    return failed


def _decision(
    gate: Gate, slice_: str, measurement: Measurement | None, is_tested: bool, has_failed: bool
) -> Decision:
    if measurement is None:
        return Decision(gate, slice_, "not enough data", None, -math.inf, math.inf)
    low, high = _ends(measurement, 1 - gate.confidence)
    answer: Answer = "not enough data"
    if has_failed:
        answer = "failed"
    elif is_tested and gate.within(low, high):
        answer = "passed"
    return Decision(gate, slice_, answer, measurement, low, high)


def _ends(measurement: Measurement, alpha: float) -> tuple[float, float]:
    """Ends that are each wrong with at most `alpha`."""
    return measurement.interval(1 - 2 * alpha)
