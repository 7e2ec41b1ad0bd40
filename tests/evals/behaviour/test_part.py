"""The part end to end, against two played servers."""

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from strop.evals.behaviour import Behaviour, harness
from strop.evals.behaviour.part import FINDING_KINDS, KINDS, METRICS
from strop.evals.behaviour.sandbox import isolation_missing
from strop.evals.observation import Bench, EvalError, Finding, Observation, Side
from strop.serving.hardware import Hardware
from strop.serving.stack import Artifact, Engine, Stack

DATA = Path(__file__).parents[4] / "shared" / "data"
needs_data = pytest.mark.skipif(not (DATA / "HumanEval.jsonl.gz").is_file(), reason=f"{DATA} holds no data")

Reply = Callable[[dict[str, Any], bool], str | dict[str, Any] | int]
"""(Body, whether it is the candidate) -> text, message, or HTTP status of a failure."""


def stack(name: str, **args: str | int) -> Stack:
    return Stack(
        served_model=name,
        model=Artifact(location="/nowhere", files={"model.safetensors": name}),
        engine=Engine(version="vllm 0", dtype="float32", args={"max-model-len": 2048, **args}),
        hardware=Hardware(device="cpu", name="x", isa="avx2"),
    )


def bench(tmp_path: Path, reply: Reply, done: frozenset[str] = frozenset(), **args: str | int) -> Bench:
    async def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "new", "max_model_len": 1100}]})
        body = json.loads(request.content)
        assert request.headers["x-strop-tenant"] == "strop" and body["temperature"] == 0
        assert body["model"] == ("new" if request.url.host == "candidate" else "old")
        answer = reply(body, request.url.host == "candidate")
        if isinstance(answer, int):
            return httpx.Response(answer, json={"error": {"message": f"status {answer}"}})
        message = {"content": answer} if isinstance(answer, str) else answer
        choice = {"index": 0, "finish_reason": "stop"}
        if not body["stream"]:
            return httpx.Response(200, json={"choices": [{**choice, "message": message}]})
        chunk = json.dumps({"choices": [{**choice, "delta": message}]})
        return httpx.Response(200, text=f"data: {chunk}\n\ndata: [DONE]\n\n")

    return Bench(
        reference=Side("reference", stack("old", **args), "http://reference"),
        candidate=Side("candidate", stack("new", **args), "http://candidate"),
        traces=[],
        client=httpx.AsyncClient(transport=httpx.MockTransport(handle)),
        cache=tmp_path,
        progress=lambda done, text: None,
        done=done,
    )


async def _all(found: AsyncIterator[Observation | Finding]) -> list[Observation | Finding]:
    return [each async for each in found]


def observe(part: Behaviour, on: Bench) -> tuple[list[Observation], list[Finding]]:
    found = asyncio.run(_all(part.observe(on)))
    observations = [each for each in found if isinstance(each, Observation)]
    known = {metric.name for metric in part.metrics}
    assert {each.metric for each in observations} <= known
    return observations, [each for each in found if isinstance(each, Finding)]


def mean(observations: list[Observation], metric: str) -> tuple[float, float]:
    values = [(o.reference[0], o.candidate[0]) for o in observations if o.metric == metric and o.reference]
    assert values, metric
    return sum(r for r, _ in values) / len(values), sum(c for _, c in values) / len(values)


def test_every_metric_of_a_grade_has_a_kind_of_finding() -> None:
    assert FINDING_KINDS.keys() == {metric.name for metric in METRICS} - {"lm_eval"}


def test_the_better_side_shows_and_each_difference_is_a_finding(tmp_path: Path) -> None:
    def reply(body: dict[str, Any], candidate: bool) -> str:
        prompt = body["messages"][0]["content"]
        word = prompt.partition(" is ")[2].split(".")[0]
        return "no idea" if candidate else word

    part = Behaviour(kinds=("retrieval",), tasks=6, context_lengths=(300, 600, 5000))
    observations, findings = observe(part, bench(tmp_path, reply))
    assert mean(observations, "retrieval_right") == (1, 0)
    assert mean(observations, "error") == mean(observations, "refused") == (0, 0)
    slices = {name for each in observations for name in each.slices}
    assert {"retrieval", "300 tokens", "600 tokens", "depth 0%", "depth 50%", "depth 100%"} == slices
    assert len(findings) == 6 and {f.kind for f in findings} == {"not_found"}
    one = findings[0]
    assert (one.arm, one.answer, one.stack) == ("candidate", "no idea", stack("new").fingerprint)
    assert "no idea" in one.detail and one.other and one.body["model"] == "new"


