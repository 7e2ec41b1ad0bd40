"""What a learner is and what it hands to the judge."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from strop.serving.stack import Stack
from strop.serving.traces import TraceSet


@dataclass(frozen=True, slots=True)
class Budget:
    """What a learner may spend, and where it may write.

    A learner keeps its checkpoints in `folder`: called again with the same folder, it resumes.
    """

    folder: Path
    seconds: float
    started: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        return max(0.0, self.seconds - (time.monotonic() - self.started))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A Stack that a learner believes is better than the champion."""

    stack: Stack
    learner: str
    expects: dict[str, float]
    """What should change, by the judge's metric name: e.g. {"acceptance_length": 2.3}."""
    cost_s: float
    """Wall-clock seconds spent so far."""
    notes: dict[str, object] = field(default_factory=dict)
    """What was learned, for the report (JSON types only)."""


@dataclass(frozen=True, slots=True)
class Declined:
    """A learner's reason not to propose anything."""

    learner: str
    reason: str


class Progress(Protocol):
    def __call__(self, done: float, text: str) -> None:
        """`done` from 0 to 1 within the stage; `text` is one short line."""
        ...


class Learner(Protocol):
    @property
    def name(self) -> str: ...

    def propose(
        self, champion: Stack, traces: TraceSet, budget: Budget, progress: Progress
    ) -> Candidate | Declined: ...
