"""The judge against two fake servers whose speed, answers and failures are planted."""

import asyncio
import json
import random
import shutil
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from strop.evals.evaluation import load_evaluation
from strop.evals.judge import JudgeError, _faster, judge
from strop.evals.losslessness import Agreement, first_difference, outputs_agree, tie_bound
from strop.evals.metrics import compare
from strop.evals.observation import Side
from strop.evals.regressions import cases_of_traces, remember
from strop.evals.replay import Pair, Request
from strop.evals.settings import EvalSettings
from strop.evals.suite import SuiteError
from strop.evals.verdict import Verdict
from strop.serving.client import Outcome
from strop.serving.hardware import Hardware
from strop.serving.home import home
from strop.serving.stack import Artifact, Engine, Speculator, Stack
from strop.serving.traces import Choice, Trace

from .conftest import send_event, served

OUTPUT_TOKENS = 13
FIRST_OUTPUT_ID = 100_000


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_HOME", str(tmp_path / "home"))


@dataclass(frozen=True)
class FakeServer:
    """Answers `OUTPUT_TOKENS` tokens that follow from the prompt; prompt ids are its characters."""

    token_s: float = 0.003
    tokens_per_step: int = 1
    other_token_where: str = "\0"
    """Prompts that hold this get another sixth token."""
    other_token_gap: float = 0.0
    top_logprobs: float = 9.0
    """Tokens less likely than this are not among the top ones."""
    fails_where: str = "\0"
    extra_tokens: int = 0
    noise_when_sampled: bool = False
    """Whether answers at a temperature are drawn from all tokens alike, as if the temperature were lost."""

    def tokens(self, prompt: str) -> list[int]:
        rng = random.Random(prompt)
        tokens = [FIRST_OUTPUT_ID + rng.randrange(1000) for _ in range(OUTPUT_TOKENS + self.extra_tokens)]
        if self.other_token_where in prompt:
            tokens[5] += 1
        return tokens

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["messages"][-1]["content"]
        if self.fails_where in prompt:
            return web.json_response({"error": {"message": "planted"}}, status=500)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        tokens = self.tokens(prompt)
        if self.noise_when_sampled and body["temperature"]:
            tokens = [token + 5000 for token in tokens]
        await send_event(response, prompt_token_ids=[ord(c) for c in prompt], choices=[])
        steps, sent, due = 0, 1, time.perf_counter() + self.token_s
        await _wait_until(due)
        await send_event(response, choices=[_choice(tokens[:1])])
        while sent < len(tokens):
            due += self.token_s
            await _wait_until(due)
            await send_event(response, choices=[_choice(tokens[sent : sent + self.tokens_per_step])])
            sent += self.tokens_per_step
            steps += 1
        await send_event(response, choices=[{"index": 0, "delta": {}, "finish_reason": "length"}])
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        drafted = self.tokens_per_step - 1
        histogram = [0] * drafted + [steps]
        counts = {
            "acceptance_histogram": histogram,
            "num_spec_steps": steps,
            "num_draft_tokens": drafted * steps,
            "num_accepted_draft_tokens": drafted * steps,
        }
        metrics = {"speculative_decoding": counts} if drafted else None
        await send_event(response, choices=[], usage=usage, metrics=metrics)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def completions(self, request: web.Request) -> web.Response:
        """What follows the first five tokens of an answer: the planted gap, in the way it was asked for."""
        body = await request.json()
        prompt = "".join(chr(i) for i in body["prompt"] if i < FIRST_OUTPUT_ID)
        tokens = self.tokens(prompt)
        if "prompt_logprobs" in body and len(body["prompt"]) > len(prompt) + 6:
            scored = [{str(t): {"logprob": -1.0 if t in tokens else -9.0}} for t in body["prompt"]]
            return web.json_response({"choices": [{"prompt_logprobs": scored}]})
        prefix = [*(ord(c) for c in prompt), *tokens[:5]]
        logprobs = {tokens[5]: -0.5, tokens[5] + 1: -0.5 - self.other_token_gap}
        if "prompt_logprobs" in body and body["prompt"][:-1] == prefix:
            last = body["prompt"][-1]
            entries = [None] * len(prefix) + [{str(last): {"logprob": logprobs[last], "rank": 9}}]
            return web.json_response({"choices": [{"prompt_logprobs": entries}]})
        if body["prompt"] != prefix or body["max_tokens"] != 1 or body["logprobs"] != 20:
            return web.json_response({"error": "not the common prefix"}, status=400)
        top = {f"token_id:{t}": logprob for t, logprob in logprobs.items() if logprob > -self.top_logprobs}
        return web.json_response({"choices": [{"logprobs": {"top_logprobs": [top]}}]})


