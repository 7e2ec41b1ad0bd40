import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strop.serving import journal
from strop.serving.journal import TraceWriter, recover
from strop.serving.traces import TraceStore

WRITER = """
import sys, time
from datetime import UTC, datetime
from pathlib import Path
from strop.serving.journal import TraceWriter
from strop.serving.traces import Choice, Trace

def trace(n):
    return Trace(f"r{n}", datetime.now(UTC), "default", "s", "ab" * 32, "chat", False, "tiny", "{}", None, "[]",
                 [1, 2], [Choice(0, [3], "x", "stop")], 200)

writer = TraceWriter(Path(sys.argv[1]), roll_s=float(sys.argv[2]))
for n in range(50):
    writer.put(trace(n))
time.sleep(0.3)
print("ready", flush=True)
time.sleep(60)
"""


def stored(root: Path) -> list[str]:
    return sorted((t.request_id for t in TraceStore(root).scan()), key=lambda name: int(name[1:]))


def wait_for(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def writing_process(root: Path, roll_s: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), str(roll_s)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


def test_close_leaves_everything_as_parquet_and_no_journal(tmp_path, make_trace):
    writer = TraceWriter(tmp_path, roll_s=60)
    traces = [make_trace(n) for n in range(200)]
    assert all(writer.put(t) for t in traces)
    writer.close()
    assert list(TraceStore(tmp_path).scan()) == traces
    assert not list((tmp_path / "journal").iterdir())
    assert (writer.counts.written, writer.counts.dropped, writer.counts.failed) == (200, 0, 0)


def test_readers_see_records_after_roll_s(tmp_path, make_trace):
    writer = TraceWriter(tmp_path, roll_s=0.1)
    writer.put(make_trace(1))
    wait_for(lambda: stored(tmp_path) == ["r1"])
    writer.put(make_trace(2))
    wait_for(lambda: stored(tmp_path) == ["r1", "r2"])
    writer.close()


def test_journal_rolls_after_a_thousand_records(tmp_path, make_trace):
    writer = TraceWriter(tmp_path, roll_s=3600)
    for n in range(journal._ROLL_RECORDS):
        writer.put(make_trace(n))
    wait_for(lambda: len(stored(tmp_path)) >= journal._ROLL_RECORDS)
    writer.close()


def test_full_queue_drops_and_counts_without_waiting(tmp_path, make_trace):
    writer = TraceWriter(tmp_path, queue_records=10)
    with writer._wake:  # the writer's thread cannot take anything while the lock is held
        taken = [writer.put(make_trace(n)) for n in range(25)]
    assert taken == [True] * 10 + [False] * 15
    writer.close()
    assert writer.counts.dropped == 15
    assert len(stored(tmp_path)) == 10


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_records_survive_a_killed_process(tmp_path, how):
    process = writing_process(tmp_path, roll_s=3600)
    process.send_signal(how)
    process.wait(10)
    assert recover(tmp_path) == journal.Recovered(records=50, torn=0)
    assert stored(tmp_path) == [f"r{n}" for n in range(50)]
    assert recover(tmp_path).records == 0


def test_a_living_writer_is_left_alone(tmp_path):
    process = writing_process(tmp_path, roll_s=3600)
    assert recover(tmp_path).records == 0
    process.kill()
    process.wait(10)
    assert recover(tmp_path).records == 50


def test_crash_between_parquet_and_removal_does_not_duplicate(tmp_path, monkeypatch, make_trace):
    writer = TraceWriter(tmp_path, roll_s=3600)
    for n in range(20):
        writer.put(make_trace(n))
    wait_for(lambda: writer.counts.written == 20)
    (path,) = (tmp_path / "journal").glob("*.jsonl")
    copy = path.read_bytes()
    writer.close()
    assert len(stored(tmp_path)) == 20
    path.write_bytes(copy)
    assert recover(tmp_path).records == 20
    assert stored(tmp_path) == [f"r{n}" for n in range(20)]


@pytest.mark.parametrize("cut", [1, 7, 150])
def test_torn_last_line_is_set_aside_and_the_rest_recovered(tmp_path, cut):
    process = writing_process(tmp_path, roll_s=3600)
    process.kill()
    process.wait(10)
    (path,) = (tmp_path / "journal").glob("*.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    lost = 0 if cut == 1 else 1  # one byte less is only the newline
    assert recover(tmp_path) == journal.Recovered(records=50 - lost, torn=lost)
    assert len(stored(tmp_path)) == 50 - lost
    torn = list((tmp_path / "quarantine").glob("*.torn"))
    assert [t.read_bytes() for t in torn] == ([whole[:-cut].splitlines()[-1]] if lost else [])


def test_zeros_after_a_power_cut_are_set_aside(tmp_path):
    process = writing_process(tmp_path, roll_s=3600)
    process.kill()
    process.wait(10)
    (path,) = (tmp_path / "journal").glob("*.jsonl")
    path.write_bytes(path.read_bytes() + bytes(4096))
    assert recover(tmp_path) == journal.Recovered(records=50, torn=1)


def test_writer_recovers_what_its_predecessor_left(tmp_path, make_trace):
    process = writing_process(tmp_path, roll_s=3600)
    process.kill()
    process.wait(10)
    writer = TraceWriter(tmp_path)
    wait_for(lambda: len(stored(tmp_path)) == 50)
    writer.close()


def test_unwritable_folder_costs_records_not_the_caller_and_heals(tmp_path, make_trace, caplog):
    root = tmp_path / "traces"
    root.write_text("a file where the folder should be")
    writer = TraceWriter(root, roll_s=0.1)
    assert writer.put(make_trace(1))
    wait_for(lambda: writer.counts.failed == 1)
    assert str(root) in caplog.text
    root.unlink()
    writer.put(make_trace(2))
    wait_for(lambda: root.is_dir() and stored(root) == ["r2"])
    writer.close()


def test_full_disk_keeps_what_was_acknowledged(tmp_path, make_trace):
    """A limit on file size makes the kernel refuse the rest of a write, as a full disk does."""
    code = f"""
import resource, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
{WRITER.split("writer =")[0]}
writer = TraceWriter(Path({str(tmp_path)!r}), roll_s=3600)
for n in range(20):
    writer.put(trace(n))
while writer.counts.written < 20: time.sleep(0.01)
resource.setrlimit(resource.RLIMIT_FSIZE, (7000, resource.RLIM_INFINITY))
for n in range(20, 60):
    writer.put(trace(n))
    while writer.counts.written + writer.counts.failed < n + 1: time.sleep(0.001)
print(writer.counts.written, writer.counts.failed)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
time.sleep(1.2)
writer.put(trace(60))
writer.close()
"""
    out = subprocess.run(
        [sys.executable, "-c", code, "x", "1"], capture_output=True, text=True, check=True
    ).stdout
    written, failed = map(int, out.split())
    assert written + failed == 60
    assert failed > 0
    names = stored(tmp_path)
    assert len(names) == len(set(names)) == written + 1
    assert names[:20] == [f"r{n}" for n in range(20)]
    assert names[-1] == "r60"
    assert not list((tmp_path / "journal").iterdir())


def test_record_that_arrow_cannot_hold_does_not_take_others_with_it(tmp_path, make_trace):
    writer = TraceWriter(tmp_path, roll_s=3600)
    writer.put(make_trace(1))
    writer.put(make_trace(2, prompt_token_ids=[1 << 40]))
    writer.put(make_trace(3, prompt_token_ids=[1 << 70]))
    writer.put(make_trace(4))
    writer.close()
    recover(tmp_path)
    assert stored(tmp_path) == ["r1", "r4"]
    assert writer.counts.failed == 1
    assert len(list((tmp_path / "quarantine").iterdir())) == 1


def test_journal_is_private_to_its_user(tmp_path, make_trace):
    writer = TraceWriter(tmp_path, roll_s=3600)
    writer.put(make_trace(1))
    wait_for(lambda: writer.counts.written == 1)
    (path,) = (tmp_path / "journal").glob("*.jsonl")
    assert path.stat().st_mode & 0o077 == 0
    writer.close()
