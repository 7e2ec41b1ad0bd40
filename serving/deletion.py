"""Deleting what was recorded of a tenant or a session, wherever strop keeps it.

A deletion is noted first (`tombstones`) and carried out then, so that one that was killed anywhere
is completed by the next. It goes through the journals, the Parquet parts, the quarantine, named
datasets, the requests that once failed, and the loops' frozen selections with the hidden states
computed from them, and looks again at the end. Whoever makes a selection outside of a loop holds `tombstones.epoch` meanwhile.
What was learned (drafts, Stacks) and measured (verdicts, which name sessions) stays.
"""

import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from strop.serving.home import locked, sync_folder, write_atomic
from strop.serving.journal import recover
from strop.serving.tombstones import Tombstones, bury, epoch, read_tombstones, settle
from strop.serving.traces import TraceStore, read_table, write_table

SPLITS = ("train", "heldout")
REGRESSIONS = "regressions"
"""Folder of the home in which each file holds one request that once failed."""
_KEY = ["tenant", "session", "started_at"]


@dataclass(slots=True)
class Deleted:
    """What was removed, and what was not."""

    records: int = 0
    """Rows of Parquet files, and requests that once failed; records that were still in a journal are not counted."""
    files: int = 0
    """Files removed or written anew."""
    unreadable: int = 0
    """Damaged files and lines removed because nobody can tell whose they are."""
    features: int = 0
    """Folders of hidden states removed."""
    left: tuple[str, ...] = ()
    """What still holds such records, or may; empty when the deletion is complete."""


def delete(home: Path, tenant: str | None, session: str | None, wait_s: float = 30.0) -> Deleted:
    """Delete all that started until now of a tenant, of a session, or of a tenant's session (both given).

    Waits up to `wait_s` for living writers to end their journals. Raises OSError if the disk refuses;
    the deletion is then completed by the next call of `delete` or `carry_out`.
    """
    bury(home / "traces", tenant, session)
    return carry_out(home, wait_s)


def carry_out(home: Path, wait_s: float = 30.0) -> Deleted:
    """Complete the deletions that were noted."""
    root = home / "traces"
    done = Deleted()
    with maintaining(root):
        deleted = read_tombstones(root).pending
        if not deleted:
            return done
        before = set(_journals(root))
        ends = time.monotonic() + wait_s
        recover(root)
        while before & set(_journals(root)) and time.monotonic() < ends:
            time.sleep(0.1)
            recover(root)
        with epoch(root, shared=False):
            _sweep(home)
        for path in TraceStore(root).files():
            _forget_part(path, deleted, done)
        for path in _quarantined(root):
            _forget_quarantined(path, deleted, done)
        for path in _datasets(home):
            _forget_part(path, deleted, done, keep_empty=True)
        for path in regressions(home):
            _forget_regression(path, deleted, done)
        with idle_loops(home) as (loops, busy):
            for loop in loops:
                _forget_loop(loop, deleted, done)
            done.left = (
                *(
                    f"{p}: its writer did not end it within {wait_s:g} s"
                    for p in before & set(_journals(root))
                ),
                *(str(p) for p in _still_there(home, loops, deleted)),
                *(f"{p}: the loop that runs may use it; run this again when it has ended" for p in busy),
            )
        if not done.left:
            settle(root, deleted)
    return done


@contextmanager
def maintaining(root: Path) -> Iterator[None]:
    """Held by the one who removes or rewrites files of the store."""
    with locked(root / ".maintenance"):
        yield


def _journals(root: Path) -> Iterator[Path]:
    return (root / "journal").glob("*.jsonl")


def _quarantined(root: Path) -> list[Path]:
    return sorted(p for p in (root / "quarantine").glob("*") if p.is_file())


def _datasets(home: Path) -> list[Path]:
    return sorted((home / "datasets").glob("[!.]*/*/*.parquet"))


def regressions(home: Path) -> list[Path]:
    """One line of JSON each, which begins with the tenant, the session and the time."""
    return sorted((home / REGRESSIONS).glob("[!.]*.json"))


