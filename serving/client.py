"""The client side of an OpenAI-compatible server: one request in, one measured outcome out."""

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote

import httpx
import orjson

from strop.serving.traces import Speculation

Endpoint = Literal["chat", "completions"]

PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
CONNECT_TIMEOUT_S = 10.0
MAX_EVENT_BYTES = 16 << 20
MAX_ERROR_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one request led to, as its client saw it. Times in seconds; only the first choice is kept."""

    request_id: str
    session: str
    status: int
    """HTTP status of the answer; 0 where there was none."""
    error: str | None
    """Why the answer is not whole; None exactly when it is. Begins with `truncated` if it broke off."""
    stack: str | None
    """Fingerprint of the Stack that answered (header X-Strop-Stack)."""
    started_s: float
    """Unix time at which the request was sent."""
    ttft_s: float | None
    """Until the first chunk with content; None for an answer that came whole."""
    e2e_s: float
    inter_token_s: list[float]
    """Gaps between successive chunks with content. With speculation one chunk may hold several tokens."""
    prompt_tokens: int
    cached_tokens: int | None
    """Prompt tokens the server took from its prefix cache; None if it does not say."""
    output_tokens: int
    text: str
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None
    logprobs: list[dict[str, Any]] | None
    """Entries of the chat API's `logprobs.content`, one a token, if the request asked for them."""
    tool_calls: list[dict[str, Any]]
    finish_reason: str | None
    speculation: Speculation | None
    queue_s: float | None = None
    """Until the engine's scheduler took it up, as the engine says (--enable-per-request-metrics)."""


async def send(
    client: httpx.AsyncClient,
    base_url: str,
    endpoint: Endpoint,
    body: dict[str, Any],
    *,
    session: str,
    request_id: str | None = None,
    tenant: str | None = None,
    timeout_s: float = 600,
) -> Outcome:
    """Send one request and read its whole answer, streamed unless `body["stream"]` is false.

    A failure of the server or of the network is an Outcome with `error` set, never an exception.
    Cancelling the task closes the connection, which makes the server abort the request.
    """
    request_id = request_id or uuid.uuid4().hex
    answer = _Answer()
    started_s, start = time.time(), time.perf_counter()
    error: str | None = None
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.stream(
                "POST",
                base_url.rstrip("/") + PATHS[endpoint],
                content=orjson.dumps(_with_usage(body)),
                headers=_headers(session, request_id, tenant),
                timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            ) as response,
        ):
            answer.status = response.status_code
            answer.stack = response.headers.get("x-strop-stack")
            error = await _read(response, answer, body, start)
    except TimeoutError:
        error = f"no whole answer within {timeout_s:g} s"
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as failure:
        reason = f"{type(failure).__name__}: {failure}".removesuffix(": ")
        error = f"truncated: {reason}" if answer.status else reason
    return answer.outcome(
        request_id=request_id,
        session=session,
        error=error,
        started_s=started_s,
        e2e_s=time.perf_counter() - start,
    )


def _with_usage(body: dict[str, Any]) -> dict[str, Any]:
    if not body.get("stream", True):
        return body
    options = {**(body.get("stream_options") or {}), "include_usage": True}
    return {**body, "stream": True, "stream_options": options}


def _headers(session: str, request_id: str, tenant: str | None) -> dict[str, str]:
    headers = auth_headers() | {
        "Content-Type": "application/json",
        "X-Session-Id": quote(session, safe=_HEADER_SAFE),
        "X-Request-Id": quote(request_id, safe=_HEADER_SAFE),
        "X-Strop-Metrics": "1",
    }
    if tenant is not None:
        headers["X-Strop-Tenant"] = quote(tenant, safe=_HEADER_SAFE)
    return headers


