"""What was deleted: tenants and sessions whose records up to a moment must not come back.

`deletions.json` in the folder of traces lists them by the SHA-256 of their names. Whoever turns
records into files reads it under the shared lock `epoch`, and a deletion is noted under the
exclusive one: once noted, no file comes into being with a record that it covers.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from pathlib import Path

import pyarrow as pa

from strop.serving.home import locked, write_atomic
from strop.serving.traces import Trace

_EVER = datetime.min.replace(tzinfo=UTC)


class TombstoneError(OSError):
    """`deletions.json` cannot be understood; nothing is written until it can, since it may cover anything."""


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A deletion of a tenant, a session, or a tenant's session (both set)."""

    tenant: str | None
    """SHA-256 of the name."""
    session: str | None
    until: datetime
    """Records that started up to then are gone, UTC."""
    pending: bool = True
    """Whether files that existed before may still hold such records."""


@dataclass(frozen=True)
class Tombstones:
    """Deletions, asked of one record or of a table."""

    entries: tuple[Tombstone, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.entries)

    @property
    def pending(self) -> "Tombstones":
        return Tombstones(tuple(entry for entry in self.entries if entry.pending))

    @cached_property
    def _until(self) -> dict[tuple[str | None, str | None], datetime]:
        return {(entry.tenant, entry.session): entry.until for entry in self.entries}

    def cover(self, tenant: str, session: str, started_at: datetime) -> bool:
        """Whether a record is deleted."""
        if not self.entries:
            return False
        who, where = _digest(tenant), _digest(session)
        untils = (self._until.get(key) for key in ((who, None), (None, where), (who, where)))
        return any(until is not None and started_at <= until for until in untils)

    def may_cover_line(self, line: bytes) -> bool:
        """Whether a piece of a journal's line is, or could be, of a deleted record."""
        tenant, session, started = (_value(line, name) for name in (b"tenant", b"session", b"started_at"))
        return any(
            (entry.tenant is None or tenant is None or entry.tenant == _digest(tenant))
            and (entry.session is None or session is None or entry.session == _digest(session))
            and (started is None or datetime.fromisoformat(started) <= entry.until)
            for entry in self.entries
        )

    def kept(self, traces: Sequence[Trace]) -> list[Trace]:
        return [t for t in traces if not self.cover(t.tenant, t.session, t.started_at)]

    def keep_mask(self, table: pa.Table) -> list[bool]:
        """For each row of a table of traces, whether it stays."""
        tenants, sessions = table["tenant"].to_pylist(), table["session"].to_pylist()
        known = {pair for pair in set(zip(tenants, sessions, strict=True)) if self.cover(*pair, _EVER)}
        if not known:
            return [True] * table.num_rows
        rows = zip(tenants, sessions, table["started_at"].to_pylist(), strict=True)
        return [
            (tenant, session) not in known or not self.cover(tenant, session, at)
            for tenant, session, at in rows
        ]


def epoch(root: Path, shared: bool = True) -> AbstractContextManager[None]:
    """While the shared lock is held no deletion is noted: what was read before is still right to write."""
    return locked(root / ".epoch", shared)


def read_tombstones(root: Path) -> Tombstones:
    """The deletions of a folder of traces. Raises TombstoneError."""
    path = root / "deletions.json"
    try:
        stat = path.stat()
    except FileNotFoundError:
        return Tombstones()
    return _parse(path, stat.st_ino, stat.st_mtime_ns)


def bury(root: Path, tenant: str | None, session: str | None) -> None:
    """Note a deletion as of now. Raises OSError or TombstoneError with nothing noted."""
    if tenant is None and session is None:
        raise ValueError("a deletion names a tenant, a session or both")
    key = (None if tenant is None else _digest(tenant), None if session is None else _digest(session))
    with epoch(root, shared=False):
        others = [e for e in read_tombstones(root).entries if (e.tenant, e.session) != key]
        _write(root, [*others, Tombstone(*key, datetime.now(UTC))])


def settle(root: Path, carried_out: Tombstones) -> None:
    """Note that no file holds records that these deletions cover."""
    with epoch(root, shared=False):
        entries = read_tombstones(root).entries
        _write(root, [replace(e, pending=e.pending and e not in carried_out.entries) for e in entries])


def _value(line: bytes, name: bytes) -> str | None:
    """A string field of a record that may be cut anywhere. Names inside of content have escaped quotes."""
    found = re.search(rb'"%s":("(?:[^"\\]|\\.)*")' % name, line)
    try:
        return json.loads(found[1]) if found else None
    except ValueError:
        return None


@lru_cache(maxsize=4096)
def _digest(name: str) -> str:
    return hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()


@lru_cache(maxsize=4)
def _parse(path: Path, _inode: int, _mtime_ns: int) -> Tombstones:
    try:
        return Tombstones(
            tuple(
                Tombstone(e["tenant"], e["session"], datetime.fromisoformat(e["until"]), e["pending"])
                for e in json.loads(path.read_text())
            )
        )
    except (ValueError, KeyError, TypeError) as error:
        raise TombstoneError(
            f"{path} is damaged ({error!r}). Restore it, or remove it and run every deletion again."
        ) from None


def _write(root: Path, entries: Sequence[Tombstone]) -> None:
    rows = [
        {"tenant": e.tenant, "session": e.session, "until": e.until.isoformat(), "pending": e.pending}
        for e in entries
    ]
    write_atomic(root / "deletions.json", json.dumps(rows, indent=1))
