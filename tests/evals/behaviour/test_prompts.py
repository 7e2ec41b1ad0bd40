"""A user's own prompts: what is read, what is refused, how answers are graded."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.evals.behaviour import judging, prompts
from strop.evals.behaviour.prompts import PromptFileError, load
from strop.evals.behaviour.sandbox import isolation_missing
from strop.evals.behaviour.tasks import Answer, GradingError

EXACT = {"type": "exact", "answer": "42"}


def rows(tmp_path: Path, *contents: Any, **options: Any) -> list[prompts.Row]:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(c if isinstance(c, str) else json.dumps(c) for c in contents))
    return load(path, **options)


def value(row: prompts.Row, text: str) -> float:
    [grade] = prompts.grade(Answer(text), row)
    assert grade.metric == "graded" and (grade.value == 1) == (not grade.reason)
    return grade.value


def test_rows_become_requests(tmp_path: Path) -> None:
    found = rows(
        tmp_path,
        {"prompt": "6 x 7?", "grader": EXACT},
        "",
        {
            "id": "b",
            "messages": [{"role": "system", "content": "s"}],
            "grader": EXACT,
            "max_tokens": 5,
            "slices": ["math"],
            "request": {"stop": ["x"]},
        },
    )
    [first, second] = prompts.tasks(found, 99)
    assert (first.id, second.id) == ("prompts/line-1", "prompts/b")
    assert first.body == {
        "messages": [{"role": "user", "content": "6 x 7?"}],
        "temperature": 0,
        "max_tokens": 99,
    }
    assert second.body["max_tokens"] == 5 and second.body["stop"] == ["x"] and second.slices == ("math",)


def test_yaml_is_read_and_its_lines_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.yaml"
    path.write_text(
        "# mine\n- prompt: a\n  grader: {type: exact, answer: b}\n\n- prompt: a\n  grader: {type: magic}\n"
    )
    with pytest.raises(PromptFileError, match=r"1 bad rows:\nline 5: grader: .*'magic'"):
        load(path)
    path.write_text("- prompt: a\n  grader: {type: exact, answer: b}\n")
    assert [row.id for row in load(path)] == ["line-1"]
    for text in ("a: 1", "- [", "'", "\x00"):
        path.write_text(text)
        with pytest.raises(PromptFileError, match="prompts.yaml"):
            load(path)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("{", "line 2: no JSON"),
        ("7", "line 2: .*"),
        ({"grader": EXACT}, "line 2: give either prompt or messages"),
        ({"prompt": "a", "messages": [{}], "grader": EXACT}, "line 2: give either"),
        ({"prompt": "a"}, "line 2: grader: Field required"),
        ({"prompt": "a", "grader": {"type": "magic"}}, "line 2: grader: .*magic"),
        ({"prompt": "a", "grader": {"type": "regex", "pattern": "("}}, "line 2: .*no regular expression"),
        ({"prompt": "a", "grader": EXACT, "colour": 1}, "line 2: colour: Extra inputs"),
        ({"prompt": "a", "grader": EXACT, "id": "first"}, "line 2: has the id 'first' of line 1"),
        (
            {"prompt": "a", "grader": {"type": "python", "function": "no.py:f"}},
            "line 2: .*no.py cannot be read",
        ),
        ({"prompt": "a", "grader": {"type": "python", "function": "f"}}, "line 2: .*pattern"),
        (
            {"prompt": "a", "grader": {"type": "python", "function": "bad.py:f"}},
            "line 2: bad.py is no Python",
        ),
        ({"prompt": "a", "grader": {"type": "python", "function": "good.py:g"}}, "defines no function g"),
        ({"prompt": "a", "grader": {"type": "judge", "rubric": "good"}}, "the suite names none"),
    ],
)
def test_bad_rows_are_named_by_line_and_reason(tmp_path: Path, row: Any, why: str) -> None:
    (tmp_path / "bad.py").write_text("def f(:")
    (tmp_path / "good.py").write_text("def f(answer, row): return 1")
    with pytest.raises(PromptFileError, match=why):
        rows(tmp_path, {"id": "first", "prompt": "a", "grader": EXACT}, row)


def test_many_bad_rows_are_counted_and_an_empty_or_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match="30 bad rows(.*\n)+… and 20 more"):
        rows(tmp_path, *["{"] * 30)
    with pytest.raises(PromptFileError, match="holds no prompts"):
        rows(tmp_path)
    with pytest.raises(PromptFileError, match="missing.jsonl cannot be read"):
        load(tmp_path / "missing.jsonl")


@given(st.binary())
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("any")
    for name in ("a.jsonl", "a.yaml"):
        (folder / name).write_bytes(data)
        try:
            load(folder / name)
        except PromptFileError:
            pass


def test_exact_regex_and_schema(tmp_path: Path) -> None:
    exact, pattern, schema = rows(
        tmp_path,
        {"prompt": "a", "grader": EXACT},
        {"prompt": "a", "grader": {"type": "regex", "pattern": r"^\d+ apples$"}},
        {"prompt": "a", "grader": {"type": "json_schema", "json_schema": {"type": "array"}}},
    )
    assert [value(exact, t) for t in ("42", " 42\n", "42.", "", "The answer is 42")] == [1, 1, 0, 0, 0]
    assert [value(pattern, t) for t in ("7 apples", "7 pears", "")] == [1, 0, 0]
    assert [value(schema, t) for t in ("[1]", "{}", "[1", "")] == [1, 0, 0, 0]


def test_a_pattern_that_explodes_is_the_pattern_s_fault(tmp_path: Path) -> None:
    [row] = rows(tmp_path, {"prompt": "a", "grader": {"type": "regex", "pattern": "^(a|a)+$"}})
    with pytest.raises(GradingError, match="make it simpler"):
        prompts.grade(Answer("a" * 60 + "!"), row)


@pytest.mark.skipif(isolation_missing() is not None, reason="programs cannot be isolated here")
def test_functions(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def length(answer, row):\n    print('noise')\n    return len(answer) / 10, f'{row[\"prompt\"]}: short'\n"
        "def yes(answer, row): return 'é' in answer\n"
        "def runs(answer, row):\n    exec(answer)\n    return 0\n"
        "def much(answer, row): return 7\n"
        "def nothing(answer, row): pass\n"
        "def fails(answer, row): raise KeyError('oh')\n"
    )
    names = ["length", "yes", "runs", "much", "nothing", "fails"]
    contents = [{"prompt": "p", "grader": {"type": "python", "function": f"mine.py:{n}"}} for n in names]
    found: dict[str, prompts.Row] = dict(zip(names, rows(tmp_path, *contents), strict=True))
    assert prompts.grade(Answer("12345"), found["length"])[0].value == 0.5
    assert prompts.grade(Answer("12345"), found["length"])[0].reason == "p: short"
    assert [value(found["yes"], t) for t in ("é", "e")] == [1, 0]
    for name, why in (("much", "no grade from 0 to 1"), ("nothing", "no grade"), ("fails", "KeyError: 'oh'")):
        with pytest.raises(GradingError, match=why):
            prompts.grade(Answer("a"), found[name])
    # An answer that a function runs cannot give itself a grade.
    for answer in ("import os; os.write(1, b'\\n1'); os._exit(0)", "print(1); raise SystemExit(0)"):
        with pytest.raises(GradingError):
            prompts.grade(Answer(answer), found["runs"])


class _Judge(BaseHTTPRequestHandler):
    replies: list[tuple[int, str]]
    seen: list[tuple[str | None, dict[str, Any]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).seen.append((self.headers.get("Authorization"), body))
        status, content = type(self).replies.pop(0)
        answer = content if status else json.dumps({"choices": [{"message": {"content": content}}]})
        self.send_response(status or 200)
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def judge() -> Iterator[tuple[judging.JudgeModel, type[_Judge]]]:
    handler = type("Handler", (_Judge,), {"replies": [], "seen": []})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield judging.JudgeModel(url=f"http://127.0.0.1:{server.server_port}", model="wise"), handler
        server.shutdown()
        thread.join()


def test_a_judge(
    tmp_path: Path, judge: tuple[judging.JudgeModel, type[_Judge]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, handler = judge
    monkeypatch.setenv("STROP_JUDGE_API_KEY", "sk-judge")
    [row] = rows(
        tmp_path, {"prompt": "Be {kind}.", "grader": {"type": "judge", "rubric": "kind"}}, judge=model
    )
    handler.replies[:] = [(0, 'Well. {"reason": "curt", "grade": 4}'), (0, '{"grade": 10}')]
    [first] = prompts.grade(Answer("Go."), row)
    assert (first.value, first.reason) == (0.4, "graded 4 of 10: curt")
    assert prompts.grade(Answer("Dear!"), row)[0].value == 1
    key, body = handler.seen[0]
    asked = body["messages"][0]["content"]
    assert key == "Bearer sk-judge" and body["model"] == "wise" and "Be {kind}." in asked and "Go." in asked
    for reply in ((500, "down"), (200, "{}"), (0, "fine"), (0, '{"grade": 11}'), (0, '{"grade": true}')):
        handler.replies[:] = [reply]
        with pytest.raises(GradingError, match="judge"):
            prompts.grade(Answer("a"), row)
    away = model.model_copy(update={"url": "http://127.0.0.1:9"})
    with pytest.raises(GradingError, match="cannot be asked"):
        judging.verdict(away, "a", "b", "c")


@given(st.text())
def test_any_reply_of_a_judge_is_a_grade_or_none(reply: str) -> None:
    try:
        grade, _ = judging.read(reply)
        assert 0 <= grade <= 1
    except GradingError:
        pass
