"""The middleware of replicas that answer: it has long prompts computed by the prefill replicas first.

vLLM loads it by `--middleware strop.serving.prefill.Prefill`; its configuration is the JSON in the
environment variable `STROP_PREFILL`. It fails open: without the prefill replicas, the prompt is
computed where it is answered. A client's own `kv_transfer_params` are thrown away, since they could
name another client's KV.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import httpx
import orjson
from prometheus_client import Counter
from pydantic import BaseModel

from strop.serving.asgi import Message, Receive, Send, read_body, with_header
from strop.serving.wire import ENDPOINTS

PATIENCE_S = 120.0
"""Longest time that a prompt may take elsewhere before it is computed here."""
# What may shape the prompt. The rest of a request says how to go on from it.
_OF_THE_PROMPT = frozenset(
    {
        "model", "messages", "prompt", "suffix", "tools", "documents", "chat_template", "chat_template_kwargs",
        "add_generation_prompt", "continue_final_message", "add_special_tokens", "reasoning_effort",
        "truncate_prompt_tokens", "mm_processor_kwargs", "cache_salt", "priority",
    }
)  # fmt: skip
_HAND_OVER = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
"""What NIXL's connector wants to be told by the request that computes a prompt for another replica."""

_JSON = {"Content-Type": "application/json"}

REQUESTS = Counter("strop_prefill_requests", "Requests by where their prompt was computed", ["where"])


class PrefillConfig(BaseModel):
    """What `STROP_PREFILL` holds."""

    url: str
    """A router of the prefill replicas."""
    min_request_bytes: int
    transfer: Literal["lmcache", "nixl"]


class Prefill:
    """Pure ASGI middleware. Raises ValueError at start if `STROP_PREFILL` is missing or wrong."""

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self.app = app
        self.config = PrefillConfig.model_validate_json(os.environ.get("STROP_PREFILL", ""))
        self.client = httpx.AsyncClient(
            base_url=self.config.url, timeout=httpx.Timeout(PATIENCE_S, connect=2), trust_env=False
        )

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in ENDPOINTS:
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        body, _ = await read_body(headers, receive)
        try:
            request = orjson.loads(body or b"")
            request.pop("kv_transfer_params", None)
        except (ValueError, AttributeError, TypeError):
            await _refuse(send)
            return
        # Whatever comes after the body: that the client has gone.
        after = asyncio.ensure_future(receive())
        try:
            if body and len(body) >= self.config.min_request_bytes:
                elsewhere = asyncio.ensure_future(self._elsewhere(scope["path"], request))
                try:
                    await asyncio.wait({elsewhere, after}, return_when=asyncio.FIRST_COMPLETED)
                    if not elsewhere.done():
                        return
                    request |= elsewhere.result()
                finally:
                    elsewhere.cancel()
            else:
                REQUESTS.labels("here").inc()
            await self.app(*_with_body(scope, orjson.dumps(request), receive, after), send)
        finally:
            after.cancel()

    async def _elsewhere(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        """Have the prompt computed; returns what the request has to say to find its KV."""
        ahead = {key: value for key, value in request.items() if key in _OF_THE_PROMPT}
        ahead |= {"max_tokens": 1, "temperature": 0, "stream": False}
        if "tools" in request:
            ahead["tool_choice"] = "none"  # No call has to be made out of one token.
        if self.config.transfer == "nixl":
            ahead["kv_transfer_params"] = _HAND_OVER
        try:
            answer = await self.client.post(path, content=orjson.dumps(ahead), headers=_JSON)
            answer.raise_for_status()
            given = orjson.loads(answer.content).get("kv_transfer_params")
        except (httpx.HTTPError, ValueError, AttributeError):
            REQUESTS.labels("here, since it failed elsewhere").inc()
            return {}
        REQUESTS.labels("elsewhere").inc()
        return {"kv_transfer_params": given} if self.config.transfer == "nixl" and given else {}


def _with_body(
    scope: Message, body: bytes, receive: Receive, after: asyncio.Future[Message]
) -> tuple[Message, Receive]:
    messages: list[Awaitable[Message]] = [after]
    given = False

    async def again() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await (messages.pop() if messages else receive())

    return {**scope, "headers": with_header(scope["headers"], b"content-length", str(len(body)))}, again


async def _refuse(send: Send) -> None:
    error = {"message": "The body is no JSON object.", "type": "BadRequestError", "param": None, "code": 400}
    body = orjson.dumps({"error": error})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