def _choice(token_ids: list[int]) -> dict[str, Any]:
    return {"index": 0, "delta": {"content": "".join(f"{i} " for i in token_ids)}, "token_ids": token_ids}


async def _wait_until(due: float) -> None:
    await asyncio.sleep(max(0.0, due - time.perf_counter()))


CHAMPION = Stack(
    served_model="m",
    model=Artifact(location="/models/m", files={"config.json": "0" * 64, "model.safetensors": "1" * 64}),
    engine=Engine(version="vllm 0", dtype="float32"),
    hardware=Hardware(device="cpu", name="c", isa="avx2"),
)
CANDIDATE = CHAMPION.model_copy(update={"speculator": Speculator(method="ngram", draft_tokens=1)})
SETTINGS = EvalSettings(max_requests=24, min_requests=8, warmup_requests=1, bootstrap_samples=500)


def traces(count: int = 24, temperature: float = 0) -> list[Trace]:
    return [
        Trace(
            request_id=f"r{i}",
            started_at=datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=i),
            tenant="t",
            session=f"s{i // 2}",
            stack=CHAMPION.fingerprint,
            endpoint="chat",
            stream=True,
            model="m",
            sampling=json.dumps({"temperature": temperature}),
            format=json.dumps({"response_format": {"type": "json_object"}}) if i // 2 % 2 else None,
            messages=json.dumps([{"role": "user", "content": f"question {i}."}]),
            prompt_token_ids=[1],
            choices=[Choice(0, [2], "x", "stop")],
            status=200,
        )
        for i in range(count)
    ]


def judged(
    champion: FakeServer,
    candidate: FakeServer,
    heldout: list[Trace] | None = None,
    candidate_stack: Stack = CANDIDATE,
    suite: Path | None = None,
) -> Verdict:
    settings = SETTINGS.model_copy(update={"suite": suite and str(suite)})

    async def run() -> Verdict:
        async with served(champion) as here, served(candidate) as there:
            return await asyncio.to_thread(
                judge,
                Side("reference", CHAMPION, here),
                Side("candidate", candidate_stack, there),
                heldout or traces(),
                settings,
                home() / "evaluation",
                lambda done, text: None,
            )

    return asyncio.run(run())


def failed(verdict: Verdict) -> list[str]:
    return [gate.name for gate in verdict.gates if not gate.passed]


def test_finds_the_planted_speedup() -> None:
    verdict = judged(FakeServer(), FakeServer(tokens_per_step=2))
    assert verdict.passed, verdict.summary
    per_token = verdict.metric("inter_token_s")
    assert per_token.ratio_low - 0.05 < 0.5 < per_token.ratio_high + 0.05
    assert per_token.champion == pytest.approx(0.003, rel=0.25)
    assert verdict.metric("decode_tokens_per_s").ratio == pytest.approx(2, rel=0.15)
    assert verdict.metric("acceptance_length").candidate == 2.0
    assert verdict.metric("acceptance_length").champion == 1.0
    assert {c.slice for c in verdict.comparisons} == {"all", "chat", "json"}
    assert verdict.losslessness and verdict.losslessness.identical == 24
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict
    row = next(row for row in verdict.samples if row["stack"] == "candidate")
    assert row["steps"] == 6 and row["accepted_by_position"] == [6] and row["output_tokens"] == 13


def test_refuses_a_slower_candidate() -> None:
    slower = judged(FakeServer(), FakeServer(token_s=0.004))
    assert failed(slower) == ["faster"] and slower.metric("inter_token_s").ratio_low > 1
    assert slower.summary.startswith("Refused (failed: faster)")


