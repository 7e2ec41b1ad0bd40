"""The Evaluation: what was found when two Stacks answered a suite."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from strop.evals.gates import Answer
from strop.evals.speed_summary import LoadCurve


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Figure(_Frozen):
    """One number with its interval. An end that is None is open: the sessions do not bound it."""

    metric: str
    unit: str
    words: str
    better: Literal["higher", "lower"]
    compare: Literal["level", "difference", "ratio"]
    slice: str
    statistic: str
    reference: float | None
    candidate: float
    estimate: float | None
    """Level, difference from the reference, or ratio to it; None for a ratio to nothing."""
    low: float | None
    high: float | None
    confidence: float
    samples: int
    """Sessions."""
    requests: int


class GateResult(_Frozen):
    """A gate's answer on one slice."""

    metric: str
    slice: str
    statistic: str
    side: Literal["at most", "at least"]
    bound: float
    confidence: float
    min_samples: int
    required: bool
    """False for a slice looked at for harm, which may fail and need not pass."""
    answer: Answer
    figure: Figure | None
    """None where no request showed the metric. Its ends are each wrong with at most 1 - confidence."""


class Shown(_Frozen):
    """A Finding, as kept."""

    kind: str
    arm: str
    stack: str
    request_id: str
    detail: str
    body: dict[str, Any]
    answer: str
    other: str


class Ran(_Frozen):
    """How a part went."""

    name: str
    seconds: float
    requests: int
    observations: int
    findings: int
    ended: bool
    problem: str


class Curve(_Frozen):
    """Quantiles 0, 1, ..., 100 of a metric over all requests of both Stacks, to draw."""

    metric: str
    reference: tuple[float, ...]
    candidate: tuple[float, ...]


class Evaluation(_Frozen):
    """What was found when the candidate was compared with the reference."""

    id: str
    suite: str
    verdict: Answer
    summary: str
    """The verdict in plain words, one paragraph."""
    reference: dict[str, Any]
    """The Stacks' manifests, each with its fingerprint."""
    candidate: dict[str, Any]
    differences: dict[str, tuple[Any, Any]]
    """As `Stack.diff` gives it."""
    started_at: float
    """Unix time."""
    seconds: float
    """Time of all parts; of one that was interrupted, of its last run."""
    traces: int
    parts: tuple[Ran, ...]
    gates: tuple[GateResult, ...]
    figures: tuple[Figure, ...]
    findings: tuple[Shown, ...]
    curves: tuple[Curve, ...]
    load: tuple[LoadCurve, ...] = ()
    """Throughput against concurrency of each Stack, where the suite measured it."""

    @property
    def passed(self) -> bool:
        return self.verdict == "passed"

    def __repr__(self) -> str:
        """What pytest shows of a failed assertion."""
        return f"<Evaluation {self.id}: {self.summary}>"

    def __bool__(self) -> bool:
        """So that `assert strop_eval(url)` says what it seems to say."""
        return self.passed


def load_evaluation(folder: Path) -> Evaluation | None:
    """The Evaluation that was finished in `folder`, if there is one that can be read."""
    try:
        return Evaluation.model_validate_json((folder / "evaluation.json").read_bytes())
    except (OSError, ValueError):
        return None
