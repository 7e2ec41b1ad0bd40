import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from strop.pipelines import importing
from strop.pipelines.commands.traces import app
from strop.pipelines.importing import Imported, TraceImportError, import_file
from strop.serving.formats import BadRow, Exchange
from strop.serving.tokens import TokenizerError, Tokens
from strop.serving.traces import Trace, TraceStore

USER, ANSWER = {"role": "user", "content": "say hello"}, {"role": "assistant", "content": "hello world"}


@pytest.fixture(scope="module")
def tokens(tiny_model: Path) -> Tokens:
    return Tokens(str(tiny_model))


@pytest.fixture
def take(tmp_path: Path, tiny_model: Path):
    """Imports a file of the given lines into a home of its own."""

    def run(*lines: Any, name: str = "x.jsonl", kind: str = "auto") -> Imported:
        file = tmp_path / name
        file.write_text(
            "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        )
        return import_file(tmp_path / "home", file, kind, tiny_model, "acme")

    return run


def stored(tmp_path: Path) -> list[Trace]:
    return sorted(TraceStore(tmp_path / "home" / "traces").scan(), key=lambda t: (t.started_at, t.request_id))


def test_token_ids_are_those_of_the_chat_template(tokens: Tokens, tiny_model: Path) -> None:
    prompt, answer = tokens.ids(Exchange([USER], ANSWER))
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    decoded = tokenizer.decode(prompt)
    assert decoded == "<|im_start|>user\nsay hello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(answer) == "hello world<|im_end|>"
    # As one text for the engine: nothing is merged across the border.
    whole = tokenizer(decoded + "hello world<|im_end|>", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(prompt + answer) == tokenizer.decode(whole)


def test_a_cut_answer_has_no_end_and_recorded_ids_are_taken(tokens: Tokens) -> None:
    end = tokens.tokenizer.eos_token_id
    assert tokens.ids(Exchange([USER], ANSWER, finish_reason="length"))[1][-1] != end
    assert tokens.ids(Exchange("say", ANSWER, prompt_token_ids=[1], output_token_ids=[2])) == ([1], [2])
    assert tokens.ids(Exchange("say", {"role": "assistant", "content": ""}))[1] == [end]


def test_tools_are_in_the_prompt(tokens: Tokens) -> None:
    tools = [{"type": "function", "function": {"name": "print"}}]
    prompt, _ = tokens.ids(Exchange([USER], ANSWER, format={"tools": tools}))
    assert "print" in tokens.tokenizer.decode(prompt)


def test_arguments_that_are_not_json_are_a_bad_row(tokens: Tokens) -> None:
    call = {"function": {"name": "f", "arguments": "{"}}
    with pytest.raises(BadRow, match="not JSON"):
        tokens.ids(Exchange([{**ANSWER, "tool_calls": [call]}, USER], ANSWER))


def test_an_import_and_the_same_again(take, tmp_path: Path) -> None:
    rows = [
        {"messages": [USER, ANSWER, {**USER, "content": "more"}, ANSWER]},
        "{broken",
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "id": "s7"},
        {"messages": [USER]},
        {"messages": [USER, ANSWER, {**USER, "content": "more"}, ANSWER]},
    ]
    first = take(*rows)
    assert (first.added, first.known, first.bad) == (3, 2, 2)
    assert set(first.reasons.values()) == {1} and first.set_aside
    kept = [json.loads(line) for line in first.set_aside.read_text().splitlines()]
    assert [row["reason"] for row in kept] == list(first.reasons)
    assert kept[1]["row"] == json.dumps(rows[3], separators=(",", ":"))
    traces = stored(tmp_path)
    assert [t.stack for t in traces] == ["imported-openai", "imported-openai", "imported-sharegpt"]
    assert {t.tenant for t in traces} == {"acme"}
    assert traces[0].session == traces[1].session != traces[2].session == "s7"
    assert [len(json.loads(t.messages)) for t in traces] == [1, 3, 1]
    assert all(t.prompt_token_ids and t.output_token_ids and t.status == 200 for t in traces)
    again = take(*rows)
    assert (again.added, again.known) == (0, 5)
    assert stored(tmp_path) == traces
    assert take(*rows, name="copy.jsonl").added == 0


def test_ranges_give_what_one_gives(take, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"messages": [{**USER, "content": f"number {n}"}, ANSWER]} for n in range(50)]
    monkeypatch.setattr(importing, "RANGE_BYTES", 700)
    assert take(*rows).added == 50
    asked = [json.loads(t.messages)[0]["content"] for t in stored(tmp_path)]
    assert asked == [f"number {n}" for n in range(50)]