def _sweep(home: Path) -> None:
    """Remove what writers left that were killed in the act; no file is being written meanwhile."""
    for pattern in ("day=*/stack_id=*/.*", "quarantine/.*"):
        for path in (home / "traces").glob(pattern):
            path.unlink(missing_ok=True)
    for path in (home / REGRESSIONS).glob(".*"):
        path.unlink(missing_ok=True)
    for half in (home / "datasets").glob(".*/"):
        shutil.rmtree(half)


def _forget_part(path: Path, deleted: Tombstones, done: Deleted, keep_empty: bool = False) -> None:
    """Take the covered rows out of a Parquet file, and the file away if none is left or it is damaged."""
    with suppress(FileNotFoundError):
        mask = _keep_mask(path, deleted)
        if mask is None:
            done.unreadable += 1
            _remove(path, done)
        elif not all(mask):
            done.records += len(mask) - sum(mask)
            if any(mask) or keep_empty:
                table = read_table(path)
                write_table(path, table.filter(pa.array(mask, pa.bool_())))
                done.files += 1
            else:
                _remove(path, done)


def _forget_quarantined(path: Path, deleted: Tombstones, done: Deleted) -> None:
    if path.suffix == ".parquet":
        _forget_part(path, deleted, done)
        return
    lines = path.read_bytes().split(b"\n")
    kept = [line for line in lines if not (line and deleted.may_cover_line(line))]
    done.unreadable += len(lines) - len(kept)
    if not kept:
        _remove(path, done)
    elif len(kept) < len(lines):
        write_atomic(path, b"\n".join(kept))
        done.files += 1


def _forget_regression(path: Path, deleted: Tombstones, done: Deleted) -> None:
    with suppress(FileNotFoundError):
        if _covered(path, deleted):
            done.records += 1
            _remove(path, done)


def _forget_loop(loop: Path, deleted: Tombstones, done: Deleted) -> None:
    for half in (*loop.glob(".*/"), *loop.glob("*/.features.*/")):
        shutil.rmtree(half)  # a selection that was never finished, or is half removed
    files = [file for split in SPLITS for file in (loop / split).glob("*.parquet")]
    if not any(_covered(file, deleted) for file in files):
        return
    # First what was computed from the selection: it is what tells that there is something to do.
    for features in loop.glob("*/features"):
        shutil.rmtree(features)
        done.features += 1
    for file in files:
        _forget_part(file, deleted, done, keep_empty=True)


@contextmanager
def idle_loops(home: Path) -> Iterator[tuple[list[Path], list[Path]]]:
    """The loops' folders that nobody uses, and those that a running loop may; none starts meanwhile.

    A loop that runs is the newest, since only the newest can be resumed.
    """
    try:
        with locked(home / "run" / "loop.lock", wait=False):
            yield _loops(home), []
    except BlockingIOError:
        loops = _loops(home)
        yield loops[:-1], loops[-1:] or [home / "loops"]


def _loops(home: Path) -> list[Path]:
    return sorted(p for p in (home / "loops").glob("*") if p.is_dir())


def _still_there(home: Path, loops: Iterable[Path], deleted: Tombstones) -> Iterator[Path]:
    """Files in which a second look finds covered records.

    Not the journals: one that began since the deletion was noted holds none.
    """
    frozen = (f for loop in loops for split in SPLITS for f in (loop / split).glob("*.parquet"))
    root = home / "traces"
    others = (*_datasets(home), *regressions(home), *_quarantined(root))
    for path in (*TraceStore(root).files(), *others, *frozen):
        with suppress(FileNotFoundError):
            if _covered(path, deleted):
                yield path


def _covered(path: Path, deleted: Tombstones) -> bool:
    """Whether a file holds, or may hold, covered records."""
    if path.suffix != ".parquet":
        return any(line and deleted.may_cover_line(line) for line in path.read_bytes().split(b"\n"))
    mask = _keep_mask(path, deleted)
    return mask is None or not all(mask)


def _keep_mask(path: Path, deleted: Tombstones) -> list[bool] | None:
    """For each row of a Parquet file whether it stays; None if the file is damaged. Raises OSError."""
    try:
        return deleted.keep_mask(read_table(path, _KEY))
    except (pa.ArrowException, KeyError):
        return None
    except OSError as error:
        if error.errno:
            raise  # The disk or its permissions, not the file.
        return None


def _remove(path: Path, done: Deleted) -> None:
    path.unlink(missing_ok=True)
    sync_folder(path.parent)
    done.files += 1
