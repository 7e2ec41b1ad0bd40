"""OpenTelemetry's GenAI semantic conventions as OTLP JSON: the spans that are calls of a model.

Read are the attributes `gen_ai.input.messages`, `gen_ai.output.messages` and
`gen_ai.system_instructions` of spans, of their events and of log records (version 1.37 of the
conventions and later), the events `gen_ai.*.message` and `gen_ai.choice` of spans (until 1.36), and
the numbered attributes `gen_ai.prompt.N.*` and `gen_ai.completion.N.*` that OpenLLMetry writes.
Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Attributes = dict[str, Any]
_NUMBERED = re.compile(r"gen_ai\.(prompt|completion)\.(\d+)\.(role|content|finish_reason)")
_EVENT_ROLES = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed")
_OPERATIONS = ("chat", "generate_content", "text_completion", "completion")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a model; messages are in OpenAI's layout."""

    prompt: list[dict[str, Any]]
    answers: list[dict[str, Any]]
    finish_reason: str | None
    model: str
    session: str | None
    at: datetime | None
    e2e_s: float | None
    sampling: dict[str, Any]


def otel_exchanges(record: dict[str, Any]) -> Iterator[Call]:
    """The calls of a model in one OTLP JSON object. Raises KeyError, TypeError for what is not OTLP."""
    for resource in record.get("resourceSpans") or []:
        for scope in resource.get("scopeSpans") or []:
            yield from (call for span in scope.get("spans") or [] if (call := _call(span, _events(span))))
    for resource in record.get("resourceLogs") or []:
        for scope in resource.get("scopeLogs") or []:
            for log in scope.get("logRecords") or []:
                body = _value(log.get("body") or {})
                extra = body if isinstance(body, dict) else {}
                merged = {**_attributes(log), **extra}
                if "gen_ai.input.messages" in merged and (call := _call(log, [("", merged)])):
                    yield call


def _call(span: dict[str, Any], events: list[tuple[str, Attributes]]) -> Call | None:
    """None for a span that is something else: a tool, an agent, a database."""
    known = _attributes(span)
    for name, attributes in events:
        if name in ("", "gen_ai.client.inference.operation.details"):
            known |= attributes
    operation = known.get("gen_ai.operation.name")
    if not any(key.startswith("gen_ai.") for key in known) or (operation and operation not in _OPERATIONS):
        return None
    instructions = _structured(known.get("gen_ai.system_instructions"))
    prompt = [*_said({"role": "system", "parts": instructions})] if instructions else []
    prompt += [m for part in _structured(known.get("gen_ai.input.messages")) for m in _said(part)]
    outputs = _structured(known.get("gen_ai.output.messages"))
    answers = [m for part in outputs for m in _said(part)]
    reasons = [part.get("finish_reason") for part in outputs]
    for name, attributes in events:
        if name in _EVENT_ROLES:
            prompt.append({**_plain(attributes), "role": _EVENT_ROLES[name]})
        elif name == "gen_ai.choice":
            message = _structured(attributes.get("message")) or attributes
            answers.append({**_plain(message), "role": "assistant"})
            reasons.append(attributes.get("finish_reason"))
    for side, numbered in _numbered(known).items():
        (prompt if side == "prompt" else answers).extend(_plain(m) | {"role": m["role"]} for m in numbered)
        reasons += [m.get("finish_reason") for m in numbered if side == "completion"]
    started, ended = (_nanoseconds(span.get(name)) for name in ("startTimeUnixNano", "endTimeUnixNano"))
    started = started or _nanoseconds(span.get("timeUnixNano"))
    listed = known.get("gen_ai.response.finish_reasons") or []
    return Call(
        prompt=prompt,
        answers=answers,
        finish_reason=next((str(r) for r in [*reasons, *listed] if r), None),
        model=str(known.get("gen_ai.request.model") or known.get("gen_ai.response.model") or ""),
        session=known.get("gen_ai.conversation.id") or span.get("traceId"),
        at=datetime.fromtimestamp(started / 1e9, UTC) if started else None,
        e2e_s=(ended - started) / 1e9 if started and ended else None,
        sampling={
            name: known[f"gen_ai.request.{name}"] for name in _SAMPLING if f"gen_ai.request.{name}" in known
        },
    )


def _said(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A message of parts as one of OpenAI's, or as one for each answer of a tool."""
    text, calls = [], []
    for part in message["parts"]:
        kind = part.get("type")
        if kind == "text":
            text.append({"type": "text", "text": part["content"]})
        elif kind == "tool_call":
            calls.append(_tool_call(part.get("id"), part["name"], part.get("arguments")))
        elif kind == "tool_call_response":
            answer = part.get("response", part.get("result"))
            content = answer if isinstance(answer, str) else json.dumps(answer)
            yield {"role": "tool", "tool_call_id": part.get("id"), "content": content}
        elif kind != "reasoning":
            text.append({"type": kind})
    if text or calls:
        yield {"role": message["role"], "content": text, **({"tool_calls": calls} if calls else {})}


def _plain(attributes: Attributes) -> dict[str, Any]:
    calls = _structured(attributes.get("tool_calls"))
    message: dict[str, Any] = {"content": attributes.get("content")}
    if calls:
        parts = ((call.get("id"), call.get("function") or call) for call in calls)
        message["tool_calls"] = [_tool_call(id_, f["name"], f.get("arguments")) for id_, f in parts]
    if attributes.get("id") and not calls:
        message["tool_call_id"] = attributes["id"]
    return message


def _tool_call(id_: Any, name: str, arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments if arguments is not None else {})
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": text}}


def _numbered(known: Attributes) -> dict[str, list[Attributes]]:
    sides: dict[str, dict[int, Attributes]] = {"prompt": {}, "completion": {}}
    for key, value in known.items():
        if found := _NUMBERED.fullmatch(key):
            entry = sides[found[1]].setdefault(int(found[2]), {"role": "assistant"})
            entry[found[3]] = value
    return {side: [entry for _, entry in sorted(entries.items())] for side, entries in sides.items()}


def _events(span: dict[str, Any]) -> list[tuple[str, Attributes]]:
    return [
        (event.get("name", ""), _attributes(event)) for event in span.get("events") or [] if event.get("name")
    ]


def _attributes(part: dict[str, Any]) -> Attributes:
    return {attribute["key"]: _value(attribute["value"]) for attribute in part.get("attributes") or []}


def _value(value: dict[str, Any]) -> Any:
    """An OTLP AnyValue as plain Python."""
    if "arrayValue" in value:
        return [_value(item) for item in value["arrayValue"].get("values") or []]
    if "kvlistValue" in value:
        return {item["key"]: _value(item["value"]) for item in value["kvlistValue"].get("values") or []}
    if "intValue" in value:
        return int(value["intValue"])
    return next(iter(value.values()), None)


def _structured(value: Any) -> Any:
    """What may be kept as JSON text; an empty list for nothing. Raises KeyError where it is cut off."""
    try:
        return (json.loads(value) if isinstance(value, str) else value) or []
    except ValueError:
        raise KeyError("messages that are not whole JSON") from None


def _nanoseconds(value: Any) -> int | None:
    return int(value) if value and str(value).isdecimal() else None
