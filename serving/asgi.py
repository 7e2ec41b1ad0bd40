"""What our middlewares of vLLM's server share: reading a request's body without taking it away."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

MAX_BODY_BYTES = 32 << 20


async def read_body(headers: dict[bytes, str], receive: Receive) -> tuple[bytes | None, Receive]:
    """The body, and a `receive` that gives it again; None for one that is too large or never ends."""
    length = headers.get(b"content-length", "")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        return None, receive
    messages: list[Message] = []
    size, whole = 0, False
    while not whole and size <= MAX_BODY_BYTES:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request":
            break
        size += len(message.get("body", b""))
        whole = not message.get("more_body")
    # Reversed, to be popped from the end.
    replay = messages[::-1]

    async def again() -> Message:
        return replay.pop() if replay else await receive()

    if not whole or size > MAX_BODY_BYTES:
        return None, again
    return b"".join(m.get("body", b"") for m in messages), again


def with_header(headers: Any, name: bytes, value: str) -> Headers:
    return [(k, v) for k, v in headers if k.lower() != name] + [(name, value.encode("latin-1"))]
