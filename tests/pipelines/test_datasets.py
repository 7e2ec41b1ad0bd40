import json
import os
import random
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from strop.pipelines import datasets, scale
from strop.pipelines.commands.traces import app
from strop.pipelines.registry import Registry
from strop.serving.redaction import without_content
from strop.serving.selection import SelectionError
from strop.serving.traces import PROBE_TENANT, Choice, TraceSet, TraceStore, split_by_session

START = datetime(2026, 3, 1, 12, tzinfo=UTC)


def words(seed: object, count: int = 60) -> list[str]:
    rng = random.Random(str(seed))
    return ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(3, 8))) for _ in range(count)]


@pytest.fixture
def say(make_trace):
    """Builds a trace with an answer of its own, `seconds` after the start."""

    def make(number: int, seconds: float | None = None, answer: str | None = None, **changes):
        text = answer if answer is not None else " ".join(words(number))
        at = START + timedelta(seconds=number if seconds is None else seconds)
        return make_trace(number, started_at=at, choices=[Choice(0, [4, 5, 2], text, "stop")], **changes)

    return make


@pytest.fixture
def recorded(home: Path, monkeypatch: pytest.MonkeyPatch, say) -> Path:
    """20 sessions of two turns, and some that must not be taken."""
    monkeypatch.setenv("STROP_HOME", str(home))
    monkeypatch.chdir(home)
    traces = [say(number, session=f"s{number // 2}") for number in range(40)]
    odd = [say(90, tenant=PROBE_TENANT), say(91, status=400, error="no")]
    again = " ".join([*words(3)[:-1], "changed"])
    copies = [say(92, 60, answer=" ".join(words(2)).upper()), say(93, 61, answer=again)]
    store = TraceStore(home / "traces")
    store.append([*traces[20:], *odd])
    store.append([*traces[:20], *copies])
    return home


def test_a_dataset_holds_each_thing_once_in_order_of_time(recorded: Path) -> None:
    dataset = datasets.create(recorded, "first")
    assert (dataset.read, dataset.selected, dataset.identical, dataset.similar) == (44, 42, 1, 1)
    train, heldout = (list(datasets.split_of(recorded, "first", split)) for split in datasets.SPLITS)
    assert [t.request_id for t in train] == [f"r{n}" for n in range(32)]
    assert [t.request_id for t in heldout] == [f"r{n}" for n in range(32, 40)]
    split = dataset.splits["heldout"]
    assert (split.requests, split.sessions, split.prompt_tokens, split.output_tokens) == (8, 4, 24, 24)
    assert (split.first, split.last) == (heldout[0].started_at, heldout[-1].started_at)
    assert split.stacks == {"ab" * 32: 8}
    assert datasets.leaks(recorded, "first") == datasets.Leaks(0, 0, 0)


def test_records_without_content_are_not_selected(recorded: Path, say) -> None:
    TraceStore(recorded / "traces").append([without_content(say(number, 70)) for number in range(50, 53)])
    dataset = datasets.create(recorded, "first")
    assert (dataset.read, dataset.selected, dataset.identical) == (47, 42, 1)


def test_the_split_is_that_of_the_loop(recorded: Path) -> None:
    datasets.create(recorded, "first", split_share=0.35)
    ours = [list(datasets.split_of(recorded, "first", split)) for split in datasets.SPLITS]
    theirs = split_by_session([*ours[0], *ours[1]], 0.35)
    assert [[t.request_id for t in side] for side in ours] == [
        [t.request_id for t in side] for side in theirs
    ]


def test_the_digest_is_that_of_the_content(recorded: Path, say, tmp_path: Path) -> None:
    one = datasets.create(recorded, "one", "tenant = 'default'")
    same = datasets.create(recorded, "two", "status < 500 AND tenant = 'default'")
    other = datasets.create(recorded, "three", "tenant = 'default' AND session <> 's4'")
    assert one.digest == same.digest != other.digest
    assert datasets.create(recorded, "one", "tenant = 'default'") == one
    assert [d.name for d in datasets.every(recorded)] == ["one", "two", "three"]
    # The same traces in other files.
    elsewhere = tmp_path / "elsewhere"
    traces = list(TraceStore(recorded / "traces").scan())
    for first in range(0, 44, 4):
        TraceStore(elsewhere / "traces").append(traces[first : first + 4][::-1])
    assert datasets.create(elsewhere, "one", "tenant = 'default'").digest == one.digest


def test_a_dataset_does_not_change(recorded: Path, say) -> None:
    before = datasets.create(recorded, "one")
    TraceStore(recorded / "traces").append([say(200)])
    with pytest.raises(datasets.DatasetError, match="one-2"):
        datasets.create(recorded, "one")
    with pytest.raises(datasets.DatasetError, match="do not change"):
        datasets.create(recorded, "one", split_share=0.5)
    assert datasets.load(recorded, "one") == before
    assert sorted(p.name for p in (recorded / "datasets").iterdir()) == ["one"]
    file = recorded / "datasets" / "one" / "train" / "part-00000.parquet"
    file.write_bytes(file.read_bytes()[:-1])
    assert datasets.changed_files(recorded, before) == ["train/part-00000.parquet"]


