import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from strop.evals.replay import kind_of, rebuild, select
from strop.evals.settings import EvalSettings
from strop.serving.traces import Choice, Trace

SCHEMA_FORMAT = json.dumps(
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}}
)
TOOLS_FORMAT = json.dumps({"tools": [{"type": "function", "function": {"name": "f"}}]})


def trace(session: str, minute: int, format: str | None = None, **changes: Any) -> Trace:
    plain = Trace(
        request_id=f"{session}-{minute}",
        started_at=datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minute),
        tenant="t",
        session=session,
        stack="f" * 64,
        endpoint="chat",
        stream=False,
        model="m",
        sampling=json.dumps({"temperature": 0, "max_tokens": 900}),
        format=format,
        messages=json.dumps([{"role": "user", "content": f"{session} {minute}"}]),
        prompt_token_ids=[1, 2],
        choices=[Choice(0, [3], "a", "stop")],
        status=200,
    )
    return replace(plain, **changes)


def test_request_is_the_recorded_one_streamed_alone_and_capped() -> None:
    sampling = {"temperature": 0.7, "max_tokens": 900, "n": 3, "stop": ["x"]}
    request = rebuild(
        trace("a", 0, TOOLS_FORMAT, sampling=json.dumps(sampling)), EvalSettings(max_output_tokens=64)
    )
    assert request.body == {
        "messages": [{"role": "user", "content": "a 0"}],
        "temperature": 0.7,
        "stop": ["x"],
        "max_tokens": 64,
        "seed": 0,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "stream": True,
        "return_token_ids": True,
    }
    assert not request.greedy and request.made_greedy().greedy


@pytest.mark.parametrize(
    ("sampling", "greedy"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0}, True),
        ({"temperature": 0, "repetition_penalty": 1.1}, False),
        ({"temperature": 0, "logit_bias": {"5": 1}}, False),
        ({}, False),
    ],
)
def test_greedy_means_nothing_but_the_logits_decides(sampling: dict[str, Any], greedy: bool) -> None:
    assert rebuild(trace("a", 0, sampling=json.dumps(sampling)), EvalSettings()).greedy is greedy


def test_kind_follows_from_the_format() -> None:
    assert [kind_of(trace("a", 0, f)) for f in (None, SCHEMA_FORMAT, TOOLS_FORMAT)] == [
        "chat",
        "json",
        "tools",
    ]
    assert kind_of(trace("a", 0, json.dumps({"response_format": {"type": "text"}}))) == "chat"


def test_newest_sessions_are_taken_whole_and_evenly_over_kinds() -> None:
    traces = [trace(f"chat{s}", 10 * s + turn) for s in range(20) for turn in range(3)]
    traces += [trace(f"json{s}", 10 * s + 5, SCHEMA_FORMAT) for s in range(20)]
    chosen, warmup = select(traces, EvalSettings(max_requests=12, warmup_requests=2))
    assert [r.request_id for r in chosen if r.kind == "chat"] == [
        f"chat{s}-{10 * s + t}" for s in (18, 19) for t in range(3)
    ]
    assert [r.request_id for r in chosen if r.kind == "json"] == [
        f"json{s}-{10 * s + 5}" for s in range(14, 20)
    ]
    assert [r.request_id for r in chosen] == sorted(
        (r.request_id for r in chosen), key=lambda name: int(name.split("-")[1])
    )
    assert len(warmup) == 2 and not {r.session for r in warmup} & {r.session for r in chosen}


def test_warmup_does_not_touch_measured_requests_when_there_are_no_others() -> None:
    chosen, warmup = select([trace("a", 0), trace("b", 1)], EvalSettings(warmup_requests=3))
    assert len(chosen) == 2 and [r.request_id for r in warmup] == ["warmup"] * 3


def test_a_session_longer_than_all_room_is_cut_and_bad_traces_are_left_out() -> None:
    traces = [trace("long", minute) for minute in range(9)]
    traces += [
        trace("failed", 50, status=500),
        trace("torn", 51, messages="{"),
        trace("odd", 52, messages="null"),
    ]
    traces += [trace("list", 53, sampling="[]")]
    chosen, _ = select(traces, EvalSettings(max_requests=4))
    assert [r.request_id for r in chosen] == [f"long-{minute}" for minute in range(4)]
