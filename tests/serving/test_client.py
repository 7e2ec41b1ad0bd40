"""The client against servers that answer well, badly and not at all."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from strop.serving.client import Outcome, send
from strop.serving.traces import Speculation

Respond = Callable[[asyncio.StreamWriter, dict[str, str], dict], Awaitable[None]]

BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Strop-Stack: abc\r\n\r\n"


@asynccontextmanager
async def listening(respond: Respond) -> AsyncIterator[str]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:]
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head if line)}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        await respond(writer, headers, body)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def ask(respond: Respond, body: dict = BODY, timeout_s: float = 30) -> Outcome:
    async def main() -> Outcome:
        async with listening(respond) as url, httpx.AsyncClient() as client:
            return await send(client, url, "chat", body, session="s", timeout_s=timeout_s)

    return asyncio.run(main())


def writes(*parts: bytes) -> Respond:
    async def respond(writer: asyncio.StreamWriter, headers: dict[str, str], body: dict) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return respond


def event(**content: object) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


def delta(finish_reason: str | None = None, token_ids: list[int] | None = None, **content: object) -> bytes:
    choice = {"index": 0, "delta": content, "finish_reason": finish_reason, "token_ids": token_ids}
    return event(choices=[choice])


def refusal(status: int, content: bytes) -> bytes:
    return f"HTTP/1.1 {status} No\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


DONE = b"data: [DONE]\n\n"
WHOLE = [
    HEAD,
    delta(role="assistant", content=""),
    delta(content="Hel"),
    delta(content="lo\u2028\x85 you"),
    delta("stop", content=""),
    event(choices=[], usage=USAGE),
    DONE,
]


def test_a_whole_stream_becomes_an_outcome() -> None:
    outcome = ask(writes(*WHOLE))
    assert (outcome.status, outcome.error, outcome.stack) == (200, None, "abc")
    assert (outcome.text, outcome.finish_reason) == ("Hello\u2028\x85 you", "stop")
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens) == (7, 2, 4)
    assert outcome.ttft_s is not None and 0 < outcome.ttft_s <= outcome.e2e_s
    assert len(outcome.inter_token_s) == 1
    assert outcome.token_ids is None and outcome.speculation is None


@given(st.lists(st.integers(0, len(b"".join(WHOLE[1:]))), max_size=30))
def test_no_matter_how_the_network_cuts_the_stream(cuts: list[int]) -> None:
    data = b"".join(WHOLE[1:])
    edges = [0, *sorted(cuts), len(data)]

    async def pieces() -> AsyncIterator[bytes]:
        for start, end in pairwise(edges):
            yield data[start:end]

    async def main() -> Outcome:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=pieces()))
        async with httpx.AsyncClient(transport=transport) as client:
            return await send(client, "http://x", "chat", BODY, session="s")

    outcome = asyncio.run(main())
    assert (outcome.error, outcome.text, outcome.output_tokens) == (None, "Hello\u2028\x85 you", 2)


@given(st.binary(max_size=400))
def test_garbage_is_an_error_and_never_an_exception(data: bytes) -> None:
    async def main(body: dict) -> Outcome:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=data))
        async with httpx.AsyncClient(transport=transport) as client:
            return await send(client, "http://x", "chat", body, session="s")

    for body in (BODY, {**BODY, "stream": False}):
        outcome = asyncio.run(main(body))
        assert outcome.status == 200 and outcome.error


KEYS = [
    "choices",
    "delta",
    "content",
    "usage",
    "prompt_tokens",
    "index",
    "tool_calls",
    "function",
    "metrics",
    "token_ids",
    "logprobs",
    "speculative_decoding",
    "acceptance_histogram",
    "error",
    "text",
]
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@example({"choices": [{"delta": {"content": 5}}]})
@example({"choices": [{"token_ids": 5}]})
@example({"usage": {"prompt_tokens": "x"}})
@given(JSON_VALUES)
def test_json_of_any_shape_is_never_an_exception(value: object) -> None:
    async def main() -> Outcome:
        content = b"data: " + json.dumps(value).encode() + b"\n\n" + DONE
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=content))
        async with httpx.AsyncClient(transport=transport) as client:
            return await send(client, "http://x", "chat", BODY, session="s")

    assert asyncio.run(main()).error


def test_it_collects_token_ids_speculation_logprobs_and_tool_calls() -> None:
    counts = {
        "num_spec_steps": 10,
        "num_draft_tokens": 30,
        "num_accepted_draft_tokens": 9,
        "acceptance_histogram": [5, 2, 2, 1],
    }

    def call(**function: str) -> dict:
        return {"index": 0, "function": function}

    entry = {"token": "a", "logprob": -0.5, "top_logprobs": []}
    outcome = ask(
        writes(
            HEAD,
            event(prompt_token_ids=[1, 2, 3], choices=[{"index": 0, "delta": {"role": "assistant"}}]),
            delta(token_ids=[11, 12], tool_calls=[{"id": "c1", **call(name="search", arguments='{"q')}]),
            event(choices=[{"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [entry]}}]),
            delta("stop", token_ids=[13], tool_calls=[call(arguments='": 1}')]),
            event(choices=[], usage=USAGE, metrics={"speculative_decoding": counts}),
            DONE,
        )
    )
    assert outcome.token_ids == [11, 12, 13] and outcome.prompt_token_ids == [1, 2, 3]
    assert outcome.logprobs == [entry]
    assert outcome.tool_calls == [
        {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"q": 1}'}}
    ]
    assert outcome.speculation == Speculation(10, 30, accepted=9, accepted_by_position=[5, 3, 1])


def test_an_answer_that_comes_whole() -> None:
    message = {"role": "assistant", "content": "Hi", "tool_calls": []}
    choice = {"index": 0, "message": message, "finish_reason": "length", "token_ids": [5]}
    answer = json.dumps({"choices": [choice], "usage": USAGE, "prompt_token_ids": [1]}).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\n\r\n".encode()
    seen: list[dict] = []

    async def respond(writer: asyncio.StreamWriter, headers: dict[str, str], body: dict) -> None:
        seen.append(body)
        writer.write(head + answer)

    outcome = ask(respond, {**BODY, "stream": False})
    assert (outcome.error, outcome.text, outcome.finish_reason, outcome.ttft_s) == (
        None,
        "Hi",
        "length",
        None,
    )
    assert (outcome.token_ids, outcome.prompt_token_ids) == ([5], [1])
    assert "stream_options" not in seen[0]


def test_it_sends_who_asks_and_asks_for_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_API_KEY", "secret")
    seen: list[tuple[dict[str, str], dict]] = []

    async def respond(writer: asyncio.StreamWriter, headers: dict[str, str], body: dict) -> None:
        seen.append((headers, body))
        writer.write(b"".join(WHOLE))

    async def main() -> Outcome:
        async with listening(respond) as url, httpx.AsyncClient() as client:
            return await send(
                client, url + "/", "chat", BODY, session="é\r\nX-Evil: 1", request_id="r1", tenant="t1"
            )

    outcome = asyncio.run(main())
    ((headers, body),) = seen
    assert headers["x-request-id"] == outcome.request_id == "r1"
    assert headers["x-strop-tenant"] == "t1" and headers["x-strop-metrics"] == "1"
    assert headers["authorization"] == "Bearer secret"
    assert headers["x-session-id"] == "%C3%A9%0D%0AX-Evil: 1" and "x-evil" not in headers
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("raw", "status", "error"),
    [
        (refusal(500, b'{"error": {"message": "engine died"}}'), 500, "HTTP 500: engine died"),
        (refusal(429, b'{"message": "too fast"}'), 429, "HTTP 429: too fast"),
        (refusal(503, b"<html>no server is available</html>"), 503, "HTTP 503: <html>no server"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", 404, "HTTP 404: Not Found"),
        (HEAD + WHOLE[1] + WHOLE[2], 200, "truncated: the stream ended without [DONE]"),
        (HEAD + WHOLE[2] + DONE, 200, "truncated: the answer has no finish_reason"),
        (HEAD + b"data: {nonsense\n\n", 200, "not an OpenAI answer"),
        (HEAD + event(error={"message": "engine died", "code": 500}), 200, "engine died"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n" + WHOLE[2], 200, "truncated: RemoteProtocolError"),
        (b"SSH-2.0-OpenSSH\r\n", 0, "RemoteProtocolError"),
        (b"", 0, "RemoteProtocolError"),
    ],
)
def test_bad_answers_are_named(raw: bytes, status: int, error: str) -> None:
    outcome = ask(writes(raw))
    assert outcome.status == status
    assert outcome.error is not None and outcome.error.startswith(error)


def test_a_reset_in_the_middle_keeps_what_came() -> None:
    async def respond(writer: asyncio.StreamWriter, headers: dict[str, str], body: dict) -> None:
        writer.write(HEAD + WHOLE[2])
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()

    outcome = ask(respond)
    assert outcome.text == "Hel" and outcome.error is not None and outcome.error.startswith("truncated")


def test_a_silent_server_ends_by_the_time_limit() -> None:
    async def respond(writer: asyncio.StreamWriter, headers: dict[str, str], body: dict) -> None:
        writer.write(HEAD + WHOLE[2])
        await writer.drain()
        await asyncio.sleep(0.5)

    outcome = ask(respond, timeout_s=0.1)
    assert outcome.error == "no whole answer within 0.1 s" and outcome.text == "Hel"


def test_nothing_listens() -> None:
    async def main() -> Outcome:
        async with httpx.AsyncClient() as client:
            return await send(client, "http://127.0.0.1:1", "chat", BODY, session="s")

    outcome = asyncio.run(main())
    assert outcome.status == 0 and outcome.error is not None and "ConnectError" in outcome.error


def test_cancelling_closes_the_connection() -> None:
    async def main() -> bool:
        closed = asyncio.Event()

        async def respond(writer: asyncio.StreamWriter, headers: dict[str, str], body: dict) -> None:
            writer.write(HEAD)
            try:
                while True:
                    writer.write(WHOLE[2])
                    await writer.drain()
                    await asyncio.sleep(0.01)
            except ConnectionError:
                closed.set()

        async with listening(respond) as url, httpx.AsyncClient() as client:
            task = asyncio.create_task(send(client, url, "chat", BODY, session="s"))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(closed.wait(), 5)
            return closed.is_set()

    assert asyncio.run(main())
