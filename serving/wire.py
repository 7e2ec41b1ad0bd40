"""vLLM's OpenAI-compatible JSON: what capture asks of the engine, hides from the client, and keeps.

The engine is asked for token ids (`return_token_ids`), for streams also for the usage chunk, which
carries the metrics. `restore_*` undo what that changes in an answer, so that a client
sees what it would have seen without capture.
"""

import time
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any

import orjson

from strop.serving.traces import Choice, Speculation, Trace

ENDPOINTS = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
FORMAT_KEYS = ("tools", "tool_choice", "parallel_tool_calls", "response_format", "structured_outputs")
# Neither what was asked nor how to sample the answer: plumbing, or about the person who asked.
_NOT_SAMPLING = frozenset(
    {
        "model", "messages", "prompt", "stream", "stream_options", "return_token_ids", "user", "metadata",
        "store", "safety_identifier", "request_id", "priority", "cache_salt", "kv_transfer_params",
        *FORMAT_KEYS,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the client sent it."""

    endpoint: str
    """`chat` or `completions`."""
    body: dict[str, Any]
    keep_metrics: bool
    """Whether the client asked to see the engine's metrics."""

    @classmethod
    def parse(cls, path: str, raw: bytes, keep_metrics: bool = False) -> "Request | None":
        """None where there is nothing to learn from: not a JSON object, or an echo of the prompt.

        With `echo`, asking for token ids would change the text of the answer.
        """
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError:
            return None
        if not isinstance(body, dict) or body.get("echo"):
            return None
        return cls(ENDPOINTS[path], body, keep_metrics)

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def keep_ids(self) -> bool:
        return bool(self.body.get("return_token_ids"))

    @property
    def keep_usage(self) -> bool:
        options = self.body.get("stream_options")
        return isinstance(options, dict) and bool(options.get("include_usage"))

    @property
    def prompts(self) -> list[Any]:
        """What each group of choices answers: the chat, or every prompt of a batch."""
        if self.endpoint == "chat":
            return [self.body.get("messages")]
        prompt = self.body.get("prompt")
        is_batch = isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list))
        return prompt if is_batch else [prompt]  # type: ignore[return-value]

    @property
    def choices_per_prompt(self) -> int:
        n = self.body.get("n")
        return n if isinstance(n, int) and n > 0 else 1

    def amended(self) -> bytes:
        """The body to send to the engine."""
        body = {**self.body}
        if body.get("return_token_ids") in (None, False):
            body["return_token_ids"] = True
        options = body.get("stream_options")
        if self.stream and not self.keep_usage and (options is None or isinstance(options, dict)):
            body["stream_options"] = {
                **(options or {}),
                "include_usage": True,
                "continuous_usage_stats": False,
            }
        return orjson.dumps(body)


def restore_whole(body: dict[str, Any], request: Request) -> None:
    """Edit an answer that came whole into what the client asked for."""
    if not request.keep_metrics and "metrics" in body:
        body["metrics"] = None
    if not request.keep_ids:
        for part in (body, *body.get("choices", ())):
            _blank_ids(part)


def restore_chunk(chunk: dict[str, Any], request: Request, system_fingerprint: str | None) -> bool:
    """Edit one chunk of a stream into what the client asked for; False if it would not have been sent."""
    choices = chunk.get("choices") or ()
    if not choices and chunk.get("usage"):
        if not request.keep_metrics:
            chunk.pop("metrics", None)
        return request.keep_usage
    if not request.keep_ids:
        _blank_ids(chunk)
        for choice in choices:
            if _exists_for_its_ids(choice):
                return False
            _blank_ids(choice)
    finished = any(choice.get("finish_reason") for choice in choices)
    if finished and not request.keep_usage and system_fingerprint is not None:
        # The engine puts it on its last chunk, which would have been this one.
        chunk["system_fingerprint"] = system_fingerprint
    return True


def _blank_ids(part: dict[str, Any]) -> None:
    for name in ("prompt_token_ids", "token_ids"):
        if name in part:
            part[name] = None


def _exists_for_its_ids(choice: dict[str, Any]) -> bool:
    # While a parser holds text back, the engine sends a chunk only to tell ids or log-probabilities.
    silent = choice.get("delta") == {} and choice.get("finish_reason") is None
    return silent and choice.get("logprobs") is None and "token_ids" in choice


@dataclass(frozen=True, slots=True)
class Arrival:
    """Who sent a request, and when."""

    request_id: str
    tenant: str
    session: str
    at: datetime
    clock: float
    """The same moment on the performance counter, seconds."""


@dataclass(slots=True)
class _Parts:
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    tool_calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    finish_reason: str | None = None

    def choice(self, index: int) -> Choice:
        calls = [call for _, call in sorted(self.tool_calls.items())]
        return Choice(
            index=index,
            token_ids=self.token_ids,
            text="".join(self.text),
            finish_reason=self.finish_reason,
            tool_calls=orjson.dumps(calls).decode() if calls else None,
        )


