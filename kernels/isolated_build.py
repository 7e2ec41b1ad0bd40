"""The compiler on text that is not trusted, and the program that runs what it made.

A source can name any file (`#include`, `.incbin`), and the compiler's words quote it: so the compiler
sees the system's headers and ours, and no more.
"""

import hashlib
import shutil
import tempfile
from pathlib import Path

from strop.evals.behaviour import sandbox
from strop.evals.behaviour.sandbox import Limits
from strop.kernels.build import CSRC, TIME_LIMIT_S, BuildError, run_compiler, torch_folder
from strop.serving.home import locked

_SYSTEM = ("/usr/bin", "/usr/include", "/usr/libexec", "/bin", "/etc/alternatives")
_LIMITS = Limits(
    seconds=TIME_LIMIT_S,
    cpu_seconds=int(TIME_LIMIT_S),
    memory_bytes=4 << 30,
    disk_bytes=64 << 20,
    processes=16,
)
_WORDS_BYTES = 8000
_HOST = CSRC / "host.cpp"
_HOST_FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra")
_SANITIZE = ("-fsanitize=address,undefined",)


def compile_isolated(command: list[str], scratch: Path, name: str) -> None:
    """Run the compiler where nothing else can be read. Raises BuildError and SandboxError."""
    compiler, *flags, code, _, made = command
    include = scratch / "include"
    (include / "ATen").mkdir(parents=True)
    for header, into in (*((h, include) for h in CSRC.glob("*.h")), (_dlpack(), include / "ATen")):
        shutil.copyfile(header, into / header.name)
    for path in (include, *include.rglob("*")):
        path.chmod(0o755)
    kept = [flag for flag in flags if not flag.startswith("-I")]
    shell = '"$@" && exec cat made.so'
    inside = [compiler, *kept, f"-I{include}", "-x", "c++", "-", "-o", "made.so"]
    with tempfile.TemporaryFile() as words, Path(made).open("wb") as output:
        with sandbox.started(
            ["/bin/sh", "-c", shell, "sh", *inside],
            _LIMITS,
            visible=[*_SYSTEM, str(include)],
            given=Path(code).read_bytes(),
            stdout=output.fileno(),
            stderr=words.fileno(),
            environment={"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TMPDIR": "."},
        ) as program:
            how = program.ended(TIME_LIMIT_S + 10) or "time"
        words.seek(0)
        said = words.read().decode(errors="replace").strip()
    if how == "time":
        raise BuildError(f"{name} was not compiled within {TIME_LIMIT_S:g} s: make it smaller.")
    if how != "exit 0":
        raise BuildError(f"{name} does not compile ({how}):\n{said[-_WORDS_BYTES:]}")


def host_program(folder: Path, sanitize: bool = False) -> Path:
    """Compile `csrc/host.cpp` into `folder`, once. Raises BuildError."""
    flags = (*_HOST_FLAGS, *(_SANITIZE if sanitize else ()))
    digest = hashlib.sha256("\0".join([_HOST.read_text(), *flags]).encode()).hexdigest()
    target = folder.absolute() / f"host-{digest[:32]}"
    with locked(target.with_suffix(".lock")):
        if not target.is_file():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch, "host")
                command = ["g++", *flags, f"-I{_include()}", str(_HOST), "-ldl", "-o", str(made)]
                run_compiler(command, Path(scratch), "host")
                # The sandbox runs it as a user who owns nothing.
                made.chmod(0o755)
                made.replace(target)
    return target


def _dlpack() -> Path:
    return _include() / "ATen" / "dlpack.h"


def _include() -> Path:
    return torch_folder() / "include"
