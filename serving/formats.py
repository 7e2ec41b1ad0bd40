"""Conversations as others record them: OpenAI chat JSON, ShareGPT, OpenTelemetry spans, vLLM's request log.

A record becomes exchanges, one for each answer in it. What cannot be understood raises BadRow with the
reason; nothing is guessed.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from strop.serving.otel import otel_exchanges
from strop.serving.wire import FORMAT_KEYS

Message = dict[str, Any]
FORMATS = ("openai", "sharegpt", "otel", "vllm")
SAMPLING_KEYS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "max_completion_tokens",
    "seed",
    "stop",
)
OPEN_REQUESTS = 10_000
"""Requests of a log that may wait for their answer; the oldest is given up for a newer one."""


class BadRow(ValueError):
    """A record that is no conversation with an answer; the message says why."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its answer, not yet tokenised."""

    prompt: list[Message] | str
    """Messages of a chat, or the text of a completion."""
    answer: Message
    """The assistant's message; only `content` for a completion."""
    session: str | None = None
    model: str = ""
    at: datetime | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    format: dict[str, Any] = field(default_factory=dict)
    """`tools`, `response_format` and the like."""
    finish_reason: str | None = None
    e2e_s: float | None = None
    prompt_token_ids: list[int] | None = None
    """As recorded; None where they must be made."""
    output_token_ids: list[int] | None = None


def exchanges(record: Any, kind: str) -> list[Exchange]:
    """The answers in one JSON record of a format. Raises BadRow."""
    if not isinstance(record, dict):
        raise BadRow(f"a JSON {type(record).__name__} where an object is needed")
    try:
        found = _READERS[kind](record)
    except BadRow:
        raise
    except (TypeError, KeyError, AttributeError, IndexError, ValueError, OverflowError, OSError) as error:
        raise BadRow(f"not laid out as {kind}: {type(error).__name__} {error}") from None
    if not found and kind != "otel":
        raise BadRow("no answer in it")
    return found


def kind_of(record: Any) -> str:
    """Format of a JSON record, by its keys. Raises BadRow if they are those of none."""
    if not isinstance(record, dict):
        raise BadRow(f"a JSON {type(record).__name__} where an object is needed")
    if "resourceSpans" in record or "resourceLogs" in record:
        return "otel"
    if any(name in record for name in _CONVERSATION):
        return "sharegpt"
    if "messages" in record or "response" in record:
        return "openai"
    raise BadRow(f"the keys {', '.join(sorted(map(str, record))[:8])} are those of no known format")


def _openai(record: dict[str, Any]) -> list[Exchange]:
    request = record.get("request", record.get("body", record))
    request = request.get("body", request)
    response = record.get("response")
    if response is None:
        return _turns(_messages(record["messages"]), _session(record), **_common(record))
    if response.get("error") or response.get("status_code", 200) >= 400:
        raise BadRow("the response is an error")
    body = response.get("body", response)
    prompt = _messages(request["messages"]) if "messages" in request else request.get("prompt")
    if not isinstance(prompt, list | str) or not prompt:
        raise BadRow("the request has no messages")
    common = _common({**request, "created": body.get("created", record.get("created"))})
    return [
        Exchange(
            prompt,
            _message(choice.get("message") or {"role": "assistant", "content": choice["text"]}),
            _session(record) or _session(request),
            finish_reason=choice.get("finish_reason"),
            output_token_ids=choice.get("token_ids"),
            prompt_token_ids=choice.get("prompt_token_ids") or body.get("prompt_token_ids"),
            **common,
        )
        for choice in body["choices"][:1]
    ]


def _common(body: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": str(body.get("model") or ""),
        "at": _time(body.get("created", body.get("timestamp"))),
        "sampling": {key: body[key] for key in SAMPLING_KEYS if body.get(key) is not None},
        "format": {key: body[key] for key in FORMAT_KEYS if body.get(key) is not None},
    }


