"""Run untrusted programs: what a model wrote, and what a user grades it with.

On Linux a program runs in namespaces of its own: no network (not even loopback), no other process to
be seen, a root folder of memory that holds nothing but the interpreter, read-only, and an empty /work;
no capabilities, no second process or thread, no environment, no open file but stdin, stdout and
stderr (and what its caller hands it). Limits on processor time, memory, file size and output hold besides, and when time is up the
kernel kills all of the namespace at once. This is what bubblewrap does, done here because it is often
not installed. It protects from what programs do by accident or by simple malice; it is no answer to a
program that attacks the kernel.

Where the kernel allows no namespaces nothing of the kind is possible: blocking the socket module, say,
protects from nothing. Then a program runs only if the caller says so, with the limits alone.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from strop.evals.behaviour import sandbox_boot
from strop.evals.observation import EvalError

_GRACE_S = 10.0
"""How much longer than its program the sandbox itself may live, while it starts and clears up."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may take."""

    seconds: float = 10.0
    """By the clock."""
    cpu_seconds: int = 8
    memory_bytes: int = 512 << 20
    """Address space, of which the interpreter takes about 20 MB."""
    disk_bytes: int = 8 << 20
    output_bytes: int = 64 << 10
    """Of stdout and stderr each; a program that says more is killed."""
    processes: int = 1
    """Processes and threads together."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a program ended."""

    how: str
    """`exit 0`, `exit 1`, `signal 9`, `time`, `output`."""
    stdout: str
    """At most `output_bytes`; bytes that are no UTF-8 are replaced."""
    stderr: str

    @property
    def words(self) -> str:
        """Why it did not do what it should, in a few words."""
        if self.how == "time":
            return "ran past its time limit"
        if self.how == "output":
            return "wrote more than it may"
        if self.how == "signal 9":
            return "ran past its limit of processor time, or was killed for its memory"
        last = self.stderr.strip().splitlines()[-1:] or [self.how]
        return last[0][:200]


class SandboxError(EvalError):
    """No program can be run here as it was asked for."""


def run(
    program: str, given: str = "", limits: Limits = Limits(), allow_without_isolation: bool = False
) -> Ran:
    """Run a program with `given` on its stdin; blocks until it has ended.

    Raises SandboxError if programs cannot be isolated here, unless `allow_without_isolation`: then the
    program has the user's own rights, files and network, and only the limits hold.
    """
    why = isolation_missing()
    if why and not allow_without_isolation:
        raise SandboxError(
            f"Programs that a model wrote cannot be isolated here ({why}), so none is run. Allow unprivileged user "
            "namespaces, leave out what runs programs, or set allow_code_without_isolation, which gives such programs "
            "your own rights."
        )
    return _run(program, given, limits, isolate=why is None)


@cache
def isolation_missing() -> str | None:
    """Why programs cannot be isolated on this machine; None if they can."""
    if sys.platform != "linux":
        return f"there are no namespaces on {sys.platform}"
    try:
        ran = _run(_PROBE, "", Limits(seconds=30), isolate=True)
    except (SandboxError, OSError) as error:
        return str(error)
    return None if ran.stdout == "isolated" else f"a trial run ended with {ran.how}: {ran.words}"


_PROBE = """\
import os, socket
assert not os.path.exists('/proc') and os.listdir('.') == []
assert [name for _, name in socket.if_nameindex()] in ([], ['lo'])
try:
    os.fork()
except OSError:
    print('isolated', end='')
"""


