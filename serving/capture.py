"""The middleware that records every served request as a Trace, from inside vLLM.

vLLM loads it by `--middleware strop.serving.capture.Capture`; its configuration is the JSON in
the environment variable `STROP_CAPTURE`. It fails open: whatever goes wrong with recording, the
request is served as if nobody recorded. Streams are passed on event by event, never held back.
"""

import asyncio
import logging
import os
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from strop.serving.asgi import Message, Receive, Send, read_body, with_header
from strop.serving.capture_metrics import publish
from strop.serving.interest import Interest, in_sample
from strop.serving.journal import TraceWriter
from strop.serving.redaction import without_content
from strop.serving.settings import CaptureSettings
from strop.serving.sse import EventSplitter, payload
from strop.serving.traces import Trace
from strop.serving.wire import ENDPOINTS, Answer, Arrival, Request, restore_chunk, restore_whole

Result = TypeVar("Result")

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_COMPLAIN_EVERY_S = 60.0

logger = logging.getLogger(__name__)


class CaptureConfig(CaptureSettings):
    """What `STROP_CAPTURE` holds."""

    root: Path
    """Folder of traces."""
    stack: str
    """Fingerprint of the Stack that serves."""
    model: Path | None = None
    """Folder of the model; redaction needs its tokenizer."""


@dataclass(slots=True)
class Counts:
    """What capture did in this process."""

    recorded: int = 0
    passed_untouched: int = 0
    """Requests for text that could not be recorded: too large, not JSON, an echo of the prompt."""
    opted_out: int = 0
    """Requests that were not to be recorded."""
    sampled_out: int = 0
    """Records of sessions outside the sample that were of no interest."""
    errors: int = 0
    """Failures of capture itself, each of which cost a record or left an answer unedited."""


counts = Counts()
_complained = float("-inf")


class Capture:
    """Pure ASGI middleware. Raises ValueError at start if `STROP_CAPTURE` is missing or wrong, or redaction
    is asked for and impossible."""

    def __init__(self, app: Callable[..., Awaitable[None]]):
        try:
            self.config = CaptureConfig.model_validate_json(os.environ.get("STROP_CAPTURE", ""))
        except ValidationError as error:
            raise ValueError(
                'STROP_CAPTURE must hold JSON such as {"root": "/traces", "stack": "<fingerprint>"}: '
                f"{error.errors()[0]['loc']}: {error.errors()[0]['msg']}"
            ) from None
        self.app = app
        self.interest = Interest()
        self.writer = TraceWriter(
            self.config.root,
            self.config.queue_records,
            self.config.flush_s,
            self.config.roll_s,
            _redactor(self.config),
        )
        _guarded(publish, None, counts, self.writer.counts)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        request_id = headers.get(b"x-request-id", "")
        if not _SANE_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        scope = {**scope, "headers": with_header(scope["headers"], b"x-request-id", request_id)}
        send = _announcing(send, self.config.stack, request_id)
        if scope["method"] != "POST" or scope["path"] not in ENDPOINTS or not self.config.enabled:
            await self.app(scope, receive, send)
            return
        if self._opted_out(headers):
            counts.opted_out += 1
            await self.app(scope, receive, send)
            return
        body, again = await read_body(headers, receive)
        exchange = _guarded(_Exchange.begin, None, scope, headers, request_id, body, send) if body else None
        if exchange is None:
            counts.passed_untouched += 1
            await self.app(scope, again, send)
            return
        await self._record(exchange, receive)

    def _opted_out(self, headers: dict[bytes, str]) -> bool:
        off = headers.get(b"x-strop-capture", "").strip().lower() == "off"
        return off or _tenant(headers) in self.config.opted_out_tenants

    async def _record(self, exchange: "_Exchange", receive: Receive) -> None:
        try:
            await self.app(exchange.scope, exchange.receiving(receive), exchange.send)
        except asyncio.CancelledError:
            exchange.disconnected = True
            raise
        except Exception as error:
            exchange.answer.fail(500, repr(error))
            raise
        finally:
            _guarded(self._keep, None, exchange)

    def _keep(self, exchange: "_Exchange") -> None:
        if exchange.unauthorised:
            return
        for trace in exchange.traces(self.config.stack):
            reason = self.interest.of(trace) if self.config.sample_rate < 1 else None
            if not in_sample(trace.tenant, trace.session, self.config.sample_rate):
                if reason is None:
                    counts.sampled_out += 1
                    continue
                trace = replace(trace, kept_for=reason)
            counts.recorded += self.writer.put(trace if self.config.content else without_content(trace))


