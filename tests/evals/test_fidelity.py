"""Fidelity against two fake servers of a bigram model, whose weights, template and sampling are planted."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from scipy.special import log_softmax

from strop.evals.distances import full_distances
from strop.evals.fidelity import Fidelity
from strop.evals.observation import Bench, EvalError, Finding, Observation, Side
from strop.evals.reference_logits import MAX_ANSWER_BYTES, Cache, ScoreError, most_logprobs, score
from strop.evals.replay import Server
from strop.serving.hardware import Hardware
from strop.serving.stack import Artifact, Engine, Stack
from strop.serving.traces import WITHHELD, Choice, Trace

VOCAB = 48
END = 0


def weights(seed: int = 0) -> np.ndarray:
    """Logits [token before, next token] that make some tokens likely and most hardly so."""
    return np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)) * 2.5


@dataclass
class FakeServer:
    """Speaks as much of vLLM's API as fidelity uses."""

    logits: np.ndarray = field(default_factory=weights)
    suffix: tuple[int, ...] = (1, 2)
    """What its chat template puts after the message."""
    temperature: Callable[[float], float] = lambda asked: asked
    top_p: Callable[[float], float] = lambda asked: asked
    broken: str | None = None
    """Endpoint that fails."""
    asked: list[dict[str, Any]] = field(default_factory=list)

    def logprobs(self, ids: list[int]) -> np.ndarray:
        """[len(ids), VOCAB], of the tokens after each."""
        return log_softmax(self.logits[ids], axis=1)

    def template(self, body: dict[str, Any]) -> list[int]:
        return [*(1 + ord(c) % (VOCAB - 1) for m in body["messages"] for c in m["content"]), *self.suffix]

    def draw(self, prompt: list[int], body: dict[str, Any]) -> list[int]:
        rng = np.random.default_rng(body.get("seed", len(self.asked)))
        ids = list(prompt)
        temperature = self.temperature(body.get("temperature", 1.0))
        for _ in range(body["max_tokens"]):
            logits = self.logits[ids[-1]]
            token = int(logits.argmax())
            if temperature:
                p = np.exp(log_softmax(logits / temperature))
                order = np.argsort(-p)
                kept = order[np.cumsum(p[order]) - p[order] < self.top_p(body.get("top_p", 1.0))]
                token = int(rng.choice(kept, p=p[kept] / p[kept].sum()))
            ids.append(token)
            if token == END:
                break
        return ids[len(prompt) :]

    def answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.asked.append(body)
        if self.broken and request.url.path.endswith(self.broken):
            return httpx.Response(500, json={"error": {"message": "planted\x1b[31m"}})
        prompt = self.template(body) if "messages" in body else body["prompt"]
        tokens = self.draw(prompt, body)
        choice: dict[str, Any] = {
            "index": 0,
            "token_ids": tokens,
            "prompt_token_ids": prompt,
            "finish_reason": "length",
        }
        rows = self.logprobs([*prompt, *tokens][len(prompt) - 1 : -1])
        if "messages" in body:
            entries = [
                {
                    "logprob": float(row[token]),
                    # As vLLM does: the token that was drawn, then the likeliest, cut to as many as were asked for.
                    "top_logprobs": [{"logprob": float(row[i])} for i in (token, *np.argsort(-row))][
                        : body["top_logprobs"]
                    ],
                }
                for token, row in zip(tokens, rows, strict=True)
            ]
            whole = {**choice, "message": {"content": "x"}, "logprobs": {"content": entries}}
            return httpx.Response(200, json={"choices": [whole], "prompt_token_ids": prompt})
        choice["text"] = "x"
        if (k := body.get("prompt_logprobs")) is not None:
            entries = zip(prompt[1:], self.logprobs(prompt[:-1]), strict=True)
            choice["prompt_logprobs"] = [None, *(told(token, row, k) for token, row in entries)]
        if k := body.get("logprobs"):
            shown = (told(token, row, k) for token, row in zip(tokens, rows, strict=True))
            choice["logprobs"] = {
                "top_logprobs": [
                    {f"token_id:{i}": one["logprob"] for i, one in entry.items()} for entry in shown
                ]
            }
        return httpx.Response(200, json={"choices": [choice]})


def told(token: int, row: np.ndarray, k: int) -> dict[str, Any]:
    order = np.argsort(-row)
    ranks = {int(i): rank for rank, i in enumerate(order, 1)}
    chosen = {token, *map(int, order if k == -1 else order[:k])}
    return {
        str(i): {"logprob": float(np.float32(row[i])), "rank": ranks[i], "decoded_token": f"<{i}>"}
        for i in chosen
    }


