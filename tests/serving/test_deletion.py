"""Deletion, tried on whole homes: what the deleted left must not be found by any means, the rest must be intact."""

import json
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from strop.pipelines.commands.traces import app
from strop.serving import traces
from strop.serving.deletion import carry_out, delete
from strop.serving.home import locked
from strop.serving.journal import TraceWriter, recover
from strop.serving.tombstones import TombstoneError, bury, read_tombstones
from strop.serving.traces import Choice, Trace, TraceSet, TraceStore, write_parquet

NAMES = ("ann", "bob", 'q"uote\\', "é😀")
START = datetime(2026, 3, 1, tzinfo=UTC)


def secret(tenant: str, session: str, number: int) -> str:
    """Content that tells whose it is, and is found by looking at bytes."""
    return f"SECRET-{NAMES.index(tenant)}-{NAMES.index(session)}-{number}."


def trace_of(make_trace, tenant: str, session: str, number: int, **changes) -> Trace:
    text = secret(tenant, session, number)
    return make_trace(
        number,
        tenant=tenant,
        session=session,
        started_at=START + timedelta(hours=7 * number),
        messages=json.dumps([{"role": "user", "content": text}]),
        choices=[Choice(0, [4, 5], text, "stop")],
        **changes,
    )


def build(home: Path, placed: list[tuple[str, Trace]]) -> None:
    """A home with traces in every place where strop keeps them."""
    by_place: dict[str, list[Trace]] = {}
    for place, trace in placed:
        by_place.setdefault(place, []).append(trace)
    root = home / "traces"
    for place, some in by_place.items():
        if place == "part":
            TraceStore(root).append(some)
        elif place == "journal":
            (root / "journal").mkdir(parents=True, exist_ok=True)
            (root / "journal" / "dead.jsonl").write_bytes(b"".join(orjson.dumps(t) + b"\n" for t in some))
        elif place == "quarantined part":
            write_parquet(root / "quarantine" / "whole.parquet", some)
        elif place == "torn":
            (root / "quarantine").mkdir(parents=True, exist_ok=True)
            (root / "quarantine" / "x.torn").write_bytes(b"\n".join(orjson.dumps(t)[:-9] for t in some))
        elif place == "regression":
            (home / "regressions").mkdir(parents=True, exist_ok=True)
            for trace in some:
                (home / "regressions" / f"{trace.request_id}.json").write_bytes(orjson.dumps(trace))
        elif place == "dataset":
            TraceSet.create(home / "datasets" / "mine" / "train", some)
        else:
            TraceSet.create(home / "loops" / place, some)
            features = home / "loops" / place.split("/")[0] / "speculator" / "features" / "model"
            features.mkdir(parents=True, exist_ok=True)
            (features / f"{place.split('/')[1]}.safetensors").write_text(
                "".join(t.choices[0].text for t in some)
            )


PLACES = (
    "part",
    "journal",
    "quarantined part",
    "torn",
    "dataset",
    "regression",
    "loop-1/train",
    "loop-1/heldout",
    "loop-2/train",
)
records = st.lists(
    st.tuples(st.sampled_from(PLACES), st.sampled_from(NAMES), st.sampled_from(NAMES)),
    min_size=1,
    max_size=25,
)
victims = st.tuples(st.none() | st.sampled_from(NAMES), st.none() | st.sampled_from(NAMES)).filter(any)


def readable(home: Path) -> dict[str, set[str]]:
    """Contents of everything under a home by the top of its path, as a reader finds it."""
    found: dict[str, set[str]] = {}
    for path in home.rglob("*"):
        if path.suffix == ".parquet":
            texts = [t.choices[0].text + t.messages for t in traces.read_parquet(path)]
        elif path.is_file():
            texts = [path.read_text(errors="replace")]
        else:
            continue
        for text in texts:
            for piece in text.split("SECRET-")[1:]:
                number = piece.split(".")[0]
                found.setdefault(str(path.relative_to(home)).split("/")[0], set()).add(f"SECRET-{number}.")
    return found