def test_what_the_reference_got_wrong_is_a_finding_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a", "grader": {"type": "exact", "answer": "yes"}, "slices": ["mine"]}')
    part = Behaviour(kinds=(), prompts=path)
    observations, findings = observe(part, bench(tmp_path, lambda _, candidate: "yes" if candidate else "no"))
    assert mean(observations, "graded") == (0, 1)
    assert [(f.kind, f.arm, f.answer, f.other) for f in findings] == [
        ("graded_lower", "reference", "no", "yes")
    ]
    _, findings = observe(part, bench(tmp_path, lambda *_: "yes"))
    assert findings == []


def test_a_server_that_fails_is_an_observation_and_one_that_refuses_another(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a", "grader": {"type": "exact", "answer": "yes"}}')
    part = Behaviour(kinds=(), prompts=path)
    for status, metric, other in ((500, "error", "refused"), (400, "refused", "error")):

        def reply(_: Any, candidate: bool, status: int = status) -> str | int:
            return status if candidate else "yes"  # fmt: skip

        observations, findings = observe(part, bench(tmp_path, reply))
        assert mean(observations, metric) == (0, 1) and mean(observations, other) == (0, 0)
        assert {o.metric for o in observations} == {"error", "refused"}
        assert [(f.kind, f.arm, f.other) for f in findings] == [(metric, "candidate", "yes")]
        assert f"status {status}" in findings[0].detail


def test_what_is_done_is_not_asked_again(tmp_path: Path) -> None:
    asked: list[str] = []

    def reply(body: dict[str, Any], candidate: bool) -> str:
        asked.append(body["messages"][0]["content"])
        return "a"

    part = Behaviour(kinds=("instructions",), tasks=4)
    observations, _ = observe(part, bench(tmp_path, reply))
    ids = {each.request_id for each in observations}
    assert len(ids) == 4 and len(asked) == 8
    asked.clear()
    observations, _ = observe(part, bench(tmp_path, reply, done=frozenset(list(ids)[:3])))
    assert len(asked) == 2 and len({each.request_id for each in observations} & ids) == 1


def test_an_answer_that_cannot_be_graded_is_said_and_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a", "grader": {"type": "regex", "pattern": "^(a|aa)+$"}}')
    part = Behaviour(kinds=(), prompts=path)
    observations, findings = observe(part, bench(tmp_path, lambda *_: "a" * 60 + "!"))
    assert "graded" not in {o.metric for o in observations}
    assert [f.kind for f in findings] == ["not_graded", "not_graded"]


@needs_data
def test_programs_that_cannot_be_isolated_are_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strop.evals.behaviour.part.isolation_missing", lambda: "the kernel says no")
    said: list[str] = []
    on = replace(bench(tmp_path, lambda *_: "a"), progress=lambda done, text: said.append(text))
    assert observe(Behaviour(kinds=("coding",), data=DATA), on) == ([], [])
    assert any("coding is left out" in text and "the kernel says no" in text for text in said)


def test_closing_early_cancels_what_is_running(tmp_path: Path) -> None:
    hung = 0

    async def handle(request: httpx.Request) -> httpx.Response:
        nonlocal hung
        if hung < 4:
            hung += 1
            await asyncio.sleep(60)
        return httpx.Response(500)

    async def first() -> tuple[int, int]:
        client = httpx.AsyncClient(transport=httpx.MockTransport(handle))
        on = replace(bench(tmp_path, lambda *_: "a"), client=client)
        found = Behaviour(kinds=("instructions",), tasks=30, concurrency=4).observe(on)
        async with aclosing(found):
            async for _ in found:
                break
            before = len(asyncio.all_tasks())
        return before, len(asyncio.all_tasks())

    before, after = asyncio.run(first())
    assert before > 2 and after == 1


def test_missing_and_broken_data_is_named(tmp_path: Path) -> None:
    observations, _ = observe(Behaviour(tasks=1), bench(tmp_path, lambda *_: "a"))
    assert {o.slices[0] for o in observations} == {"instructions", "retrieval"}
    with pytest.raises(EvalError, match="holds no HumanEval.jsonl.gz"):
        observe(Behaviour(kinds=("coding",), data=tmp_path), bench(tmp_path, lambda *_: "a"))
    file = tmp_path / "HumanEval.jsonl.gz"
    for content, why in ((b"x", "cannot be read"), (gzip.compress(b"{}\n{"), "line 2"), (gzip.compress(b"7"), "no JSON object")):  # fmt: skip
        file.write_bytes(content)
        with pytest.raises(EvalError, match=why):
            observe(Behaviour(kinds=("coding",), data=tmp_path), bench(tmp_path, lambda *_: "a"))


@needs_data
@pytest.mark.skipif(isolation_missing() is not None, reason="programs cannot be isolated here")
def test_all_kinds_on_real_data(tmp_path: Path) -> None:
    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in gzip.decompress((DATA / name).read_bytes()).splitlines()]

    solutions = {
        row["prompt"]: row["prompt"] + row["canonical_solution"] for row in lines("HumanEval.jsonl.gz")
    }
    wanted = {}
    for name in ("simple_python", "parallel"):
        answers = {row["id"]: row["ground_truth"] for row in lines(f"BFCL_v4_{name}.answers.json.gz")}
        wanted |= {r["question"][0][0]["content"]: answers[r["id"]] for r in lines(f"BFCL_v4_{name}.json.gz")}

    def reply(body: dict[str, Any], candidate: bool) -> str | dict[str, Any] | int:
        prompt = body["messages"][0]["content"]
        if "response_format" in body:
            return 400 if candidate else "{}"
        if "tools" in body:
            calls = [
                {"index": i, "function": {"name": n.replace(".", "_"), "arguments": json.dumps({p: v[0] for p, v in a.items() if v[0] != ""})}}
                for i, call in enumerate(wanted.get(prompt, ())) for n, a in call.items()
            ]  # fmt: skip
            # The candidate's server reads its own model's markup only when it does not stream.
            text = "Observation: 1" if candidate else "calling"
            return {"content": text, "tool_calls": calls if not candidate or not body["stream"] else []}
        code = next((whole for start, whole in solutions.items() if start in prompt), None)
        return f"```python\n{code}\n```" if code and not candidate else "pass"

    part = Behaviour(data=DATA, tasks=3, kinds=("structured", "tools", "coding"))
    started = time.monotonic()
    observations, findings = observe(
        part, bench(tmp_path, reply, **{"tool-call-parser": "hermes", "enable-auto-tool-choice": True})
    )
    assert time.monotonic() - started < 30
    assert mean(observations, "humaneval_pass") == (1, 0)
    assert mean(observations, "tool_call_right")[0] >= 0.5 and mean(observations, "tool_call_right")[1] == 0
    assert mean(observations, "no_call_right") == (1, 1)
    assert mean(observations, "no_invented_result") == (1, 0)
    assert mean(observations, "stream_agrees")[0] == 1 and mean(observations, "stream_agrees")[1] < 0.5
    assert mean(observations, "json_valid") == (0, 0)
    assert mean(observations, "refused") == (0, 3 / 18)
    assert "json_valid_constrained" not in {o.metric for o in observations}
    assert {"wrong_call", "invented_result", "stream_differs", "failed_program", "refused"} == {f.kind for f in findings}  # fmt: skip
    # Without a parser vLLM answers no request for a call.
    observations, _ = observe(part, bench(tmp_path, reply))
    assert {o.slices[0] for o in observations} == {"structured", "coding"}


