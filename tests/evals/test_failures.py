"""The part `failures` against played servers that loop, stop, race and leak, and a real one that does not."""

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from strop.evals.failures import FAULTS, Failures
from strop.evals.leakage import found_leaks, marked_prompts
from strop.evals.observation import Bench, EvalError, Finding, Observation, Side
from strop.serving.client import Outcome
from strop.serving.engine import cores_of_replica, engine_command, engine_environment
from strop.serving.hardware import Hardware
from strop.serving.process import Child, free_port
from strop.serving.stack import Artifact, Engine, Stack, Topology
from strop.serving.traces import Choice, Trace

from .conftest import send_event, served

STACK = Stack(
    served_model="m",
    model=Artifact(location="/models/m", files={"config.json": "0" * 64, "model.safetensors": "1" * 64}),
    engine=Engine(version="vllm 0", dtype="float32"),
    hardware=Hardware(device="cpu", name="c", isa="avx2"),
)
OTHER = STACK.model_copy(update={"topology": Topology(replicas=2)})


@dataclass
class Played:
    """A server whose faults are planted. Tokens are numbers that follow from the prompt."""

    says: dict[str, str] = field(default_factory=dict)
    """Text of the answer, where the prompt holds the key."""
    loops_where: str = "\0"
    empty_where: str = "\0"
    fails_where: str = "\0"
    breaks_where: str = "\0"
    races_where: str = "\0"
    """Another seventh token at every second time."""
    batch_where: str = "\0"
    """Another fourth token while others are answered."""
    gap: float = 4.0
    """Log-probabilities of the two tokens where answers part."""
    leaks: bool = False
    """Whether answers say what the request before it asked."""
    other_where: str = "\0"
    asked: int = 0
    times: Counter[str] = field(default_factory=Counter)
    running: int = 0
    last_prompt: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def tokens(self, prompt: str) -> list[int]:
        rng = random.Random(prompt)
        return [1000 + rng.randrange(5000) for _ in range(24)]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        prompt = body["messages"][-1]["content"]
        before, self.last_prompt = self.last_prompt, prompt
        self.asked += 1
        self.times[prompt] += 1
        self.running += 1
        try:
            # Long enough for all that was sent at once to be here.
            await asyncio.sleep(0.02)
            return await self._answer(request, body, prompt, before)
        finally:
            self.running -= 1

    async def _answer(
        self, request: web.Request, body: dict[str, Any], prompt: str, before: str
    ) -> web.StreamResponse:
        if self.fails_where in prompt:
            return web.json_response({"error": {"message": "planted"}}, status=500)
        tokens, finish = self.tokens(prompt), "stop"
        if self.races_where in prompt and self.times[prompt] % 2:
            tokens[6] += 1
        if self.batch_where in prompt and self.running > 1:
            tokens[3] += 1
        if self.other_where in prompt:
            tokens[2] += 1
        if self.loops_where in prompt:
            tokens, finish = [*tokens[:5], *[7, 8, 9] * 40], "length"
        text = next(
            (said for key, said in self.says.items() if key in prompt), " ".join(map(str, tokens)) + "."
        )
        if self.leaks:
            text = f"You said: {before}"
        if self.empty_where in prompt:
            tokens, text = [2], ""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        ids = [ord(c) for c in prompt]
        await send_event(response, prompt_token_ids=ids, choices=[])
        await send_event(response, choices=[{"index": 0, "delta": {"content": text}, "token_ids": tokens}])
        if self.breaks_where in prompt:
            return response
        await send_event(response, choices=[{"index": 0, "delta": {}, "finish_reason": finish}])
        tokens_out = body["max_tokens"] if finish == "length" else len(tokens)
        await send_event(
            response, choices=[], usage={"prompt_tokens": len(ids), "completion_tokens": tokens_out}
        )
        await response.write(b"data: [DONE]\n\n")
        return response

    async def completions(self, request: web.Request) -> web.Response:
        """Log-probabilities after a prefix: of every token alike but for the gap to those one above it."""
        body = await request.json()
        prompt = "".join(chr(i) for i in body["prompt"] if i < 1000)
        right = self.tokens(prompt)[len(body["prompt"]) - len(prompt)]
        top = {f"token_id:{right}": -0.5, f"token_id:{right + 1}": -0.5 - self.gap}
        return web.json_response({"choices": [{"logprobs": {"top_logprobs": [top]}}]})