def test_refuses_an_equal_candidate() -> None:
    judged_pairs = [
        Pair(Request(f"r{i}", f"s{i // 2}", "chat", "chat", {"temperature": 0}), outcome, outcome)
        for i, outcome in enumerate(outcome_of(0.01 * (i + 1)) for i in range(12))
    ]
    gate = _faster(compare(judged_pairs, SETTINGS), judged_pairs, SETTINGS)
    assert not gate.passed and "1.000 (1.000 to 1.000)" in gate.detail


def outcome_of(token_s: float) -> Outcome:
    return Outcome(
        request_id="r", session="s", status=200, error=None, stack=None, started_s=0.0, ttft_s=token_s,
        e2e_s=11 * token_s, inter_token_s=[token_s] * 10, prompt_tokens=4, cached_tokens=None, output_tokens=11,
        text="x", token_ids=list(range(11)), prompt_token_ids=[1], logprobs=None, tool_calls=[],
        finish_reason="length", speculation=None,
    )  # fmt: skip


def test_catches_a_wrong_token() -> None:
    verdict = judged(FakeServer(other_token_gap=4.0), FakeServer(tokens_per_step=2, other_token_where="7."))
    assert failed(verdict) == ["lossless"]
    assert verdict.losslessness and verdict.losslessness.different == 2
    difference = verdict.losslessness.differences[0]
    assert (difference.position, difference.logprob_gap, difference.tie) == (5, 4.0, False)
    assert difference.candidate_token == difference.champion_token + 1


@pytest.mark.parametrize("top_logprobs", [9.0, 0.1])
def test_accepts_a_numeric_tie_however_unlikely_both_tokens_are(top_logprobs: float) -> None:
    champion = FakeServer(other_token_gap=tie_bound("float32") / 2, top_logprobs=top_logprobs)
    verdict = judged(champion, FakeServer(tokens_per_step=2, other_token_where="7."))
    assert verdict.passed, verdict.summary
    assert verdict.losslessness and (verdict.losslessness.ties, verdict.losslessness.identical) == (2, 22)


def test_sampled_traffic_is_still_tested_for_losslessness() -> None:
    verdict = judged(
        FakeServer(other_token_gap=4.0),
        FakeServer(tokens_per_step=2, other_token_where="question"),
        traces(temperature=1),
    )
    assert failed(verdict) == ["lossless", "sampled alike"]
    assert verdict.losslessness and verdict.losslessness.requests == 8


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_catches_an_engine_that_samples_noise(temperature: float) -> None:
    candidate = FakeServer(token_s=0.003, tokens_per_step=2, noise_when_sampled=True)
    verdict = judged(FakeServer(), candidate, traces(temperature=temperature))
    assert "sampled alike" in failed(verdict)
    assert verdict.sampled and verdict.sampled.difference == pytest.approx(-8)


def test_sampled_answers_from_the_same_distribution_pass() -> None:
    verdict = judged(FakeServer(), FakeServer(tokens_per_step=2), traces(temperature=0.7))
    assert "sampled alike" not in failed(verdict)
    assert verdict.sampled and verdict.sampled.requests >= 6


def test_an_answer_that_stops_elsewhere_is_not_the_same_answer() -> None:
    verdict = judged(FakeServer(extra_tokens=1), FakeServer(tokens_per_step=2), traces(8))
    assert verdict.losslessness and verdict.losslessness.different == 8
    assert "only the time per token counts" in next(g for g in verdict.gates if g.name == "faster").detail


def test_refuses_a_candidate_that_fails_where_the_champion_answers() -> None:
    verdict = judged(FakeServer(), FakeServer(tokens_per_step=2, fails_where="7."))
    assert failed(verdict) == ["no new errors"]
    assert "planted" in verdict.gates[1].detail


def test_a_dead_candidate_is_a_failed_verdict_and_is_not_tried_for_long() -> None:
    verdict = judged(FakeServer(), FakeServer(fails_where="question"))
    assert not verdict.passed and "enough data" in failed(verdict)
    assert len(verdict.samples) == 2 * 3