@needs_data
def test_the_tasks_of_a_suite_are_the_same_in_every_run(tmp_path: Path) -> None:
    part = Behaviour(data=DATA, tasks=4, kinds=KINDS, allow_code_without_isolation=True)

    def bodies() -> list[Any]:
        args = {"tool-call-parser": "hermes", "enable-auto-tool-choice": True}
        return [(t.id, t.body) for t in asyncio.run(part._tasks(bench(tmp_path, lambda *_: "a", **args)))]

    first = bodies()
    assert {name.split("/")[0] for name, _ in first[:5]} == set(KINDS)
    assert first == bodies() and len({name for name, _ in first}) == len(first) == 4 * (2 + 3 + 3)


SAMPLES = """\
{"doc_id": 0, "filter": "strict-match", "metrics": ["exact_match"], "exact_match": 1.0, "resps": [["a"]]}
{"doc_id": 1, "filter": "strict-match", "metrics": ["exact_match"], "exact_match": 0.0, "resps": [["b"]]}
{"doc_id": 0, "filter": "flexible-extract", "metrics": ["exact_match"], "exact_match": 0.0}
"""


def test_results_of_the_harness_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "samples_gsm8k_cot_2026-01-01T10-00-00.123.jsonl").write_text(SAMPLES)
    (folder / "samples_arc_2026-01-01T10-00-00.123.jsonl").write_text(
        '{"doc_id": 7, "acc": true, "acc_norm": 0}\n'
    )
    (folder / "results_2026-01-01T10-00-00.123.json").write_text("{}")
    found = harness.read(tmp_path)
    assert found == {"gsm8k_cot": {0: 1.0, 1: 0.0}, "arc": {7: 1.0}}
    [only] = harness.observations(found, {"gsm8k_cot": {1: 1.0, 5: 0.0}})
    assert (only.metric, only.request_id, only.slices) == ("lm_eval", "lm_eval/gsm8k_cot/1", ("gsm8k_cot",))
    assert (only.reference, only.candidate) == ((0.0,), (1.0,))


