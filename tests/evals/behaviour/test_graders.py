"""What is right, wrong, malformed and hostile, for each kind of answer."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.evals.behaviour import instructions, retrieval, structured
from strop.evals.behaviour.tasks import Answer, Grade

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]+$"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "patternProperties": {"^x-": {"type": "number"}},
    "additionalProperties": False,
}  # fmt: skip

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@pytest.mark.parametrize(
    ("text", "json_valid", "schema_valid"),
    [
        ('{"name": "ada", "age": 3}', 1, 1),
        ('  {"name": "ada", "x-height": 1.5}\n', 1, 1),
        ('{"name": "Ada"}', 1, 0),
        ('{"name": "ada", "age": -1}', 1, 0),
        ('{"name": "ada", "age": 1.5}', 1, 0),
        ('{"name": "ada", "other": 1}', 1, 0),
        ('{"name": "ada", "x-height": "tall"}', 1, 0),
        ("{}", 1, 0),
        ("null", 1, 0),
        ("", 0, 0),
        ("Here it is: {}", 0, 0),
        ('```json\n{"name": "ada"}\n```', 0, 0),
        ('{"name": "ada"', 0, 0),
        ('{"name": NaN}', 0, 0),
        ("[" * 100_000, 0, 0),
        ("[" * 100_000 + "]" * 100_000, 0, 0),
        ("{'name': 'ada'}", 0, 0),
    ],
)
def test_json_and_its_schema(text: str, json_valid: float, schema_valid: float) -> None:
    grades = structured.grade(Answer(text), SCHEMA)
    assert [(g.metric, g.value) for g in grades] == [
        ("json_valid", json_valid),
        ("schema_valid", schema_valid),
    ]
    assert all((grade.value == 1) == (not grade.reason) for grade in grades)


def test_an_answer_cut_off_says_so() -> None:
    assert "cut off" in structured.grade(Answer('{"a', finish_reason="length"), {})[0].reason


@given(json_values)
def test_what_is_json_is_valid_against_a_schema_that_allows_all(value: Any) -> None:
    assert [g.value for g in structured.grade(Answer(json.dumps(value)), {})] == [1, 1]


@given(json_values, st.text(min_size=1))
def test_constants_are_met_by_themselves_alone(value: Any, more: str) -> None:
    assert structured.mismatch(value, {"const": value}) is None
    assert structured.mismatch(value, {"const": [value, more]})
    assert structured.mismatch({more: value}, {"const": value})


@given(st.text())
def test_any_text_gets_a_grade(text: str) -> None:
    assert all(0 <= grade.value <= 1 for grade in structured.grade(Answer(text), SCHEMA))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "https://example.org/schema.json"},
        {"$ref": "#/$defs/missing"},
        {"$ref": "#"},
        {"type": 7},
        {"pattern": "("},
        7,
    ],
)
def test_schemas_that_cannot_be_checked_are_not_met_and_fetch_nothing(schema: Any) -> None:
    assert structured.mismatch("text", schema)


def test_patterns_that_explode_end() -> None:
    # Each would take longer than anybody waits.
    for schema in (
        {"pattern": "^(a|aa)+$"},
        {"patternProperties": {"^(a|aa)+$": {}}},
        {"additionalProperties": False, "patternProperties": {"^(a|aa)+$": {}}},
    ):
        text = "a" * 60 + "!"
        found = structured.mismatch(text if "pattern" in schema else {text: 1}, schema)
        assert found and "took more than" in found


INSTRUCTED = [
    (instructions.at_least(3), ["one two three", "well-known don't, three 4"], ["one two", "", "- - -"]),
    (instructions.at_most(2), ["one two", "don't"], ["one two three", "", "…"]),
    (instructions.with_word("bell"), ["The BELL rang.", "bell"], ["bells", "", "label"]),
    (instructions.without_word("and"), ["sand or band", "brand"], ["this and that", "AND", "", " "]),
    (instructions.lowercase(), ["all of it, ünd 3"], ["One", "éÉ", "", "123"]),
    (instructions.bullets(2), ["- a\n- b", "Here:\n* a\n  * b\n"], ["- a", "-a\n-b", "", "- a\n- b\n- c", "--\n--"]),
    (instructions.ends_with("That is all."), ["So. That is all.", 'x "That is all."\n'], ["That is all. Bye.", ""]),
    (instructions.starts_with("To put it"), ["To put it simply", "\n**To put it**"], ["Well, To put it", ""]),
    (instructions.json_only("a", "b"), ['{"a": 1, "b": 2}', '```json\n{"a": 1, "b": 2}\n```'],
     ['{"a": 1}', "[]", "", 'Sure: {"a": 1, "b": 2}', '["a", "b"]', '"ab"']),
    (instructions.paragraphs(2), ["a\nb\n\nc", "\n\na\n\n \n\nb\n"], ["a\nb", "", "a\n\nb\n\nc"]),
]  # fmt: skip


@pytest.mark.parametrize(("instruction", "kept", "broken"), INSTRUCTED, ids=lambda v: getattr(v, "kind", ""))
def test_instructions(instruction: instructions.Instruction, kept: list[str], broken: list[str]) -> None:
    assert [instruction.check(text) for text in kept] == [""] * len(kept)
    assert all(instruction.check(text) for text in broken)


@given(st.text(), st.sampled_from([each for each, _, _ in INSTRUCTED]))
def test_a_check_never_fails_and_gives_a_reason_or_none(text: str, instruction: Any) -> None:
    assert isinstance(instruction.check(text), str)


@given(st.lists(st.from_regex(r"[a-zà-öø-ÿ]{1,8}", fullmatch=True)))
def test_words_are_counted(words: list[str]) -> None:
    assert instructions.count_words(", ".join(words)) == len(words)


def test_the_share_of_instructions_kept_is_the_grade() -> None:
    both = [instructions.lowercase(), instructions.with_word("bell")]
    assert instructions.grade(Answer("a bell"), both) == (Grade("instructions_kept", 1.0, ""),)
    assert instructions.grade(Answer("A bell"), both)[0].value == 0.5
    assert instructions.grade(Answer("A"), both)[0].value == 0.0


def test_instructions_are_the_same_for_a_seed_and_can_be_kept_together() -> None:
    first, again = list(instructions.tasks(40, 64, 5)), list(instructions.tasks(40, 64, 5))
    assert (
        [t.body for t in first] == [t.body for t in again] != [t.body for t in instructions.tasks(40, 64, 6)]
    )
    assert len({kind for task in first for kind in task.slices}) >= 8
    for task in first:
        words = task.body["messages"][0]["content"]
        # An answer that repeats the prompt or says nothing keeps few of them.
        assert task.grade(Answer(""))[0].value < 1, words


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("amber-123", 1),
        ("The code word is Amber-123.", 1),
        ("amber-1234", 0),
        ("xamber-123", 0),
        ("amber 123", 0),
        ("", 0),
    ],
)
def test_a_found_needle(text: str, value: float) -> None:
    assert retrieval.grade(Answer(text), "amber-123")[0].value == value


@given(st.integers(200, 3000), st.floats(0, 1), st.integers(0, 99))
def test_a_needle_stands_where_it_should_in_a_text_of_the_length_asked_for(
    length: int, depth: float, seed: int
) -> None:
    def tokens(text: str) -> int:
        return len(text.split())

    [task] = retrieval.tasks(1, [length], [depth], 100_000, tokens, seed)
    prompt = task.body["messages"][0]["content"]
    [found] = re.findall(r"The code word of the \w+ is ([\w-]+)\.", prompt)
    assert task.grade(Answer(found))[0].value == 1
    assert tokens(prompt) <= length
    assert length < 600 or tokens(prompt) > 0.7 * length
    text = prompt[len(retrieval.PROMPT.split("{")[0]) : prompt.index("\n\nQuestion:")]
    sentences = text.split(".")
    at = next(i for i, s in enumerate(sentences) if "code word" in s)
    assert abs(at - depth * (len(sentences) - 2)) <= 1


def test_lengths_that_a_stack_cannot_take_are_left_out() -> None:
    tasks = list(retrieval.tasks(6, [512, 1024, 4096], [0, 1], 1100, len, 0))
    assert [t.slices for t in tasks[:4]] == [
        ("512 tokens", "depth 0%"), ("512 tokens", "depth 100%"),
        ("1024 tokens", "depth 0%"), ("1024 tokens", "depth 100%"),
    ]  # fmt: skip
    assert len(tasks) == 6 and len({t.id for t in tasks}) == 6
    assert list(retrieval.tasks(6, [4096], [0, 1], 1100, len, 0)) == []