def traces(count: int = 12) -> list[Trace]:
    return [
        Trace(
            request_id=f"r{i}",
            started_at=datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=i),
            tenant="t",
            session=f"s{i // 2}",
            stack=STACK.fingerprint,
            endpoint="chat",
            stream=True,
            model="m",
            sampling=json.dumps({"temperature": 0, "max_tokens": 200}),
            format=None,
            messages=json.dumps([{"role": "user", "content": f"question {i}."}]),
            prompt_token_ids=[1],
            choices=[Choice(0, list(range(24)), "A recorded answer.", "stop")],
            status=200,
        )
        for i in range(count)
    ]


PLAIN = Failures(repeated_requests=0, leak_rounds=0)
REPEATS = Failures(max_requests=8, repeated_requests=8, leak_rounds=0)
Seen = tuple[list[Observation], list[Finding]]


def observed(
    part: Failures,
    reference: Played,
    candidate: Played,
    tmp_path: Path,
    heldout: list[Trace] | None = None,
    replicas: tuple[Played, ...] = (),
    stack: Stack = OTHER,
    done: frozenset[str] = frozenset(),
) -> Seen:
    async def run() -> Seen:
        async with contextlib.AsyncExitStack() as stack_:
            here, there = [await stack_.enter_async_context(served(s)) for s in (reference, candidate)]
            others = [await stack_.enter_async_context(served(s)) for s in replicas]
            urls = (there, *others) if others else ()
            client = await stack_.enter_async_context(httpx.AsyncClient(trust_env=False))
            bench = Bench(
                reference=Side("reference", STACK, here),
                candidate=Side("candidate", stack, there, urls),
                traces=traces() if heldout is None else heldout,
                client=client,
                cache=tmp_path,
                progress=lambda done, text: None,
                done=done,
            )
            seen = [one async for one in part.observe(bench)]
        return (
            [one for one in seen if isinstance(one, Observation)],
            [one for one in seen if isinstance(one, Finding)],
        )

    return asyncio.run(run())


def share(observations: list[Observation], metric: str, arm: str = "candidate") -> float:
    values = [getattr(o, arm)[0] for o in observations if o.metric == metric]
    return sum(values) / len(values)


def test_equal_servers_have_no_findings_and_every_metric(tmp_path: Path) -> None:
    observations, findings = observed(Failures(repeated_requests=4), Played(), Played(), tmp_path)
    assert not findings
    assert {o.metric for o in observations} == {m.name for m in Failures.metrics} - {"replica_same"}
    assert all(share(observations, m.name) == 0 for m in FAULTS)
    assert share(observations, "repeats_same") == share(observations, "batch_same", "reference") == 1
    assert share(observations, "race") == share(observations, "leak") == 0
    assert {o.session for o in observations if o.metric == "loop"} == {f"t/s{i}" for i in range(6)}


def test_faults_of_the_candidate_are_shares_and_findings(tmp_path: Path) -> None:
    candidate = Played(
        says={"question 3.": "```python\nprint(", "question 4.": "Ответ на вопрос, по-русски.", "question 5.": "a \ufffd b"},
        loops_where="question 1.",
        empty_where="question 2.",
        fails_where="question 6.",
        breaks_where="question 7.",
    )  # fmt: skip
    observations, findings = observed(PLAIN, Played(), candidate, tmp_path)
    by_request = {f.request_id: f for f in findings}
    assert {request: f.kind for request, f in by_request.items()} == {
        "r1": "loop", "r2": "empty", "r3": "premature_stop", "r4": "language_switch", "r5": "garbage", "r6": "error",
        "r7": "truncated",
    }  # fmt: skip
    assert all(f.arm == "candidate" and f.stack == OTHER.fingerprint for f in findings)
    loop = by_request["r1"]
    assert "from token 5 on, 120 of 125 tokens repeat with period 3" in loop.detail
    assert loop.body["messages"][0]["content"] == "question 1." and loop.body["model"] == "m"
    assert "cache_salt" not in loop.body and loop.other
    assert "planted" in by_request["r6"].answer
    # A failed request is an error and nothing else; one that broke off is both.
    assert share(observations, "error") == 2 / 12 and share(observations, "error", "reference") == 0
    assert share(observations, "loop") == 1 / 10
    assert all(share(observations, m.name, "reference") == 0 for m in FAULTS)


def test_faults_of_the_reference_are_told_as_its_own(tmp_path: Path) -> None:
    observations, findings = observed(PLAIN, Played(loops_where="question 1."), Played(), tmp_path)
    assert [(f.arm, f.kind, f.stack) for f in findings if f.request_id == "r1"] == [
        ("reference", "loop", STACK.fingerprint)
    ]
    assert share(observations, "loop", "reference") > 0 == share(observations, "loop")


