"""The built-in workload is stable, real and bounded; request files are read or refused by line."""

import ast
import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.serving.client import Outcome
from strop.serving.sessions import MAX_LINE_BYTES, Session, Turn, WorkloadError, load_jsonl, spoken
from strop.serving.source_code import EXCERPT_TOKENS, MODULES, estimate_tokens, modules
from strop.serving.workload import FORMATS, KINDS, MAX_TOKENS, SYSTEM, TOOLS, code_assistant


def answer(text: str, **fields: Any) -> Outcome:
    values: dict[str, Any] = dict.fromkeys(Outcome.__dataclass_fields__)
    return Outcome(**{**values, "text": text, "tool_calls": [], **fields})


def play(session: Session, said: str = "Fine.") -> list[dict[str, Any]]:
    return [session.request(turn, [answer(said)] * turn).body for turn in range(len(session.turns))]


def test_the_seed_decides_everything() -> None:
    assert list(code_assistant(3, 20, "m")) == list(code_assistant(3, 20, "m"))
    assert list(code_assistant(3, 20, "m")) == list(code_assistant(3, 30, "m"))[:20]
    assert list(code_assistant(3, 20, "m")) != list(code_assistant(4, 20, "m"))


def test_the_hash_seed_of_the_process_does_not() -> None:
    code = (
        "from strop.serving.workload import code_assistant; import hashlib;"
        "print(hashlib.sha256(repr(list(code_assistant(1, 30, 'm'))).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1 and digests.pop().strip()


def test_excerpts_are_whole_code_of_the_wanted_length() -> None:
    assert len({module.name for module in modules()}) == MODULES
    for module in modules():
        assert EXCERPT_TOKENS.start - 5 <= estimate_tokens(module.excerpt) <= EXCERPT_TOKENS.stop + 5
        ast.parse(module.excerpt)
        for function in (*module.shown, *module.others):
            (definition,) = ast.parse(function.code).body
            assert isinstance(definition, ast.FunctionDef)
            assert definition.name == function.name.split(".")[-1]
        shown = {function.code.splitlines()[-1].strip() for function in module.shown}
        assert all(line in module.excerpt for line in shown)


def test_sessions_on_one_module_share_their_prefix() -> None:
    by_system: dict[str, int] = {}
    for session in code_assistant(0, 200, "m"):
        system, user = session.request(0).body["messages"]
        assert (system["role"], user["role"]) == ("system", "user")
        by_system[system["content"]] = by_system.get(system["content"], 0) + 1
    assert MODULES // 2 <= len(by_system) <= MODULES
    assert max(by_system.values()) > 200 / MODULES * 3
    shared = SYSTEM.split("{name}")[0]
    assert estimate_tokens(shared) > 200
    assert all(system.startswith(shared) for system in by_system)


def test_each_turn_continues_the_one_before() -> None:
    for session in code_assistant(1, 50, "m"):
        bodies = play(session)
        for before, after in pairwise(bodies):
            said = {"role": "assistant", "content": "Fine."}
            assert after["messages"][: len(before["messages"]) + 1] == [*before["messages"], said]
            assert after["messages"][-1]["role"] == "user"


def test_the_mix_is_as_declared() -> None:
    turns = [turn for session in code_assistant(0, 1500, "m") for turn in session.turns]
    assert 2.5 * 1500 < len(turns) < 3.1 * 1500
    for kind, share in KINDS.items():
        assert sum(turn.kind == kind for turn in turns) / len(turns) == pytest.approx(share, abs=0.02)
    sampled = [turn for turn in turns if turn.options["temperature"] > 0]
    assert len(sampled) / len(turns) == pytest.approx(0.15, abs=0.02)
    assert all("seed" in turn.options for turn in sampled)
    assert all(64 <= turn.options["max_tokens"] == MAX_TOKENS[turn.kind] <= 192 for turn in turns)
    asked = [turn.messages[-1]["content"] for turn in turns]
    assert len(set(asked)) > 0.6 * len(asked)


@pytest.mark.parametrize("limit", [1200, 2048])
def test_prompts_stay_within_the_limit(limit: int) -> None:
    for session in code_assistant(2, 100, "m", max_prompt_tokens=limit):
        assert session.turns
        worst = 0
        for turn in session.turns:
            worst += sum(estimate_tokens(message["content"]) for message in turn.messages)
            if turn is not session.turns[0]:
                assert worst <= limit + len(session.turns)
            worst += turn.options["max_tokens"]


def bounded(schema: dict[str, Any]) -> bool:
    if schema["type"] == "object":
        return not schema["additionalProperties"] and all(map(bounded, schema["properties"].values()))
    if schema["type"] == "array":
        return "maxItems" in schema and bounded(schema["items"])
    return schema["type"] != "string" or "maxLength" in schema or "enum" in schema


def largest(schema: dict[str, Any]) -> Any:
    if schema["type"] == "object":
        return {name: largest(inner) for name, inner in schema["properties"].items()}
    if schema["type"] == "array":
        return [largest(schema["items"])] * schema["maxItems"]
    if "enum" in schema:
        return max(schema["enum"], key=len)
    return {"string": "x" * schema.get("maxLength", 0), "integer": 9999, "boolean": False}[schema["type"]]


@pytest.mark.parametrize(
    ("schema", "max_tokens"),
    [(schema, MAX_TOKENS["json"]) for schema in FORMATS.values()]
    + [(tool["function"]["parameters"], MAX_TOKENS["tools"]) for tool in TOOLS.values()],
)
def test_every_schema_is_valid_and_its_largest_answer_fits(schema: dict[str, Any], max_tokens: int) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    assert bounded(schema)
    jsonschema.validate(largest(schema), schema)
    assert estimate_tokens(json.dumps(largest(schema))) <= max_tokens


def test_structured_turns_carry_what_they_need() -> None:
    seen = set()
    for session in code_assistant(5, 200, "m"):
        for body, turn in zip(play(session), session.turns, strict=True):
            if turn.kind == "json":
                assert body["response_format"]["json_schema"]["schema"] in FORMATS.values()
            if turn.kind == "tools":
                named = body["tool_choice"]["function"]["name"]
                assert named in {tool["function"]["name"] for tool in body["tools"]}
                assert named in turn.messages[-1]["content"]
            seen.add(turn.kind)
    assert seen == set(KINDS)


def test_an_edit_names_an_argument_that_is_there() -> None:
    for session in code_assistant(6, 300, "m"):
        shown = ""
        for turn in session.turns:
            shown += "".join(message["content"] for message in turn.messages)
            if turn.kind == "edit":
                asked = turn.messages[-1]["content"].split("```")[-1]
                (old,) = re.findall(r"(?:argument|rename) `(\w+)`", asked, re.IGNORECASE)
                (new,) = re.findall(r"(?:to|becomes) `(\w+)`", asked)
                assert old != new and re.search(rf"def .*\b{old}\b", shown, re.DOTALL)


def test_tool_calls_are_told_to_the_next_turn() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": '{"query": "x"}'}}
    assert json.loads(spoken(answer("", tool_calls=[call])))["name"] == "search"
    assert spoken(answer("plain")) == "plain"


def test_a_turn_needs_the_answers_before_it() -> None:
    session = next(iter(code_assistant(0, 1, "m")))
    with pytest.raises(ValueError, match="needs 1 answers"):
        session.request(1)


CHAT = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}


