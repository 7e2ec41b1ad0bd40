"""Sessions of traffic: little scripts whose later turns hold the model's own earlier answers.

`load_jsonl` reads them from a file of OpenAI requests.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from strop.serving.client import PATHS, Endpoint, Outcome

MAX_LINE_BYTES = 16 << 20

Message = dict[str, Any]


class WorkloadError(ValueError):
    """A request file that cannot be used; the message names file, line and reason."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request, ready to be sent."""

    session: str
    turn: int
    endpoint: Endpoint
    body: dict[str, Any]
    kind: str


@dataclass(frozen=True, slots=True)
class Turn:
    """What the client adds in one turn, and how it asks."""

    kind: str
    messages: tuple[Message, ...]
    """Messages of this turn; empty for the completions endpoint."""
    options: dict[str, Any]
    """The rest of the request's body: sampling, tools, response_format, prompt."""
    endpoint: Endpoint = "chat"
    continues: bool = True
    """Whether the earlier turns and their answers go before `messages`; False if they are already in it."""


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation in the making."""

    id: str
    turns: tuple[Turn, ...]

    def request(self, turn: int, answers: Sequence[Outcome] = ()) -> Request:
        """The request of turn number `turn`, given the answers to all turns before it."""
        if len(answers) < turn:
            raise ValueError(f"turn {turn} of session {self.id} needs {turn} answers, not {len(answers)}")
        now = self.turns[turn]
        history: list[Message] = []
        if now.continues:
            for earlier, answer in zip(self.turns[:turn], answers, strict=False):
                history += [*earlier.messages, {"role": "assistant", "content": spoken(answer)}]
        messages = [*history, *now.messages]
        body = {**now.options, "messages": messages} if messages else dict(now.options)
        return Request(self.id, turn, now.endpoint, body, now.kind)


def spoken(answer: Outcome) -> str:
    """An answer as text. Tool calls are written out, so that models without a tool template see them too."""
    calls = [
        json.dumps({"name": call["function"]["name"], "arguments": call["function"]["arguments"]})
        for call in answer.tool_calls
    ]
    return "\n".join(part for part in (answer.text, *calls) if part)


def kind_of(body: dict[str, Any]) -> str:
    """Slice of traffic that a request belongs to: `json`, `tools` or `chat`."""
    if (body.get("response_format") or {}).get("type") in ("json_schema", "json_object"):
        return "json"
    return "tools" if body.get("tools") else "chat"


def load_jsonl(
    path: Path,
    *,
    model: str | None = None,
    on_bad: Callable[[WorkloadError], None] | None = None,
) -> list[Session]:
    """Read OpenAI requests, one a line: a request body, or a line of the batch API.

    Lines with the same "session" become the turns of one session, in file order; each carries its own
    history. `model` replaces the model that the lines name. A bad line raises WorkloadError, or is left
    out and handed to `on_bad` if that is given.
    """
    turns: dict[tuple[str, str], list[Turn]] = {}
    try:
        with path.open("rb") as file:
            for number, line in _lines(file):
                try:
                    key, turn = _parse(line, f"{path.stem}-{number}", model)
                    if key in turns and key[0] == "custom_id":
                        raise _BadLine(f'custom_id "{key[1]}" appears twice')
                except _BadLine as reason:
                    error = WorkloadError(f"{path}, line {number}: {reason}")
                    if on_bad is None:
                        raise error from None
                    on_bad(error)
                else:
                    turns.setdefault(key, []).append(turn)
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror or error}") from None
    if not turns:
        raise WorkloadError(f"{path} holds no request. Give one OpenAI request a line, as JSON.")
    return [Session(name, tuple(found)) for (_, name), found in turns.items()]


class _BadLine(ValueError):
    pass


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines that hold something; None for a line above the size bound."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        whole = len(line) <= MAX_LINE_BYTES
        while not line.endswith(b"\n") and len(line) > MAX_LINE_BYTES:
            line = file.readline(MAX_LINE_BYTES + 1)
        if not whole or line.strip():
            yield number, line if whole else None


def _parse(line: bytes | None, default_id: str, model: str | None) -> tuple[tuple[str, str], Turn]:
    if line is None:
        raise _BadLine(f"longer than {MAX_LINE_BYTES >> 20} MiB")
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise _BadLine(f"not JSON ({error})") from None
    if not isinstance(record, dict):
        raise _BadLine(f"a JSON {type(record).__name__} where an object is needed")
    session = record.pop("session", None)
    if session is not None and not isinstance(session, str):
        raise _BadLine('"session" is not a string')
    body, endpoint = _body(record)
    messages = _messages(body) if endpoint == "chat" else ()
    if endpoint == "completions" and not isinstance(body.get("prompt"), str | list):
        raise _BadLine('"prompt" is missing or not text')
    if model is not None:
        body["model"] = model
    if not isinstance(body.get("response_format") or {}, dict):
        raise _BadLine('"response_format" is not an object')
    key = (
        ("session", session)
        if session is not None
        else ("custom_id", str(record.get("custom_id", default_id)))
    )
    return key, Turn(kind_of(body), messages, body, endpoint, continues=False)


def _body(record: dict[str, Any]) -> tuple[dict[str, Any], Endpoint]:
    if "body" not in record:
        return dict(record), "completions" if "prompt" in record and "messages" not in record else "chat"
    for endpoint, url in PATHS.items():
        if record.get("url", PATHS["chat"]) == url:
            if not isinstance(record["body"], dict):
                raise _BadLine('"body" is not an object')
            return dict(record["body"]), endpoint
    raise _BadLine(f'"url" is {record["url"]!r}; only {" and ".join(PATHS.values())} can be replayed')


def _messages(body: dict[str, Any]) -> tuple[Message, ...]:
    messages = body.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise _BadLine('"messages" is missing or not a list with at least one message')
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _BadLine('a message is not an object with a "role"')
    return tuple(messages)