def test_what_is_done_is_not_asked_again(tmp_path: Path) -> None:
    candidate = Played()
    done = frozenset(f"r{i}" for i in range(10))
    observations, _ = observed(PLAIN, Played(), candidate, tmp_path, done=done)
    assert {o.request_id for o in observations} == {"r10", "r11"} and candidate.asked == 2
    everything = {o.request_id for o in observed(Failures(), Played(), Played(), tmp_path)[0]}
    again = Played()
    assert observed(Failures(), Played(), again, tmp_path, done=frozenset(everything)) == ([], [])
    assert again.asked == 0


def test_a_server_that_answers_differently_each_time_races(tmp_path: Path) -> None:
    """Alone, so that no gap excuses it."""
    observations, findings = observed(REPEATS, Played(), Played(races_where="question", gap=1e-5), tmp_path)
    alone = [f for f in findings if f.kind == "race" and "alone" in f.detail]
    assert len(alone) == 8 and all("at position 6" in f.detail and "1e-05 nats" in f.detail for f in alone)
    assert share(observations, "repeats_same") == 0 and share(observations, "repeats_same", "reference") == 1
    assert share(observations, "race") == 1 and share(observations, "race", "reference") == 0
    assert {f.request_id for f in alone} == {f"r{i}" for i in range(4, 12)}


@pytest.mark.parametrize(("gap", "kind"), [(1e-4, "tie"), (2.0, "race")])
def test_a_batch_that_changes_answers_is_a_tie_or_a_race_by_the_gap(
    tmp_path: Path, gap: float, kind: str
) -> None:
    candidate = Played(batch_where="question 9.", gap=gap)
    observations, findings = observed(REPEATS, Played(), candidate, tmp_path)
    (found,) = [f for f in findings if "in a batch of 8" in f.detail]
    assert (found.kind, found.request_id, found.arm) == (kind, "r9", "candidate")
    assert "at position 3" in found.detail and f"{gap:.3g} nats, ties reach 0.001" in found.detail
    assert share(observations, "repeats_same") == 1 and share(observations, "batch_same") == 7 / 8
    assert share(observations, "race") == (kind == "race") / 8
    assert found.body["temperature"] == 0 and found.body["max_tokens"] == 64


def test_replicas_are_compared_with_the_first(tmp_path: Path) -> None:
    observations, findings = observed(
        REPEATS, Played(), Played(), tmp_path, replicas=(Played(), Played(other_where="question 8."))
    )
    (found,) = findings
    assert found.request_id == "r8" and found.kind == "race" and "on replica 2" in found.detail
    assert share(observations, "replica_same") == 7 / 8
    assert all(o.reference is None for o in observations if o.metric == "replica_same")


def test_runs_do_not_find_each_other_in_the_prefix_cache(tmp_path: Path) -> None:
    candidate = Played()
    observed(
        REPEATS.model_copy(update={"max_requests": 1, "repeated_requests": 1}), Played(), candidate, tmp_path
    )
    salts = [body["cache_salt"] for body in candidate.bodies if "cache_salt" in body]
    assert len(salts) >= 2 and len(set(salts)) == len(salts)


def test_what_only_fails_in_a_batch_is_a_race(tmp_path: Path) -> None:
    class Overloaded(Played):
        async def _answer(
            self, request: web.Request, body: dict[str, Any], prompt: str, before: str
        ) -> web.StreamResponse:
            if self.running > 4:
                return web.json_response({"error": {"message": "too many"}}, status=503)
            return await super()._answer(request, body, prompt, before)

    observations, findings = observed(REPEATS, Played(), Overloaded(), tmp_path)
    assert findings and all(
        f.kind == "race" and "answered once, failed in a batch" in f.detail for f in findings
    )
    assert share(observations, "batch_same") < 1 == share(observations, "repeats_same")


def test_no_request_is_begun_after_its_time(tmp_path: Path) -> None:
    candidate = Played()
    part = REPEATS.model_copy(update={"seconds": 1e-9})
    observations, _ = observed(part, Played(), candidate, tmp_path)
    assert {o.request_id for o in observations} == {"r4", "r5", "r6", "r7", "repeat-r4", "repeat-r5"}
    assert share(observations, "batch_same") == 1


