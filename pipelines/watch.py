"""Looking at newly recorded traces for drift, and deciding when a loop starts.

Nothing is kept on disk: what is compared are the sessions that the champion served since the newest
loop began, all of them after a restart and only those in new files after that. Every loop that
ends, whatever came of it, makes a new reference, so the same drift starts one loop.
"""

import math
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from strop.pipelines.drift import WATCHED, Drift, Observation, Past, may_start
from strop.pipelines.registry import Registry
from strop.pipelines.settings import Settings
from strop.serving.journal import recover
from strop.serving.traces import PROBE_TENANT, Trace, TraceError, TraceStore, read_parquet

RETRY_S = 3600.0
"""After a loop that failed to run, the next is tried no sooner."""
SESSIONS_KNOWN = 200_000
"""Sessions that are told from new ones; one that was silent for that many counts as new."""


@dataclass(frozen=True, slots=True)
class Look:
    """What one look found."""

    at: str
    champion: str | None
    """Fingerprint; None before anything was served."""
    sessions: int
    """Sessions seen since the newest loop, those of the reference included."""
    reference_sessions: int
    evidence: dict[str, float]
    """As log10; an alarm is raised at `alarm_at`."""
    alarm_at: float
    raised: list[str]
    holding: list[str]
    acceptance_reference: float | None
    acceptance_recent: float | None
    start: bool
    """Whether a loop should start now."""
    decision: str


@dataclass(slots=True)
class Watch:
    """Looks at one home again and again."""

    home: Path
    settings: Settings
    registry: Registry
    champion: str | None = None
    since: datetime | None = None
    not_before: float = 0.0
    drift: Drift = field(init=False)
    files: set[Path] = field(default_factory=set)
    """Read already."""
    known: dict[tuple[str, str], None] = field(default_factory=dict)
    """Sessions seen already, in order."""

    def __post_init__(self) -> None:
        self.drift = self.settings.drift.drift()

    def look(self) -> Look:
        """Take in what is new. Raises RegistryError if MLflow cannot be reached."""
        recover(self.home / "traces")
        self._turn_to(*self._reference())
        for observation in map(Observation.of, self._new_sessions()):
            self.drift.see(observation)
        start, decision = self._decide()
        drift = self.drift
        return Look(
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            champion=self.champion,
            sessions=drift.sessions,
            reference_sessions=drift.reference_sessions,
            evidence={w: round(math.log10(max(d.evidence, 1.0)), 2) for w, d in drift.detectors.items()},
            alarm_at=round(math.log10(drift.threshold), 2),
            raised=[w for w in WATCHED if w in drift.raised_at],
            holding=[str(w) for w in drift.holding],
            acceptance_reference=drift.reference_acceptance,
            acceptance_recent=drift.recent_mean,
            start=start,
            decision=decision,
        )

    def failed(self) -> None:
        """A loop did not run to its end; wait before the next try."""
        self.not_before = time.time() + RETRY_S

    def _decide(self) -> tuple[bool, str]:
        if self.champion is None:
            return False, "nothing was served yet"
        if not self.drift.has_reference:
            return False, f"{self.drift.sessions} of {self.drift.reference_sessions} sessions for a reference"
        if not (holding := self.drift.holding):
            return False, "an alarm is raised but does not hold yet" if self.drift.raised_at else "no drift"
        what = f"drift of {', '.join(holding)}"
        if time.time() < self.not_before:
            return (
                False,
                f"{what}, but the last loop failed; the next try is in up to {RETRY_S / 60:.0f} minutes",
            )
        past = [
            Past(loop["started_ms"] / 1000, (loop["ended_ms"] - loop["started_ms"]) / 1000)
            for loop in self.registry.loops()
            if loop["ended_ms"]
        ]
        budget_s = 60 * self.settings.drift.budget_minutes_per_day
        against = may_start(time.time(), past, budget_s, 60 * self.settings.loop.budget_minutes)
        return (False, f"{what}, but {against}") if against else (True, f"{what}: a loop starts")

    def _reference(self) -> tuple[str | None, datetime]:
        """The champion's fingerprint, and when the newest loop that ended had begun."""
        loops = self.registry.loops()
        began = next((loop["started_ms"] for loop in loops if loop["outcome"]), 0)
        since = datetime.fromtimestamp(began / 1000, UTC)
        for version in self.registry.versions():
            if "champion" in version.aliases:
                return version.fingerprint, since
        if loops and loops[0]["champion"]:
            return loops[0]["champion"], since
        return self.champion or self._newest_stack(), since

    def _newest_stack(self) -> str | None:
        files = TraceStore(self.home / "traces").files()
        for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
            clients = [trace for trace in _traces(path) if _counts(trace)]
            if clients:
                return clients[-1].stack
        return None

    def _turn_to(self, champion: str | None, since: datetime) -> None:
        """Begin anew where a loop has ended or another Stack serves."""
        if (champion, since) != (self.champion, self.since):
            self.champion, self.since = champion, since
            self.drift = self.settings.drift.drift()
            self.files, self.known = set(), {}

    def _new_sessions(self) -> list[Trace]:
        """The first request of every session not seen before, in order of time."""
        if self.champion is None or self.since is None:
            return []
        found: list[Trace] = []
        for path in self.home.glob(f"traces/day=*/stack_id={self.champion[:16]}/*.parquet"):
            if path not in self.files:
                self.files.add(path)
                if path.stat().st_mtime >= self.since.timestamp():
                    found += [t for t in _traces(path) if _counts(t) and t.started_at > self.since]
        first: list[Trace] = []
        for trace in sorted(found, key=lambda trace: trace.started_at):
            session = (trace.tenant, trace.session)
            if session not in self.known:
                self.known[session] = None
                first.append(trace)
        while len(self.known) > SESSIONS_KNOWN:
            self.known.pop(next(iter(self.known)))
        return first


def _counts(trace: Trace) -> bool:
    return trace.tenant != PROBE_TENANT and trace.status == 200 and trace.error is None


def _traces(path: Path) -> list[Trace]:
    try:
        return list(read_parquet(path))
    except TraceError:
        return []  # `TraceStore.scan` sets torn files aside.