def _run(program: str, given: str, limits: Limits, isolate: bool) -> Ran:
    source = program.encode(errors="replace")
    with tempfile.TemporaryDirectory(prefix="strop-sandbox-") as root:
        Path(root, "work").mkdir()
        verdict, told = os.pipe()
        spec = _spec(root, told, limits, isolate) | {"program_bytes": len(source)}
        try:
            process = subprocess.Popen(
                _boot(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={},
                cwd="/",
                start_new_session=True,
                pass_fds=(told,),
            )
        except BaseException:
            os.close(verdict)
            raise
        finally:
            os.close(told)
        try:
            data = json.dumps(spec).encode() + b"\n" + source + given.encode(errors="replace")
            return _attend(process, verdict, data, limits)
        finally:
            os.close(verdict)
            _end(process)


@dataclass(frozen=True, slots=True)
class Program:
    """A program that runs, or ran, in isolation."""

    sandbox: subprocess.Popen[bytes]
    verdict: int

    def pid(self) -> int:
        """Of the program itself, as it is seen from outside. Raises SandboxError if it is gone."""
        children = Path(f"/proc/{self.sandbox.pid}/task/{self.sandbox.pid}/children").read_text().split()
        if not children:
            raise SandboxError(f"The program is gone: {self.ended(1.0) or 'nobody knows why'}.")
        return int(children[0])

    def ended(self, seconds: float) -> str | None:
        """How it ended, in the words of `Ran.how`; None if it still runs after so many seconds."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.verdict, selectors.EVENT_READ)
            if not selector.select(seconds):
                return None
        return os.read(self.verdict, 1 << 12).decode(errors="replace").strip() or "killed"


@contextmanager
def started(
    command: list[str],
    limits: Limits,
    *,
    visible: Sequence[str] = (),
    handed: Sequence[int] = (),
    given: bytes = b"",
    stdout: int = subprocess.DEVNULL,
    stderr: int = subprocess.DEVNULL,
    environment: Mapping[str, str] | None = None,
    allow_without_isolation: bool = False,
) -> Iterator[Program]:
    """Keep a program running, in the same isolation, for as long as the context lasts.

    `command` sees the files and folders `visible` besides the system's shared objects, reads `given` from
    its stdin, writes to the descriptors `stdout` and `stderr`, and has those of `handed` open under the
    same numbers. Raises SandboxError like `run`; that a sandbox could not be made is in `Program.ended`.
    """
    why = isolation_missing()
    if why and not allow_without_isolation:
        raise SandboxError(
            f"Programs cannot be isolated here ({why}), so none that is not trusted is run. Allow unprivileged user "
            "namespaces, or allow it expressly, which gives such programs your own rights."
        )
    with tempfile.TemporaryDirectory(prefix="strop-sandbox-") as root:
        Path(root, "work").mkdir()
        verdict, told = os.pipe()
        spec = _spec(root, told, limits, isolate=why is None) | {
            "program_bytes": 0,
            "command": command,
            "kept": list(handed),
            "environment": dict(environment or {}),
            "visible": _without_nested([*_visible(), *visible]),
        }
        try:
            process = subprocess.Popen(
                _boot(),
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                env={},
                cwd="/",
                start_new_session=True,
                pass_fds=(told, *handed),
            )
        except BaseException:
            os.close(verdict)
            raise
        finally:
            os.close(told)
        try:
            assert process.stdin
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(spec).encode() + b"\n" + given)
                process.stdin.close()
            yield Program(process, verdict)
        finally:
            os.close(verdict)
            _end(process)


def _boot() -> list[str | Path]:
    return [_interpreter(), "-I", "-S", "-B", Path(sandbox_boot.__file__).resolve()]


def _spec(root: str, told: int, limits: Limits, isolate: bool) -> dict[str, Any]:
    return {
        **asdict(limits),
        "isolate": isolate,
        "told": told,
        "root": root,
        "visible": _visible(),
        "python": str(_interpreter()),
        "command": None,
        "kept": [],
        "environment": {},
    }


def _attend(process: subprocess.Popen[bytes], verdict: int, data: bytes, limits: Limits) -> Ran:
    """Feed the sandbox and read it, bounded in time and size."""
    assert process.stdin and process.stdout and process.stderr
    given, stdout, stderr = (stream.fileno() for stream in (process.stdin, process.stdout, process.stderr))
    output = {stdout: bytearray(), stderr: bytearray(), verdict: bytearray()}
    deadline = time.monotonic() + limits.seconds + _GRACE_S
    too_much = False
    with selectors.DefaultSelector() as selector:
        os.set_blocking(given, False)
        selector.register(given, selectors.EVENT_WRITE)
        for fd in output:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.fd == given:
                    data = _write(given, data)
                    if not data:
                        selector.unregister(given)
                        process.stdin.close()
                    continue
                piece = os.read(key.fd, 1 << 16)
                if not piece:
                    selector.unregister(key.fd)
                    if key.fd == verdict:
                        # It is over; without isolation others may be left that hold stdout open.
                        _kill_group(process)
                    continue
                room = limits.output_bytes - len(output[key.fd])
                output[key.fd] += piece[: max(room, 0)]
                if len(piece) > room and not too_much:
                    too_much = True
                    process.send_signal(signal.SIGTERM)
    texts = {fd: bytes(kept).decode(errors="replace") for fd, kept in output.items()}
    how = texts[verdict].strip()
    if not how and time.monotonic() > deadline:
        how = "time"
    if not how or how.startswith("not isolated"):
        raise SandboxError(f"The sandbox could not be made: {(how or texts[stderr].strip())[-500:]}")
    return Ran("output" if too_much else how, texts[stdout], texts[stderr])


def _write(fd: int, data: bytes) -> bytes:
    try:
        return data[os.write(fd, data) :]
    except BrokenPipeError:
        return b""


def _end(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream:
            stream.close()
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            pass
    _kill_group(process)
    process.wait()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _interpreter() -> Path:
    """The interpreter itself rather than a virtual environment's link to it."""
    return Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()


def _visible() -> list[str]:
    """What a program may read: the interpreter, its library and the system's shared objects."""
    wanted = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null"]
    wanted += [str(_interpreter())]
    for prefix in dict.fromkeys((sys.base_prefix, sys.base_exec_prefix)):
        wanted += [f"{prefix}/lib", f"{prefix}/lib64"]
    return _without_nested(wanted)


def _without_nested(wanted: list[str]) -> list[str]:
    chosen: list[str] = []
    for path in dict.fromkeys(wanted):
        inside = any(path.startswith(f"{other}/") for other in chosen)
        if not inside and (Path(path).exists() or Path(path).is_symlink()):
            chosen.append(path)
    return chosen