class _Exchange:
    """One request and its answer on their way through."""

    def __init__(self, scope: Message, arrival: Arrival, request: Request, send: Send):
        self.arrival, self.request = arrival, request
        self.body = request.amended()
        length = str(len(self.body))
        self.scope = {**scope, "headers": with_header(scope["headers"], b"content-length", length)}
        self.answer = Answer()
        self.disconnected = False
        self._pass_on = send
        self._fingerprint = _system_fingerprint(scope, request.endpoint)
        self._start: Message = {}
        self._events: EventSplitter | None = None
        self._whole: bytearray | None = None

    @classmethod
    def begin(
        cls, scope: Message, headers: dict[bytes, str], request_id: str, body: bytes, send: Send
    ) -> "_Exchange | None":
        request = Request.parse(scope["path"], body, headers.get(b"x-strop-metrics") == "1")
        arrival = Arrival(
            request_id=request_id,
            tenant=_tenant(headers),
            session=headers.get(b"x-session-id", "")[:256] or request_id,
            at=datetime.now(UTC),
            clock=time.perf_counter(),
        )
        return cls(scope, arrival, request, send) if request else None

    @property
    def unauthorised(self) -> bool:
        return self.answer.status in (401, 403)

    def traces(self, stack: str) -> list[Trace]:
        if self.disconnected and self.answer.ended is None:
            self.answer.fail(499, "the client went away")
        elif self.answer.status >= 400 and self.answer.error is None:
            self.answer.error = f"HTTP status {self.answer.status}"
        self.answer.ended = self.answer.ended or time.perf_counter()
        return self.answer.traces(self.request, self.arrival, stack)

    def receiving(self, receive: Receive) -> Receive:
        """Gives the amended body, then whatever comes, and notes when the client leaves."""
        body_given = False

        async def amended() -> Message:
            nonlocal body_given
            if not body_given:
                body_given = True
                return {"type": "http.request", "body": self.body, "more_body": False}
            message = await receive()
            self.disconnected |= message["type"] == "http.disconnect"
            return message

        return amended

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body") and not self.disconnected:
            self.answer.ended = time.perf_counter()
        if message["type"] == "http.response.start":
            await self._send_start(message)
        elif self._events is not None:
            await self._send_stream(message, self._events)
        elif self._whole is not None:
            await self._send_whole(message, self._whole)
        else:
            await self._pass_on(message)

    async def _send_start(self, message: Message) -> None:
        self._start = message
        self.answer.status = message["status"]
        headers = dict(message["headers"])
        kind = headers.get(b"content-type", b"")
        if b"content-encoding" not in headers and kind.startswith(b"application/json"):
            self._whole = bytearray()  # the length in the headers depends on the edited body
            return
        if b"content-encoding" not in headers and kind.startswith(b"text/event-stream"):
            self._events = EventSplitter()
        await self._pass_on(message)

    async def _send_whole(self, message: Message, whole: bytearray) -> None:
        whole += message.get("body", b"")
        if message.get("more_body"):
            return
        original = bytes(whole)
        body = _guarded(self._edited_whole, original, original)
        headers = with_header(self._start["headers"], b"content-length", str(len(body)))
        await self._pass_on({**self._start, "headers": headers})
        await self._pass_on({"type": "http.response.body", "body": body})

    def _edited_whole(self, original: bytes) -> bytes:
        content = orjson.loads(original)
        self.answer.take_whole(self._start["status"], content)
        if self._start["status"] >= 400 or content is None:
            return original
        restore_whole(content, self.request)
        return orjson.dumps(content)

    async def _send_stream(self, message: Message, events: EventSplitter) -> None:
        last = not message.get("more_body")
        complete = events.feed(message.get("body", b""))
        body = b"".join(_guarded(self._edited_event, event, event) for event in complete)
        if last:
            body += events.rest()
        if body or last:
            await self._pass_on({"type": "http.response.body", "body": body, "more_body": not last})

    def _edited_event(self, event: bytes) -> bytes:
        data = payload(event)
        if not data or data == b"[DONE]":
            return event
        chunk = orjson.loads(data)
        self.answer.take_chunk(chunk)
        if not restore_chunk(chunk, self.request, self._fingerprint):
            return b""
        return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _redactor(config: CaptureConfig) -> Callable[[Trace], Trace] | None:
    if not config.redact or not config.content:
        return None
    if config.model is None:
        raise ValueError('STROP_CAPTURE asks to redact, and so must name the folder of the "model".')
    from strop.serving.personal import Redactor

    return Redactor(config.model)


def _tenant(headers: dict[bytes, str]) -> str:
    return headers.get(b"x-strop-tenant", "")[:256] or "default"


def _announcing(send: Send, stack: str, request_id: str) -> Send:
    """Adds the Stack and the request's id to the headers of the answer."""

    async def announce(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = with_header(message.get("headers", []), b"x-strop-stack", stack)
            message = {**message, "headers": with_header(headers, b"x-request-id", request_id)}
        await send(message)

    return announce


def _system_fingerprint(scope: Message, endpoint: str) -> str | None:
    name = "openai_serving_chat" if endpoint == "chat" else "openai_serving_completion"
    state = getattr(scope.get("app"), "state", None)
    return getattr(getattr(state, name, None), "system_fingerprint", None)


def _guarded(action: Callable[..., Result], otherwise: Any, *args: Any) -> Result:
    """The one place where a failure of capture ends: it is counted and the request goes on."""
    global _complained
    try:
        return action(*args)
    except Exception:
        counts.errors += 1
        if time.monotonic() - _complained > _COMPLAIN_EVERY_S:
            _complained = time.monotonic()
            logger.exception("Capture failed; the request was served all the same (%s)", counts)
        return otherwise
