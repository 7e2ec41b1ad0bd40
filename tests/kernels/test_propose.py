"""The loop against a played endpoint, whose answers are as bad as they come, and then good."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from strop.kernels import propose as loop
from strop.kernels.build import Source
from strop.kernels.cheats import CONTRACT, kernel, quickly
from strop.kernels.contract import Contract
from strop.kernels.propose import Budget, Endpoint, Proposal, ProposeError, code_of, propose
from strop.kernels.tuning import tune
from strop.kernels.verify import Verification, verify

from ..evals.conftest import served
from .conftest import isolated

CALLED_KERNEL = replace(CONTRACT, name="kernel")


def _code(body: str) -> str:
    return kernel(f"KERNEL {{ {body} }}\n").code


def _slower(times: int) -> str:
    return _code(
        f"int status = 0; for (int i = 0; i < {times} && !status; i++) {{ status = right(in, n_in, out, n_out); "
        'asm volatile("" ::: "memory"); } return status;'
    )


RIGHT, SLOWER = _code("return right(in, n_in, out, n_out);"), _slower(2)
WRONG = _code("return takes(in, n_in, out, n_out) ? 0 : 1;")
BROKEN = "int kernel( { return 0 }"


class Writer:
    """Answers one after the other, and keeps what it was asked."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body["messages"][-1]["content"])
        if not self.answers:
            return web.json_response({"error": {"message": "no more"}}, status=503)
        message = {"role": "assistant", "content": self.answers.pop(0)}
        usage = {"prompt_tokens": 100, "completion_tokens": 50, "total_tokens": 150}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        return web.json_response({"choices": choices, "usage": usage})

    completions = chat


def _fenced(code: str) -> str:
    return f"Here it is, faster than ever:\n```cpp\n{code}```\nDone."


async def _run(writer: Writer, folder: Path, budget: Budget) -> Proposal:
    async with served(writer) as url:
        return await asyncio.to_thread(
            propose, CALLED_KERNEL, Endpoint(url, "m"), folder, "linear: 60 % of the time", budget
        )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Real verification, but for the times: a busy machine's would decide the test."""
    speeds = {RIGHT: 3.0, SLOWER: 1.5}

    def checked(source: Source, contract: Contract, folder: Path, threads: int) -> Verification:
        found = verify(source, contract, folder, threads=threads, rounds=1, burst_s=0.001)
        speed = speeds.get(source.code)
        if speed is None or not found.correct:
            return found
        timings = tuple(
            t.model_copy(update={"speedup": speed, "low": speed, "high": speed, "noise": 1.01})
            for t in found.timings
        )
        checks = tuple(check.model_copy(update={"passed": True}) for check in found.checks)
        return found.model_copy(update={"timings": timings, "checks": checks})

    monkeypatch.setattr(loop, "verify", checked)
    return speeds


@isolated
def test_nonsense_wrong_good_slower(tmp_path: Path, measured: dict[str, float]) -> None:
    writer = Writer("I would rather not.", _fenced(BROKEN), _fenced(WRONG), _fenced(RIGHT), _fenced(SLOWER))
    found = asyncio.run(_run(writer, tmp_path, Budget(rounds=5)))
    assert [attempt.kept for attempt in found.attempts] == [False, False, False, True, False]
    assert found.source and found.source.code == RIGHT
    assert found.verification and found.verification.passed
    words = [attempt.outcome for attempt in found.attempts]
    assert "no C++ code block" in words[0]
    assert "'build'" in words[1] and "error" in words[1]
    assert "'served shapes'" in words[2]
    assert words[3].startswith("Kept: 3.00 times") and "attempt 4, which stays" in words[4]
    assert found.ended == "5 rounds were asked"
    # Each question carries what became of the last answer, and the best so far.
    assert all(said in asked for said, asked in zip(words, writer.asked[1:], strict=False))
    assert "60 % of the time" in writer.asked[0] and RIGHT in writer.asked[4]
    assert "linear(x, weight)" in writer.asked[0] and "rows=4 inputs=96" in writer.asked[0]


@isolated
@pytest.mark.slow
def test_a_loop_goes_on_where_it_was_and_ends_with_its_budget(
    tmp_path: Path, measured: dict[str, float]
) -> None:
    asyncio.run(_interrupted(tmp_path))


async def _interrupted(folder: Path) -> None:
    writer = Writer("no", _fenced(WRONG), _fenced(WRONG), _fenced(RIGHT))
    async with served(writer) as url:

        async def up_to(budget: Budget) -> Proposal:
            endpoint = Endpoint(url, "m")
            return await asyncio.to_thread(propose, CALLED_KERNEL, endpoint, folder, budget=budget)

        assert len((await up_to(Budget(rounds=2))).attempts) == 2
        found = await up_to(Budget(rounds=9, tokens=600))
        assert len(writer.asked) == 4 and found.ended == "600 tokens were spent"
        assert "attempt 2 again" in found.attempts[2].outcome
        assert found.source and found.source.code == RIGHT
        assert (await up_to(Budget(rounds=9, tokens=600))).source == found.source
        assert len(writer.asked) == 4
        with pytest.raises(ProposeError, match="3 times"):
            await up_to(Budget(rounds=20, tokens=9000))


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("```cpp\nint f() {}\n```", "int f() {}\n"),
        ("```\nint f() {}\n```", "int f() {}\n"),
        ("```cpp\nint f() {}\n```\nor\n```c++\nint f(int) {}\n```", "int f(int) {}\n"),
        ("```cpp\nint g() {}\n```", None),
        ("```python\nf()\n```", None),
        ("```cpp\nint f() {}", None),
        ("", None),
    ],
)
def test_the_last_block_that_defines_the_function_is_the_answer(answer: str, code: str | None) -> None:
    assert code_of(answer, "f") == code


@isolated
@pytest.mark.parametrize("how", ['#include "/etc/passwd"', 'asm(".incbin \\"/etc/passwd\\"");'])
def test_the_compiler_reads_no_file_for_a_source(how: str, objects: Path) -> None:
    found = quickly(kernel(how), objects)
    assert found.failure and found.failure.name == "build"
    assert "root:" not in found.failure.detail
    assert "No such file" in found.failure.detail or "not found" in found.failure.detail


@isolated
@pytest.mark.slow
def test_parameters_are_found_by_measuring_and_wrong_ones_are_not_chosen(tmp_path: Path) -> None:
    code = """
KERNEL {
  int status = 0;
  for (int i = 0; i < TIMES && !status; i++) {
    status = UNROLL == 3 ? 0 : right(in, n_in, out, n_out);
    asm volatile("" ::: "memory");
  }
  return status;
}"""
    parameters = {"TIMES": (60, 1), "UNROLL": (1, 3)}
    given = (kernel(code), parameters, CONTRACT, tmp_path)
    found = tune(*given, rounds=3, burst_s=0.003)
    assert found.values == {"TIMES": 1, "UNROLL": 1} and found.verification.correct
    assert {tuple(t.values.values()) for t in found.trials} == {(60, 1), (1, 1), (1, 3)}
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("trial-*.json")}
    assert len(stamps) == 3
    assert tune(*given, rounds=3, burst_s=0.003).values == found.values
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.glob("trial-*.json")}