def write(path: Path, *lines: Any) -> Path:
    data = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    path.write_bytes(b"".join(line + b"\n" for line in data))
    return path


def test_request_files_of_both_shapes(tmp_path: Path) -> None:
    batch = {
        "custom_id": "c",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {**CHAT, "model": "n"},
    }
    completion = {"custom_id": "d", "url": "/v1/completions", "body": {"prompt": "once", "max_tokens": 3}}
    shape = {**CHAT, "response_format": {"type": "json_object"}, "session": "s"}
    path = write(
        tmp_path / "r.jsonl", CHAT, b"", batch, completion, shape, {**CHAT, "session": "s", "tools": [{}]}
    )
    plain, batched, completed, grouped = load_jsonl(path)
    assert plain.request(0).body == CHAT and plain.turns[0].kind == "chat"
    assert batched.id == "c" and batched.request(0).body["model"] == "n"
    assert completed.request(0).endpoint == "completions"
    assert completed.request(0).body == {"prompt": "once", "max_tokens": 3}
    assert grouped.id == "s" and [turn.kind for turn in grouped.turns] == ["json", "tools"]
    assert grouped.request(1, [answer("ignored")]).body["messages"] == CHAT["messages"]
    assert all(s.turns[0].options["model"] == "served" for s in load_jsonl(path, model="served"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"messages": [', "not JSON"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "not JSON"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not JSON"),
        (b"[1]", "a JSON list where an object"),
        ({"prompt": 3}, '"prompt" is missing or not text'),
        ({}, '"messages" is missing'),
        ({"messages": []}, '"messages" is missing'),
        ({"messages": ["hi"]}, "not an object with a"),
        ({**CHAT, "session": 7}, '"session" is not a string'),
        ({**CHAT, "response_format": "json"}, '"response_format"'),
        ({"custom_id": "c", "url": "/v1/embeddings", "body": {}}, "/v1/embeddings"),
        ({"custom_id": "c", "body": []}, '"body" is not an object'),
        ({"custom_id": "first", "body": CHAT}, '"first" appears twice'),
        (b" " * (MAX_LINE_BYTES + 5), "longer than 16 MiB"),
    ],
)
def test_a_bad_line_is_named_or_left_out(tmp_path: Path, line: Any, reason: str) -> None:
    path = write(tmp_path / "r.jsonl", {"custom_id": "first", "body": CHAT}, line, CHAT)
    with pytest.raises(WorkloadError, match="line 2") as caught:
        load_jsonl(path)
    assert reason in str(caught.value) and str(path) in str(caught.value)
    bad: list[WorkloadError] = []
    assert len(load_jsonl(path, on_bad=bad.append)) == 2
    assert [str(error) for error in bad] == [str(caught.value)]


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="cannot be read: No such file"):
        load_jsonl(tmp_path / "absent.jsonl")
    with pytest.raises(WorkloadError, match="holds no request"):
        load_jsonl(write(tmp_path / "empty.jsonl"))


@given(st.lists(st.binary(max_size=60), max_size=6))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    path = write(tmp_path_factory.mktemp("any") / "r.jsonl", CHAT, *lines)
    sessions = load_jsonl(path, on_bad=lambda _: None)
    assert all(isinstance(turn, Turn) for session in sessions for turn in session.turns)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from(
            ["messages", "session", "custom_id", "url", "body", "prompt", "response_format", "tools"]
        ),
        JSON | st.just(CHAT) | st.just(CHAT["messages"]),
    )
)
def test_any_object_becomes_a_sendable_request_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, record: dict[str, Any]
) -> None:
    path = write(tmp_path_factory.mktemp("any") / "r.jsonl", record)
    try:
        (session,) = load_jsonl(path, model="m")
    except WorkloadError:
        return
    body = session.request(0).body
    assert body["model"] == "m" and ("messages" in body or "prompt" in body)
