"""What the parts of an evaluation have in common: what they see, and what they may look at.

A part puts requests to two servers and yields what it saw, one `Observation` a request and metric and
one `Finding` an answer that a person should look at. Averages, intervals, slices and gates are made
of these, in one place and for all parts alike (`aggregate`, `gates`).
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import httpx

from strop.evals.proposal import Progress
from strop.serving.stack import Stack
from strop.serving.traces import Trace

Arm = Literal["reference", "candidate"]
ARMS: tuple[Arm, Arm] = ("reference", "candidate")


@dataclass(frozen=True, slots=True)
class Metric:
    """How values of one name are summed up and compared."""

    name: str
    unit: str
    """Empty for shares and counts."""
    better: Literal["higher", "lower"]
    compare: Literal["level", "difference", "ratio"]
    """What counts of it: the candidate's own value (distances, which take both Stacks to make), its
    difference from the reference's (shares), or its ratio to it (times)."""
    words: str
    """What it is, for the report: continues "the candidate's ..."."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One request's values of one metric."""

    metric: str
    request_id: str
    session: str
    """The independent unit: intervals resample whole sessions."""
    slices: tuple[str, ...]
    """Kinds of traffic it belongs to, besides `all`."""
    candidate: tuple[float, ...]
    """One value, or one a token."""
    reference: tuple[float, ...] | None = None
    """None for a metric that is compared as a level."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer that a person should look at."""

    kind: str
    """`loop`, `invalid_json`, `wrong_call`, ..."""
    arm: Arm
    stack: str
    """Fingerprint of the Stack that gave it."""
    request_id: str
    detail: str
    """In plain words, with the numbers."""
    body: dict[str, Any]
    """The request as it was sent; `strop eval replay` sends it again."""
    answer: str = ""
    """Of this arm; the beginning, if it is long."""
    other: str = ""
    """What the other arm said, where there is one."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two Stacks, served."""

    arm: Arm
    stack: Stack
    url: str
    """Of its router, or of its only replica; without `/v1`."""
    replicas: tuple[str, ...] = ()
    """URLs of its replicas, where they can be reached one by one."""

    @property
    def model(self) -> str:
        return self.stack.served_model


@dataclass(frozen=True, slots=True)
class Bench:
    """What a part may work with."""

    reference: Side
    candidate: Side
    traces: Sequence[Trace]
    """Held-out traffic with content, oldest first."""
    client: httpx.AsyncClient
    cache: Path
    """Folder that outlives the evaluation; files in it are named by all they depend on."""
    progress: Progress
    """Share done in [0, 1] and a few words."""
    seed: int = 0
    done: frozenset[str] = field(default_factory=frozenset)
    """Ids of the requests whose observations are there already, from a run that was interrupted."""

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.reference, self.candidate


class Part(Protocol):
    """A part of an evaluation. Its options are its own fields, read from the suite's YAML."""

    @property
    def name(self) -> str: ...

    @property
    def metrics(self) -> Sequence[Metric]: ...

    def observe(self, bench: Bench) -> AsyncIterator[Observation | Finding]:
        """Ask both servers and yield what was seen; requests in `bench.done` are left out.

        A server that fails is an observation. Raises EvalError where nothing can be said at all.
        """
        ...


class EvalError(RuntimeError):
    """No evaluation is possible; the message says why and what to do."""
