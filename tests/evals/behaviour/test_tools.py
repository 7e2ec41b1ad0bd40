"""Calls compared with accepted answers: made up here, and the real ones where the data is there."""

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.evals.behaviour import tools
from strop.evals.behaviour.tasks import Answer, Call

DATA = Path(__file__).parents[4] / "shared" / "data"
needs_data = pytest.mark.skipif(
    not (DATA / "BFCL_v4_parallel.json.gz").is_file(), reason=f"{DATA} holds no BFCL_v4_*.json.gz"
)

FUNCTIONS: list[dict[str, Any]] = [
    {
        "name": "music.play",
        "description": "Plays.",
        "parameters": {
            "type": "dict",
            "properties": {
                "artist": {"type": "string"},
                "minutes": {"type": "integer"},
                "volume": {"type": "float"},
                "loop": {"type": "boolean"},
                "moods": {"type": "tuple", "items": {"type": "string"}},
                "where": {"type": "dict", "properties": {"room": {"type": "string"}}},
                "other": {"type": "any"},
            },
            "required": ["artist"],
        },
    },
    {"name": "stop", "parameters": {"type": "dict", "properties": {}}},
]
WANTED: list[dict[str, Any]] = [
    {
        "music.play": {
            "artist": ["Taylor Swift", "T. Swift"],
            "minutes": [20, ""],
            "volume": [0.5, ""],
            "loop": [True, ""],
            "moods": [["calm", "warm"], ""],
            "where": [{"room": ["kitchen", "Kitchen 1"], "floor": [1, ""]}, ""],
            "other": [None, 3, ""],
        }
    }
]


def difference(arguments: Any, name: str = "music_play") -> str:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return tools.difference([Call(name, text)], FUNCTIONS, WANTED)


@pytest.mark.parametrize(
    "arguments",
    [
        {"artist": "Taylor Swift"},
        {"artist": "taylor swift."},
        {"artist": "T Swift", "minutes": 20},
        {"artist": "Taylor Swift", "minutes": 20.0},
        {"artist": "Taylor Swift", "volume": 0.5, "loop": True},
        {"artist": "Taylor Swift", "moods": ["Calm", "warm"]},
        {"artist": "Taylor Swift", "where": {"room": "kitchen"}},
        {"artist": "Taylor Swift", "where": {"room": "Kitchen 1", "floor": 1}},
        {"artist": "Taylor Swift", "other": None},
        {"artist": "Taylor Swift", "other": 3},
    ],
)
def test_right_calls(arguments: Any) -> None:
    assert difference(arguments) == ""


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "is not given 'artist'"),
        ({"artist": "Maroon 5"}, "artist is"),
        ({"artist": ["Taylor Swift"]}, "artist is"),
        ({"artist": None}, "artist is"),
        ({"artist": "Taylor Swift", "minutes": "20"}, "minutes is"),
        ({"artist": "Taylor Swift", "minutes": 20.5}, "minutes is"),
        ({"artist": "Taylor Swift", "minutes": True}, "minutes is"),
        ({"artist": "Taylor Swift", "loop": 1}, "loop is"),
        ({"artist": "Taylor Swift", "loop": "true"}, "loop is"),
        ({"artist": "Taylor Swift", "volume": 0.51}, "volume is"),
        ({"artist": "Taylor Swift", "volume": True}, "volume is"),
        ({"artist": "Taylor Swift", "moods": ["warm", "calm"]}, "moods is"),
        ({"artist": "Taylor Swift", "moods": ["calm"]}, "moods is"),
        ({"artist": "Taylor Swift", "moods": "calm"}, "moods is"),
        ({"artist": "Taylor Swift", "where": {"floor": 1}}, "where is"),
        ({"artist": "Taylor Swift", "where": {"room": "kitchen", "floor": 2}}, "where is"),
        ({"artist": "Taylor Swift", "where": {"room": "kitchen", "door": 1}}, "where is"),
        ({"artist": "Taylor Swift", "other": 4}, "other is"),
        ({"artist": "Taylor Swift", "key": 1}, "'key', which it must not be"),
        ("", "no JSON object"),
        ("{", "no JSON object"),
        ("[]", "no JSON object"),
        ('{"artist": NaN}', "no JSON object"),
        ("[" * 5000, "no JSON object"),
    ],
)
def test_wrong_calls(arguments: Any, why: str) -> None:
    assert why in difference(arguments)


