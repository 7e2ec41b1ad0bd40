import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.serving.quality import LOOP_TIMES, LOOP_TOKENS, Flags, Loop, find_loop, flags
from strop.serving.redaction import without_content
from strop.serving.traces import WITHHELD, Choice

TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]


def _call(name: str, arguments: str) -> str:
    return json.dumps([{"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}])


def _answer(text: str = "", calls: str | None = None) -> list[Choice]:
    return [Choice(0, [4, 5, 2], text, "stop", calls)]


def test_a_plain_answer_has_no_fault(make_trace) -> None:
    found = flags(make_trace())
    assert (found.empty, found.loop, found.invalid_json, found.invalid_tool_call) == (
        False,
        False,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("text", "calls", "empty"), [("", None, True), (" \n", None, True), ("", "[]", False), ("a", None, False)]
)
def test_nothing_is_neither_text_nor_a_call(make_trace, text: str, calls: str | None, empty: bool) -> None:
    assert flags(make_trace(choices=_answer(text, calls))).empty is empty
    assert flags(make_trace(choices=[])).empty


@pytest.mark.parametrize(
    ("text", "kind", "invalid"),
    [
        ('{"a": 1}', "json_object", False),
        ("[1]", "json_object", True),
        ("[1]", "json_schema", False),
        ('{"a": ', "json_schema", True),
        ('```json\n{"a": 1}\n```', "json_object", True),
        ("NaN", "json_schema", True),
        ("not json", "text", None),
    ],
)
def test_json_is_read_only_where_it_was_asked_for(
    make_trace, text: str, kind: str, invalid: bool | None
) -> None:
    format_ = json.dumps({"response_format": {"type": kind}})
    assert flags(make_trace(format=format_, choices=_answer(text))).invalid_json is invalid


def test_a_tool_call_instead_of_the_json_is_not_invalid_json(make_trace) -> None:
    format_ = json.dumps({"response_format": {"type": "json_object"}, "tools": TOOLS})
    assert flags(make_trace(format=format_, choices=_answer("", _call("read", "{}")))).invalid_json is None
    structured = json.dumps({"structured_outputs": {"json": {"type": "object"}}})
    assert flags(make_trace(format=structured, choices=_answer("{"))).invalid_json is True


@pytest.mark.parametrize(
    ("text", "calls", "choice", "invalid"),
    [
        ("", _call("read", '{"path": "a"}'), "auto", False),
        ("", _call("write", "{}"), "auto", True),
        ("", _call("read", '{"path": '), "auto", True),
        ("", _call("read", '"a"'), "auto", True),
        ("no tool needed", None, "auto", False),
        ('<tool_call>{"name": "read", "argu', None, "auto", True),
        ("no tool needed", None, "required", True),
        ("no tool needed", None, "none", None),
    ],
)
def test_tool_calls_name_a_tool_and_have_arguments(
    make_trace, text: str, calls: str | None, choice: str, invalid: bool | None
) -> None:
    format_ = json.dumps({"tools": TOOLS, "tool_choice": choice})
    assert flags(make_trace(format=format_, choices=_answer(text, calls))).invalid_tool_call is invalid


@given(
    st.lists(st.integers(0, 50), max_size=40),
    st.lists(st.integers(100, 150), min_size=1, max_size=30),
    st.lists(st.integers(0, 50), max_size=40),
)
def test_a_repeated_passage_is_found_wherever_it_stands(
    before: list[int], passage: list[int], after: list[int]
) -> None:
    times = max(LOOP_TIMES, -(-LOOP_TOKENS // len(passage))) + 1
    found = find_loop(before + passage * times + after)
    assert found is not None
    assert len(passage) % found.period == 0
    assert found.start <= len(before) + len(passage)
    assert found.tokens >= LOOP_TOKENS


@given(st.lists(st.integers(0, 4), max_size=300))
def test_what_is_called_a_loop_repeats(token_ids: list[int]) -> None:
    if found := find_loop(token_ids):
        stretch = token_ids[found.start : found.start + found.tokens]
        assert len(stretch) == found.tokens >= max(LOOP_TOKENS, LOOP_TIMES * found.period)
        assert stretch[found.period :] == stretch[: -found.period]


def test_a_rule_and_varied_text_are_no_loops(make_trace) -> None:
    assert find_loop([7] * (LOOP_TOKENS - 1)) is None
    assert find_loop([7] * LOOP_TOKENS) == Loop(0, 1, LOOP_TOKENS)
    assert find_loop(list(range(500))) is None
    looping = [Choice(0, [1, 2, 3, 4] * 20, "again " * 20, "length")]
    assert flags(make_trace(choices=looping)).loop


@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=60))
def test_whatever_a_trace_holds_is_read(make_trace, format_: str, text: str, arguments: str) -> None:
    flags(make_trace(format=format_, choices=_answer(text, _call("read", arguments))))


def test_tokens_that_were_withheld_are_no_loop(make_trace) -> None:
    masked = [5, *[WITHHELD] * (2 * LOOP_TOKENS), 7]
    assert find_loop(masked) is None
    assert find_loop([5, *[6] * (2 * LOOP_TOKENS), 7]) is not None


def test_of_a_record_without_content_only_its_length_is_judged(make_trace) -> None:
    wanted = {"format": '{"response_format":{"type":"json_object"},"tools":1}'}
    long = [Choice(0, [4] * (2 * LOOP_TOKENS), "{}", "stop", None)]
    found = flags(without_content(make_trace(choices=long, **wanted)))
    assert found == Flags(empty=False, loop=None, invalid_json=None, invalid_tool_call=None)
    assert flags(without_content(make_trace(choices=_answer()[:0]))).empty
