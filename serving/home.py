"""Where strop keeps its files, and the two ways it may write them."""

import os
import tempfile
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
