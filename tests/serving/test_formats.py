"""Layouts as the projects that write them document them; what is in none of them is refused, never guessed."""

import json
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.serving.formats import FORMATS, BadRow, Exchange, exchanges, kind_of, vllm_log
from strop.serving.records import layout_of, lines_in, records_of

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def read(record: dict[str, Any]) -> list[Exchange]:
    return exchanges(record, kind_of(record))


def test_fine_tuning_chats_give_an_exchange_for_each_answer() -> None:
    system = {"role": "system", "content": "Be brief."}
    skipped = {**ANSWER, "weight": 0}
    tools = [{"type": "function", "function": {"name": "f"}}]
    found = read(
        {
            "messages": [system, USER, skipped, USER, {"role": "assistant", "tool_calls": [CALL]}],
            "tools": tools,
        }
    )
    assert [len(e.prompt) for e in found] == [4]
    assert found[0].answer == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert found[0].format == {"tools": tools}
    assert [len(e.prompt) for e in read({"messages": [USER, ANSWER, USER, ANSWER]})] == [1, 3]


@pytest.mark.parametrize("wrapped", [True, False])
def test_requests_with_their_responses(wrapped: bool) -> None:
    request = {"model": "m", "messages": [USER], "temperature": 0.5, "max_tokens": 9}
    response = {"created": 1772366400, "choices": [{"message": ANSWER, "finish_reason": "length"}]}
    record = (
        {"custom_id": "c7", "body": request, "response": {"status_code": 200, "body": response}}
        if wrapped
        else {"id": "c7", "request": request, "response": response}
    )
    assert read(record) == [
        Exchange(
            [USER], ANSWER, "c7", "m", datetime(2026, 3, 1, 12, tzinfo=UTC), {"temperature": 0.5, "max_tokens": 9},
            finish_reason="length",
        )
    ]  # fmt: skip


def test_completions() -> None:
    record = {"request": {"prompt": "Once"}, "response": {"choices": [{"text": " upon", "token_ids": [7]}]}}
    (found,) = read(record)
    assert (found.prompt, found.answer["content"], found.output_token_ids) == ("Once", " upon", [7])


def test_sharegpt() -> None:
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
    (found,) = read({"id": "x_0", "system": "Be brief.", "conversations": turns})
    assert [m["role"] for m in found.prompt if isinstance(m, dict)] == ["system", "user"]
    assert (found.answer, found.session) == (ANSWER, "x_0")


def test_wildchat_has_a_time_for_each_answer() -> None:
    at = [datetime(2026, 3, 1, hour, tzinfo=UTC) for hour in (1, 2)]
    turns = [USER, {**ANSWER, "timestamp": at[0]}, USER, {**ANSWER, "timestamp": at[1].isoformat()}]
    found = read({"conversation_hash": "ab", "model": "gpt", "timestamp": at[1], "conversation": turns})
    assert [(e.session, e.model, e.at) for e in found] == [("ab", "gpt", at[0]), ("ab", "gpt", at[1])]


def attribute(key: str, value: Any) -> dict[str, Any]:
    kind = {str: "stringValue", float: "doubleValue", int: "intValue"}.get(type(value))
    if kind:
        return {"key": key, "value": {kind: str(value) if kind == "intValue" else value}}
    return {"key": key, "value": {"arrayValue": {"values": [attribute("", v)["value"] for v in value]}}}