def stack(name: str, **args: Any) -> Stack:
    return Stack(
        served_model="bigram",
        model=Artifact(location="/nowhere", files={"config.json": "0" * 64, "model.safetensors": name * 64}),
        engine=Engine(version="vllm 0.32.0", dtype="float32", args={"max-logprobs": -1, **args}),
        hardware=Hardware(device="cpu", name="test", isa="avx2"),
    )


def traces(server: FakeServer, count: int) -> list[Trace]:
    made = []
    for number in range(count):
        messages = [{"role": "user", "content": f"request {number} asks for some words"}]
        prompt = server.template({"messages": messages})
        output = server.draw(prompt, {"max_tokens": 40, "temperature": 1.0, "seed": number})
        made.append(
            Trace(
                request_id=f"r{number}",
                started_at=datetime(2026, 3, 1, tzinfo=UTC) + timedelta(seconds=number),
                tenant="default",
                session=f"s{number // 2}",
                stack="ab" * 32,
                endpoint="chat",
                stream=True,
                model="bigram",
                sampling='{"temperature":0}',
                format=None,
                messages=json.dumps(messages),
                prompt_token_ids=prompt,
                choices=[Choice(0, output, "words", "stop")],
                status=200,
            )
        )
    return made


@dataclass
class Seen:
    observations: list[Observation]
    findings: list[Finding]

    def values(self, metric: str, arm: str = "candidate") -> list[float]:
        return [v for o in self.observations if o.metric == metric for v in getattr(o, arm)]

    def mean(self, metric: str, arm: str = "candidate") -> float:
        return float(np.mean(self.values(metric, arm)))


def measure(
    reference: FakeServer,
    candidate: FakeServer,
    heldout: list[Trace],
    cache: Path,
    done: frozenset[str] = frozenset(),
    args: dict[str, Any] | None = None,
    **options: Any,
) -> Seen:
    async def run() -> Seen:
        servers = {"reference": reference, "candidate": candidate}
        transport = httpx.MockTransport(lambda request: servers[request.url.host].answer(request))
        async with httpx.AsyncClient(transport=transport) as client:
            bench = Bench(
                reference=Side("reference", stack("a", **(args or {})), "http://reference"),
                candidate=Side("candidate", stack("b", **(args or {})), "http://candidate"),
                traces=heldout,
                client=client,
                cache=cache,
                progress=lambda done, text: None,
                done=done,
            )
            seen = [one async for one in Fidelity(parity=False, **options).observe(bench)]
        return Seen(
            [one for one in seen if isinstance(one, Observation)],
            [one for one in seen if isinstance(one, Finding)],
        )

    return asyncio.run(run())


def test_the_same_twice_is_no_distance(tmp_path: Path) -> None:
    server = FakeServer()
    heldout = traces(server, 8)
    seen = measure(server, replace(server, asked=[]), heldout, tmp_path)
    assert max(seen.values("kl")) < 1e-5
    assert max(map(abs, seen.values("perplexity_log_ratio"))) < 1e-6
    for metric in ("prompt_same", "top1_agreement", "topk_overlap", "greedy_is_argmax"):
        assert set(seen.values(metric)) == {1.0}, metric
    assert set(seen.values("error") + seen.values("error", "reference")) == {0.0}
    assert seen.values("sampled_gap") == seen.values("sampled_gap", "reference")
    assert not seen.findings
    declared = {metric.name for metric in Fidelity.metrics}
    assert {o.metric for o in seen.observations} == declared - {"parity_kl", "parity_top1"}
    tokens = sum(len(t.output_token_ids) for t in heldout)
    assert len(seen.values("kl")) == tokens
    assert {o.session for o in seen.observations} == {f"default/s{n}" for n in range(4)}


@pytest.mark.parametrize("k", [-1, 20, 3])
def test_other_weights_are_as_far_as_they_are(tmp_path: Path, k: int) -> None:
    reference = FakeServer()
    other = reference.logits + np.random.default_rng(1).normal(size=reference.logits.shape)
    heldout = traces(reference, 6)
    seen = measure(reference, FakeServer(other), heldout, tmp_path, top_logprobs=k)
    exact = []
    for trace in sorted(
        heldout,
        key=lambda t: [o.request_id for o in seen.observations if o.metric == "kl"].index(t.request_id),
    ):
        before = [trace.prompt_token_ids[-1], *trace.output_token_ids[:-1]]
        exact += [*full_distances(reference.logits[before], other[before], trace.output_token_ids).kl]
    found = np.array(seen.values("kl"))
    assert (found <= np.array(exact) + 1e-5).all()
    assert found.mean() > (0.3 if k == 3 else 0.9) * np.mean(exact)
    if k == -1:
        np.testing.assert_allclose(found, exact, atol=1e-5)
    assert seen.mean("top1_agreement") < 1
    worst = next(f for f in seen.findings if f.kind == "far_token")
    assert f"{max(seen.values('kl')):.3f} nats" in worst.detail and "<" in worst.detail
    assert worst.body["prompt_logprobs"] == k and len(worst.body["prompt"]) > 10


