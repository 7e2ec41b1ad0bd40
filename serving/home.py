"""Where strop keeps its files, and how it writes and locks them."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def home() -> Path:
    """`STROP_HOME`, or `./.strop`: the only folder strop writes to."""
    return Path(os.environ.get("STROP_HOME", ".strop")).absolute()


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a file so that a reader sees the old content or the new, never a part.

    Raises OSError (disk full, read-only folder) with nothing left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def locked(path: Path, shared: bool = False, wait: bool = True) -> Iterator[None]:
    """Hold the advisory lock of the file `path`, which is made if need be; a process that dies lets go.

    Raises BlockingIOError if someone else holds it and `wait` is False, OSError if there can be no file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(fd)
