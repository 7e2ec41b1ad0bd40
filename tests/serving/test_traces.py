import json
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from strop.pipelines.commands.traces import app
from strop.serving.journal import TraceWriter
from strop.serving.traces import (
    Choice,
    Speculation,
    Trace,
    TraceError,
    TraceSet,
    TraceStore,
    read_parquet,
    split_by_session,
    to_jsonable,
    write_parquet,
)

text = st.text(st.characters(codec="utf-8"), max_size=30)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=8)
seconds = st.none() | st.floats(0, 1e6)
small = st.integers(0, 1000)
speculations = st.builds(
    Speculation, steps=small, drafted=small, accepted=small, accepted_by_position=st.lists(small, max_size=4)
)
traces = st.builds(
    Trace,
    request_id=text,
    started_at=st.datetimes(datetime(1990, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)),
    tenant=text,
    session=text,
    stack=st.from_regex(r"[0-9a-f]{64}", fullmatch=True) | st.just(""),
    endpoint=st.sampled_from(["chat", "completions"]),
    stream=st.booleans(),
    model=text,
    sampling=text,
    format=st.none() | text,
    messages=text,
    prompt_token_ids=ids,
    choices=st.lists(st.builds(Choice, small, ids, text, st.none() | text, st.none() | text), max_size=3),
    status=small,
    error=st.none() | text,
    queue_s=seconds,
    ttft_s=seconds,
    e2e_s=seconds,
    inter_token_s=st.lists(st.floats(0, 1e6, width=32), max_size=4),
    cached_tokens=st.none() | small,
    speculation=st.none() | speculations,
)
by_example = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@by_example
@given(st.lists(traces, max_size=4))
def test_parquet_round_trip(tmp_path, batch):
    write_parquet(tmp_path / "x.parquet", batch)
    assert list(read_parquet(tmp_path / "x.parquet")) == batch


@by_example
@given(st.lists(traces, max_size=4))
def test_journal_round_trip(tmp_path_factory, batch):
    """What the writer stores by way of its journal is what it was given."""
    root = tmp_path_factory.mktemp("traces")
    writer = TraceWriter(root, roll_s=60)
    for trace in batch:
        writer.put(trace)
    writer.close()
    stored = list(TraceStore(root).scan())
    assert sorted(stored, key=repr) == sorted(batch, key=repr)


def test_json_form_is_json(make_trace):
    trace = make_trace(1, speculation=Speculation(2, 6, 3, [2, 1, 0]))
    row = json.loads(json.dumps(to_jsonable(trace)))
    assert row["messages"] == [{"role": "user", "content": "hé\n"}]
    assert row["choices"][0]["token_ids"] == [4, 5, 2]
    assert row["speculation"]["accepted_by_position"] == [2, 1, 0]


def test_acceptance_length_counts_the_bonus_token():
    assert Speculation(10, 30, 15, [9, 4, 2]).acceptance_length == 2.5
    assert Speculation(0, 0, 0, []).acceptance_length == 1.0


def test_store_parts_by_utc_day_and_stack(tmp_path, make_trace):
    evening = datetime(2026, 3, 1, 23, 30, tzinfo=timezone(timedelta(hours=-5)))
    store = TraceStore(tmp_path)
    files = store.append([make_trace(1), make_trace(2, started_at=evening), make_trace(3, stack="cd" * 32)])
    assert sorted(str(f.parent.relative_to(tmp_path)) for f in files) == [
        "day=2026-03-01/stack_id=abababababababab",
        "day=2026-03-01/stack_id=cdcdcdcdcdcdcdcd",
        "day=2026-03-02/stack_id=abababababababab",
    ]
    assert len(list(store.scan(lambda t: t.stack.startswith("ab")))) == 2


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"PAR1" + bytes(50) + b"PAR1"]
)
def test_torn_file_is_set_aside_and_named(tmp_path, make_trace, damage):
    store = TraceStore(tmp_path)
    (bad,) = store.append([make_trace(1)])
    store.append([make_trace(2)])
    bad.write_bytes(damage(bad.read_bytes()))
    with pytest.raises(TraceError, match="not a readable trace file"):
        list(read_parquet(bad))
    reported = []
    assert [t.request_id for t in store.scan(on_bad_file=lambda path, _: reported.append(path))] == ["r2"]
    assert reported == [bad]
    assert [p.name for p in (tmp_path / "quarantine").iterdir()] == [bad.name]
    assert len(store.files()) == 1


def test_set_is_materialised_once(tmp_path, make_trace):
    first = TraceSet.create(tmp_path / "set", [make_trace(n) for n in range(5)])
    again = TraceSet.create(tmp_path / "set", [make_trace(99)])
    assert len(first) == len(again) == 5
    assert first.digest == again.digest
    assert [t.request_id for t in again] == [f"r{n}" for n in range(5)]
    assert [p.name for p in tmp_path.iterdir()] == ["set"]