def otlp(attributes: dict[str, Any], events: dict[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    span = {
        "traceId": "t1",
        "startTimeUnixNano": "1772366400000000000",
        "endTimeUnixNano": "1772366401500000000",
        "attributes": [attribute(k, v) for k, v in attributes.items()],
        "events": [
            {"name": name, "attributes": [attribute(k, v) for k, v in of.items()]}
            for name, of in (events or {}).items()
        ],
    }
    other = {"traceId": "t1", "name": "SELECT", "attributes": [attribute("db.system", "x")]}
    tool = {"traceId": "t1", "attributes": [attribute("gen_ai.operation.name", "execute_tool")]}
    return {"resourceSpans": [{"scopeSpans": [{"spans": [other, tool, span]}]}]}


REQUEST = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.request.max_tokens": 9}
INPUT = json.dumps([{"role": "user", "parts": [{"type": "text", "content": "Hi"}]}])
OUTPUT = json.dumps(
    [{"role": "assistant", "parts": [{"type": "text", "content": "Hello."}], "finish_reason": "stop"}]
)
CONTENT = {"gen_ai.input.messages": INPUT, "gen_ai.output.messages": OUTPUT}


@pytest.mark.parametrize(
    "record",
    [
        otlp(REQUEST | CONTENT),
        otlp(REQUEST, {"gen_ai.client.inference.operation.details": CONTENT}),
        otlp(
            REQUEST,
            {
                "gen_ai.user.message": {"content": "Hi"},
                "gen_ai.choice": {"message": json.dumps({"content": "Hello."}), "finish_reason": "stop"},
            },
        ),
        otlp(
            REQUEST
            | {
                "gen_ai.prompt.0.role": "user",
                "gen_ai.prompt.0.content": "Hi",
                "gen_ai.completion.0.content": "Hello.",
                "gen_ai.completion.0.finish_reason": "stop",
            }
        ),
    ],
    ids=["attributes", "details event", "message events", "numbered"],
)
def test_opentelemetry(record: dict[str, Any]) -> None:
    at = datetime(2026, 3, 1, 12, tzinfo=UTC)
    expected = Exchange([USER], ANSWER, "t1", "m", at, {"max_tokens": 9}, {}, "stop", 1.5)
    assert read(record) == [expected]


def test_opentelemetry_tools_and_instructions() -> None:
    parts = [
        {"role": "user", "parts": [{"type": "text", "content": "Hi"}]},
        {
            "role": "assistant",
            "parts": [{"type": "tool_call", "id": "c1", "name": "f", "arguments": {"x": 1}}],
        },
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": {"y": 2}}]},
    ]
    instructions = json.dumps([{"type": "text", "content": "Be brief."}])
    content = {"gen_ai.system_instructions": instructions, "gen_ai.input.messages": json.dumps(parts)}
    (found,) = read(otlp(REQUEST | CONTENT | content))
    assert found.prompt == [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": '{"y": 2}'},
    ]


def test_spans_that_call_no_model_are_no_bad_rows_and_those_without_content_are() -> None:
    assert exchanges(otlp({"gen_ai.operation.name": "invoke_agent"}), "otel") == []
    with pytest.raises(BadRow, match="was content captured"):
        read(otlp(REQUEST))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([1], "JSON list"),
        ({"prompt": "x"}, "the keys prompt"),
        ({"messages": []}, "at least one message"),
        ({"messages": [USER]}, "no answer"),
        ({"messages": [{"content": "x"}]}, 'with a "role"'),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]}, "not text: image_url"),
        ({"messages": [{"role": "user", "content": 3}, ANSWER]}, "is not text"),
        ({"conversations": [{"from": "ghost", "value": "x"}]}, "'ghost' is nobody"),
        ({"conversations": [3]}, "not laid out as sharegpt"),
        ({"body": {"messages": [USER]}, "response": {"status_code": 429}}, "the response is an error"),
        ({"request": {"messages": [USER]}, "response": {}}, "not laid out as openai"),
        (otlp(REQUEST | {"gen_ai.input.messages": "[{"}), "not whole JSON"),
    ],
)
def test_bad_rows_say_why(record: Any, reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        read(record)


KEYS = [
    "messages",
    "role",
    "content",
    "conversations",
    "from",
    "value",
    "request",
    "response",
    "choices",
    "message",
    "resourceSpans",
    "scopeSpans",
    "spans",
    "attributes",
    "key",
    "stringValue",
    "tool_calls",
    "function",
    "name",
    "id",
    "created",
    "text",
    "body",
]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["messages", "conversations", "response", "resourceSpans"]), json_values),
    st.sampled_from(FORMATS[:3]),
)
def test_any_json_is_read_or_a_bad_row(record: dict[str, Any], kind: str) -> None:
    try:
        found = exchanges(record, kind)
    except BadRow:
        return
    assert all(isinstance(e.answer["content"], str) for e in found)