def test_mistakes_are_named(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(datasets.DatasetError, match="None of 44 traces"):
        datasets.create(recorded, "none", "tenant = 'nobody'")
    with pytest.raises(datasets.DatasetError, match="not a name"):
        datasets.create(recorded, "../etc")
    with pytest.raises(datasets.DatasetError, match="no dataset 'x'"):
        datasets.load(recorded, "x")
    with pytest.raises(datasets.DatasetError, match="no traces"):
        datasets.create(tmp_path / "empty", "none")
    with pytest.raises(SelectionError, match="no such column"):
        datasets.create(recorded, "none", "tenannt = 'a'")


def test_a_torn_file_is_named_and_left_out(recorded: Path) -> None:
    files = TraceStore(recorded / "traces").files()
    files[0].write_bytes(files[0].read_bytes()[:-20])
    assert datasets.create(recorded, "one").unreadable == [files[0].name]


def test_leaks_are_counted(recorded: Path, say) -> None:
    datasets.create(recorded, "one")
    folder = recorded / "datasets" / "one"
    near = " ".join([*words(5)[:-1], "changed"])
    extra = [say(300, session="s1"), say(301, answer=" ".join(words(4)).title()), say(302, answer=near)]
    TraceSet.create(folder / "more", extra).files[0].rename(folder / "heldout" / "part-00001.parquet")
    assert datasets.leaks(recorded, "one") == datasets.Leaks(1, 1, 1)
    result = CliRunner().invoke(app, ["dataset", "check", "one", "--json"])
    assert (result.exit_code, json.loads(result.stdout)) == (1, {"sessions": 1, "identical": 1, "similar": 1})


def test_readable_by_datasets(recorded: Path) -> None:
    datasets.create(recorded, "one")
    rows = datasets.split_of(recorded, "one", "heldout").to_dataset()
    assert rows["request_id"][:2] == ["r32", "r33"]


def test_the_commands(recorded: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    made = run(app, ["dataset", "create", "one", "--where", "tenant = 'default'", "--json"])
    assert made.exit_code == 0, made.output
    digest = json.loads(made.stdout)["digest"]
    assert json.loads(run(app, ["dataset", "ls", "--json"]).stdout)[0]["digest"] == digest
    assert digest[:12] in run(app, ["dataset", "ls"]).stdout
    assert json.loads(run(app, ["dataset", "show", "one", "--json"]).stdout)["digest"] == digest
    assert "43 selected" in run(app, ["dataset", "show", "one"]).stdout
    assert run(app, ["dataset", "check", "one"]).exit_code == 0
    assert run(app, ["dataset", "export", "one", str(tmp_path / "out")]).exit_code == 0
    chats = (tmp_path / "out" / "heldout.jsonl").read_text().splitlines()
    assert [m["role"] for m in json.loads(chats[0])["messages"]] == ["user", "assistant"]


def test_mlflow_has_a_run_for_each_dataset(recorded: Path) -> None:
    run = CliRunner().invoke
    assert run(app, ["dataset", "create", "one"]).exit_code == 0
    assert run(app, ["dataset", "create", "one"]).exit_code == 0
    registry = Registry(recorded, "strop")
    runs = registry.client.search_runs([registry.experiment_id], "tags.`strop.kind` = 'dataset'")
    assert len(runs) == 1
    digest = datasets.load(recorded, "one").digest
    assert runs[0].data.tags["strop.dataset.digest"] == digest
    inputs = runs[0].inputs
    assert inputs
    logged = {found.dataset.name: found.dataset.digest for found in inputs.dataset_inputs}
    assert logged == {"one/train": digest[:36], "one/heldout": digest[:36]}
    assert [f.path for f in registry.client.list_artifacts(runs[0].info.run_id)] == ["dataset.json"]


@pytest.mark.slow
def test_ray_chooses_what_this_process_chooses(recorded: Path, tmp_path: Path) -> None:
    here = datasets.create(recorded, "one", split_share=0.5)
    many = tmp_path / "many"
    for trace in TraceStore(recorded / "traces").scan():
        TraceStore(many / "traces").append([trace])
    assert len(TraceStore(many / "traces").files()) > scale.FEW
    environment = {**os.environ, "STROP_HOME": str(many)}
    command = [sys.executable, "-m", "strop.pipelines.cli", "traces", "dataset", "create", "one"]
    made = subprocess.run(
        [*command, "--split-share", "0.5"], env=environment, capture_output=True, cwd=tmp_path
    )
    assert made.returncode == 0, made.stderr
    assert datasets.load(many, "one").digest == here.digest


def test_rows_that_differ_in_time_only_are_split_by_their_sessions_first(recorded: Path, say) -> None:
    TraceStore(recorded / "traces").append([say(400, 100, session="s0")])
    datasets.create(recorded, "one")
    train = [t.request_id for t in datasets.split_of(recorded, "one", "train")]
    assert train[-1] == "r400" and np.unique(train).size == len(train)