def test_datasets_reads_a_set(tmp_path, make_trace, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    dataset = TraceSet.create(tmp_path / "set", [make_trace(n) for n in range(5)]).to_dataset()
    assert dataset["request_id"][:] == [f"r{n}" for n in range(5)]
    assert dataset[0]["choices"][0]["token_ids"] == [4, 5, 2]


@pytest.mark.slow
def test_ray_data_reads_a_set(tmp_path, make_trace):
    import ray

    ray.shutdown()  # The session's fleet may have left its connection open.
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        rows = TraceSet.create(tmp_path / "set", [make_trace(n) for n in range(5)]).to_ray().take_all()
    finally:
        ray.shutdown()
    assert sorted(row["request_id"] for row in rows) == [f"r{n}" for n in range(5)]


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 10_000)), max_size=60),
    st.floats(0, 1),
)
def test_split_shares_no_session_and_holds_out_the_newer(make_trace, requests, share):
    start = datetime(2026, 1, 1, tzinfo=UTC)
    all_traces = [
        make_trace(number, session=f"s{session}", started_at=start + timedelta(seconds=second))
        for number, (session, second) in enumerate(requests)
    ]
    train, heldout = split_by_session(all_traces, share)
    assert sorted(t.request_id for t in train + heldout) == sorted(t.request_id for t in all_traces)
    assert not {t.session for t in train} & {t.session for t in heldout}
    assert len({t.session for t in heldout}) == round(len({s for s, _ in requests}) * share)
    if train and heldout:
        first = {}
        for trace in sorted(all_traces, key=lambda t: t.started_at):
            first.setdefault(trace.session, trace.started_at)
        assert max(first[t.session] for t in train) <= min(first[t.session] for t in heldout)


def test_split_keeps_tenants_with_equal_session_names_apart(make_trace):
    pair = [make_trace(1, tenant="a", session="s"), make_trace(2, tenant="b", session="s")]
    train, heldout = split_by_session(pair, 0.5)
    assert [t.tenant for t in train] == ["a"]
    assert [t.tenant for t in heldout] == ["b"]


@pytest.fixture
def recorded(strop_home, make_trace):
    drafted = Speculation(10, 30, 15, [9, 4, 2])
    TraceStore(strop_home / "traces").append(
        [
            make_trace(1, cached_tokens=2, speculation=drafted),
            make_trace(2, session="s1", tenant="acme", ttft_s=0.75),
            make_trace(3, stack="cd" * 32, choices=[], status=400, error="[no] such model", ttft_s=None),
            make_trace(4, endpoint="completions", messages='"once"'),
        ]
    )
    return strop_home


def run(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_ls_counts_rows_and_bytes(recorded):
    rows = json.loads(run("ls", "--json").stdout)
    assert [(r["day"], r["stack"], r["files"], r["rows"]) for r in rows] == [
        ("2026-03-01", "ab" * 8, 1, 3),
        ("2026-03-01", "cd" * 8, 1, 1),
    ]
    assert all(r["bytes"] > 0 for r in rows)
    assert "2026-03-01" in run("ls").stdout


def test_show_finds_a_request_by_id(recorded):
    row = json.loads(run("show", "r2", "--json").stdout)
    assert (row["tenant"], row["choices"][0]["text"]) == ("acme", "ok 😀\n")
    assert "[no] such model" in run("show", "r3").stdout
    missing = run("show", "nope")
    assert missing.exit_code == 2
    assert "nope" in missing.output


def test_stats_by_stack(recorded):
    first, second = json.loads(run("stats", "--json").stdout)
    assert (first["requests"], first["sessions"], first["tenants"], first["errors"]) == (3, 3, 2, 0)
    assert (first["prompt_tokens"], first["output_tokens"]) == (9, 9)
    assert (first["ttft_p50_s"], first["inter_token_p95_s"]) == (0.25, 0.125)
    assert first["cached_share"] == pytest.approx(2 / 3)
    assert first["acceptance_length"] == 2.5
    assert (second["requests"], second["errors"], second["ttft_p50_s"], second["cached_share"]) == (
        1,
        1,
        None,
        None,
    )
    assert "acceptance_length" in run("stats").stdout


def test_stats_see_what_a_killed_server_left_in_its_journal(recorded, make_trace):
    import orjson

    journal = recorded / "traces" / "journal" / "dead.jsonl"
    journal.parent.mkdir(exist_ok=True)
    journal.write_bytes(orjson.dumps(make_trace(9)) + b'\n{"request_id": "torn')
    result = run("stats", "--json")
    assert json.loads(result.stdout)[0]["requests"] == 4
    assert "1 torn" in result.stderr


def test_export_writes_chats_with_answers(recorded, tmp_path):
    out = tmp_path / "chats.jsonl"
    assert run("export", out).exit_code == 0
    chats = [json.loads(line) for line in out.read_text().splitlines()]
    assert (
        chats
        == [{"messages": [{"role": "user", "content": "hé\n"}, {"role": "assistant", "content": "ok 😀\n"}]}]
        * 2
    )
    assert run("export", out, "--where", "tenant=acme,stack=abab").exit_code == 0
    assert len(out.read_text().splitlines()) == 1


def test_export_keeps_tools_and_calls(strop_home, make_trace, tmp_path):
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    choice = Choice(0, [1], "", "tool_calls", json.dumps(calls))
    TraceStore(strop_home / "traces").append(
        [make_trace(1, choices=[choice], format=json.dumps({"tools": tools}))]
    )
    out = tmp_path / "chats.jsonl"
    run("export", out)
    chat = json.loads(out.read_text())
    assert chat["tools"] == tools
    assert chat["messages"][-1]["tool_calls"] == calls


@pytest.mark.parametrize("where", ["tenant", "nope=1", "=", "tenant=a,x"])
def test_export_refuses_a_selection_that_makes_no_sense(recorded, tmp_path, where):
    result = run("export", tmp_path / "x.jsonl", "--where", where)
    assert result.exit_code == 2
    assert not (tmp_path / "x.jsonl").exists()


def test_nothing_recorded_yet(strop_home):
    assert json.loads(run("ls", "--json").stdout) == []
    assert json.loads(run("stats", "--json").stdout) == []
    assert "No traces" in run("stats").stdout