def test_the_function_must_be_the_right_one_and_one_that_is_there() -> None:
    assert "calls stop instead of music.play" in difference({}, "stop")
    assert "was not offered" in difference({}, "invented")
    assert "0 calls instead of 1" in tools.difference([], FUNCTIONS, WANTED)


def test_parallel_calls_may_come_in_any_order_but_each_counts_once() -> None:
    wanted = [{"stop": {"at": [1, 2]}}, {"stop": {"at": [1]}}]
    functions = [{"name": "stop", "parameters": {"properties": {"at": {"type": "integer"}}}}]

    def calls(*values: int) -> list[Call]:
        return [Call("stop", json.dumps({"at": value})) for value in values]

    # The first accepts 1 as well, so that only a real matching finds the places.
    assert tools.difference(calls(1, 2), functions, wanted) == ""
    assert tools.difference(calls(2, 1), functions, wanted) == ""
    assert tools.difference(calls(1, 1), functions, wanted) == ""
    assert tools.difference(calls(2, 2), functions, wanted)
    assert "3 calls instead of 2" in tools.difference(calls(1, 2, 2), functions, wanted)


def test_functions_become_openai_tools_and_names_come_back() -> None:
    odd = [{"name": name, "parameters": {}} for name in ("a.b", "a_b", "ä b", "x" * 80, "x" * 70)]
    names = list(tools.Names.of(odd).own)
    assert len(set(names)) == 5 and list(tools.Names.of(odd).own.values()) == [f["name"] for f in odd]
    assert all(len(n) <= 64 and n.replace("_", "").replace("-", "").isalnum() and n.isascii() for n in names)
    [play, _] = tools.openai_tools(FUNCTIONS)
    parameters = play["function"]["parameters"]
    assert play["function"]["name"] == "music_play" and parameters["type"] == "object"
    kinds = {name: inner.get("type") for name, inner in parameters["properties"].items()}
    assert kinds == {
        "artist": "string", "minutes": "integer", "volume": "number", "loop": "boolean",
        "moods": "array", "where": "object", "other": None,
    }  # fmt: skip


@given(st.text(), st.text(), st.text())
def test_any_answer_gets_a_grade(text: str, name: str, arguments: str) -> None:
    for wanted in (WANTED, None):
        for calls in ((), (Call(name, arguments),), (Call("music_play", arguments),)):
            for grade in tools.grade(Answer(text, calls), FUNCTIONS, wanted):
                assert grade.value in (0, 1) and (grade.value == 1) == (not grade.reason)


def test_no_call_where_none_fits() -> None:
    def value(answer: Answer) -> float:
        grade = tools.grade(answer, FUNCTIONS, None)[0]
        assert grade.metric == "no_call_right"
        return grade.value

    assert value(Answer("I have no tool for that.")) == 1
    assert value(Answer("", (Call("stop", "{}"),))) == 0
    assert value(Answer('<tool_call>{"name": "stop"}</tool_call>')) == 0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("It is 20 degrees, the tool says.", 1),
        ("My observation: none. Observation posts are towers.", 1),
        ('<tool_response>\n{"degrees": 20}\n</tool_response>', 0),
        ("I call it.\nObservation: 20 degrees", 0),
        ("[TOOL_RESULTS] 20 [/TOOL_RESULTS]", 0),
        ("<|im_start|>tool\n20", 0),
        ("<|start_header_id|>ipython<|end_header_id|>", 0),
        ('{"role": "tool", "content": "20"}', 0),
    ],
)
def test_results_that_no_tool_gave(text: str, value: float) -> None:
    grades = {g.metric: g for g in tools.grade(Answer(text), FUNCTIONS, WANTED)}
    assert grades["no_invented_result"].value == value


def test_a_call_left_in_the_text_is_named() -> None:
    answer = Answer('<tool_call>{"name": "music_play", "arguments": {}}')
    assert "left in the text" in tools.grade(answer, FUNCTIONS, WANTED)[0].reason