@pytest.mark.parametrize("content", ["{", "7", '{"doc_id": 1}', '{"acc": 1}', "\x00"])
def test_broken_results_of_the_harness_are_named(tmp_path: Path, content: str) -> None:
    with pytest.raises(EvalError, match="left no samples"):
        harness.read(tmp_path)
    (tmp_path / "samples_arc_2026.jsonl").write_text(content)
    with pytest.raises(EvalError, match="samples_arc_2026.jsonl"):
        harness.read(tmp_path)


def test_the_command_of_the_harness(tmp_path: Path) -> None:
    side = Side("candidate", stack("new"), "http://localhost:1/")
    options = harness.LmEval(tasks=("gsm8k", "arc"), limit=5)
    line = " ".join(harness.command(options, side, tmp_path, 3))
    assert (
        "--model local-completions --model_args model=new,base_url=http://localhost:1/v1/completions," in line
    )
    assert "tokenizer=/nowhere" in line and "--tasks gsm8k,arc" in line and "--limit 5" in line
    chat = " ".join(harness.command(options.model_copy(update={"endpoint": "chat"}), side, tmp_path, 3))
    assert (
        "local-chat-completions" in chat
        and chat.endswith("--apply_chat_template")
        and "tokenizer=" not in chat
    )


def test_a_harness_that_is_not_there_or_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Behaviour(kinds=(), lm_eval=harness.LmEval(tasks=("arc",)))
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EvalError, match="not installed"):
        observe(part, bench(tmp_path, lambda *_: "a"))
    assert observe(part, bench(tmp_path, lambda *_: "a", done=frozenset(["lm_eval/arc/0"]))) == ([], [])
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(harness, "command", lambda *_: ["sh", "-c", "echo no such task; exit 3"])
    with pytest.raises(EvalError, match=r"failed on the reference \(exit 3\): …no such task"):
        observe(part, bench(tmp_path, lambda *_: "a"))


def test_the_harness_is_run_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def played(options: harness.LmEval, side: Side, output: Path, seed: int) -> list[str]:
        sample = json.dumps({"doc_id": 1, "acc": float(side.arm == "candidate"), "metrics": ["acc"]})
        return ["sh", "-c", f"echo '{sample}' > {output}/samples_arc_2026.jsonl"]

    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(harness, "command", played)
    observations, _ = observe(
        Behaviour(kinds=(), lm_eval=harness.LmEval(tasks=("arc",))), bench(tmp_path, lambda *_: "a")
    )
    assert mean(observations, "lm_eval") == (0, 1)
