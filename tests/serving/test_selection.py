import json
import sqlite3

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.serving.selection import FIELDS, Condition, SelectionError
from strop.serving.traces import SCHEMA, Choice, Speculation, to_table


@pytest.fixture(scope="module")
def table(make_trace) -> pa.Table:
    return to_table(
        [
            make_trace(0, tenant="acme", speculation=Speculation(10, 30, 15, [15])),
            make_trace(1, status=400, choices=[], error="no such model"),
            make_trace(2, choices=[Choice(0, [1] * 9, "It's 50%", "length"), Choice(1, [2], "", "stop")]),
        ]
    )


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("status = 200", [0, 2]),
        ("tenant = 'acme' OR error LIKE '%MODEL'", [0, 1]),
        ("started_at >= '2026-03-01 12:00:01'", [1, 2]),
        ("date(started_at) = '2026-03-01' -- all of them", [0, 1, 2]),
        ("prompt_tokens = 3 AND output_tokens > 3", [2]),
        ("acceptance_length BETWEEN 2 AND 3", [0]),
        ("acceptance_length IS NULL", [1, 2]),
        ("answer = 'It''s 50%' AND finish_reason = 'length'", [2]),
        ("json_extract(messages, '$[0].role') = 'user' AND stream", [0, 1, 2]),
        ("instr(request_id, 'r') > 1", []),
    ],
)
def test_conditions(table: pa.Table, text: str, rows: list[int]) -> None:
    assert Condition.parse(text).holds(table).nonzero()[0].tolist() == rows


def test_a_condition_names_what_it_reads() -> None:
    condition = Condition.parse("output_tokens > 3 AND tenant = 'a'")
    assert condition.fields == ("tenant", "output_tokens")
    assert condition.sources == ["choices", "tenant"]


def test_every_field_can_be_read(table: pa.Table) -> None:
    text = " AND ".join(f"({name} IS NULL OR {name} IS NOT NULL)" for name in FIELDS)
    assert Condition.parse(text).holds(table).all()
    assert Condition.parse(text).holds(SCHEMA.empty_table()).tolist() == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tenannt = 'a'",
        "status = ",
        "1) UNION SELECT 1 FROM sqlite_master WHERE (1",
        "status IN (SELECT status FROM traces)",
        "(WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n) > 1",
        "1); DROP TABLE traces; --",
        "1); ATTACH '/etc/passwd' AS x; --",
        "load_extension('x.so')",
        "randomblob(1000000000) IS NOT NULL",
        "EXISTS (SELECT 1 FROM pragma_database_list)",
        "__import__('os').system('id')",
        "status = 200\0",
        "x" * 20_000,
    ],
)
def test_what_is_not_a_condition_is_refused(text: str) -> None:
    with pytest.raises(SelectionError):
        Condition.parse(text)


def test_a_value_that_grows_without_bound_is_no_value(table: pa.Table) -> None:
    assert not Condition.parse("length(printf('%300000000d', prompt_tokens)) > 5").holds(table).any()
    with pytest.raises(SelectionError, match="too big"):
        Condition.parse("replace(printf('%30000000d', status), ' ', 'aaaaaaaaaa') = ''").holds(table)


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=40) | st.sampled_from(sorted(FIELDS)).map(json.dumps))
def test_any_text_is_a_condition_or_refused(table: pa.Table, text: str) -> None:
    try:
        condition = Condition.parse(text)
    except SelectionError:
        return
    try:
        condition.holds(table)
    except SelectionError as error:
        assert not isinstance(error.__cause__, sqlite3.Error)