def test_arrays_parquet_and_logs(take, tmp_path: Path, tiny_model: Path) -> None:
    rows = [
        {"conversation_hash": f"c{n}", "conversation": [{**USER, "content": str(n)}, ANSWER]}
        for n in range(3)
    ]
    assert take(json.dumps(rows), name="x.json").added == 3
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    found = import_file(tmp_path / "home", tmp_path / "x.parquet", "auto", tiny_model, "acme")
    assert (found.added, found.known, found.bad) == (0, 3, 0)
    log = [
        "DEBUG 03-01 Request cmpl-1 details: prompt: 'say', prompt_token_ids: [5, 6], prompt_embeds shape: None.",
        "INFO 03-01 Received request cmpl-1: params: SamplingParams(temperature=0.0), lora_request: None.",
        "INFO 03-01 Generated response cmpl-1: output: 'hello', finish_reason: stop",
    ]
    assert take(*log, name="vllm.log").added == 1
    (logged,) = (t for t in stored(tmp_path) if t.stack == "imported-vllm")
    assert (logged.endpoint, logged.prompt_token_ids) == ("completions", [5, 6])


def test_what_cannot_be_used_is_named(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(TraceImportError, match=r"nothing.jsonl cannot be read"):
        import_file(tmp_path, tmp_path / "nothing.jsonl", "auto", tiny_model, "t")
    with pytest.raises(TokenizerError, match="not a folder with a tokenizer"):
        import_file(tmp_path, tmp_path / "nothing.jsonl", "auto", tmp_path, "t")
    (tmp_path / "empty.jsonl").touch()
    assert import_file(tmp_path, tmp_path / "empty.jsonl", "auto", tiny_model, "t") == Imported(
        0, 0, 0, {}, None
    )


def test_the_command(
    strop_home: Path, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": [USER, ANSWER]}) + "\nbroken\n")
    arguments = ["import", "x.jsonl", "--model", str(tiny_model), "--tenant", "acme"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["added"], found["bad"]) == (1, 1) and Path(found["set_aside"]).exists()
    assert "1 were there" in CliRunner().invoke(app, arguments).stdout
    assert CliRunner().invoke(app, [*arguments, "--format", "xml"]).exit_code == 2
    assert [t.tenant for t in TraceStore(strop_home / "traces").scan()] == ["acme"]


@pytest.mark.slow
def test_ray_imports_what_this_process_imports(tmp_path: Path, tiny_model: Path, take) -> None:
    rows = [{"messages": [{**USER, "content": f"number {n}"}, ANSWER]} for n in range(200)]
    assert take(*rows, "broken").added == 200
    code = (
        "import sys; from pathlib import Path; from strop.pipelines import importing;"
        "importing.RANGE_BYTES = 1000; home, file, model = map(Path, sys.argv[1:]);"
        "found = importing.import_file(home, file, 'auto', model, 'acme');"
        "assert (found.added, found.bad) == (200, 1), found"
    )
    arguments = [str(path) for path in (tmp_path / "ray", tmp_path / "x.jsonl", tiny_model)]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, cwd=tmp_path)
    on_ray = sorted(t.request_id for t in TraceStore(tmp_path / "ray" / "traces").scan())
    assert on_ray == sorted(t.request_id for t in stored(tmp_path))
