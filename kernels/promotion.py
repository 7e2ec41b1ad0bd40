"""From a verified kernel to one that may serve: the record, what speaks against it, and who decided.

A record is a file named by the hash of its content, beside the object that was verified, named by its
own. What the engine measured and what was decided are files of the same name in other folders, so that
the record itself never changes. Everything lies in `STROP_HOME/kernels`.
"""

import hashlib
import json
import math
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from strop.kernels.build import Source
from strop.kernels.contract import words
from strop.kernels.timing import median_interval, overall_speedup
from strop.kernels.verify import CHECKS, Verification
from strop.serving.home import write_atomic
from strop.serving.stack import Artifact

Kind = TypeVar("Kind", bound=BaseModel)
State = Literal["proposed", "approved", "rejected"]


class PromotionError(RuntimeError):
    """A record that is not there, is damaged, or may not be promoted."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Ran(_Frozen):
    """What one worker of the engine says that it ran: `bundle.Activation`, and whose."""

    worker: str
    name: str
    sha256: str | None
    """Of the object that it loaded; None if it loaded none."""
    calls: int
    """Calls that the kernel took."""
    refusals: int
    """Calls that were computed without it."""


class Engine(_Frozen):
    """The same traffic with the kernel and without, in alternating bursts, and what it did to the answers."""

    workers: int
    """How many ran: each must have told what it did."""
    activations: tuple[Ran, ...]
    on_s: tuple[float, ...]
    """Times of the bursts with the kernel, in their order."""
    off_s: tuple[float, ...]
    """And of those without, each beside the one with it."""
    same_s: tuple[tuple[float, float], ...]
    """Pairs of bursts between which nothing was changed (A/A): what is no gain."""
    fidelity_passed: bool | None
    """Whether the evaluation end to end passed; None if there was none."""
    fidelity: str
    """Which evaluation that was, and what it found."""

    @property
    def gain(self) -> float:
        """How many times as fast with the kernel, by the median of the pairs; NaN if a time is missing."""
        logs = self._logs()
        return math.exp(median(logs)) if logs else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Of the gain, by the sign test; (0, infinity) if a time is missing."""
        logs = self._logs()
        low, high = median_interval(logs) if logs else (-math.inf, math.inf)
        return math.exp(low), math.exp(high)

    @property
    def noise(self) -> float:
        """The largest factor between two bursts that were the same; infinite if none were measured."""
        pairs = [pair for pair in self.same_s if all(_is_time(t) for t in pair)]
        if not pairs or len(pairs) < len(self.same_s):
            return math.inf
        return math.exp(max(abs(math.log(a / b)) for a, b in pairs))

    def _logs(self) -> list[float]:
        times = (*self.on_s, *self.off_s)
        if not times or len(self.on_s) != len(self.off_s) or not all(_is_time(t) for t in times):
            return []
        return [math.log(off / on) for on, off in zip(self.on_s, self.off_s, strict=True)]


class Record(_Frozen):
    """One kernel that was proposed and verified."""

    name: str
    """The exported function."""
    code: str
    flags: tuple[str, ...]
    contract: str
    served: tuple[dict[str, int], ...]
    """The shapes it would serve."""
    object: str
    """SHA-256 of the object beside the record."""
    verification: Verification
    share: float
    """The operator's part of the engine's time, from the profile."""
    proposed_by: str
    proposed_at: datetime

    @property
    def source(self) -> Source:
        return Source(self.name, self.code, self.flags)

    @property
    def predicted_gain(self) -> float:
        """How many times as fast the whole would be if the measured speed-up were all that changes."""
        return predicted_gain(self.share, overall_speedup(self.verification.timings))

    @property
    def identity(self) -> str:
        content = self.model_dump(mode="json")
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class Decision(_Frozen):
    state: Literal["approved", "rejected"]
    by: str
    at: datetime
    reason: str


class Promotion(_Frozen):
    """A record with all that came after it."""

    record: Record
    engine: Engine | None
    decision: Decision | None

    @property
    def state(self) -> State:
        return self.decision.state if self.decision else "proposed"

    @property
    def credited_gain(self) -> float | None:
        """What taking the kernel out of the engine takes away; None where that was not shown."""
        return self.engine.gain if self.engine and not _against_gain(self.engine) else None


def predicted_gain(share: float, speedup: float) -> float:
    """Amdahl's law: of the whole, `share` becomes `speedup` times as fast."""
    return 1 / (1 - share + share / speedup)


def objections(promotion: Promotion, data: bytes) -> list[str]:
    """All that speaks against serving the object `data` under this record; nothing can be waived."""
    record, engine = promotion.record, promotion.engine
    found = _against_verification(record, hashlib.sha256(data).hexdigest())
    if engine is None:
        return [*found, "it was not measured in the engine"]
    found += _against_activation(engine, record.object) + _against_gain(engine)
    if engine.fidelity_passed is None:
        found.append(
            "there was no evaluation end to end, and layers that are right do not make answers right"
        )
    elif not engine.fidelity_passed:
        found.append(f"the evaluation end to end failed: {engine.fidelity}")
    return found


def _against_verification(record: Record, digest: str) -> list[str]:
    verification = record.verification
    found: list[str] = []
    if digest != record.object or verification.object != record.object:
        found.append(
            f"the object is not the one that was verified: {digest[:12]} is there, {str(verification.object)[:12]} was verified"
        )
    if verification.contract != record.contract:
        found.append(f"it was verified as {verification.contract}, not as {record.contract}")
    answers = {check.name: check for check in verification.checks}
    for name in CHECKS:
        if name not in answers:
            found.append(f"the check {name!r} was not done")
        elif not answers[name].passed:
            found.append(f"the check {name!r} failed: {answers[name].detail}")
    timings = {timing.shape: timing for timing in verification.timings}
    served = {words(shape) for shape in record.served}
    for shape in sorted(served):
        if shape not in timings or not timings[shape].complete:
            found.append(f"{shape} is served, and no time was taken of it")
    found += [f"{shape} was timed, and is not served" for shape in timings if shape not in served]
    return found


