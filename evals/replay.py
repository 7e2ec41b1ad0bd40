"""Choose held-out requests, rebuild them from their traces, and put each to two servers."""

import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import httpx

from strop.evals.settings import EvalSettings
from strop.serving.client import Endpoint, Outcome, send
from strop.serving.traces import PROBE_TENANT, Trace

Kind = Literal["chat", "json", "tools"]

"""Tenant under which replayed requests are sent, so that whatever records them can tell them from traffic."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request to replay. The recorded messages are the prompt, whatever either server answered before."""

    request_id: str
    session: str
    kind: Kind
    endpoint: Endpoint
    body: dict[str, Any]
    """Everything but the model's name."""

    @property
    def greedy(self) -> bool:
        """Whether the answer is the arg max of the logits at every step, within a grammar if any."""
        return self.body.get("temperature") == 0 and not any(
            self.body.get(name) not in (None, neutral) for name, neutral in _NEUTRAL.items()
        )

    def made_greedy(self) -> "Request":
        # A sampler that draws all the same would hide behind a seed.
        kept = {name: value for name, value in self.body.items() if name not in (*_NEUTRAL, "seed")}
        return replace(self, body={**kept, "temperature": 0})

    def made_sampled(self) -> "Request":
        """The same request at temperature 0.7, without the grammar that would leave little to sample."""
        kept = {n: v for n, v in self.body.items() if n not in ("response_format", "tools", "tool_choice")}
        return replace(self, kind="chat", body={**kept, "temperature": 0.7})


_NEUTRAL = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": {}}
# The server's own bookkeeping and what would make one request into several.
_NOT_REPLAYED = frozenset({"n", "best_of", "stream", "stream_options", "model", "user", "messages", "prompt"})


@dataclass(frozen=True, slots=True)
class Server:
    """Where a Stack answers, and the model name it answers to."""

    url: str
    model: str
    cache_salt: str | None = None
    """Keeps what this server cached for others out of the measurement: both sides start cold."""

    async def answer(self, client: httpx.AsyncClient, request: Request, timeout_s: float) -> Outcome:
        body = {**request.body, "model": self.model}
        if self.cache_salt:
            body["cache_salt"] = self.cache_salt
        return await send(
            client,
            self.url,
            request.endpoint,
            body,
            session=request.session,
            tenant=PROBE_TENANT,
            timeout_s=timeout_s,
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """What both servers answered to one request."""

    request: Request
    champion: Outcome
    candidate: Outcome

    @property
    def answered(self) -> bool:
        return self.champion.error is None and self.candidate.error is None


def kind_of(trace: Trace) -> Kind:
    """Slice of traffic, from what the request asked the answer to look like."""
    wanted = json.loads(trace.format) if trace.format else {}
    if wanted.get("tools"):
        return "tools"
    response_format = (wanted.get("response_format") or {}).get("type", "text")
    constrained = any(wanted.get(name) for name in ("structured_outputs", "guided_json", "guided_grammar"))
    return "json" if response_format != "text" or constrained else "chat"


def rebuild(trace: Trace, settings: EvalSettings) -> Request:
    """The request of a trace, streamed, with one answer and a capped length.

    Raises ValueError if the trace's JSON is broken or it holds no prompt.
    """
    prompt = json.loads(trace.messages) if trace.messages else None
    if not prompt or trace.endpoint not in ("chat", "completions"):
        raise ValueError(f"trace {trace.request_id} holds no prompt to replay")
    sampling = json.loads(trace.sampling) if trace.sampling else {}
    wanted = json.loads(trace.format) if trace.format else {}
    body = {name: value for name, value in {**sampling, **wanted}.items() if name not in _NOT_REPLAYED}
    limit = body.pop("max_completion_tokens", None) or body.get("max_tokens") or settings.max_output_tokens
    body["max_tokens"] = min(limit, settings.max_output_tokens)
    if body.get("temperature") != 0:
        body.setdefault("seed", settings.seed)
    body["messages" if trace.endpoint == "chat" else "prompt"] = prompt
    return Request(
        request_id=trace.request_id,
        session=f"{trace.tenant}/{trace.session}",
        kind=kind_of(trace),
        endpoint=trace.endpoint,
        body={**body, "stream": True, "return_token_ids": True},
    )


def select(heldout: Iterable[Trace], settings: EvalSettings) -> tuple[list[Request], list[Request]]:
    """Requests to measure in the order they were made, and others to warm up with.

    Sessions are taken whole and newest first, each time from the kind of traffic that has fewest
    requests so far, until `max_requests`. A session that is longer than all the room is cut.
    """
    sessions: dict[str, list[tuple[Trace, Request]]] = {}
    for trace in heldout:
        if trace.status == 200:
            try:
                request = rebuild(trace, settings)
            except (ValueError, AttributeError, TypeError):
                continue
            sessions.setdefault(request.session, []).append((trace, request))
    by_kind: dict[str, list[list[tuple[Trace, Request]]]] = {}
    for session in sorted(sessions.values(), key=lambda turns: min(t.started_at for t, _ in turns)):
        by_kind.setdefault(session[0][1].kind, []).append(
            sorted(session, key=lambda turn: turn[0].started_at)
        )
    counts: dict[str, int] = dict.fromkeys(by_kind, 0)
    chosen: list[tuple[Trace, Request]] = []
    passed_over: list[list[tuple[Trace, Request]]] = []
    while waiting := [kind for kind in by_kind if by_kind[kind]]:
        kind = min(waiting, key=lambda k: counts[k])
        session = by_kind[kind].pop()
        room = settings.max_requests - len(chosen)
        if len(session) > room and chosen:
            passed_over.append(session)
            continue
        counts[kind] += len(session[:room])
        chosen += session[:room]
    chosen.sort(key=lambda turn: turn[0].started_at)
    warmup = [request for session in passed_over for _, request in session][: settings.warmup_requests]
    warmup += [_WARMUP] * (settings.warmup_requests - len(warmup))
    return [request for _, request in chosen], warmup


# Stands in where there is no spare held-out request: a measured one would already be in the prefix cache.
_WARMUP = Request(
    request_id="warmup",
    session="warmup",
    kind="chat",
    endpoint="chat",
    body={
        "messages": [{"role": "user", "content": "Name the days of the week in order."}],
        "temperature": 0,
        "max_tokens": 32,
        "stream": True,
        "return_token_ids": True,
    },
)


async def play(
    client: httpx.AsyncClient,
    champion: Server,
    candidate: Server,
    requests: Iterable[Request],
    timeout_s: float,
) -> AsyncIterator[Pair]:
    """Put every request to both servers, one at a time; who goes first changes from request to request.

    Drift of the machine (heat, a neighbour) thereby falls on both alike, and each server's prefix
    cache has seen the same requests in the same order.
    """
    for number, request in enumerate(requests):
        if number % 2:
            candidate_outcome = await candidate.answer(client, request, timeout_s)
            champion_outcome = await champion.answer(client, request, timeout_s)
        else:
            champion_outcome = await champion.answer(client, request, timeout_s)
            candidate_outcome = await candidate.answer(client, request, timeout_s)
        yield Pair(request, champion_outcome, candidate_outcome)