def auth_headers() -> dict[str, str]:
    """The bearer key of STROP_API_KEY, if it is set."""
    key = os.environ.get("STROP_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


_HEADER_SAFE = "!#$&'()*+,/:;=?@[]^`{|}<> \""


@dataclass(slots=True)
class _Answer:
    """The answer as far as it has come."""

    status: int = 0
    stack: str | None = None
    ttft_s: float | None = None
    last_content: float = 0.0
    pieces: int = 0
    inter_token_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    parts: list[str] = field(default_factory=list)
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: list[dict[str, Any]] | None = None
    tool_calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    finish_reason: str | None = None
    speculation: Speculation | None = None
    queue_s: float | None = None

    def outcome(
        self, *, request_id: str, session: str, error: str | None, started_s: float, e2e_s: float
    ) -> Outcome:
        return Outcome(
            request_id=request_id,
            session=session,
            status=self.status,
            error=error,
            stack=self.stack,
            started_s=started_s,
            ttft_s=self.ttft_s,
            e2e_s=e2e_s,
            inter_token_s=self.inter_token_s,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            text="".join(self.parts),
            token_ids=self.token_ids,
            prompt_token_ids=self.prompt_token_ids,
            logprobs=self.logprobs,
            tool_calls=[self.tool_calls[index] for index in sorted(self.tool_calls)],
            finish_reason=self.finish_reason,
            speculation=self.speculation,
            queue_s=self.queue_s,
        )

    def saw_content(self, now: float, start: float) -> None:
        if self.ttft_s is None:
            self.ttft_s = now - start
        else:
            self.inter_token_s.append(now - self.last_content)
        self.last_content = now


async def _read(response: httpx.Response, answer: _Answer, body: dict[str, Any], start: float) -> str | None:
    """Read the answer into `answer`; returns why it is not whole."""
    if response.status_code != 200:
        return f"HTTP {response.status_code}: {await _error_message(response)}"
    try:
        if body.get("stream", True):
            return await _read_stream(response, answer, start)
        return _take_event(orjson.loads(await response.aread()), answer) or _unfinished(answer)
    except (ValueError, TypeError, AttributeError, KeyError) as failure:
        return f"not an OpenAI answer: {failure}"


async def _read_stream(response: httpx.Response, answer: _Answer, start: float) -> str | None:
    async for event in _events(response):
        if event == b"[DONE]":
            return _unfinished(answer)
        pieces = answer.pieces
        if error := _take_event(orjson.loads(event), answer):
            return error
        if answer.pieces > pieces:
            answer.saw_content(time.perf_counter(), start)
    return "truncated: the stream ended without [DONE]"


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of server-sent events. Split on newline bytes alone: answers may hold U+2028 and U+0085."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
        if len(rest) > MAX_EVENT_BYTES:
            raise ValueError(f"one event is larger than {MAX_EVENT_BYTES} bytes")
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


def _take_event(event: dict[str, Any], answer: _Answer) -> str | None:
    """Add one chunk, or a whole answer, to `answer`; returns the error if it reports one."""
    if error := event.get("error"):
        return str(error.get("message") or error) if isinstance(error, dict) else str(error)
    if event.get("prompt_token_ids") is not None:
        answer.prompt_token_ids = event["prompt_token_ids"]
    for choice in event.get("choices") or ():
        if choice.get("index", 0) == 0:
            _take_choice(choice, answer)
    if usage := event.get("usage"):
        answer.prompt_tokens = int(usage["prompt_tokens"])
        answer.output_tokens = int(usage.get("completion_tokens") or 0)
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    metrics = event.get("metrics") or {}
    if counts := metrics.get("speculative_decoding"):
        answer.speculation = _speculation(counts)
    if (queue_ms := metrics.get("queue_time_ms")) is not None:
        answer.queue_s = float(queue_ms) / 1000
    return None


def _take_choice(choice: dict[str, Any], answer: _Answer) -> None:
    message = choice.get("delta") or choice.get("message") or {}
    if text := message.get("content") or choice.get("text"):
        if not isinstance(text, str):
            raise TypeError(f"content is {text!r}, not text")
        answer.parts.append(text)
        answer.pieces += 1
    for position, call in enumerate(message.get("tool_calls") or ()):
        _take_tool_call(call.get("index", position), call, answer)
    if choice.get("prompt_token_ids") is not None:
        answer.prompt_token_ids = choice["prompt_token_ids"]
    if choice.get("token_ids") is not None:
        answer.token_ids = answer.token_ids or []
        answer.token_ids.extend(choice["token_ids"])
        answer.pieces += len(choice["token_ids"])
    if entries := (choice.get("logprobs") or {}).get("content"):
        answer.logprobs = answer.logprobs or []
        answer.logprobs.extend(entries)
    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


def _take_tool_call(index: int, call: dict[str, Any], answer: _Answer) -> None:
    empty = {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
    known = answer.tool_calls.setdefault(index, empty)
    function = call.get("function") or {}
    known["id"] = call.get("id") or known["id"]
    known["function"]["name"] = function.get("name") or known["function"]["name"]
    known["function"]["arguments"] += function.get("arguments") or ""
    answer.pieces += 1


def _speculation(counts: dict[str, Any]) -> Speculation:
    histogram: list[int] = counts["acceptance_histogram"]
    return Speculation(
        steps=counts["num_spec_steps"],
        drafted=counts["num_draft_tokens"],
        accepted=counts["num_accepted_draft_tokens"],
        accepted_by_position=[sum(histogram[position:]) for position in range(1, len(histogram))],
    )


def _unfinished(answer: _Answer) -> str | None:
    return None if answer.finish_reason else "truncated: the answer has no finish_reason"


async def _error_message(response: httpx.Response) -> str:
    data = b""
    async for chunk in response.aiter_bytes():
        data += chunk
        if len(data) > MAX_ERROR_BYTES:
            break
    try:
        content = orjson.loads(data)
        error = content.get("error") or content
        return str(error.get("message") or error) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        return data.decode(errors="replace").strip()[:500] or response.reason_phrase