def test_streaming_agrees_when_the_same_tokens_are_read_alike() -> None:
    def answer(text: str, arguments: str, tokens: tuple[int, ...] | None) -> Answer:
        return Answer(text, (Call("f", arguments),), token_ids=tokens)

    def value(here: Answer, there: Answer) -> float | None:
        grade = tools.same_reading(here, there)
        return None if grade is None else grade.value

    assert value(answer("", '{"a": 1}', (1, 2)), answer("", '{"a":1}', (1, 2))) == 1
    assert value(answer("", '{"a": 1}', (1, 2)), answer("", '{"a": 2}', (1, 2))) == 0
    assert value(answer("x", '{"a": 1}', (1, 2)), answer("", '{"a": 1}', (1, 2))) == 0
    assert value(answer("", '{"a": 1}', None), Answer("<tool_call>")) == 0
    # Other tokens: the model said something else, and no parser is to blame.
    assert value(answer("", '{"a": 1}', (1, 2)), answer("", '{"a": 2}', (1, 3))) is None


def _cases(name: str) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    def lines(file: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in gzip.decompress((DATA / file).read_bytes()).splitlines()]

    answers = {row["id"]: row["ground_truth"] for row in lines(f"BFCL_v4_{name}.answers.json.gz")}
    return [(row["function"], answers[row["id"]]) for row in lines(f"BFCL_v4_{name}.json.gz")]


def _first(value: Any) -> Any:
    """An argument as a model would give it: of an accepted object, the first accepted of each member."""
    if isinstance(value, dict):
        return {name: _first(values[0]) for name, values in value.items() if values[0] != ""}
    return [_first(each) for each in value] if isinstance(value, list) else value


def _calls(functions: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    safe = {own: name for name, own in tools.Names.of(functions).own.items()}
    return [
        (safe[name], {p: _first(v[0]) for p, v in parameters.items() if v[0] != ""})
        for call in wanted
        for name, parameters in call.items()
    ]


def _as_calls(calls: list[tuple[str, dict[str, Any]]]) -> list[Call]:
    return [Call(name, json.dumps(arguments)) for name, arguments in calls]


@needs_data
@pytest.mark.parametrize("name", ["simple_python", "parallel"])
def test_real_answers_are_right_and_their_variants_wrong(name: str) -> None:
    wrong_types = 0
    for functions, wanted in _cases(name):
        calls = _calls(functions, wanted)
        why = tools.difference(_as_calls(calls), functions, wanted)
        if why:
            # A few of the data's own answers do not have the type that their function's document says.
            wrong_types += 1
            continue
        assert tools.difference(_as_calls(calls[::-1]), functions, wanted) == ""
        assert tools.difference(_as_calls(calls[:-1]), functions, wanted)
        assert tools.difference(_as_calls([*calls, calls[0]]), functions, wanted)
        assert tools.difference(_as_calls([("other", calls[0][1]), *calls[1:]]), functions, wanted)
        [parameters] = wanted[0].values()
        for parameter, values in parameters.items():
            if parameter in calls[0][1]:
                for bad in ("certainly not this", 987654321, None, ["x"], {"x": 1}):
                    variant = copy.deepcopy(calls)
                    variant[0][1][parameter] = bad
                    if bad not in values:
                        assert tools.difference(_as_calls(variant), functions, wanted), (parameter, bad)
                if "" not in values:
                    variant = copy.deepcopy(calls)
                    del variant[0][1][parameter]
                    assert tools.difference(_as_calls(variant), functions, wanted), parameter
        variant = copy.deepcopy(calls)
        variant[0][1]["not_a_parameter"] = 1
        assert tools.difference(_as_calls(variant), functions, wanted)
    assert wrong_types <= 12, wrong_types


@needs_data
def test_all_real_functions_become_valid_schemas() -> None:
    import jsonschema

    for name in ("simple_python", "parallel"):
        for functions, _ in _cases(name):
            for tool in tools.openai_tools(functions):
                jsonschema.Draft202012Validator.check_schema(tool["function"]["parameters"])