def test_an_unknown_dtype_ends_it_with_a_sentence(tmp_path: Path) -> None:
    odd = STACK.model_copy(update={"engine": STACK.engine.model_copy(update={"dtype": "float8"})})
    with pytest.raises(EvalError, match="float8"):
        observed(REPEATS, Played(), Played(), tmp_path, stack=odd)


def test_no_traffic_leaves_the_marked_prompts(tmp_path: Path) -> None:
    observations, _ = observed(Failures(), Played(), Played(), tmp_path, heldout=[])
    assert {o.metric for o in observations} == {"leak"} and len(observations) == 16


def test_a_server_that_leaks_is_caught_on_either_side(tmp_path: Path) -> None:
    leaks = Failures(max_requests=1, repeated_requests=0)
    observations, findings = observed(leaks, Played(), Played(leaks=True), tmp_path)
    assert share(observations, "leak") > 0.8
    assert {(f.kind, f.arm) for f in findings if f.kind == "leak"} == {("leak", "candidate")}
    assert any("of two tenants" in f.detail for f in findings)
    observations, findings = observed(leaks, Played(leaks=True), Played(), tmp_path)
    assert share(observations, "leak") == 0
    assert {f.arm for f in findings if f.kind == "leak"} == {"reference"}


def test_marked_prompts_share_beginnings_and_tenants_and_follow_from_the_seed() -> None:
    first, second = marked_prompts(3, 2, 8)
    assert marked_prompts(3, 2, 8) == [first, second] and marked_prompts(4, 2, 8) != [first, second]
    assert len({p.marker for p in (*first, *second)}) == 16
    beginnings = [p.body["messages"][0]["content"] for p in first]
    shared = [n for n, text in enumerate(beginnings) if text == beginnings[0]]
    assert len(shared) == 4 and {first[n].tenant for n in shared} == {"tenant-a", "tenant-b"}


def _said(text: str) -> Outcome:
    return Outcome(
        request_id="r", session="s", status=200, error=None, stack=None, started_s=0.0, ttft_s=None, e2e_s=0.1,
        inter_token_s=[], prompt_tokens=1, cached_tokens=None, output_tokens=1, text=text, token_ids=None,
        prompt_token_ids=None, logprobs=None, tool_calls=[], finish_reason="stop", speculation=None,
    )  # fmt: skip


def test_a_piece_of_a_marker_is_enough_and_ones_own_is_none() -> None:
    (prompts,) = marked_prompts(0, 1, 4)
    own = [_said(f"It is {p.marker}, {p.marker.upper()}.") for p in prompts]
    assert found_leaks(prompts, own) == []
    spelled = " ".join(prompts[2].marker[3:11].upper())
    assert found_leaks(prompts, [*own[:1], _said(spelled), *own[2:]]) == [(2, 1)]
    assert found_leaks(prompts, [*own[:1], _said(prompts[2].marker[:7]), *own[2:]]) == []


@pytest.fixture(scope="module")
def tiny_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    stack = Stack.build(
        tiny_model,
        "tiny",
        "float32",
        engine_args={"max-model-len": 1024, "max-num-seqs": 8, "enforce-eager": True},
    )
    port = free_port()
    child = Child.start(
        "engine",
        engine_command(stack, "127.0.0.1", port, capture=False),
        tmp_path_factory.mktemp("engine") / "engine.log",
        engine_environment(stack, 1, cores_of_replica(0, 1), None),
    )
    try:
        child.wait_until_answers(f"http://127.0.0.1:{port}/health", 240)
        yield Side("reference", stack, f"http://127.0.0.1:{port}")
    finally:
        child.stop()


@pytest.mark.slow
def test_a_real_server_says_the_same_alone_and_in_a_batch_and_leaks_nothing(
    tiny_server: Side, tmp_path: Path
) -> None:
    """In float32, where a batch may change no token beyond a tie."""

    async def run() -> list[Observation | Finding]:
        async with httpx.AsyncClient(trust_env=False) as client:
            other = Side("candidate", tiny_server.stack, tiny_server.url)
            bench = Bench(tiny_server, other, traces(), client, tmp_path, lambda done, text: None)
            return [one async for one in Failures(max_output_tokens=64).observe(bench)]

    seen = asyncio.run(run())
    observations = [one for one in seen if isinstance(one, Observation)]
    assert {o.metric for o in observations} == {m.name for m in Failures.metrics} - {"replica_same"}
    assert share(observations, "repeats_same") == share(observations, "repeats_same", "reference") == 1
    for metric in ("race", "leak", "error"):
        assert share(observations, metric) == 0, [one for one in seen if isinstance(one, Finding)]
