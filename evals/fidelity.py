"""How far a candidate's served distributions are from a reference's, on tokens that were really said.

Both servers score the same held-out token ids, so that neither sampling nor template enters the distances.
Template and sampling are then looked at by themselves, and the candidate's engine is compared with its
own weights computed offline (`parity`).
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import Field

from strop.evals.distances import Distances, TopLogprobs, top_distances
from strop.evals.losslessness import first_difference
from strop.evals.observation import ARMS, Arm, Bench, EvalError, Finding, Metric, Observation, Side
from strop.evals.parity import parity
from strop.evals.picking import Picked, choose
from strop.evals.probes import (
    SAMPLED_LOGPROBS,
    greedy_is_argmax,
    outside_nucleus,
    sampled,
    sampled_body,
    sampling_excess,
    template_probe,
)
from strop.evals.reference_logits import (
    Cache,
    Scored,
    ScoreError,
    ask,
    most_logprobs,
    printable,
    score,
    score_body,
)
from strop.evals.replay import Request, Server
from strop.serving.client import Outcome
from strop.serving.settings import Section

Seen = Observation | Finding
T = TypeVar("T")

_WINDOW = 12
"""Tokens shown before one that is far off; half as many come after it."""
_GIVE_UP_AFTER = 3
_AT_ONCE = 4
_MEASURING = 0.85
"""Share of the time that is for requests; the rest is for parity."""
_FAR_NATS = 0.05
"""Below this a token is not far off: two batches of one engine in bfloat16 may differ as much."""
SAMPLED = "/sampled"
"""What the id of a request ends with whose answer was sampled."""

METRICS = (
    Metric("kl", "nats", "lower", "level", "divergence from the reference's next-token distribution, KL(reference || candidate)"),
    Metric("reverse_kl", "nats", "lower", "level", "divergence the other way round, KL(candidate || reference)"),
    Metric("top1_agreement", "", "higher", "level", "share of tokens for which it holds the same one likeliest"),
    Metric("topk_overlap", "", "higher", "level", "share of the reference's likeliest tokens among its own"),
    Metric("perplexity_log_ratio", "nats", "lower", "level", "log of its perplexity over the reference's on recorded answers"),
    Metric("unseen", "", "lower", "level", "share of probability for which distances are known by bounds alone"),
    Metric("prompt_same", "", "higher", "level", "share of requests of which it makes the same prompt tokens"),
    Metric("greedy_is_argmax", "", "higher", "difference", "share of tokens at temperature 0 that it holds likeliest itself"),
    Metric("sampled_gap", "nats", "higher", "difference", "sampled tokens' log-probability under the reference, less its expectation; clearly above 0 is a sampler too cold"),
    Metric("outside_nucleus", "", "lower", "difference", "share of sampled tokens that top_p should have ruled out"),
    Metric("parity_kl", "nats", "lower", "level", "engine's divergence from its own weights computed offline"),
    Metric("parity_top1", "", "higher", "level", "share of tokens for which its engine and its weights computed offline agree"),
    Metric("error", "", "lower", "difference", "share of requests that failed"),
)  # fmt: skip


class Fidelity(Section):
    """Distances of the candidate's distributions from the reference's, its template, its sampling, its parity."""

    name: Literal["fidelity"] = "fidelity"
    max_requests: int = Field(default=24, ge=1)
    """Held-out requests that are measured, of as many sessions and slices as there are."""
    max_output_tokens: int = Field(default=300, ge=1)
    """Tokens of an answer that are scored; the rest is left out."""
    max_tokens: int = Field(default=24_000, ge=1)
    """Tokens that each server has to read, prompts included: what the time depends on."""
    top_logprobs: int = Field(default=20, ge=-1)
    """Likeliest tokens asked of each position, as far as both Stacks' `max-logprobs` allow; -1 for the whole vocabulary."""
    probes: int = Field(default=12, ge=0)
    """Prompts that are answered at a temperature as well, to see how tokens are drawn; the shortest ones."""
    parity: bool = True
    """Whether the candidate's engine is compared with its weights computed offline."""
    findings: int = Field(default=8, ge=0)
    """Tokens with the largest distance that are shown."""
    seconds: float = Field(default=600, gt=0)
    """Time it may take; requests that do not fit in are left out."""
    timeout_s: float = Field(default=120, gt=0)
    """Longest time that one request may take."""

    metrics: ClassVar[tuple[Metric, ...]] = METRICS

    async def observe(self, bench: Bench) -> AsyncIterator[Seen]:
        """Distances request by request, then template, sampling and parity, then the tokens farthest off.

        Raises EvalError if no held-out trace can be scored, or the reference fails three requests in a row.
        """
        chosen = choose(bench.traces, self.max_requests, self.max_output_tokens, self.max_tokens)
        if not chosen:
            raise EvalError(
                "No held-out trace holds a prompt that was answered with status 200, so fidelity has nothing to "
                "measure. Record traffic with its content, or import some."
            )
        run, ends = _Run.of(self, bench), time.monotonic() + _MEASURING * self.seconds
        shortest = sorted(chosen, key=lambda picked: len(picked.prompt))[: self.probes]
        probed = {picked.request.request_id for picked in shortest}
        failed: Counter[Arm] = Counter()
        probes: list[tuple[Picked, list[int], int]] = []
        for number, picked in enumerate(chosen):
            if time.monotonic() > ends:
                break
            bench.progress(0.9 * number / len(chosen), f"{number} of {len(chosen)} requests scored")
            request_id, prompt = picked.request.request_id, picked.prompt
            if request_id not in bench.done:
                measured = await run.request(picked)
                for seen in measured.seen:
                    yield seen
                for arm, error in measured.failed.items():
                    failed[arm] = failed[arm] + 1 if error else 0
                if failed["reference"] >= _GIVE_UP_AFTER:
                    raise EvalError(
                        f"The reference at {bench.reference.url} failed {_GIVE_UP_AFTER} requests in a row (last: "
                        f"{measured.failed['reference']}). See its log; without a reference nothing can be compared."
                    )
                if failed["candidate"] >= _GIVE_UP_AFTER:
                    return
                prompt = measured.prompt
            if request_id in probed and prompt and request_id + SAMPLED not in bench.done:
                probes.append((picked, prompt, bench.seed + number))
            if len(probes) >= _AT_ONCE or number + 1 == len(chosen):
                for many in await asyncio.gather(*(run.probe(*probe) for probe in probes)):
                    for seen in many:
                        yield seen
                probes = []
        if self.parity:
            bench.progress(0.9, "comparing the engine with its weights computed offline")
            async for seen in parity(bench, self.top_logprobs, self.timeout_s):
                yield seen
        for finding in run.farthest(self.findings):
            yield finding
        bench.progress(1.0, f"fidelity measured on {len(chosen)} requests")