PREFIX = "(APIServer pid=7) INFO 03-01 12:00:00 [request_logger.py:60] "
NEW = [
    "Request chatcmpl-1 details: prompt: 'Hi, \"you\"\\n', prompt_token_ids: [1, 2], prompt_embeds shape: None.",
    "Received request chatcmpl-1: params: SamplingParams(n=1, temperature=0.5, max_tokens=9, stop=[]), lora_request: None.",
    "Generated response chatcmpl-1 details: output_token_ids: [3, 4]",
    "Generated response chatcmpl-1: output: 'Hel\\'lo', finish_reason: stop",
]
OLD = [
    "Received request cmpl-2: prompt: 'Hi', params: SamplingParams(temperature=0.0, max_tokens=9), "
    "prompt_token_ids: [1, 2], prompt_embeds shape: None, lora_request: None.",
    "Generated response cmpl-2 (streaming delta): output: 'H', output_token_ids: None, finish_reason: None, streaming: True",
    "Generated response cmpl-2 (streaming complete): output: 'Hello', output_token_ids: None, finish_reason: length, streaming: True",
]


def from_log(*lines: str) -> list[Any]:
    return [found for _, found in vllm_log(iter(enumerate(PREFIX + line for line in lines)))]


def test_vllm_logs() -> None:
    (new,) = from_log(*NEW)
    assert (new.prompt, new.answer["content"]) == ('Hi, "you"\n', "Hel'lo")
    assert (new.prompt_token_ids, new.output_token_ids, new.finish_reason) == ([1, 2], [3, 4], "stop")
    assert new.sampling == {"temperature": 0.5, "max_tokens": 9}
    (old,) = from_log("INFO started", *OLD)
    assert (old.prompt, old.answer["content"], old.finish_reason) == ("Hi", "Hello", "length")
    body = json.dumps({"model": "m", "messages": [USER]})
    (chat,) = from_log(f"Request chatcmpl-1 JSON body: {body}", *NEW)
    assert (chat.prompt, chat.model) == ([USER], "m")
    both = from_log(NEW[0], OLD[0], NEW[3], OLD[2])
    assert [e.session for e in both] == ["chatcmpl-1", "cmpl-2"]


def test_vllm_logs_that_lack_something() -> None:
    without_prompt, never = from_log(*NEW[1:], OLD[0])
    assert isinstance(without_prompt, BadRow) and "log-level DEBUG" in str(without_prompt)
    assert isinstance(never, BadRow) and "no answer" in str(never)


def test_the_layout_of_a_file_is_told_from_its_beginning() -> None:
    assert layout_of(b'{"messages": [', "auto") == "lines"
    assert layout_of(b"\xef\xbb\xbf{broken\n", "auto") == "lines"
    assert layout_of(b'{\n "resourceSpans"', "auto") == "values"
    assert layout_of(b' [ {"a": 1}', "auto") == "values"
    assert layout_of(b"[2026-03-01] INFO", "auto") == layout_of(b"INFO 03-01", "auto") == "log"
    assert layout_of(b'{"a"', "vllm") == "log"
    assert layout_of(b"PAR1\x15", "auto") == "parquet"


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.sampled_from(['{"a": 1}', "broken", "", "é" * 5, " "]), max_size=12),
    cuts=st.lists(st.integers(0, 120), max_size=4),
    end=st.booleans(),
)
def test_ranges_of_a_file_share_no_line_and_miss_none(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], cuts: list[int], end: bool
) -> None:
    file = tmp_path_factory.mktemp("ranges") / "x.jsonl"
    file.write_text("\n".join(lines) + ("\n" if end else ""))
    size = file.stat().st_size
    edges = sorted({0, size, *(cut for cut in cuts if cut < size)})
    parts = [place for a, b in pairwise(edges) for place, _ in lines_in(file, a, b)]
    assert parts == [place for place, _ in lines_in(file, 0, size)]
    assert len(parts) == sum(bool(line.strip()) for line in lines)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.dictionaries(st.text(max_size=5), json_values, max_size=3), min_size=1, max_size=5),
    st.integers(0, 3),
)
def test_arrays_and_printed_objects_are_read_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, values: list[dict[str, Any]], indent: int
) -> None:
    file = tmp_path_factory.mktemp("values") / "x.json"
    file.write_text(json.dumps(values, indent=indent or None))
    assert [record for _, (_, record) in records_of(file, "values")] == values
    file.write_text("\n".join(json.dumps(value, indent=indent) for value in values))
    assert [record for _, (_, record) in records_of(file, "values")] == values


def test_what_follows_a_broken_value_is_told_as_left_out(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text('[{"a": 1}, {"b": }, {"c": 3}]')
    first, second = (record for _, (_, record) in records_of(file, "values"))
    assert first == {"a": 1} and isinstance(second, BadRow)
