"""The middleware that has long prompts computed elsewhere, with the engine and the prefill replicas played."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.serving.prefill import REQUESTS, Prefill

LONG = {
    "model": "m",
    "messages": [{"role": "user", "content": "long " * 1000}],
    "max_tokens": 7,
    "stream": True,
}
SHORT = {"model": "m", "messages": [{"role": "user", "content": "short"}], "max_tokens": 7}


class Engine:
    """Notes the bodies it gets."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.lengths: list[int] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.lengths.append(int(dict(scope["headers"])[b"content-length"]))
        self.bodies.append((await receive())["body"])
        self.then = asyncio.ensure_future(receive())
        for _ in range(5):
            await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def _middleware(
    monkeypatch: pytest.MonkeyPatch, prefill: Callable[[httpx.Request], Any], transfer: str = "lmcache"
) -> tuple[Prefill, Engine]:
    known = {"url": "http://prefill", "min_request_bytes": 1000, "transfer": transfer}
    monkeypatch.setenv("STROP_PREFILL", json.dumps(known))
    engine = Engine()
    middleware = Prefill(engine)
    middleware.client = httpx.AsyncClient(base_url="http://prefill", transport=httpx.MockTransport(prefill))
    return middleware, engine


def _ask(
    middleware: Prefill, body: bytes, path: str = "/v1/chat/completions", leaves: bool = False
) -> int | None:
    """The status that the client gets; None if it got nothing."""
    sent: list[Any] = []

    async def go() -> None:
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await asyncio.sleep(0 if leaves else 60)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-length", str(len(body)).encode())]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        await asyncio.wait_for(middleware(scope, receive, send), 10)

    asyncio.run(go())
    return sent[0]["status"] if sent else None


def _count(where: str) -> float:
    return REQUESTS.labels(where)._value.get()


def test_a_long_prompt_is_computed_elsewhere_and_answered_here(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def prefill(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/chat/completions"
        asked.append(json.loads(request.content))
        return httpx.Response(200, json={"choices": []})

    middleware, engine = _middleware(monkeypatch, prefill)
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = LONG | {
        "tools": tools,
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
        "n": 3,
    }
    before = _count("elsewhere")
    assert _ask(middleware, json.dumps(body).encode()) == 200
    assert asked == [
        {
            "model": "m", "messages": LONG["messages"], "tools": tools, "tool_choice": "none",
            "max_tokens": 1, "temperature": 0, "stream": False,
        }
    ]  # fmt: skip
    assert json.loads(engine.bodies[0]) == body and engine.lengths == [len(engine.bodies[0])]
    assert _count("elsewhere") == before + 1


def test_a_short_prompt_is_not_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def prefill(request: httpx.Request) -> httpx.Response:
        raise AssertionError("nobody should ask")

    middleware, engine = _middleware(monkeypatch, prefill)
    assert _ask(middleware, json.dumps(SHORT).encode()) == 200
    assert json.loads(engine.bodies[0]) == SHORT


@pytest.mark.parametrize("trouble", ["refused", "broken", "no JSON", "a list"])
def test_without_prefill_replicas_the_prompt_is_computed_here(
    monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    def prefill(request: httpx.Request) -> httpx.Response:
        match trouble:
            case "refused":
                raise httpx.ConnectError("nobody there")
            case "broken":
                return httpx.Response(500)
            case "no JSON":
                return httpx.Response(200, content=b"<html>")
            case _:
                return httpx.Response(200, json=[1])

    middleware, engine = _middleware(monkeypatch, prefill)
    before = _count("here, since it failed elsewhere")
    assert _ask(middleware, json.dumps(LONG).encode()) == 200
    assert json.loads(engine.bodies[0]) == LONG
    assert _count("here, since it failed elsewhere") == before + 1


def test_a_client_that_leaves_meanwhile_costs_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = []

    async def prefill(request: httpx.Request) -> httpx.Response:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return httpx.Response(200, json={})

    middleware, engine = _middleware(monkeypatch, prefill)
    assert _ask(middleware, json.dumps(LONG).encode(), leaves=True) is None
    assert engine.bodies == [] and cancelled == [True]


def test_the_engine_hears_that_the_client_left(monkeypatch: pytest.MonkeyPatch) -> None:
    middleware, engine = _middleware(monkeypatch, lambda _: httpx.Response(200, json={}))
    body = json.dumps(SHORT).encode()
    assert _ask(middleware, body, leaves=True) == 200
    assert engine.then.done() and engine.then.result() == {"type": "http.disconnect"}


def test_with_nixl_the_request_says_where_its_kv_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    where = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [4, 5]}

    def prefill(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content)["kv_transfer_params"])
        return httpx.Response(200, json={"choices": [], "kv_transfer_params": where})

    middleware, engine = _middleware(monkeypatch, prefill, "nixl")
    assert _ask(middleware, json.dumps(LONG).encode()) == 200
    assert asked[0]["do_remote_decode"] is True and asked[0]["do_remote_prefill"] is False
    assert json.loads(engine.bodies[0]) == LONG | {"kv_transfer_params": where}


@pytest.mark.parametrize("transfer", ["lmcache", "nixl"])
@pytest.mark.parametrize("body", [SHORT, LONG])
def test_a_client_cannot_name_the_kv_of_another(
    monkeypatch: pytest.MonkeyPatch, transfer: str, body: dict[str, Any]
) -> None:
    middleware, engine = _middleware(monkeypatch, lambda _: httpx.Response(500), transfer)
    stolen = {"do_remote_prefill": True, "remote_block_ids": [1]}
    # Twice, and with the name in disguise: whatever the engine's parser would see is gone.
    text = (
        json.dumps(body)[:-1]
        + ', "kv_transfer_params": 1, "\\u006bv_transfer_params": '
        + json.dumps(stolen)
        + "}"
    )
    assert json.loads(text)["kv_transfer_params"] == stolen
    assert _ask(middleware, text.encode()) == 200
    assert json.loads(engine.bodies[0]) == body


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"3", b"null", b'{"seed": NaN}', b"\xff\xfe", b"[" * 5000]
)
def test_what_is_no_json_object_is_refused(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    middleware, engine = _middleware(monkeypatch, lambda _: httpx.Response(200, json={}))
    assert _ask(middleware, body) == 400
    assert engine.bodies == []


def test_other_paths_pass_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    middleware, engine = _middleware(monkeypatch, lambda _: httpx.Response(500))
    assert _ask(middleware, b"no json", "/v1/tokenize") == 200
    assert engine.bodies == [b"no json"]


def test_a_missing_configuration_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STROP_PREFILL", raising=False)
    with pytest.raises(ValueError, match="PrefillConfig"):
        Prefill(Engine())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip


@given(request=st.dictionaries(st.text(), VALUES, max_size=5))
def test_the_engine_gets_what_the_client_said(request: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        middleware, engine = _middleware(monkeypatch, lambda _: httpx.Response(500))
        assert _ask(middleware, json.dumps(request).encode()) == 200
    request.pop("kv_transfer_params", None)
    assert json.loads(engine.bodies[0]) == request