def _against_activation(engine: Engine, expected: str) -> list[str]:
    found: list[str] = []
    if len({a.worker for a in engine.activations}) < max(engine.workers, 1):
        found.append(f"{len(engine.activations)} of {engine.workers} workers told what they ran")
    for each in engine.activations:
        if each.sha256 != expected:
            loaded = each.sha256[:12] if each.sha256 else "nothing"
            found.append(f"worker {each.worker} loaded {loaded}, not {expected[:12]}")
        if each.calls <= 0:
            found.append(f"the kernel never ran in worker {each.worker}")
        if each.refusals > 0:
            found.append(
                f"worker {each.worker} fell back to the stock operator {each.refusals} times in {each.calls + each.refusals} calls"
            )
    return found


def _against_gain(engine: Engine) -> list[str]:
    low, _ = engine.interval
    if math.isnan(engine.gain):
        return ["a time of the engine is missing, and what was not measured is no gain"]
    if math.isinf(engine.noise):
        return ["there is no A/A run to tell a gain from unrest"]
    if low <= 1 or engine.gain <= engine.noise:
        return [
            f"{engine.gain:.3f} times as fast in the engine (from {low:.3f}), where bursts that are the same differ by {engine.noise:.3f}"
        ]
    return []


def _is_time(value: float) -> bool:
    return math.isfinite(value) and value > 0


class Promotions:
    """The records of one home, read anew at each call."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "kernels"

    def propose(self, record: Record, data: bytes) -> str:
        """Keep a record and the object it is about; its identity. Raises PromotionError if they differ."""
        if hashlib.sha256(data).hexdigest() != record.object:
            raise PromotionError("The object handed over is not the one in the record: nothing was kept.")
        write_atomic(self.object_path(record.object), data)
        write_atomic(self._path("records", record.identity), record.model_dump_json(indent=1))
        return record.identity

    def all(self) -> list[Promotion]:
        """Every promotion, oldest first."""
        found = [self.get(path.stem) for path in (self.folder / "records").glob("*.json")]
        return sorted(found, key=lambda promotion: promotion.record.proposed_at)

    def get(self, beginning: str) -> Promotion:
        """The one whose identity begins so. Raises PromotionError if there is not one, or it was changed."""
        matches = [p for p in (self.folder / "records").glob("*.json") if p.stem.startswith(beginning)]
        if len(matches) != 1:
            raise PromotionError(
                f"{len(matches)} kernels begin with {beginning!r}; `strop kernels ls` lists those there are."
            )
        record = self._read(Record, matches[0])
        identity = matches[0].stem
        if record.identity != identity:
            raise PromotionError(f"{matches[0]} was changed after it was written: propose the kernel anew.")
        engine, decision = self._path("engine", identity), self._path("decisions", identity)
        return Promotion(
            record=record,
            engine=self._read(Engine, engine) if engine.exists() else None,
            decision=self._read(Decision, decision) if decision.exists() else None,
        )

    def objections(self, promotion: Promotion) -> list[str]:
        """What speaks against it, with the object as it lies there now."""
        path = self.object_path(promotion.record.object)
        return objections(promotion, path.read_bytes() if path.exists() else b"")

    def measured(self, identity: str, engine: Engine) -> None:
        """Keep what the engine measured, in place of what it measured before. Raises PromotionError."""
        found = self.get(identity)
        if found.state == "approved":
            raise PromotionError(f"{identity[:12]} is approved: what it was approved on stays as it is.")
        write_atomic(self._path("engine", found.record.identity), engine.model_dump_json(indent=1))

    def approve(self, beginning: str, by: str, reason: str = "") -> Promotion:
        """Approve what nothing speaks against. Raises PromotionError with all that does."""
        promotion = self.get(beginning)
        if against := self.objections(promotion):
            listed = "".join(f"\n- {each}" for each in against)
            raise PromotionError(f"{promotion.record.identity[:12]} cannot be approved:{listed}")
        return self._decide(promotion, "approved", by, reason)

    def reject(self, beginning: str, by: str, reason: str = "") -> Promotion:
        """Reject it, also after it was approved."""
        return self._decide(self.get(beginning), "rejected", by, reason)

    def artifact(self, beginning: str) -> Artifact:
        """The object of an approved kernel, as a Stack holds it. Raises PromotionError."""
        promotion = self.get(beginning)
        if promotion.state != "approved":
            raise PromotionError(f"{beginning} is {promotion.state}: only approved kernels go into a Stack.")
        if against := self.objections(promotion):
            raise PromotionError(f"{beginning} is no longer what was approved: {'; '.join(against)}.")
        path = self.object_path(promotion.record.object)
        return Artifact(location=str(path.parent), files={path.name: promotion.record.object})

    def object_path(self, digest: str) -> Path:
        return self.folder / "objects" / f"{digest}.so"

    def _decide(
        self, promotion: Promotion, state: Literal["approved", "rejected"], by: str, reason: str
    ) -> Promotion:
        decision = Decision(state=state, by=by, at=datetime.now(UTC), reason=reason)
        write_atomic(self._path("decisions", promotion.record.identity), decision.model_dump_json(indent=1))
        return promotion.model_copy(update={"decision": decision})

    def _path(self, kind: str, identity: str) -> Path:
        return self.folder / kind / f"{identity}.json"

    def _read(self, kind: type[Kind], path: Path) -> Kind:
        try:
            return kind.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise PromotionError(f"{path} cannot be read: {error.error_count()} faults in it.") from None