_CONVERSATION = ("conversations", "conversation", "items")
_SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "system": "system", "tool": "tool",
    "observation": "tool", "function_call": "assistant",
}  # fmt: skip


def _sharegpt(record: dict[str, Any]) -> list[Exchange]:
    turns = next((record[name] for name in _CONVERSATION if name in record), [])
    messages, times = [], []
    for turn in turns:
        speaker = str(turn.get("from") or turn.get("role"))
        if speaker not in _SPEAKERS:
            raise BadRow(f"{speaker!r} is nobody who speaks in a conversation")
        messages.append(
            _message({"role": _SPEAKERS[speaker], "content": turn.get("value", turn.get("content"))})
        )
        times.append(_time(turn.get("timestamp")))
    if record.get("system"):
        messages.insert(0, {"role": "system", "content": str(record["system"])})
        times.insert(0, None)
    found = _turns(messages, _session(record), **_common({**record, "tools": _parsed(record.get("tools"))}))
    answered = [time for message, time in zip(messages, times, strict=True) if message["role"] == "assistant"]
    if len(answered) != len(found):
        return found
    return [replace(exchange, at=time or exchange.at) for exchange, time in zip(found, answered, strict=True)]


def _turns(messages: list[Message], session: str | None, **common: Any) -> list[Exchange]:
    """An exchange for each answer that something was said before; `weight` 0 marks one not to learn from."""
    return [
        Exchange(messages[:number], {k: v for k, v in message.items() if k != "weight"}, session, **common)
        for number, message in enumerate(messages)
        if message["role"] == "assistant" and number and message.get("weight", 1) != 0
    ]


def _session(record: dict[str, Any]) -> str | None:
    names = ("session", "session_id", "conversation_hash", "conversation_id", "custom_id", "id")
    return next((str(record[name])[:256] for name in names if record.get(name)), None)


