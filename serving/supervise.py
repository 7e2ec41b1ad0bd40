"""Run one command, again when it dies if that is wanted, and let nothing of it outlive its owner.

Started by `serving/process.py` with a folder of its own. The owner holds the other end of the FIFO
`lifeline` in it; the file `state` says what runs. When nobody
holds it for longer than `orphan_s`, because the owner ended in whatever way and no other took its
place, or when SIGTERM arrives, the command gets SIGTERM, then its whole process group gets
SIGKILL after the grace period. Imports only the standard library, since one of these runs beside
every server.

Usage: python supervise.py OPTIONS_JSON COMMAND...
"""

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
LIVED_WELL_S = 60.0
LONGEST_PAUSE_S = 30.0


def main() -> int:
    options, command = json.loads(sys.argv[1]), sys.argv[2:]
    stop_read, stop_write = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.write(stop_write, b"x"))
    folder = options["folder"]
    lifeline = os.open(f"{folder}/lifeline", os.O_RDONLY | os.O_NONBLOCK)
    restarts, pause_s = 0, 0.5
    while True:
        started = time.monotonic()
        child = _spawn(command, options["fds"])
        _say(folder, {"supervisor": os.getpid(), "pid": child.pid, "restarts": restarts})
        ended = os.pidfd_open(child.pid)
        asked_to_stop = _wait(stop_read, lifeline, ended, options["orphan_s"])
        if asked_to_stop:
            child.terminate()
            select.select([ended], [], [], options["grace_s"])
        os.close(ended)
        # Helpers of the command may live on after it: its group goes as a whole.
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        code = child.wait()
        if not asked_to_stop and options["restart"]:
            restarts += 1
            lived_well = time.monotonic() - started > LIVED_WELL_S
            pause_s = 0.5 if lived_well else min(2 * pause_s, LONGEST_PAUSE_S)
            print(f"{command[0]} ended with code {code}; restart {restarts} in {pause_s} s", flush=True)
            asked_to_stop = _wait(stop_read, lifeline, None, options["orphan_s"], pause_s)
        if asked_to_stop or not options["restart"]:
            shutil.rmtree(folder, ignore_errors=True)
            return code if code >= 0 else 128 - code


def _spawn(command: list[str], fds: list[int]) -> "subprocess.Popen[bytes]":
    prctl = ctypes.CDLL(None).prctl
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        process_group=0,
        pass_fds=fds,
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
    )


def _wait(stop: int, lifeline: int, ended: int | None, orphan_s: float, at_most_s: float = 1e9) -> bool:
    """Wait for the command's end or for `at_most_s`; True if it has to be stopped instead."""
    poll = select.poll()
    for descriptor in (stop, ended):
        if descriptor is not None:
            poll.register(descriptor, select.POLLIN)
    until = time.monotonic() + at_most_s
    orphaned_at = None
    while (left_s := until - time.monotonic()) > 0:
        ready = {descriptor for descriptor, _ in poll.poll(1000 * min(left_s, 0.5))}
        if stop in ready:
            return True
        if ended in ready:
            return False
        if _held(lifeline):
            orphaned_at = None
        else:
            orphaned_at = orphaned_at or time.monotonic()
            if time.monotonic() - orphaned_at >= orphan_s:
                return True
    return False


def _held(lifeline: int) -> bool:
    """Whether anybody has the FIFO open for writing."""
    try:
        return os.read(lifeline, 1) != b""
    except BlockingIOError:
        return True


def _say(folder: str, state: dict[str, int]) -> None:
    new = Path(folder, "state.new")
    new.write_text(json.dumps(state))
    new.replace(Path(folder, "state"))


if __name__ == "__main__":
    sys.exit(main())
