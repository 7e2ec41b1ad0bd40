import json
import os
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from strop.pipelines.commands.traces import app
from strop.serving import retention
from strop.serving.home import locked
from strop.serving.journal import TraceWriter
from strop.serving.retention import Sizes, keep_bounded, prune
from strop.serving.settings import RetentionSettings
from strop.serving.traces import TraceSet, TraceStore

DAY = timedelta(days=1)


def aged(make_trace, days: Sequence[float], **changes):
    now = datetime.now(UTC)
    return [make_trace(n, started_at=now - d * DAY, **changes) for n, d in enumerate(days)]


def size(root) -> int:
    return sum(p.stat().st_size for p in TraceStore(root).files())


def test_what_is_too_old_goes_to_the_second(tmp_path, make_trace):
    root = tmp_path / "traces"
    for trace in aged(make_trace, [0, 2.999, 3.001, 40]):
        TraceStore(root).append([trace])
    done = prune(tmp_path, 3, None)
    assert sorted(t.request_id for t in TraceStore(root).scan()) == ["r0", "r1"]
    assert done.files == 2 and done.kept_bytes == size(root)
    assert prune(tmp_path, None, None).files == 0


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.integers(0, 300)), min_size=1, max_size=12, unique_by=lambda x: x[0]
    ),
    st.floats(0, 1.1),
)
def test_the_oldest_go_until_the_rest_fits_and_no_further(tmp_path_factory, make_trace, parts, share):
    home = tmp_path_factory.mktemp("home")
    root = home / "traces"
    now = datetime.now(UTC)
    times = {}
    for n, (age, length) in enumerate(parts):
        moment = now - age * DAY
        (path,) = TraceStore(root).append(
            [make_trace(n, started_at=moment, prompt_token_ids=list(range(length)), stack=f"{n % 2}" * 64)]
        )
        times[path] = moment.replace(microsecond=0)
    sizes = {path: path.stat().st_size for path in times}
    limit = share * sum(sizes.values())
    done = prune(home, None, limit / 2**30)
    kept = set(TraceStore(root).files())
    gone = set(times) - kept
    assert sum(sizes[p] for p in kept) == done.kept_bytes <= limit
    assert done.bytes == sum(sizes[p] for p in gone)
    if gone:
        assert not kept or max(times[p] for p in gone) <= min(times[p] for p in kept)
        last = max(times[p] for p in gone)
        assert done.kept_bytes + max(sizes[p] for p in gone if times[p] == last) > limit


def test_what_was_set_aside_counts_and_goes_by_when_it_was(tmp_path, make_trace):
    root = tmp_path / "traces"
    (kept,) = TraceStore(root).append(aged(make_trace, [1]))
    (root / "quarantine").mkdir()
    for name, age in (("old", 50), ("new", 0.5)):
        path = root / "quarantine" / f"{name}.torn"
        path.write_bytes(bytes(1000))
        then = time.time() - age * 86400
        os.utime(path, (then, then))
    assert prune(tmp_path, None, (kept.stat().st_size + 1500) / 2**30).bytes == 1000
    assert [p.name for p in (root / "quarantine").iterdir()] == ["new.torn"] and kept.exists()


def test_sizes_are_measured_anew_where_something_changed(tmp_path, make_trace):
    root = tmp_path / "traces"
    sizes = Sizes()
    assert sizes.total(root) == 0
    for n in range(5):
        TraceStore(root).append(aged(make_trace, [n % 2], stack=f"{n}" * 64))
        assert sizes.total(root) == size(root)
    folder = TraceStore(root).files()[0].parent
    os.utime(folder, (1, 1))
    measured = sizes.total(root)
    next(folder.glob("*")).write_bytes(b"")  # unseen: writers never change a file in place
    os.utime(folder, (1, 1))
    assert sizes.total(root) == measured
    next(folder.glob("*")).unlink()
    assert sizes.total(root) == size(root)


def test_loops_follow_the_limit_of_age_but_not_while_they_run(tmp_path, make_trace):
    for name, ages in (("loop-1", [9, 1]), ("loop-2", [1]), ("loop-3", [9])):
        TraceSet.create(tmp_path / "loops" / name / "train", aged(make_trace, ages))
        features = tmp_path / "loops" / name / "speculator" / "features"
        features.mkdir(parents=True)
        (features / "x.safetensors").write_bytes(b"x")
    with locked(tmp_path / "run" / "loop.lock"):
        assert prune(tmp_path, 5, None).loops == 1
    left = sorted(
        str(p.relative_to(tmp_path / "loops")) for p in (tmp_path / "loops").rglob("*") if p.is_file()
    )
    assert left == [
        "loop-2/speculator/features/x.safetensors",
        "loop-2/train/part-00000.parquet",
        "loop-3/speculator/features/x.safetensors",
        "loop-3/train/part-00000.parquet",
    ]
    assert prune(tmp_path, 5, None).loops == 1


def test_pruning_beside_writers_and_readers(tmp_path, make_trace):
    root = tmp_path / "traces"
    writer = TraceWriter(root, flush_s=0.01, roll_s=0.02)
    over = threading.Event()
    problems: list[str] = []

    def read() -> None:
        while not over.is_set():
            list(TraceStore(root).scan(on_bad_file=lambda _, problem: problems.append(problem)))
        problems.append("none")

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(60):
        writer.put(make_trace(n, started_at=datetime.now(UTC) - (n % 3) * DAY))
        prune(tmp_path, 1.5, 20e3 / 2**30)
        time.sleep(0.01)
    over.set()
    reader.join()
    writer.close()
    assert problems == ["none"] and writer.counts.failed == 0 and writer.counts.written == 60
    prune(tmp_path, 1.5, 20e3 / 2**30)
    assert 0 < size(root) <= 20e3


def test_the_fleets_thread_prunes_and_outlives_an_error(tmp_path, make_trace, monkeypatch, caplog):
    root = tmp_path / "traces"
    root.write_text("in the way")
    monkeypatch.setattr(retention, "_EVERY_S", 0.05)
    kept = RetentionSettings(max_age_days=1)
    threading.Thread(target=keep_bounded, args=(tmp_path, kept), daemon=True).start()
    ends = time.monotonic() + 10
    while "could not be pruned" not in caplog.text and time.monotonic() < ends:
        time.sleep(0.02)
    assert "could not be pruned" in caplog.text
    root.unlink()
    TraceStore(root).append(aged(make_trace, [5]))
    while TraceStore(root).files() and time.monotonic() < ends:
        time.sleep(0.02)
    assert not TraceStore(root).files()


def test_the_command_takes_the_limits_of_the_configuration_or_its_own(strop_home, make_trace, tmp_path):
    for trace in aged(make_trace, [0, 2, 4]):
        TraceStore(strop_home / "traces").append([trace])
    config = tmp_path / "strop.yaml"
    config.write_text("serving: {retention: {max_age_days: 3}}")
    run = CliRunner().invoke
    first = json.loads(run(app, ["prune", "--config", str(config), "--json"]).stdout)
    assert (first["files"], first["kept_bytes"]) == (1, size(strop_home / "traces"))
    assert json.loads(run(app, ["prune", "--max-age-days", "1", "--json"]).stdout)["files"] == 1
    assert "1 files" in run(app, ["prune", "--max-gib", "0"]).stdout
    assert not TraceStore(strop_home / "traces").files()
