"""What plays an OpenAI-compatible server."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Plays(Protocol):
    @property
    def chat(self) -> Handler: ...

    @property
    def completions(self) -> Handler: ...


async def send_event(response: web.StreamResponse, **event: Any) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@asynccontextmanager
async def served(server: Plays) -> AsyncIterator[str]:
    """The URL at which `server` answers."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.chat)
    app.router.add_post("/v1/completions", server.completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield site.name
    finally:
        await runner.cleanup()