def everything(home: Path) -> set[str]:
    return set().union(*readable(home).values())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records, st.lists(victims, min_size=1, max_size=3))
def test_nothing_of_the_deleted_is_left_and_the_rest_is_intact(tmp_path_factory, make_trace, chosen, deleted):
    home = tmp_path_factory.mktemp("home")
    placed = [(place, trace_of(make_trace, t, s, n)) for n, (place, t, s) in enumerate(chosen)]
    build(home, placed)
    for tenant, session in deleted:
        assert not delete(home, tenant, session).left

    def is_deleted(trace: Trace) -> bool:
        return any(t in (None, trace.tenant) and s in (None, trace.session) for t, s in deleted)

    gone = {t.choices[0].text for _, t in placed if is_deleted(t)}
    stays = {t.choices[0].text for _, t in placed if not is_deleted(t)}
    assert everything(home) & gone == set()
    assert everything(home) == stays
    store = list(TraceStore(home / "traces").scan())
    expected = [t for place, t in placed if place in ("part", "journal") and not is_deleted(t)]
    assert sorted(store, key=repr) == sorted(expected, key=repr)
    for place in PLACES[6:]:
        if any(p == place for p, _ in placed):
            kept = [t for p, t in placed if p == place and not is_deleted(t)]
            assert list(TraceSet(home / "loops" / place)) == kept
    assert not read_tombstones(home / "traces").pending
    # Names live on in nothing but the records of others.
    note = (home / "traces" / "deletions.json").read_text()
    assert not any(name in note for name in NAMES)


def test_records_that_start_later_are_kept(tmp_path, make_trace):
    root = tmp_path / "traces"
    later = make_trace(2, tenant="ann", started_at=datetime.now(UTC) + timedelta(hours=1))
    TraceStore(root).append([make_trace(1, tenant="ann"), later])
    assert delete(tmp_path, "ann", None).records == 1
    assert list(TraceStore(root).scan()) == [later]
    recover(root)
    assert delete(tmp_path, "bob", None).records == 0
    assert list(TraceStore(root).scan()) == [later]


def test_a_living_writers_journal_is_cleaned_while_it_goes_on(tmp_path, make_trace):
    """Records before the deletion go from its journal, those that started before it are turned away after."""
    root = tmp_path / "traces"
    writer = TraceWriter(root, roll_s=3600)
    old = [make_trace(n, tenant=("ann", "bob")[n % 2]) for n in range(10)]
    for trace in old:
        writer.put(trace)
    while writer.counts.written < 10:
        time.sleep(0.01)
    assert b"ann" in b"".join(p.read_bytes() for p in (root / "journal").glob("*.jsonl"))
    assert not delete(tmp_path, "ann", None, wait_s=20).left
    assert not any(b"ann" in p.read_bytes() for p in (root / "journal").glob("*.jsonl"))
    writer.put(make_trace(10, tenant="ann"))  # was under way when it was deleted
    new = make_trace(11, tenant="ann", started_at=datetime.now(UTC) + timedelta(seconds=1))
    writer.put(new)
    while writer.counts.written + writer.counts.deleted < 12:
        time.sleep(0.01)
    assert writer.counts.deleted == 1
    writer.close()
    assert sorted(TraceStore(root).scan(), key=repr) == sorted([*old[1::2], new], key=repr)


def test_a_writer_that_hangs_is_named_and_the_deletion_stays_pending(tmp_path, make_trace):
    root = tmp_path / "traces"
    journal = root / "journal" / "hung.jsonl"
    journal.parent.mkdir(parents=True)
    journal.write_bytes(orjson.dumps(make_trace(1, tenant="ann")) + b"\n")
    with locked(journal):
        (left,) = delete(tmp_path, "ann", None, wait_s=0.3).left
        assert "hung.jsonl" in left and "its writer did not end it" in left
        assert read_tombstones(root).pending
    assert not carry_out(tmp_path).left
    assert not read_tombstones(root).pending
    assert not list(TraceStore(root).scan())


