import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from strop.serving.process import Child, ProcessError, free_port, port_is_free

FAMILY = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '300']); print(p.pid, flush=True); time.sleep(300)"


def _first_line(log: Path) -> str:
    for _ in range(100):
        if log.is_file() and (lines := log.read_text().splitlines()):
            return lines[0]
        time.sleep(0.05)
    raise AssertionError("the command printed nothing")


def _gone(pid: int) -> bool:
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_stop_takes_the_grandchildren_too(tmp_path: Path) -> None:
    child = Child.start("family", [sys.executable, "-c", FAMILY], tmp_path / "log", grace_s=5)
    grandchild = int(_first_line(child.log))
    assert child.alive and child.rss_bytes() > 0
    child.stop()
    assert not child.alive and _gone(grandchild)


def test_a_killed_parent_leaves_nothing_behind(tmp_path: Path) -> None:
    log = tmp_path / "log"
    parent = subprocess.Popen(
        [
            sys.executable, "-c",
            "import sys, time; from pathlib import Path; from strop.serving.process import Child;"
            f"Child.start('family', [sys.executable, '-c', {FAMILY!r}], Path({str(log)!r})); time.sleep(300)",
        ]
    )  # fmt: skip
    grandchild = int(_first_line(log))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert _gone(grandchild)


def test_a_command_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(300)"
    child = Child.start("stubborn", [sys.executable, "-c", stubborn], tmp_path / "log", grace_s=0.5)
    _first_line(child.log)
    started = time.monotonic()
    child.stop()
    assert 0.4 < time.monotonic() - started < 5


def test_waiting_for_a_command_that_dies_quotes_its_last_error(tmp_path: Path) -> None:
    child = Child.start(
        "server", [sys.executable, "-c", "raise ValueError('no such weights')"], tmp_path / "log"
    )
    with pytest.raises(ProcessError, match="no such weights"):
        child.wait_until_answers(f"http://127.0.0.1:{free_port()}/health", 10)


def test_children_do_not_reach_for_the_network_and_do_not_import_from_their_folder(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text("raise RuntimeError('picked up')")
    code = "import os, importlib.util as u; print(os.environ['HF_HUB_OFFLINE'], u.find_spec('kernels'))"
    child = Child.start("probe", [sys.executable, "-c", code], tmp_path / "log")
    assert _first_line(child.log) == "1 None"
    child.process.wait()


def test_ports() -> None:
    import socket

    port = free_port()
    assert port_is_free("127.0.0.1", port)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        assert not port_is_free("127.0.0.1", port)


def _state(child: Child, **wanted: object) -> dict[str, int]:
    for _ in range(100):
        try:
            state = json.loads((child.folder / "state").read_text())
            if all(state[name] == value for name, value in wanted.items()):
                return state
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"never {wanted}")


def test_a_command_that_dies_is_started_again_until_it_is_stopped(tmp_path: Path) -> None:
    child = Child.start("sleep", ["sleep", "300"], tmp_path / "log", grace_s=5, restart=True)
    first = _state(child, restarts=0)["pid"]
    os.kill(first, signal.SIGKILL)
    second = _state(child, restarts=1)["pid"]
    assert child.alive and child.restarts == 1 and second != first
    child.stop()
    assert not child.alive and _gone(second) and not child.folder.exists()


def test_an_orphan_is_adopted_and_lives_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    start = (
        "import sys, time; from pathlib import Path; from strop.serving.process import Child;"
        f"c = Child.start('sleep', ['sleep', '300'], Path({str(log)!r}), orphan_s=3);"
        "print(c.folder, flush=True); time.sleep(300)"
    )
    parent = subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    folder = Path(parent.stdout.readline().strip())
    for _ in range(100):
        if (folder / "state").exists():
            break
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    child = Child.adopt("sleep", log, folder)
    assert child is not None
    time.sleep(4)
    pid = _state(child)["pid"]
    assert child.alive and psutil.pid_exists(pid)
    child.stop()
    assert _gone(pid) and Child.adopt("sleep", log, folder) is None


def test_an_orphan_nobody_adopts_is_stopped(tmp_path: Path) -> None:
    child = Child.start("sleep", ["sleep", "300"], tmp_path / "log", orphan_s=1)
    pid = _state(child)["pid"]
    os.close(child.lifeline)
    child.lifeline = -1
    time.sleep(0.5)
    assert child.alive
    assert _gone(pid)
    child.process.wait(5)
    assert not child.alive


def test_a_command_inherits_the_open_files_it_is_given(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        code = f"import socket; s = socket.socket(fileno={listener.fileno()}); print(s.getsockname()[1])"
        child = Child.start("probe", [sys.executable, "-c", code], tmp_path / "log", fds=[listener.fileno()])
        assert _first_line(child.log) == str(listener.getsockname()[1])
        child.stop()
