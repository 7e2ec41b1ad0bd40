"""The background writer of traces: a bounded queue, a journal on disk, Parquet every few seconds.

A record is in the journal (`root/journal/*.jsonl`) as soon as the writer's thread gets to it, and
so survives a process that is killed; it is synced to the device at most `flush_s` later. A journal
is locked while its writer lives. One whose lock is free belongs to a dead process and is recovered
into Parquet by whoever looks next. The Parquet files of a journal are named after it, so turning
the same journal into Parquet twice writes the same files twice. Records that were deleted
(`tombstones`) go into neither, and a living writer ends its journal when it hears of a deletion.
"""

import atexit
import fcntl
import io
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.json

from strop.serving.home import write_atomic
from strop.serving.redaction import without_content
from strop.serving.tombstones import Tombstones, epoch, read_tombstones
from strop.serving.traces import SCHEMA, Trace, TraceStore

_ROLL_RECORDS = 1_000
_ROLL_BYTES = 64 << 20
_QUEUE_BYTES = 256 << 20
_RETRY_S = 1.0
_LISTEN_S = 1.0
_WARN_EVERY_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class WriterCounts:
    """What became of the records, since the writer started."""

    written: int = 0
    """In the journal."""
    dropped: int = 0
    """Turned away because the queue was full."""
    failed: int = 0
    """Lost because the disk refused them."""
    deleted: int = 0
    """Of tenants and sessions that were deleted while they waited."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """What journals of dead processes held."""

    records: int
    torn: int
    """Lines that were not whole; they are kept in `quarantine/`."""


class TraceWriter:
    """Writes traces in a thread of its own. `put` never waits and never raises."""

    def __init__(
        self,
        root: Path,
        queue_records: int = 4096,
        flush_s: float = 0.5,
        roll_s: float = 5.0,
        prepare: Callable[[Trace], Trace] | None = None,
    ):
        """`prepare` changes each record in the writer's thread, before any of it is on disk."""
        self.root = root
        self._prepare = prepare
        self.counts = WriterCounts()
        self._queue_records, self._flush_s, self._roll_s = queue_records, flush_s, roll_s
        self._wake = threading.Condition()
        self._waiting: list[Trace] = []
        self._waiting_bytes = 0
        self._stopping = False
        self._warned = float("-inf")
        self._thread = threading.Thread(target=self._run, name="strop-traces", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def put(self, trace: Trace) -> bool:
        """Hand a record over; False if the queue is full and the record was dropped."""
        size = len(trace.messages)
        with self._wake:
            full = len(self._waiting) >= self._queue_records or self._waiting_bytes + size > _QUEUE_BYTES
            if full or self._stopping:
                self.counts.dropped += 1
                return False
            self._waiting.append(trace)
            self._waiting_bytes += size
            self._wake.notify()
            return True

    def close(self, timeout_s: float = 10.0) -> None:
        """Write everything that waits, turn the journal into Parquet, end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)
        atexit.unregister(self.close)

    def _run(self) -> None:
        journal: _Journal | None = None
        recover_at: float | None = 0.0
        while True:
            due = [journal.due_at(self._flush_s, self._roll_s)] if journal else []
            due += [recover_at] if recover_at is not None else []
            batch, stopping = self._take(max(0.0, min(due) - time.monotonic()) if due else None)
            batch = [self._prepared(trace) for trace in batch]
            if recover_at is not None and time.monotonic() >= recover_at:
                try:
                    recover(self.root)
                    recover_at = None
                except (OSError, pa.ArrowException) as error:
                    recover_at = time.monotonic() + _RETRY_S
                    self._warn(error)
            try:
                if batch and journal is None:
                    journal = _Journal.create(self.root)
                if journal:
                    with epoch(self.root):
                        deleted = read_tombstones(self.root)
                        kept = deleted.kept(batch)
                        written = journal.write(kept)
                    self.counts.written += written
                    self.counts.deleted += len(batch) - len(kept)
                    self.counts.failed += len(kept) - written
                    batch = []
                    journal.sync_if_due(self._flush_s)
                    if stopping or journal.is_full(self._roll_s) or deleted != journal.deleted:
                        journal.roll(self.root)
                        journal = None
            except (OSError, pa.ArrowException) as error:
                self.counts.failed += len(batch)
                self._warn(error)
                # What an abandoned journal holds stays on disk until the disk heals.
                recover_at = time.monotonic() + _RETRY_S
                if journal:
                    journal.abandon()
                    journal = None
            if stopping:
                return

    def _prepared(self, trace: Trace) -> Trace:
        try:
            return self._prepare(trace) if self._prepare else trace
        except Exception as error:
            self._warn(error)
            return without_content(trace)  # what could not be prepared must not be written as it is

    def _warn(self, error: Exception) -> None:
        if time.monotonic() - self._warned > _WARN_EVERY_S:
            self._warned = time.monotonic()
            logger.warning("Traces cannot be written to %s: %s (%s)", self.root, error, self.counts)

    def _take(self, timeout_s: float | None) -> tuple[list[Trace], bool]:
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._stopping, timeout_s)
            batch, self._waiting, self._waiting_bytes = self._waiting, [], 0
            return batch, self._stopping


class _Journal:
    """One locked file of JSON lines."""

    def __init__(self, path: Path, fd: int, deleted: Tombstones):
        self.path, self.fd = path, fd
        self.deleted = deleted
        """What was deleted before it began."""
        self.started = self.synced = time.monotonic()
        self.records = self.bytes = 0
        self.dirty = False

    @classmethod
    def create(cls, root: Path) -> "_Journal":
        deleted = read_tombstones(root)
        path = root / "journal" / f"{uuid.uuid4().hex}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            # Locked before it has its name: a recovery that runs now must not take it for a dead one.
            fcntl.flock(fd, fcntl.LOCK_EX)
            temporary.rename(path)
        except BaseException:
            os.close(fd)
            temporary.unlink(missing_ok=True)
            raise
        return cls(path, fd, deleted)

    def write(self, traces: list[Trace]) -> int:
        """Append the records that JSON can hold, all or none; returns their number. Raises OSError."""
        lines = list(filter(None, map(_line, traces)))
        data = b"".join(lines)
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self.fd, left) :]
        except OSError:
            os.ftruncate(self.fd, self.bytes)
            raise
        self.records += len(lines)
        self.bytes += len(data)
        self.dirty |= bool(data)
        return len(lines)

    def sync_if_due(self, flush_s: float) -> None:
        now = time.monotonic()
        if self.dirty and now - self.synced >= flush_s:
            os.fdatasync(self.fd)
            self.synced, self.dirty = now, False

    def is_full(self, roll_s: float) -> bool:
        old = time.monotonic() - self.started >= roll_s
        return old or self.records >= _ROLL_RECORDS or self.bytes >= _ROLL_BYTES

    def due_at(self, flush_s: float, roll_s: float) -> float:
        """When the journal wants to be synced, rolled or told of deletions, on the monotonic clock."""
        due = min(self.started + roll_s, time.monotonic() + _LISTEN_S)
        return min(due, self.synced + flush_s) if self.dirty else due

    def roll(self, root: Path) -> None:
        """Turn the journal into Parquet and remove it."""
        os.fdatasync(self.fd)
        _to_parquet(root, self.path)
        self.path.unlink()
        os.close(self.fd)

    def abandon(self) -> None:
        """Leave the journal to `recover`."""
        os.close(self.fd)
        if not self.records:
            with suppress(OSError):
                self.path.unlink()


def _line(trace: Trace) -> bytes | None:
    try:
        return orjson.dumps(trace, option=orjson.OPT_APPEND_NEWLINE)
    except orjson.JSONEncodeError as error:
        logger.warning("Trace %s cannot be written as JSON: %s", trace.request_id, error)
        return None


def recover(root: Path) -> Recovered:
    """Turn the journals that dead processes left into Parquet. Raises OSError if the disk refuses."""
    records = torn = 0
    for path in sorted((root / "journal").glob("*.jsonl")):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                found = _to_parquet(root, path)
                records, torn = records + found.records, torn + found.torn
                path.unlink()
        except BlockingIOError:
            continue
        finally:
            os.close(fd)
    return Recovered(records, torn)


def _to_parquet(root: Path, journal: Path) -> Recovered:
    data = journal.read_bytes()
    try:
        table, torn = _table(data), []
    except pa.ArrowInvalid:
        table, torn = _whole_lines(data)
    with epoch(root):
        deleted = read_tombstones(root)
        TraceStore(root).append_table(table, journal.stem, deleted.keep_mask(table) if deleted else None)
        if kept := [line for line in torn if not deleted.may_cover_line(line)]:
            write_atomic(root / "quarantine" / f"{journal.stem}.torn", b"\n".join(kept))
    return Recovered(table.num_rows, len(torn))


def _whole_lines(data: bytes) -> tuple[pa.Table, list[bytes]]:
    tables, torn = [SCHEMA.empty_table()], []
    for line in data.splitlines():
        try:
            tables.append(_table(line))
        except pa.ArrowInvalid:
            torn.append(line)
    return pa.concat_tables(tables), torn


def _table(data: bytes) -> pa.Table:
    """Parse JSON lines without holding the lock that the server's thread needs. Raises ArrowInvalid."""
    if not data:
        return SCHEMA.empty_table()
    table = pyarrow.json.read_json(
        io.BytesIO(data),
        read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        parse_options=pyarrow.json.ParseOptions(explicit_schema=SCHEMA, unexpected_field_behavior="error"),
    )
    return table.cast(SCHEMA)