def test_no_judgement_without_a_champion_or_traffic() -> None:
    with pytest.raises(JudgeError, match=r"champion at .* failed 3 requests in a row"):
        judged(FakeServer(fails_where="question"), FakeServer())
    with pytest.raises(JudgeError, match="held-out"):
        judged(FakeServer(), FakeServer(), [replace(trace, status=500) for trace in traces(4)])


SUITE = """
parts:
  failures: {seconds: 5, max_requests: 24, repeated_requests: 0, leak_rounds: 0}
gates:
  - {metric: error, at_most: 0.5, min_samples: 8}
  - {metric: loop, at_most: BOUND, min_samples: 8}
"""


@pytest.mark.parametrize(("bound", "answer"), [(0.6, "Passed"), (-1, "Failed"), (0.1, "Not enough data")])
def test_other_numerics_pass_only_if_the_suite_is_shown_to_hold(
    tmp_path: Path, bound: float, answer: str
) -> None:
    other = CHAMPION.model_copy(update={"quantization": "int8"})
    suite = tmp_path / "suite.yaml"
    suite.write_text(SUITE.replace("BOUND", str(bound)))
    verdict = judged(FakeServer(), FakeServer(tokens_per_step=2), candidate_stack=other, suite=suite)
    assert verdict.losslessness is None and verdict.gates[-1].name == "suite suite.yaml"
    assert verdict.gates[-1].detail.startswith(answer)
    assert failed(verdict) == ([] if answer == "Passed" else ["suite suite.yaml"])
    report = load_evaluation(home() / "evaluation")
    assert report is not None and report.verdict == answer.lower()


def test_what_failed_once_must_not_fail_again() -> None:
    once = [replace(t, status=500, request_id=f"once{n}", messages=ONCE.replace("N", str(n)), choices=[])
            for n, t in enumerate(traces(16))]  # fmt: skip
    assert remember(home(), cases_of_traces(once)) == 16
    again = judged(FakeServer(), FakeServer(tokens_per_step=2, fails_where="once asked"))
    assert failed(again) == ["suite lossless"] and "fail" in again.gates[-1].detail
    shutil.rmtree(home() / "evaluation")
    assert judged(FakeServer(), FakeServer(tokens_per_step=2)).passed


ONCE = json.dumps([{"role": "user", "content": "once asked N."}])


def test_the_suite_is_not_asked_of_a_candidate_that_is_refused_anyway(tmp_path: Path) -> None:
    suite = tmp_path / "suite.yaml"
    suite.write_text(SUITE.replace("BOUND", "0.6"))
    verdict = judged(FakeServer(), FakeServer(token_s=0.004), suite=suite)
    assert failed(verdict) == ["faster"] and load_evaluation(home() / "evaluation") is None
    with pytest.raises(SuiteError, match="no suite"):
        judged(FakeServer(), FakeServer(), suite=tmp_path / "none.yaml")


def agreement(champion: FakeServer, candidate: FakeServer) -> Agreement:
    async def run() -> Agreement:
        async with served(champion) as here, served(candidate) as there:
            return await outputs_agree(CHAMPION, here, CANDIDATE, there, traces(6))

    return asyncio.run(run())


def test_outputs_agree_before_a_rollout() -> None:
    assert agreement(FakeServer(), FakeServer()).ok
    assert agreement(FakeServer(), FakeServer(other_token_where="1.")).ok
    wrong = agreement(FakeServer(other_token_gap=4.0), FakeServer(other_token_where="1."))
    assert not wrong.ok and wrong.losslessness and wrong.losslessness.requests == 4
    failing = agreement(FakeServer(), FakeServer(fails_where="1."))
    assert not failing.ok and "planted" in failing.errors[0]


@pytest.mark.parametrize(
    ("here", "there", "position"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [4], 0), ([5, 1], [4, 1], 0)],
)
def test_first_difference(here: list[int], there: list[int], position: int | None) -> None:
    assert first_difference(here, there) == position


def test_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="float8"):
        tie_bound("float8")
