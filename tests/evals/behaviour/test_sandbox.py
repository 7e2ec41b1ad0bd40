"""Programs that do their worst."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from strop.evals.behaviour import sandbox
from strop.evals.behaviour.sandbox import Limits, SandboxError, isolation_missing, run

isolated = pytest.mark.skipif(
    isolation_missing() is not None, reason=f"programs cannot be isolated here: {isolation_missing()}"
)
SHORT = Limits(seconds=1.0, cpu_seconds=5)


@isolated
def test_a_program_reads_its_input_and_its_output_comes_back() -> None:
    ran = run("import sys; print(sys.stdin.read().upper()); print('why', file=sys.stderr)", "hé")
    assert (ran.how, ran.stdout, ran.stderr) == ("exit 0", "HÉ\n", "why\n")


@isolated
@pytest.mark.parametrize(
    ("program", "how", "words"),
    [
        ("import os\nwhile True: os.fork()", "exit 1", "BlockingIOError"),
        ("import threading; threading.Thread(target=print).start()", "exit 1", "can't start new thread"),
        ("import subprocess; subprocess.run(['/usr/bin/id'])", "exit 1", "BlockingIOError"),
        ("x = []\nwhile True: x.append(bytearray(10**7))", "exit 1", "MemoryError"),
        ("print('x' * 10**9)", "exit 1", "MemoryError"),
        ("import sys\nwhile True: sys.stdout.write('x' * 10**6)", "output", "more than it may"),
        ("import sys\nwhile True: sys.stderr.write('x' * 10**6)", "output", "more than it may"),
        ("open('big', 'wb').write(b'0' * 10**8)", "exit 1", "File too large"),
        ("for n in range(9): open(str(n), 'wb').write(b'0' * 10**6)", "exit 1", "No space left"),
        ("for n in range(9999): open(str(n), 'wb').close()", "exit 1", "No space left"),
        ("import os; os.kill(-1, 9)", "exit 1", "No such process"),
        ("import os; assert os.getpid() == 1 and os.getppid() == 0", "exit 0", "exit 0"),
        ("import ctypes; ctypes.string_at(0)", "signal 11", "signal 11"),
        ("(", "exit 1", "SyntaxError"),
        ("\0", "exit 1", "SyntaxError"),
        ("def f(): f()\nf()", "exit 1", "RecursionError"),
        ("raise SystemExit(97)", "exit 97", "exit 97"),
    ],
)  # fmt: skip
def test_a_hostile_program_ends_and_says_why(program: str, how: str, words: str) -> None:
    ran = run(program)
    assert ran.how == how and words in ran.words
    assert len(ran.stdout) <= Limits().output_bytes and len(ran.stderr) <= Limits().output_bytes


@isolated
def test_time_is_bounded_by_the_clock_and_by_the_processor() -> None:
    started = time.monotonic()
    assert run("import time; time.sleep(99)", limits=SHORT).how == "time"
    assert run("while True: pass", limits=Limits(seconds=9, cpu_seconds=1)).how == "signal 9"
    deaf = "import signal, time\nfor n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n  except OSError: pass\n"
    assert run(deaf + "time.sleep(99)", limits=SHORT).how == "time"
    assert time.monotonic() - started < 15


@isolated
def test_nothing_outside_is_seen_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_API_KEY", "sk-secret")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    ran = run(
        textwrap.dedent(f"""
        import os
        def attempt(what, *args):
            try:
                what(*args)
                print('could', what.__name__, *args)
            except OSError:
                pass
        for path in ({str(secret)!r}, '/etc/passwd', '/proc/1/environ', {str(Path.home())!r} + '/.bashrc'):
            attempt(open, path)
        for path in ({str(tmp_path / "new")!r}, '/usr/lib/new', '/new', '/program.py', '/dev/new', '/etc/new'):
            attempt(open, path, 'w')
        attempt(os.setuid, 0)
        attempt(os.remove, '/program.py')
        print(sorted(os.environ), os.listdir('.'), os.getcwd())
        open('mine', 'w').write('1')
        """)
    )
    assert ran.stdout == "['HOME', 'LANG', 'PATH'] [] /work\n", ran
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret"]


@isolated
def test_there_is_no_network_not_even_within_the_machine() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ran = run(f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)")
    assert ran.how == "exit 1" and "OSError" in ran.words


@isolated
def test_no_capability_is_left_and_none_can_be_had() -> None:
    ran = run(
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "print([libc.mount(b'x', b'/work', b'tmpfs', 0, None), libc.chroot(b'/work'), libc.sethostname(b'x', 1)])\n"
        "libc.unshare(0x10000000)\nprint(libc.mount(b'x', b'/work', b'tmpfs', 0, None))"
    )
    assert ran.stdout == "[-1, -1, -1]\n-1\n"


@isolated
def test_descriptors_of_the_caller_are_closed() -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    try:
        ran = run("import os\nopen_ = []\nfor n in range(3, 256):\n  try: os.fstat(n); open_.append(n)\n"
                  "  except OSError: pass\nprint(open_)")  # fmt: skip
    finally:
        os.close(read)
        os.close(write)
    # One is the program's own file, which the interpreter reads.
    assert len(eval(ran.stdout)) <= 1, ran.stdout


@isolated
def test_nothing_is_left_behind() -> None:
    def processes() -> int:
        out = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        return sum("sandbox_boot.py" in line or "/program.py" in line for line in out.splitlines())

    before = processes()
    run("import time; time.sleep(99)", limits=SHORT)
    assert processes() == before
    assert "strop-sandbox" not in Path("/proc/self/mounts").read_text()


def test_where_isolation_is_impossible_a_program_runs_only_if_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox, "isolation_missing", lambda: "the kernel says no")
    with pytest.raises(SandboxError, match="the kernel says no.*allow_code_without_isolation"):
        run("print(1)")
    assert run("print(1)", allow_without_isolation=True).stdout == "1\n"
    started = time.monotonic()
    child = "import os, time\nif os.fork() == 0: time.sleep(60)\ntime.sleep(60)"
    assert run(child, limits=SHORT, allow_without_isolation=True).how == "time"
    assert time.monotonic() - started < 10


def test_a_platform_without_namespaces_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert sandbox.isolation_missing.__wrapped__() == "there are no namespaces on darwin"
