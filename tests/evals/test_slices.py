"""Which slices a request belongs to."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.evals.slices import content_slices, context_band, languages, slices
from strop.serving.traces import Choice

ENGLISH = "The function reads a file and returns the lines that are not empty, so that you can use them."
FRENCH = "La fonction lit un fichier et renvoie les lignes qui ne sont pas vides pour que vous les utilisiez."
CODE = "def add(left, right):\n    total = left + right\n    return total\n"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (ENGLISH, ("prose",)),
        ("Here it is:\n```python\nprint(1)\n```\nThat is all.", ("code",)),
        (CODE, ("code",)),
        ("for (let i = 0; i < 3; i++) {\n  go(i);\n}", ("code",)),
        ('{"name": "add", "args": ["left"]}', ("json",)),
        ('```json\n{"a": 1}\n```', ("json",)),
        ('[{"cut off": "in the mid', ("json",)),
        ("<think>\nhm\n</think>\nForty-two.", ("reasoning",)),
        (f"<think>hm</think>\n```\n{CODE}```", ("code", "reasoning")),
        ("For example:\nthis is a list, and what it holds;\nis words.", ("prose",)),
        ("", ("prose",)),
        ("[see above]", ("prose",)),
    ],
)
def test_an_answer_is_sliced_by_what_it_holds(answer: str, expected: tuple[str, ...]) -> None:
    assert content_slices(answer) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ENGLISH, ("english",)),
        (FRENCH, ("latin",)),
        ("Das ist ein Satz, der auf Deutsch geschrieben wurde, und noch einer, damit er lang genug ist.", ("latin",)),
        ("Функция читает файл и возвращает строки.", ("cyrillic",)),
        ("この関数はファイルを読み、行を返します。", ("cjk",)),
        ("이 함수는 파일을 읽습니다", ("cjk",)),
        ("دالة تقرأ الملف وتعيد الأسطر", ("arabic",)),
        ("Перевод: " + ENGLISH + " Функция читает файл и возвращает строки.", ("cyrillic", "english")),
        ("1234 !?", ()),
    ],
)  # fmt: skip
def test_languages(text: str, expected: tuple[str, ...]) -> None:
    assert languages(text) == expected


def test_context_bands() -> None:
    lengths = (0, 255, 256, 1023, 1024, 4095, 4096)
    bands = ["prompt<256"] * 2 + ["prompt 256-1k"] * 2 + ["prompt 1k-4k"] * 2 + ["prompt 4k+"]
    assert [context_band(n) for n in lengths] == bands


def test_what_was_asked_for_counts_as_well_as_the_answer(make_trace) -> None:
    tools = json.dumps({"tools": [{"type": "function", "function": {"name": "f"}}]})
    calls = Choice(0, [1], "", "tool_calls", '[{"function":{"name":"f","arguments":"{}"}}]')
    asked = json.dumps([{"role": "user", "content": ENGLISH}])
    called = make_trace(messages=asked, format=tools, choices=[calls], prompt_token_ids=[1] * 300)
    assert slices(called) == ("tool_call", "english", "prompt 256-1k")
    wanted = json.dumps({"response_format": {"type": "json_object"}})
    refused = make_trace(messages=asked, format=wanted, choices=[Choice(0, [1], "I cannot do that.", "stop")])
    assert slices(refused) == ("json", "english", "prompt<256")
    thought = json.dumps([{"role": "assistant", "content": "x", "reasoning_content": "because"}])
    assert "reasoning" in slices(make_trace(messages=thought))


@given(st.text(max_size=400), st.text(max_size=200), st.one_of(st.none(), st.text(max_size=50)))
@settings(max_examples=200, deadline=None)
def test_no_text_is_too_odd(make_trace, answer: str, messages: str, format_: str | None) -> None:
    trace = make_trace(messages=messages, format=format_, choices=[Choice(0, [1], answer, None)])
    found = slices(trace)
    assert len(set(found)) == len(found)
    assert found[-1] == "prompt<256"
