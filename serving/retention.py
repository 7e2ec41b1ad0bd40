"""How long traces are kept: no longer than so many days, and no more than so many GiB, the oldest going first.

Files go whole; empty folders stay, since someone may be about to write into them. Names carry the
time of the first record, so that age needs no look inside, and a folder is measured anew only when
something in it changed. Loops' frozen selections and hidden states, and requests that once failed, follow
the limit of age.
"""

import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import orjson
import pyarrow as pa

from strop.serving.deletion import SPLITS, carry_out, idle_loops, maintaining, regressions
from strop.serving.settings import RetentionSettings
from strop.serving.traces import read_table

_EVERY_S = 60.0
_GIB = 1 << 30
_TICK_NS = 2_000_000_000

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Pruned:
    """What was removed, and what is there now."""

    files: int = 0
    bytes: int = 0
    loops: int = 0
    """Loops that lost their frozen traffic and hidden states."""
    kept_bytes: int = 0
    """Size of the store afterwards, without journals, which turn into files within seconds."""


class Sizes:
    """Bytes of the store's folders, remembered by when they changed."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[int, int]] = {}

    def total(self, root: Path) -> int:
        known: dict[Path, tuple[int, int]] = {}
        for folder in (*root.glob("day=*/stack_id=*"), root / "quarantine"):
            with suppress(FileNotFoundError):
                mtime_ns = folder.stat().st_mtime_ns
                if self._known.get(folder, (None, 0))[0] == mtime_ns:
                    known[folder] = self._known[folder]
                else:
                    # What changed a moment ago may change again without a new time.
                    settled = time.time_ns() - mtime_ns > _TICK_NS
                    known[folder] = (mtime_ns if settled else -1, sum(map(_size, _files(folder))))
        self._known = known
        return sum(size for _, size in known.values())


def prune(
    home: Path, max_age_days: float | None, max_gib: float | None, sizes: Sizes | None = None
) -> Pruned:
    """Remove what is too old, then the oldest until the store fits; None is no limit. Raises OSError.

    Writers and readers may be at work: readers pass over a file that went.
    """
    root = home / "traces"
    done = Pruned()
    with maintaining(root):
        if max_age_days is not None:
            oldest = datetime.now(UTC) - timedelta(days=max_age_days)
            for path, moment in _oldest_first(root):
                if moment >= oldest:
                    break
                _remove(path, done)
            _prune_regressions(home, oldest, done)
            _prune_loops(home, oldest, done)
        done.kept_bytes = (sizes or Sizes()).total(root)
        if max_gib is not None and done.kept_bytes > max_gib * _GIB:
            for path, _ in _oldest_first(root):
                if done.kept_bytes <= max_gib * _GIB:
                    break
                done.kept_bytes -= _remove(path, done)
    return done


def keep_bounded(home: Path, settings: RetentionSettings) -> None:
    """Prune every minute and complete deletions that were interrupted; a thread of the fleet."""
    sizes = Sizes()
    next_deletion = 0.0
    while True:
        time.sleep(_EVERY_S)
        try:
            started = time.monotonic()
            if started >= next_deletion:
                carry_out(home)
                # One that cannot finish yet reads the whole store each time: a tenth of the time at most.
                next_deletion = time.monotonic() + 10 * (time.monotonic() - started)
            prune(home, settings.max_age_days, settings.max_gib, sizes)
        except (OSError, pa.ArrowException) as error:
            logger.warning("Traces in %s could not be pruned: %s", home, error)


def _files(folder: Path) -> Iterator[Path]:
    return folder.glob("*" if folder.name == "quarantine" else "*.parquet")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _oldest_first(root: Path) -> Iterator[tuple[Path, datetime]]:
    """Files with the time of their first record, or when they were set aside; day after day, as they are asked for."""
    aside = [(path, moment) for path in _files(root / "quarantine") if (moment := _modified(path))]
    for folder in sorted(root.glob("day=*")):
        parts = [(path, _first_record(path)) for path in folder.glob("stack_id=*/*.parquet")]
        newest = max((moment for _, moment in parts), default=datetime.min.replace(tzinfo=UTC))
        yield from sorted([*parts, *(a for a in aside if a[1] <= newest)], key=lambda item: item[1])
        aside = [a for a in aside if a[1] > newest]
    yield from sorted(aside, key=lambda item: item[1])


def _first_record(path: Path) -> datetime:
    """From `day=YYYY-MM-DD/stack_id=…/HHMMSS-….parquet`; a day's begin for a file of another name."""
    day = path.parent.parent.name.removeprefix("day=")
    for text, form in ((f"{day} {path.name[:6]}", "%Y-%m-%d %H%M%S"), (day, "%Y-%m-%d")):
        with suppress(ValueError):
            return datetime.strptime(text, form).replace(tzinfo=UTC)
    return datetime.max.replace(tzinfo=UTC)


def _modified(path: Path) -> datetime | None:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except FileNotFoundError:
        return None


def _remove(path: Path, done: Pruned) -> int:
    size = _size(path)
    path.unlink(missing_ok=True)
    done.files += 1
    done.bytes += size
    return size


def _prune_regressions(home: Path, oldest: datetime, done: Pruned) -> None:
    for path in regressions(home):
        try:
            old = datetime.fromisoformat(orjson.loads(path.read_bytes())["started_at"]) < oldest
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError):
            old = True  # Nobody can tell.
        if old:
            _remove(path, done)


def _prune_loops(home: Path, oldest: datetime, done: Pruned) -> None:
    with idle_loops(home) as (loops, _):
        for loop in loops:
            sets = [loop / split for split in SPLITS if (loop / split).is_dir()]
            if any(_begins_before(file, oldest) for folder in sets for file in folder.glob("*.parquet")):
                for folder in (*loop.glob("*/features"), *sets):
                    # By another name first: half a selection must not pass for a whole one.
                    gone = folder.with_name(f".{folder.name}.pruned")
                    folder.rename(gone)
                    shutil.rmtree(gone)
                done.loops += 1


def _begins_before(file: Path, oldest: datetime) -> bool:
    moments = read_table(file, ["started_at"])["started_at"].to_pylist()
    return any(moment < oldest for moment in moments)