_Both = tuple[Scored | ScoreError | None, Scored | ScoreError | None]
"""What reference and candidate say of the same tokens; None for a side that was not asked."""


@dataclass(frozen=True, slots=True)
class _Measured:
    seen: list[Seen]
    failed: dict[Arm, str | None]
    """Why a side did not score the tokens; None if it did, or was not asked."""
    prompt: list[int]
    """Token ids that the reference makes of the request; empty if it does not say."""


@dataclass(frozen=True, slots=True)
class _Run:
    options: Fidelity
    bench: Bench
    servers: tuple[Server, Server]
    k: int
    sampled_k: int
    cache: Cache
    far: list[tuple[float, Finding]] = field(default_factory=list)
    shown: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, options: Fidelity, bench: Bench) -> "_Run":
        return cls(
            options=options,
            bench=bench,
            servers=(_server(bench.reference), _server(bench.candidate)),
            k=most_logprobs([side.stack for side in bench.sides], options.top_logprobs),
            sampled_k=most_logprobs([side.stack for side in bench.sides], SAMPLED_LOGPROBS),
            cache=Cache(bench.cache / "logprobs", bench.reference.stack),
        )

    async def request(self, picked: Picked) -> _Measured:
        """Distances and template of one request."""
        recorded = (
            await self._score(picked.prompt, picked.output) if picked.prompt and picked.output else None
        )
        prompts = await asyncio.gather(*(self._template(server, picked.request) for server in self.servers))
        here, there = (outcome.prompt_token_ids for outcome in prompts)
        if recorded is None or (here and here != picked.prompt):
            # Traffic of another model, or kept without tokens: the reference answers for itself.
            recorded = await self._own_answer(here or [], prompts[0].error)
        errors = [
            o.error or (str(s) if isinstance(s, ScoreError) else None)
            for o, s in zip(prompts, recorded, strict=True)
        ]
        seen: list[Seen] = [
            self._observe("error", picked, (float(errors[1] is not None),), (float(errors[0] is not None),))
        ]
        if errors[1]:
            seen += self._few("error", picked, f"Failed: {printable(errors[1])}", picked.request.body)
        seen += self._picks_likeliest(picked, *prompts)
        if here and there:
            seen += self._same_prompt(picked, here, there)
        reference, candidate = recorded
        if isinstance(reference, Scored) and isinstance(candidate, Scored):
            distances = top_distances(reference.top, candidate.top)
            seen += self._distances(picked, distances)
            self._keep_farthest(picked, here or picked.prompt, distances, reference, candidate)
        failed: dict[Arm, str | None] = {
            arm: str(scored) if isinstance(scored, ScoreError) else None
            for arm, scored in zip(ARMS, recorded, strict=True)
        }
        return _Measured(seen, failed, here or picked.prompt)

    async def _score(self, prompt: list[int], output: list[int]) -> _Both:
        longest = _longest(self.bench)
        ids = [*prompt, *output][: longest - 1] if longest else [*prompt, *output]
        if len(ids) <= len(prompt):
            return None, None
        timeout_s, client = self.options.timeout_s, self.bench.client
        return await asyncio.gather(
            _or_error(self.cache.score(client, self.servers[0], ids, len(prompt), self.k, timeout_s)),
            _or_error(score(client, self.servers[1], ids, len(prompt), self.k, timeout_s)),
        )

    async def _template(self, server: Server, request: Request) -> Outcome:
        return await server.answer(self.bench.client, template_probe(request), self.options.timeout_s)

    async def _own_answer(self, prompt: list[int], error: str | None) -> _Both:
        if not prompt:
            return ScoreError(error or "the server tells no prompt token ids (`return_token_ids`)"), None
        body = {
            "prompt": prompt,
            "max_tokens": self.options.max_output_tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        answer = await _or_error(ask(self.bench.client, self.servers[0], body, self.options.timeout_s))
        if isinstance(answer, ScoreError):
            return answer, None
        output = answer.get("token_ids")
        if not isinstance(output, list) or not output or not all(isinstance(token, int) for token in output):
            return ScoreError("no token ids in the answer"), None
        return await self._score(prompt, output)

    def _observe(
        self,
        metric: str,
        picked: Picked,
        candidate: tuple[float, ...],
        reference: tuple[float, ...] | None = None,
        probe: str = "",
    ) -> Observation:
        request = picked.request
        return Observation(
            metric, request.request_id + probe, request.session, picked.slices, candidate, reference
        )

    def _distances(self, picked: Picked, distances: Distances) -> list[Seen]:
        values = {
            "kl": distances.kl,
            "reverse_kl": distances.reverse_kl,
            "top1_agreement": distances.top1,
            "topk_overlap": distances.overlap,
            "perplexity_log_ratio": distances.surprise,
            "unseen": distances.unseen,
        }
        return [self._observe(name, picked, tuple(map(float, array))) for name, array in values.items()]

    def _same_prompt(self, picked: Picked, here: list[int], there: list[int]) -> list[Seen]:
        place = first_difference(here, there)
        seen: list[Seen] = [self._observe("prompt_same", picked, (float(place is None),))]
        if place is not None:
            detail = (
                f"Of the same messages the candidate makes {len(there)} prompt tokens and the reference {len(here)}; "
                f"they part at index {place}: candidate {there[place : place + 8]}, reference {here[place : place + 8]}. "
                "Chat template or tokenizer differ."
            )
            seen += self._few("template_differs", picked, detail, template_probe(picked.request).body)
        return seen

    def _picks_likeliest(self, picked: Picked, here: Outcome, there: Outcome) -> list[Seen]:
        probe = template_probe(picked.request)
        ours, theirs = greedy_is_argmax(probe, there), greedy_is_argmax(probe, here)
        if not ours or not theirs:
            return []
        seen: list[Seen] = [self._observe("greedy_is_argmax", picked, ours, theirs)]
        if wrong := ours.count(0.0):
            detail = (
                f"{wrong} of {len(ours)} tokens at temperature 0 were not the likeliest by its own account."
            )
            seen += self._few("not_greedy", picked, detail, probe.body)
        return seen

    def _few(self, kind: str, picked: Picked, detail: str, body: dict[str, Any]) -> list[Seen]:
        """A finding, unless there were enough of its kind: the next would say the same."""
        self.shown[kind] += 1
        if self.shown[kind] > self.options.findings:
            return []
        return [self._finding(kind, picked.request.request_id, detail, body)]

    def _finding(
        self, kind: str, request_id: str, detail: str, body: dict[str, Any], answer: str = "", other: str = ""
    ) -> Finding:
        stack = self.bench.candidate.stack.fingerprint
        return Finding(kind, "candidate", stack, request_id, detail, body, answer, other)

    def _keep_farthest(
        self, picked: Picked, prompt: list[int], distances: Distances, reference: Scored, candidate: Scored
    ) -> None:
        place = int(distances.kl.argmax())
        if distances.kl[place] < _FAR_NATS:
            return
        tokens = reference.top.tokens
        texts = {**candidate.texts, **reference.texts}
        before, came, after = (
            "".join(texts.get(int(token), "") for token in tokens[slice(*ends)])
            for ends in (
                (max(0, place - _WINDOW), place),
                (place, place + 1),
                (place + 1, place + _WINDOW // 2),
            )
        )
        detail = (
            f"Output token {place} of {len(tokens)} is {distances.kl[place]:.3f} nats off. After {before!r} there came "
            f"{came!r} and then {after!r}. Likeliest: reference {_top(reference, place)}, candidate {_top(candidate, place)}."
        )
        body = score_body([*prompt, *map(int, tokens[: place + 1])], self.k)
        finding = self._finding("far_token", picked.request.request_id, detail, body)
        self.far.append((float(distances.kl[place]), finding))

    def farthest(self, most: int) -> list[Finding]:
        return [finding for _, finding in sorted(self.far, key=lambda far: -far[0])[:most]]

    async def probe(self, picked: Picked, prompt: list[int], seed: int) -> list[Seen]:
        """Tokens that both draw at a temperature after one prompt, by their likelihood under the reference."""
        client, timeout_s = self.bench.client, self.options.timeout_s
        here, there = await asyncio.gather(
            *(
                _or_error(sampled(client, server, prompt, seed, self.sampled_k, timeout_s))
                for server in self.servers
            )
        )
        failed = [isinstance(side, ScoreError) for side in (there, here)]
        seen: list[Seen] = [self._observe("error", picked, (float(failed[0]),), (float(failed[1]),), SAMPLED)]
        if failed[0]:
            seen += self._few("error", picked, f"Failed: {there}", sampled_body(prompt, seed, self.sampled_k))
        if isinstance(here, TopLogprobs) and isinstance(there, TopLogprobs):
            under = await self._under_reference(prompt, here, there)
            for name, of in (("sampled_gap", sampling_excess), ("outside_nucleus", outside_nucleus)):
                if under:
                    ours, theirs = (tuple(map(float, of(top))) for top in (under, here))
                    seen.append(self._observe(name, picked, ours, theirs, SAMPLED))
        return seen

    async def _under_reference(
        self, prompt: list[int], here: TopLogprobs, there: TopLogprobs
    ) -> TopLogprobs | None:
        """The candidate's tokens, scored by the reference; None if it fails."""
        if np.array_equal(here.tokens, there.tokens):
            return here
        client, timeout_s = self.bench.client, self.options.timeout_s
        ids = [*prompt, *map(int, there.tokens)]
        scored = await _or_error(score(client, self.servers[0], ids, len(prompt), self.sampled_k, timeout_s))
        return scored.top if isinstance(scored, Scored) else None


async def _or_error(asked: Awaitable[T]) -> T | ScoreError:
    try:
        return await asked
    except ScoreError as error:
        return error


def _server(side: Side) -> Server:
    return Server(side.url, side.model)


def _longest(bench: Bench) -> int | None:
    """The shorter of both contexts, tokens, where a Stack says."""
    lengths = [side.stack.engine.args.get("max-model-len") for side in bench.sides]
    return min((int(n) for n in lengths if isinstance(n, int | str) and str(n).isdigit()), default=None)


def _top(scored: Scored, place: int) -> str:
    token = int(scored.top.ids[place, 0])
    text = scored.texts.get(token) or f"token {token}"
    return f"{text!r} ({np.exp(scored.top.logprobs[place, 0]):.1%})"