@dataclass(slots=True)
class Answer:
    """An answer, gathered while it passes."""

    status: int = 500
    error: str | None = None
    chunk_times: list[float] = field(default_factory=list)
    """When chunks with content came, on the performance counter."""
    ended: float | None = None
    _choices: dict[int, _Parts] = field(default_factory=dict)
    _prompt_ids: dict[int, list[int]] = field(default_factory=dict)
    _metrics: dict[str, Any] = field(default_factory=dict)
    _cached_tokens: int | None = None

    def fail(self, status: int, message: str) -> None:
        self.status, self.error = status, message[:500]

    def take_whole(self, status: int, body: Any) -> None:
        """An answer that came whole; `body` is its JSON."""
        self.status = status
        if status >= 400:
            self.fail(status, _error_message(body))
            return
        if body is None:
            # What vLLM answers when it finds that the client has gone.
            self.fail(499, "the client went away")
            return
        for choice in body["choices"]:
            self._take(choice, choice.get("message") or choice)
        self._take_rest(body)

    def take_chunk(self, chunk: dict[str, Any]) -> None:
        """One chunk of a stream."""
        if "error" in chunk:
            code = chunk["error"].get("code") if isinstance(chunk["error"], dict) else None
            self.fail(code if isinstance(code, int) else 500, _error_message(chunk))
            return
        has_content = False
        for choice in chunk.get("choices") or ():
            has_content |= self._take(choice, choice.get("delta") or choice)
        if has_content:
            self.chunk_times.append(time.perf_counter())
        self._take_rest(chunk)

    def _take(self, choice: dict[str, Any], message: dict[str, Any]) -> bool:
        parts = self._choices.setdefault(choice["index"], _Parts())
        text = message.get("content") or message.get("text") or ""
        token_ids = choice.get("token_ids") or []
        parts.text.append(text)
        parts.token_ids += token_ids
        parts.finish_reason = choice.get("finish_reason") or parts.finish_reason
        if choice.get("prompt_token_ids"):
            self._prompt_ids[choice["index"]] = choice["prompt_token_ids"]
        for position, delta in enumerate(message.get("tool_calls") or ()):
            _add_tool_call(parts.tool_calls, delta.get("index", position), delta)
        return bool(text or token_ids or message.get("tool_calls"))

    def _take_rest(self, body: dict[str, Any]) -> None:
        if body.get("prompt_token_ids"):
            self._prompt_ids[0] = body["prompt_token_ids"]
        if details := (body.get("usage") or {}).get("prompt_tokens_details"):
            self._cached_tokens = details.get("cached_tokens")
        if body.get("metrics"):
            self._metrics = body["metrics"]

    def traces(self, request: Request, arrival: Arrival, stack: str) -> list[Trace]:
        """One record for every prompt."""
        n, prompts = request.choices_per_prompt, request.prompts
        times = self.chunk_times
        queue_ms, first_ms = self._metrics.get("queue_time_ms"), self._metrics.get("time_to_first_token_ms")
        if times:
            ttft_s = times[0] - arrival.clock
        else:
            ttft_s = (first_ms + (queue_ms or 0)) / 1e3 if first_ms is not None else None
        body = request.body
        sampling = {k: v for k, v in body.items() if k not in _NOT_SAMPLING}
        format_ = {k: body[k] for k in FORMAT_KEYS if body.get(k) is not None}
        return [
            Trace(
                request_id=arrival.request_id + (f"-{number}" if len(prompts) > 1 else ""),
                started_at=arrival.at,
                tenant=arrival.tenant,
                session=arrival.session,
                stack=stack,
                endpoint=request.endpoint,
                stream=request.stream,
                model=str(body.get("model") or ""),
                sampling=orjson.dumps(sampling).decode(),
                format=orjson.dumps(format_).decode() if format_ else None,
                messages=orjson.dumps(prompt).decode(),
                prompt_token_ids=self._prompt_ids.get(number * n, []),
                choices=[
                    parts.choice(index - number * n)
                    for index, parts in sorted(self._choices.items())
                    if number * n <= index < (number + 1) * n
                ],
                status=self.status,
                error=self.error,
                queue_s=queue_ms / 1e3 if queue_ms is not None else None,
                ttft_s=ttft_s,
                e2e_s=self.ended - arrival.clock if self.ended else None,
                inter_token_s=[later - earlier for earlier, later in pairwise(times)],
                cached_tokens=self._cached_tokens,
                speculation=_speculation(self._metrics.get("speculative_decoding")),
            )
            for number, prompt in enumerate(prompts)
        ]


def _speculation(metrics: dict[str, Any] | None) -> Speculation | None:
    if not metrics:
        return None
    # histogram[k]: steps in which exactly k drafted tokens were accepted.
    histogram: list[int] = metrics["acceptance_histogram"]
    return Speculation(
        steps=metrics["num_spec_steps"],
        drafted=metrics["num_draft_tokens"],
        accepted=metrics["num_accepted_draft_tokens"],
        accepted_by_position=[sum(histogram[position:]) for position in range(1, len(histogram))],
    )


def _add_tool_call(calls: dict[int, dict[str, Any]], index: int, delta: dict[str, Any]) -> None:
    call = calls.setdefault(
        index, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
    )
    function = delta.get("function") or {}
    call["id"] = delta.get("id") or call["id"]
    call["type"] = delta.get("type") or call["type"]
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


def _error_message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or error)