def test_another_template_is_seen_and_does_not_change_the_distances(tmp_path: Path) -> None:
    server = FakeServer()
    seen = measure(server, FakeServer(suffix=(1, 3, 2)), traces(server, 6), tmp_path)
    assert seen.mean("prompt_same") == 0
    assert max(seen.values("kl")) < 1e-5
    finding = next(f for f in seen.findings if f.kind == "template_differs")
    length = len(traces(server, 6)[5].prompt_token_ids)
    assert f"part at index {length - 1}: candidate [3, 2], reference [2]" in finding.detail
    assert finding.body["messages"][0]["role"] == "user"


def test_planted_sampling_bugs_are_seen(tmp_path: Path) -> None:
    server = FakeServer()
    heldout = traces(server, 16)
    right = measure(server, FakeServer(), heldout, tmp_path, probes=16)
    assert right.mean("outside_nucleus") == 0
    assert abs(right.mean("sampled_gap")) < 0.15

    samples = measure(server, FakeServer(temperature=lambda t: t or 1.0), heldout, tmp_path, probes=16)
    assert samples.mean("greedy_is_argmax") < 0.7 < samples.mean("greedy_is_argmax", "reference") == 1
    assert any(f.kind == "not_greedy" for f in samples.findings)

    wide = measure(server, FakeServer(top_p=lambda p: 1.0), heldout, tmp_path, probes=16)
    assert wide.mean("outside_nucleus") > 0.02

    hot = measure(server, FakeServer(temperature=lambda t: t and 1.4), heldout, tmp_path, probes=16)
    assert hot.mean("sampled_gap") - hot.mean("sampled_gap", "reference") < -0.2
    cold = measure(server, FakeServer(temperature=lambda t: 0.0), heldout, tmp_path, probes=16)
    assert cold.mean("sampled_gap") - cold.mean("sampled_gap", "reference") > 0.2


def test_the_reference_is_scored_once_and_what_is_done_is_not_asked_again(tmp_path: Path) -> None:
    server, heldout = FakeServer(), traces(FakeServer(), 4)
    first = measure(server, FakeServer(), heldout, tmp_path, probes=0)
    scored = sum("prompt_logprobs" in body for body in server.asked)
    again = measure(server, FakeServer(), heldout, tmp_path, probes=0)
    assert scored == 4 == sum("prompt_logprobs" in body for body in server.asked)
    np.testing.assert_allclose(again.values("kl"), first.values("kl"), atol=1e-6)

    for file in tmp_path.rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-7])
    measure(server, FakeServer(), heldout, tmp_path, probes=0)
    assert sum("prompt_logprobs" in body for body in server.asked) == 8

    candidate = FakeServer()
    done = frozenset({"r0", "r1", "r2/sampled"})
    rest = measure(server, candidate, heldout, tmp_path, done=done, probes=4)
    assert {o.request_id for o in rest.observations if o.metric == "kl"} == {"r2", "r3"}
    assert {o.request_id for o in rest.observations if o.metric == "sampled_gap"} == {
        "r0/sampled",
        "r1/sampled",
        "r3/sampled",
    }


def test_other_tokens_stack_or_k_is_another_cache_entry(tmp_path: Path) -> None:
    cache = Cache(tmp_path, stack("a"))
    known = cache.path([1, 2, 3], 1, 20)
    retokenised = stack("a").model_copy(
        update={
            "model": Artifact(location="", files={**stack("a").model.files, "chat_template.jinja": "1" * 64})
        }
    )
    others = [
        cache.path([1, 2, 4], 1, 20),
        cache.path([1, 2, 3], 2, 20),
        cache.path([1, 2, 3], 1, 5),
        Cache(tmp_path, stack("b")).path([1, 2, 3], 1, 20),
        Cache(tmp_path, retokenised).path([1, 2, 3], 1, 20),
    ]
    assert known == Cache(tmp_path, stack("a")).path([1, 2, 3], 1, 20)
    assert len({known, *others}) == 6


def test_a_failing_candidate_is_observed(tmp_path: Path) -> None:
    server = FakeServer()
    seen = measure(server, FakeServer(broken="/completions"), traces(server, 8), tmp_path)
    assert set(seen.values("error")) == {1.0} and set(seen.values("error", "reference")) == {0.0}
    assert len(seen.values("error")) == 3, "a server that is gone is not asked to the end"
    finding = next(f for f in seen.findings if f.kind == "error")
    assert "HTTP 500" in finding.detail and "\x1b" not in finding.detail


def test_a_failing_reference_ends_it(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="reference at http://reference failed 3 requests in a row"):
        measure(FakeServer(broken="/completions"), FakeServer(), traces(FakeServer(), 8), tmp_path)