def test_a_running_loop_keeps_its_selection_until_it_ends(tmp_path, make_trace):
    build(tmp_path, [(f"loop-{n}/train", trace_of(make_trace, "ann", "bob", n)) for n in (1, 2)])
    with locked(tmp_path / "run" / "loop.lock"):
        (left,) = delete(tmp_path, "ann", None).left
        assert "loop-2" in left
        assert everything(tmp_path) == {secret("ann", "bob", 2)}
    assert carry_out(tmp_path).features == 1
    assert everything(tmp_path) == set()


def test_a_loop_that_is_about_to_make_its_first_selection_is_waited_for(tmp_path, make_trace):
    with locked(tmp_path / "run" / "loop.lock"):
        assert delete(tmp_path, "ann", None).left
    assert read_tombstones(tmp_path / "traces").pending


def test_leftovers_of_killed_writers_go(tmp_path, make_trace):
    (part,) = TraceStore(tmp_path / "traces").append([make_trace(1, tenant="bob")])
    half = part.with_name(f".{part.name}.abc")
    half.write_bytes(b"SECRET-0-0-0.")
    unfinished = tmp_path / "loops" / "loop-1" / ".train.abcd1234"
    write_parquet(unfinished / "part-00000.parquet", [make_trace(2, tenant="ann")])
    unnamed = tmp_path / "datasets" / ".mine.abcd1234" / "train"
    write_parquet(unnamed / "part-00000.parquet", [make_trace(3, tenant="ann")])
    assert not delete(tmp_path, "ann", None).left
    assert part.exists() and not half.exists() and not unfinished.exists() and not unnamed.exists()


def test_damaged_files_are_removed_since_nobody_can_tell_whose_they_are(tmp_path, make_trace):
    root = tmp_path / "traces"
    (part,) = TraceStore(root).append([make_trace(1, tenant="bob")])
    part.write_bytes(part.read_bytes()[:-20])
    (root / "quarantine").mkdir()
    (root / "quarantine" / "old.parquet").write_bytes(b"PAR1" + bytes(50) + b"PAR1")
    (root / "quarantine" / "old.torn").write_bytes(
        b'"content":"whose?"}\n' + orjson.dumps(make_trace(3))[:-5]
    )
    done = delete(tmp_path, "ann", None)
    assert done.unreadable == 3 and not done.left
    assert not part.exists() and [p.name for p in (root / "quarantine").iterdir()] == ["old.torn"]
    assert b"whose" not in (root / "quarantine" / "old.torn").read_bytes()


def test_a_journal_turned_into_parquet_twice_around_a_deletion_does_not_duplicate(tmp_path, make_trace):
    root = tmp_path / "traces"
    both = [make_trace(1, tenant="ann"), make_trace(2, tenant="bob")]
    journal = root / "journal" / "dead.jsonl"
    journal.parent.mkdir(parents=True)
    content = b"".join(orjson.dumps(t) + b"\n" for t in both)
    journal.write_bytes(content)
    recover(root)
    journal.write_bytes(content)  # its process was killed between Parquet and removal
    assert not delete(tmp_path, "ann", None).left
    assert list(TraceStore(root).scan()) == both[1:]


KILLED = """
import os, signal, sys
from pathlib import Path
from strop.serving import deletion, home, traces

left = int(sys.argv[2])
def counted(function):
    def wrapper(*args, **kwargs):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return wrapper

Path.replace, Path.unlink, Path.rename = counted(Path.replace), counted(Path.unlink), counted(Path.rename)
os.unlink, os.rmdir = counted(os.unlink), counted(os.rmdir)
deletion.delete(Path(sys.argv[1]), "ann", None)
print("finished")
"""