def _messages(messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise BadRow('"messages" is not a list with at least one message')
    return [_message(message) for message in messages]


def _message(message: Any) -> Message:
    """A message whose content is text. Raises BadRow for images, sound and what is no message."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRow('a message is not an object with a "role"')
    content = message.get("content")
    if isinstance(content, list):
        if other := [p for p in content if not isinstance(p, dict) or not isinstance(p.get("text"), str)]:
            shown = other[0].get("type") if isinstance(other[0], dict) else type(other[0]).__name__
            raise BadRow(f"a message holds something that is not text: {shown}")
        content = "\n".join(part["text"] for part in content)
    calls = message.get("tool_calls")
    if not isinstance(content, str | None) or (content is None and not calls):
        raise BadRow(f'the content of a message of "{message["role"]}" is not text')
    for call in calls or []:
        if not isinstance(call["function"]["name"], str):
            raise BadRow("a tool call has no name")
    return {**{k: v for k, v in message.items() if v is not None}, "content": content or ""}


def _time(value: Any) -> datetime | None:
    """A time as epoch seconds or ISO 8601 text; None for anything else."""
    try:
        if isinstance(value, datetime):
            return value if value.tzinfo else value.replace(tzinfo=UTC)
        if isinstance(value, str):
            parsed = datetime.fromisoformat(value)
            return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return datetime.fromtimestamp(value, UTC)
    except (ValueError, OverflowError, OSError):
        pass
    return None


def _parsed(value: Any) -> Any:
    """JSON that lies in a text, as some layouts keep their tools."""
    try:
        return json.loads(value) if isinstance(value, str) and value else value or None
    except ValueError:
        return None


def _otel(record: dict[str, Any]) -> list[Exchange]:
    found = []
    for span in otel_exchanges(record):
        if not span.prompt or not span.answers:
            raise BadRow("a span of a model holds no prompt or no answer; was content captured?")
        messages = [_message(message) for message in span.prompt]
        answer = _message(span.answers[0])
        common = {"model": span.model, "at": span.at, "sampling": span.sampling, "e2e_s": span.e2e_s}
        found.append(Exchange(messages, answer, span.session, finish_reason=span.finish_reason, **common))
    return found


_READERS: dict[str, Callable[[dict[str, Any]], list[Exchange]]] = {
    "openai": _openai,
    "sharegpt": _sharegpt,
    "otel": _otel,
}

_TEXT = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_REQUEST = re.compile(
    r"\b(?:Received request|Request) (\S+?)(?: details| JSON body)?: (?:prompt: |params: |\{)"
)
_PROMPT = re.compile(rf"\bprompt: {_TEXT}, ")
_PROMPT_IDS = re.compile(r"\bprompt_token_ids: (\[[0-9, ]*\])")
_BODY = re.compile(r" JSON body: (\{.*\})")
_PARAMS = re.compile(
    r"\b(temperature|top_p|top_k|min_p|max_tokens|seed)=(-?[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)[,)]"
)
_RESPONSE = re.compile(r"Generated response (\S+?)( \(streaming \w+\))?(?: details)?: ")
_OUTPUT = re.compile(rf"\boutput: {_TEXT}, .*?finish_reason: (\w+)")
_OUTPUT_IDS = re.compile(r"\boutput_token_ids: (\[[0-9, ]*\])")


def vllm_log(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, Exchange | BadRow]]:
    """Exchanges of a log of `vllm serve --enable-log-requests --enable-log-outputs` at level DEBUG.

    Lines come with their place, which comes back with what they told. Requests and answers are matched
    by their ids. Both the layout since 0.11 (details on lines of their own) and the one before are read.
    """
    waiting: dict[str, dict[str, Any]] = {}
    for place, line in lines:
        if found := _RESPONSE.search(line):
            known = waiting.setdefault(found[1], {"place": place})
            if found[2] == " (streaming delta)":
                continue
            _note(known, "output_token_ids", _OUTPUT_IDS, line)
            if output := _OUTPUT.search(line):
                del waiting[found[1]]
                try:
                    yield place, _logged(found[1], known, output)
                except BadRow as reason:
                    yield place, reason
        elif found := _REQUEST.search(line):
            known = waiting.setdefault(found[1], {"place": place})
            for name, pattern in (("prompt", _PROMPT), ("prompt_token_ids", _PROMPT_IDS), ("body", _BODY)):
                _note(known, name, pattern, line)
            known.setdefault("sampling", {}).update({k: json.loads(v) for k, v in _PARAMS.findall(line)})
            while len(waiting) > OPEN_REQUESTS:
                given_up = waiting.pop(next(iter(waiting)))
                yield given_up["place"], BadRow("no answer to it was logged")
    for known in waiting.values():
        yield known["place"], BadRow("no answer to it was logged")


def _note(known: dict[str, Any], name: str, pattern: re.Pattern[str], line: str) -> None:
    if found := pattern.search(line):
        try:
            known[name] = json.loads(found[1]) if name == "body" else ast.literal_eval(found[1])
        except (ValueError, SyntaxError):
            pass  # Cut off by --max-log-len: as if it had not been logged.


def _logged(request_id: str, known: dict[str, Any], output: re.Match[str]) -> Exchange:
    body = known.get("body") or {}
    messages = body.get("messages")
    prompt = _messages(messages) if messages else known.get("prompt")
    if not prompt:
        raise BadRow("its prompt was not logged; vLLM tells it at --log-level DEBUG")
    common = _common(body)
    return Exchange(
        prompt,
        {"role": "assistant", "content": ast.literal_eval(output[1])},
        request_id,
        **{**common, "sampling": common["sampling"] or known.get("sampling", {})},
        finish_reason=None if output[2] == "None" else output[2],
        prompt_token_ids=known.get("prompt_token_ids") or None,
        output_token_ids=known.get("output_token_ids") or None,
    )