def test_nothing_to_score_is_said(tmp_path: Path) -> None:
    empty = [replace(trace, messages="") for trace in traces(FakeServer(), 2)]
    with pytest.raises(EvalError, match="nothing to"):
        measure(FakeServer(), FakeServer(), empty, tmp_path)


@pytest.mark.parametrize("change", ["another model", "withheld", "no tokens"])
def test_where_the_recorded_tokens_will_not_do_the_reference_answers(tmp_path: Path, change: str) -> None:
    server = FakeServer()
    heldout = [
        replace(
            trace,
            prompt_token_ids={"another model": [5, 6], "withheld": [WITHHELD, 4], "no tokens": []}[change],
            choices=[] if change == "no tokens" else trace.choices,
        )
        for trace in traces(server, 3)
    ]
    seen = measure(server, FakeServer(), heldout, tmp_path, max_output_tokens=7, probes=0)
    assert {o.request_id for o in seen.observations if o.metric == "kl"} == {"r0", "r1", "r2"}
    assert all(1 <= len(o.candidate) <= 7 for o in seen.observations if o.metric == "kl")
    scored = [body["prompt"] for body in server.asked if "prompt_logprobs" in body]
    expected = {tuple(server.template({"messages": json.loads(trace.messages)})) for trace in heldout}
    assert {tuple(ids[: len(ids) - 7]) for ids in scored if len(ids) > 9} <= {*expected, *map(tuple, scored)}
    assert any(tuple(ids[: len(prompt)]) == prompt for ids in scored for prompt in expected)


def test_what_does_not_fit_into_the_time_is_left_out(tmp_path: Path) -> None:
    heldout = traces(FakeServer(), 4)
    assert not measure(FakeServer(), FakeServer(), heldout, tmp_path, seconds=1e-9).observations


def test_sequences_are_cut_to_the_context(tmp_path: Path) -> None:
    server = FakeServer()
    seen = measure(server, FakeServer(), traces(server, 3), tmp_path, args={"max-model-len": 48}, probes=0)
    assert seen.values("kl")
    assert all(len(body["prompt"]) < 48 for body in server.asked if "prompt_logprobs" in body)


def test_no_more_log_probabilities_are_asked_for_than_both_allow() -> None:
    whole, default, few = stack("a"), stack("b", **{"max-logprobs": None}), stack("c", **{"max-logprobs": 5})
    assert most_logprobs([whole, whole], -1) == -1
    assert most_logprobs([whole, whole], 20) == 20
    assert most_logprobs([whole, default], -1) == 20
    assert most_logprobs([default, few], 20) == 5


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"{}",
        b'{"choices":[]}',
        b'{"choices":[{}]}',
        b'{"choices":[{"prompt_logprobs":[null,null,null]}]}',
        b'{"choices":[{"prompt_logprobs":[null,{"5":{"logprob":-1,"rank":1}}]}]}',
        b'{"choices":[{"prompt_logprobs":[null,{"6":{"logprob":-1,"rank":1}},{"6":{"logprob":"x","rank":1}}]}]}',
        b'{"choices":[{"prompt_logprobs":[null,{"9":{"logprob":-1,"rank":1}},{"6":{"logprob":-1,"rank":1}}]}]}',
        b'{"choices":[{"prompt_logprobs":[null,{"5":{"logprob":7,"rank":1}},{"6":{"logprob":-1,"rank":1}}]}]}',
        b'{"choices":[{"prompt_logprobs":[null,{"5":{"logprob":-1,"rank":1}},{"6":[]}]}]}',
        b'{"choices":[{"prompt_logprobs":[null,{"5":{"logprob":-99,"rank":1}},{"6":{"logprob":-1,"rank":1}}]}]}',
        b'{"choices":[{"prompt_logprobs":[null,{"5":{"logprob":-1,"rank":1},"99999999999":{"logprob":-2,"rank":2}},{"6":{"logprob":-1,"rank":1}}]}]}',
    ],
)
def test_answers_that_are_none_are_errors(answer: bytes) -> None:
    async def run() -> None:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, content=answer))
        async with httpx.AsyncClient(transport=transport) as client:
            await score(client, Server("http://x", "m"), [4, 5, 6], 1, 2, 5)

    with pytest.raises(ScoreError):
        asyncio.run(run())


def test_an_endless_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless():
        while True:
            yield b" " * 4096

    async def run() -> None:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, content=endless()))
        async with httpx.AsyncClient(transport=transport) as client:
            await score(client, Server("http://x", "m"), [4, 5, 6], 1, 2, 5)

    assert MAX_ANSWER_BYTES > 1 << 20
    monkeypatch.setattr("strop.evals.reference_logits.MAX_ANSWER_BYTES", 1 << 20)
    with pytest.raises(ScoreError, match="larger than 1 MiB"):
        asyncio.run(run())
