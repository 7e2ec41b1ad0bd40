"""Run one command and see to it that nothing of it outlives whoever asked for it.

Started by `serving/process.py` with a pipe as standard input. When that pipe closes, because
the asking process ended in whatever way, or when SIGTERM arrives, the command gets SIGTERM,
then its whole process group gets SIGKILL after the grace period. Imports only the standard
library, since one of these runs beside every server.

Usage: python supervise.py GRACE_S COMMAND...
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1


def main() -> int:
    grace_s, command = float(sys.argv[1]), sys.argv[2:]
    stop_read, stop_write = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.write(stop_write, b"x"))
    prctl = ctypes.CDLL(None).prctl

    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
    )
    ended = os.pidfd_open(child.pid)
    ready, _, _ = select.select([0, stop_read, ended], [], [])
    if ended not in ready:
        child.terminate()
        select.select([ended], [], [], grace_s)
    # Helpers of the command may live on after it: its group goes as a whole.
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    code = child.wait()
    time.sleep(0.05)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
