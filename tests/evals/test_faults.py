"""Each fault on answers that have it, and on those that only look as if they had."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.evals.faults import (
    PASSAGE_TOKENS,
    Said,
    faults,
    garbage,
    lone_surrogates,
    open_brackets,
    open_fence,
    scripts,
    stuck,
)
from strop.serving.client import Outcome
from strop.serving.quality import LOOP_TIMES, LOOP_TOKENS, find_loop, find_loops

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me about it."}], "max_tokens": 512}


def outcome(text: str = "An answer.", **changes: Any) -> Outcome:
    fields: dict[str, Any] = {
        "request_id": "r", "session": "s", "status": 200, "error": None, "stack": None, "started_s": 0.0, "ttft_s": 0.1,
        "e2e_s": 0.2, "inter_token_s": [], "prompt_tokens": 4, "cached_tokens": None,
        "output_tokens": max(1, len(text) // 4), "text": text, "token_ids": None, "prompt_token_ids": [1],
        "logprobs": None, "tool_calls": [], "finish_reason": "stop", "speculation": None,
    }  # fmt: skip
    return Outcome(**{**fields, **changes})


def kinds(
    text: str = "An answer.", body: dict[str, Any] = CHAT, others: list[Said] | None = None, **changes: Any
) -> list[str]:
    return [fault.kind for fault in faults(body, outcome(text, **changes), others or [])]


def call(arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "read", "arguments": arguments}}


def test_a_plain_answer_has_no_fault() -> None:
    assert kinds() == []
    assert kinds("", tool_calls=[call('{"a": 1}')], finish_reason="tool_calls") == []


def test_what_failed_or_broke_off_has_no_other_fault() -> None:
    assert kinds("", error="HTTP 500: no", status=500) == ["error"]
    assert kinds("```", error="truncated: the stream ended without [DONE]") == ["truncated"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"text": " \n"}, ["empty"]),
        ({"finish_reason": "length", "output_tokens": 512}, []),
        ({"finish_reason": "length", "output_tokens": 100}, ["truncated"]),
        ({"finish_reason": "abort"}, ["truncated"]),
    ],
)
def test_empty_and_truncated(changes: dict[str, Any], expected: list[str]) -> None:
    assert kinds(**changes) == expected


# -- loops ----------------------------------------------------------------------------------

distinct = st.lists(st.integers(100, 10_000), min_size=1, max_size=40, unique=True)
passages = distinct


@given(st.lists(st.integers(0, 99), max_size=60), passages, st.integers(0, 5))
def test_a_planted_loop_is_found_with_its_period_and_start(
    before: list[int], passage: list[int], more: int
) -> None:
    times = max(LOOP_TIMES, -(-LOOP_TOKENS // len(passage))) + more
    ids = before + passage * times
    loop = stuck(ids, "length")
    assert loop is not None
    # A prefix that ends as the passage does would begin the loop earlier; these have no token in common.
    assert (loop.start, loop.period, loop.tokens) == (len(before), len(passage), len(passage) * times)


@given(st.lists(st.integers(0, 99), max_size=60), passages)
def test_an_answer_that_left_a_repetition_is_judged_by_what_it_repeated(
    before: list[int], passage: list[int]
) -> None:
    times = max(LOOP_TIMES, -(-LOOP_TOKENS // len(passage)))
    ids = [*before, *passage * times, *range(20_000, 20_030)]
    assert (stuck(ids, "stop") is not None) == (len(passage) >= PASSAGE_TOKENS)


@given(st.lists(st.integers(0, 50_000), max_size=800), st.sampled_from(["stop", "length"]))
def test_random_tokens_are_no_loop(ids: list[int], finish: str) -> None:
    loop = stuck(ids, finish)
    # Hypothesis likes lists of one value: what is called a loop has to repeat.
    if loop is not None:
        stretch = ids[loop.start : loop.start + loop.tokens]
        assert stretch[loop.period :] == stretch[: -loop.period]
        assert len(stretch) >= max(LOOP_TOKENS, LOOP_TIMES * loop.period)
    if len(set(ids)) == len(ids):
        assert loop is None


def tokens_of(text: str) -> list[int]:
    """Words, numbers and signs as tokens."""
    import re

    words = re.findall(r"\w+|[^\w\s]|\n| +", text)
    numbers = {word: n for n, word in enumerate(dict.fromkeys(words))}
    return [numbers[word] for word in words]


LEGITIMATE = {
    "matrix of zeros": "[\n" + "  [0, 0, 0, 0, 0, 0, 0, 0],\n" * 12 + "]\nThat is the matrix.",
    "empty table": "| a | b | c |\n|---|---|---|\n" + "|   |   |   |\n" * 20 + "Fill it in.",
    "numbered table": "".join(f"| {n} | item {n} | {n * n} |\n" for n in range(60)),
    "rule": "Title\n" + "=" * 79 + "\nText",
    "assertions": "".join(f"    self.assertEqual(square({n}), {n * n})\n" for n in range(40)),
    "getters": "".join(f"    def get_{n}(self):\n        return self._{n}\n\n" for n in "abcdefghijklmnopq"),
    "html": "<tr>" + "<td></td>" * 20 + "</tr>\nThat is a row.",
    "imports": "".join(f"from package.module_{n} import Class{n}\n" for n in range(30)),
}


@pytest.mark.parametrize("name", LEGITIMATE)
def test_code_and_tables_that_repeat_are_no_loops(name: str) -> None:
    assert stuck(tokens_of(LEGITIMATE[name]), "stop") is None


@pytest.mark.parametrize(
    "text", ["I am sorry. ", "0, ", "the cat sat on the mat and then it went home again. "]
)
def test_what_repeats_until_it_is_cut_off_is_a_loop(text: str) -> None:
    ids = tokens_of("Here you are: " + text * 60)
    loop = stuck(ids, "length")
    assert loop is not None and loop.period == len(tokens_of(text * 2)) // 2
    found = faults(CHAT, outcome("x", token_ids=ids, finish_reason="length", output_tokens=512), [])
    assert [f.kind for f in found] == ["loop"]
    assert f"from token {loop.start} on" in found[0].detail and f"period {loop.period} " in found[0].detail


def test_without_token_ids_words_are_looked_at() -> None:
    text = "Well. " + "one two three four five six seven eight nine ten. " * 8
    (fault,) = faults(CHAT, outcome(text, output_tokens=512, finish_reason="length"), [])
    assert fault.kind == "loop" and "from word 1 on" in fault.detail and "period 10" in fault.detail


@given(st.lists(st.integers(0, 3), max_size=200))
def test_the_first_loop_found_is_the_one_of_all(ids: list[int]) -> None:
    loops = list(find_loops(ids))
    assert find_loop(ids) == (loops[0] if loops else None)
    for loop in loops:
        stretch = ids[loop.start : loop.start + loop.tokens]
        assert stretch[loop.period :] == stretch[: -loop.period]


# -- stops ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        ("```python\nprint(1)\n```", False),
        ("```python\nprint(1)\n", True),
        ("Use ```inline``` code", False),
        ("```` md\n```\nx\n```\n````", False),
        ("```` md\n```\nx\n```", True),
        ("~~~\n```\n~~~", False),
        ("1. Do\n   ```sh\n   ls\n   ```\n2. Done", False),
        ("1. Do\n   ```sh\n   ls", True),
        ("> ```\n> x\n> ```", False),
        ("```\na ``` b\n```", False),
        ("", False),
    ],
)
def test_open_fences(text: str, is_open: bool) -> None:
    assert open_fence(text) is is_open
    assert kinds(text or "x") == (["premature_stop"] if is_open else [])
    # A client's own stop string may be what ended it.
    assert kinds(text or "x", {**CHAT, "stop": ["```"]}) == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(json_values)
def test_whole_json_leaves_nothing_open_and_every_cut_of_an_object_does(value: Any) -> None:
    for ascii_ in (True, False):
        text = json.dumps({"value": value}, ensure_ascii=ascii_)
        assert open_brackets(text) == 0
        assert all(open_brackets(text[:cut]) > 0 for cut in range(1, len(text)))


def test_json_and_tool_calls_that_end_inside_are_premature() -> None:
    wanted = {**CHAT, "response_format": {"type": "json_object"}}
    assert kinds('{"a": [1, 2', wanted) == ["premature_stop"]
    assert kinds('{"a": "}', wanted) == ["premature_stop"]
    assert kinds('{"a": [1, 2]}', wanted) == []
    assert kinds('{"a": [1, 2', wanted, finish_reason="length", output_tokens=512) == []
    assert kinds("He said {", CHAT) == []
    assert kinds("", tool_calls=[call('{"path": "a')], finish_reason="tool_calls") == ["premature_stop"]


@pytest.mark.parametrize(
    ("tokens", "others", "premature"),
    [
        (10, [(200, True)], True),
        (10, [(200, True), (300, True)], True),
        (10, [(200, True), (20, True)], False),
        (10, [(200, False)], False),
        (10, [(41, True)], False),
        (60, [(200, True)], False),
        (10, [], False),
    ],
)
def test_far_shorter_than_all_others(tokens: int, others: list[tuple[int, bool]], premature: bool) -> None:
    answers = [Said("An answer.", n, by_itself) for n, by_itself in others]
    assert kinds(output_tokens=tokens, others=answers) == (["premature_stop"] if premature else [])


# -- characters -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sign"),
    [
        ("a \ufffd b", "U+FFFD"),
        ("a\x00b", "U+0000"),
        ("a\x9bb", "U+009B"),
        ("a\ufffeb", "U+FFFE"),
        ("Je suis allÃ© au cafÃ© hier", "Latin-1"),
        ("It’s “fine” — really".encode().decode("cp1252", errors="ignore") + " donâ€™t", "Latin-1"),
        ("Привет, мир".encode().decode("latin-1"), "U+009F"),
    ],
)
def test_garbage(text: str, sign: str) -> None:
    assert any(sign in found for found in garbage(text, "asked"))
    assert not list(garbage(text, f"Why does it say {text}?"))


@pytest.mark.parametrize(
    "text",
    [
        "Déjà vu à l'École, « où » ça ? CAFÉ” et “CAFÉ”",
        "Größe: 5 µm ± 2 °C, ½ Äpfel – Öl; TÄ”",
        "Привет, мир! Ελληνικά 你好,世界 こんにちは 한국어 שלום مرحبا हिन्दी ไทย",
        "naïve café, São Paulo, Ångström, Œuvre, Ñandú ¿Qué? ¡No!",
        "👩‍👩‍👧 🇩🇪 ✓ → ∑ √ “quotes” — dash… \u200b\ufeff zero width",
        "col\tcol\r\npage\x0c break",
        "| Â |",
    ],
)
def test_odd_text_is_not_garbage(text: str) -> None:
    assert not list(garbage(text, ""))


@given(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Cn"], exclude_characters="\ufffd"))
)
def test_garbage_is_rarely_seen_in_real_characters_and_never_fails(text: str) -> None:
    found = list(garbage(text, ""))
    assert all("Latin-1" in sign for sign in found)


def test_half_a_character_at_the_cut_is_not_garbage() -> None:
    assert kinds("emoji \ufffd", finish_reason="length", output_tokens=512) == []
    assert kinds("emoji \ufffd") == ["garbage"]


@pytest.mark.parametrize(
    ("text", "places"),
    [
        (r'"\ud83d\ude00"', []),
        (r'"\ud83d"', [1]),
        (r'"\ude00\ud83d"', [1, 7]),
        (r'"\\ud83d"', []),
        (r'"\\\ud83d"', [3]),
        (r'"\u00e9 \n"', []),
    ],
)
def test_halves_of_surrogate_pairs(text: str, places: list[int]) -> None:
    assert lone_surrogates(text) == places
    wanted = {**CHAT, "response_format": {"type": "json_object"}}
    assert kinds(text, wanted) == (["garbage"] if places else [])
    assert kinds(text) == []


# -- languages ------------------------------------------------------------------------------

RUSSIAN = "Конечно, вот краткий ответ на ваш вопрос."
CHINESE = "当然可以,这是对您问题的简短回答,希望有帮助。"
ENGLISH = "Of course, here is a short answer to your question."


@pytest.mark.parametrize(
    ("asked", "answer", "other", "switched"),
    [
        ("What is it?", CHINESE, ENGLISH, True),
        ("What is it?", f"{ENGLISH} {RUSSIAN}", ENGLISH, True),
        ("Что это?", ENGLISH, RUSSIAN, True),
        ("Translate into Russian: hello", RUSSIAN, RUSSIAN, False),
        ("Translate to English: привет", ENGLISH, ENGLISH, False),
        ("What is it?", "The angle α and the sum Σ of β are π.", ENGLISH, False),
        ("What is it?", "```python\nтекст = 'вот краткий ответ'\n```\nIt prints.", ENGLISH, False),
        ("你好吗", "日本語でお答えします。これは短い答えです。", CHINESE, False),
        ("1 + 1 = ?", CHINESE, "2", False),
        ("这是什么?", "```python\nprint('a long piece of code')\n```", CHINESE, False),
        ("这是什么?", f"{CHINESE} 请使用 Python 的 print 函数。", CHINESE, False),
    ],
)
def test_language_switches(asked: str, answer: str, other: str, switched: bool) -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": asked}]}
    found = kinds(answer, body, [Said(other, len(answer) // 4, True)])
    assert found == (["language_switch"] if switched else [])


def test_scripts_count_letters_of_prose() -> None:
    assert scripts("ab c `дд` https://пример.рф <b> 12") == {"LATIN": 2}
    assert scripts("日本語 한국 ｆｕｌｌ") == {"CJK": 3, "HANGUL": 2, "LATIN": 4}


@given(st.text(max_size=80), st.text(max_size=80), st.text(max_size=80), st.text(max_size=40))
def test_whatever_is_said_is_read(text: str, asked: str, other: str, arguments: str) -> None:
    body = {"messages": [{"role": "user", "content": asked}, {"content": [asked]}, asked], "tools": [asked]}
    faults(body, outcome(text, tool_calls=[call(arguments)]), [Said(other, 5, True)])
    faults({"prompt": asked, "response_format": asked}, outcome(text), [])
