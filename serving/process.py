"""Child processes that never outlive the process that started them."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

# No process of ours may wait for a network that is not there, or report home.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class ProcessError(RuntimeError):
    """A server that did not start or ended early; the message quotes its last words."""


@dataclass(slots=True)
class Child:
    """A supervised command and its log file."""

    name: str
    process: psutil.Process
    """Its supervisor."""
    log: Path
    folder: Path
    """Where the supervisor says what runs; enough to `adopt` the command."""
    lifeline: int
    """The command lives while somebody holds this open."""

    @classmethod
    def start(
        cls,
        name: str,
        command: list[str],
        log: Path,
        env: dict[str, str] | None = None,
        *,
        grace_s: float = 30,
        restart: bool = False,
        orphan_s: float = 0,
        fds: Sequence[int] = (),
    ) -> "Child":
        """Start `command` with `env` added to ours.

        With `restart` it is started again whenever it ends by itself. When we are gone it is stopped
        after `orphan_s` seconds, unless another process adopts it first. `fds` are open files it
        inherits under the same numbers. Raises OSError if it cannot be executed.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{log.stem}.", dir=log.parent))
        os.mkfifo(folder / "lifeline", 0o600)
        # For reading too, since opening it for writing alone would wait for the supervisor.
        lifeline = os.open(folder / "lifeline", os.O_RDWR | os.O_CLOEXEC)
        options = {
            "folder": str(folder),
            "grace_s": grace_s,
            "restart": restart,
            "orphan_s": orphan_s,
            "fds": list(fds),
        }
        supervisor = str(Path(__file__).with_name("supervise.py"))
        with log.open("ab") as output:
            process = psutil.Popen(
                [sys.executable, "-I", "-S", supervisor, json.dumps(options), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                env={**os.environ, **OFFLINE, "PYTHONSAFEPATH": "1", **(env or {})},
                pass_fds=fds,
                # A Ctrl-C in the terminal is for the one who started us; it will tell us.
                start_new_session=True,
            )
        return cls(name, process, log, folder, lifeline)

    @classmethod
    def adopt(cls, name: str, log: Path, folder: Path) -> "Child | None":
        """Take over a command whose owner is gone; None if it is no longer there."""
        try:
            process = psutil.Process(json.loads((folder / "state").read_text())["supervisor"])
            if str(folder) not in " ".join(process.cmdline()):
                return None
            lifeline = os.open(folder / "lifeline", os.O_RDWR | os.O_CLOEXEC)
        except (OSError, ValueError, KeyError, psutil.Error):
            return None
        child = cls(name, process, log, folder, lifeline)
        return child if child.alive else None

    @property
    def alive(self) -> bool:
        """Whether it is supervised: with `restart`, also while it is being started again."""
        try:
            self.process.wait(timeout=0)
        except psutil.TimeoutExpired:
            return True
        return False

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        try:
            return int(json.loads((self.folder / "state").read_text())["restarts"])
        except (OSError, ValueError, KeyError):
            return 0

    def rss_bytes(self) -> int:
        """Resident memory of the command and everything it started."""
        total = 0
        try:
            for child in self.process.children(recursive=True):
                try:
                    total += child.memory_info().rss
                except psutil.Error:
                    continue
        except psutil.Error:
            return 0
        return total

    def stop(self) -> None:
        """SIGTERM, the grace period, then SIGKILL for the whole group. Returns when all is over."""
        if self.alive:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait()
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1

    def wait_until_answers(self, url: str, timeout_s: float) -> float:
        """Wait for HTTP 200 at `url`; returns the seconds it took. Raises ProcessError."""
        started = time.monotonic()
        while (waited := time.monotonic() - started) < timeout_s:
            if not self.alive or self.restarts:
                raise ProcessError(f"{self.name} ended before it answered. {self.last_words()}")
            if answers(url):
                return waited
            time.sleep(0.2)
        raise ProcessError(
            f"{self.name} did not answer at {url} within {timeout_s:.0f} s. {self.last_words()}"
        )

    def last_words(self) -> str:
        """The last error line of the log and where to read the rest."""
        try:
            tail = self.log.read_bytes()[-65536:].decode(errors="replace").splitlines()
        except OSError:
            tail = []
        errors = [line.strip() for line in tail if "error" in line.lower() and "Traceback" not in line]
        last = errors[-1] if errors else next((line.strip() for line in reversed(tail) if line.strip()), "")
        return f"Its log ends: {last[-400:]!r} (all of it: {self.log})"


def answers(url: str) -> bool:
    """Whether a GET of `url` is answered with 200 within 5 s."""
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on now; the caller binds it soon after."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        return listener.getsockname()[1]


def port_is_free(host: str, port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
    return True