@pytest.mark.slow
def test_killed_at_any_step_it_is_completed_by_the_next(tmp_path, make_trace):
    """The process is killed before its first change of the disk, before its second, and so on."""
    step, finished = 0, False
    while not finished:
        home = tmp_path / str(step)
        placed = [
            (place, trace_of(make_trace, tenant, "bob", 10 * n + m))
            for n, place in enumerate(PLACES)
            for m, tenant in enumerate(("ann", "bob"))
        ]
        build(home, placed)
        process = subprocess.run(
            [sys.executable, "-c", KILLED, str(home), str(step)], capture_output=True, text=True
        )
        finished = process.stdout == "finished\n"
        assert finished or process.returncode == -signal.SIGKILL, process.stderr
        assert not delete(home, "ann", None).left
        assert everything(home) == {t.choices[0].text for _, t in placed if t.tenant == "bob"}
        step += 1
    assert step > 10


def test_writers_and_readers_at_work_meanwhile(tmp_path, make_trace):
    """Four writers with small journals, a reader, and deletions one after the other."""
    root = tmp_path / "traces"
    over = threading.Event()
    writers = [TraceWriter(root, flush_s=0.01, roll_s=0.05) for _ in range(4)]
    problems: list[str] = []
    put: list[Trace] = []

    def write(writer: TraceWriter, first: int) -> None:
        for n in range(150):
            trace = make_trace(first + n, tenant=NAMES[n % 3], started_at=datetime.now(UTC))
            put.append(trace)
            writer.put(trace)
            time.sleep(0.005)

    def read() -> None:
        while not over.is_set():
            list(TraceStore(root).scan(on_bad_file=lambda _, problem: problems.append(problem)))
        problems.append("none")

    threads = [threading.Thread(target=write, args=(w, 1000 * i)) for i, w in enumerate(writers)]
    reader = threading.Thread(target=read)
    for thread in (*threads, reader):
        thread.start()
    untils: dict[str, datetime] = {}
    while any(t.is_alive() for t in threads):
        for tenant in NAMES[:2]:
            assert not delete(tmp_path, tenant, None, wait_s=20).left
            untils[tenant] = max(e.until for e in read_tombstones(root).entries)
            assert not [
                t for t in TraceStore(root).scan() if t.tenant == tenant and t.started_at <= untils[tenant]
            ]
    over.set()
    for thread in (*threads, reader):
        thread.join()
    for writer in writers:
        writer.close()
    kept = [t for t in put if t.tenant not in untils or t.started_at > untils[t.tenant]]
    assert sorted(t.request_id for t in TraceStore(root).scan()) == sorted(t.request_id for t in kept)
    assert problems == ["none"]


def test_a_damaged_note_stops_everything_and_says_so(tmp_path, make_trace):
    root = tmp_path / "traces"
    bury(root, "ann", None)
    (root / "deletions.json").write_text("[{]")
    with pytest.raises(TombstoneError, match="is damaged"):
        recover_one(root, make_trace)
    assert len(list((root / "journal").glob("*.jsonl"))) == 1


def recover_one(root: Path, make_trace) -> None:
    (root / "journal").mkdir()
    (root / "journal" / "dead.jsonl").write_bytes(orjson.dumps(make_trace(1)))
    recover(root)


def test_the_command_asks_says_what_it_did_and_exits_with_1_if_something_is_left(strop_home, make_trace):
    TraceStore(strop_home / "traces").append([make_trace(1, tenant="ann"), make_trace(2, tenant="bob")])
    run = CliRunner().invoke
    assert run(app, ["delete"]).exit_code == 2
    unasked = run(app, ["delete", "--tenant", "ann"])
    assert unasked.exit_code == 2 and "--yes" in unasked.output
    assert len(list(TraceStore(strop_home / "traces").scan())) == 2
    done = run(app, ["delete", "--tenant", "ann", "--yes", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout) == {
        "tenant": "ann", "session": None, "records": 1, "files": 1, "unreadable": 0, "features": 0, "left": [],
    }  # fmt: skip
    with locked(strop_home / "run" / "loop.lock"):
        left = run(app, ["delete", "--session", "s2", "--yes"])
    assert left.exit_code == 1 and "run this again" in left.stderr.replace("\n", " ")
    assert not list(TraceStore(strop_home / "traces").scan())
