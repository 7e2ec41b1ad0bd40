"""Servers that the tests of this folder build on."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from strop.serving.engine import cores_of_replica, engine_command, engine_environment
from strop.serving.gateway import Gateway
from strop.serving.process import Child, free_port
from strop.serving.settings import GatewaySettings
from strop.serving.stack import Stack


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    model: str
    stack: Stack
    traces: Path


@pytest.fixture(scope="session")
def engine_with_capture(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A real vLLM server of the tiny model that records what it serves."""
    folder = tmp_path_factory.mktemp("engine")
    args = {"max-model-len": 1024, "max-num-seqs": 8, "enforce-eager": True}
    tools = {"enable-auto-tool-choice": True, "tool-call-parser": "hermes"}
    stack = Stack.build(tiny_model, "tiny", engine_args={**args, **tools})
    capture: dict[str, object] = {"root": str(folder / "traces"), "stack": stack.fingerprint, "roll_s": 1}
    port = free_port()
    child = Child.start(
        "engine",
        engine_command(stack, "127.0.0.1", port),
        folder / "engine.log",
        engine_environment(stack, 1, cores_of_replica(0, 1), capture),
    )
    try:
        child.wait_until_answers(f"http://127.0.0.1:{port}/health", 240)
        yield Served(f"http://127.0.0.1:{port}", "tiny", stack, folder / "traces")
    finally:
        child.stop()


@dataclass(frozen=True)
class Received:
    """A request as it came to a router."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]


@dataclass
class FakeRouter:
    """Keeps what it is sent; `hold` makes POSTs wait, `left` counts clients that went away meanwhile."""

    port: int = 0
    received: list[Received] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)
    left: int = 0


def _handler(router: FakeRouter) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path != "/readiness":
                self._keep(b"")
            self._answer()

        def do_POST(self) -> None:
            self._keep(self._body())
            while not router.hold.wait(0.05):
                self.connection.settimeout(0.01)
                try:
                    gone = self.connection.recv(1, socket.MSG_PEEK) == b""
                except TimeoutError:
                    gone = False
                except ConnectionResetError:
                    gone = True
                self.connection.settimeout(None)
                if gone:
                    router.left += 1
                    self.close_connection = True
                    return
            self._answer()

        do_HEAD = do_PUT = do_DELETE = do_OPTIONS = do_GET

        def _keep(self, body: bytes) -> None:
            router.received.append(Received(self.command, self.path, list(self.headers.items()), body))

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers["Content-Length"]))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _answer(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@pytest.fixture
def fake_router() -> Iterator[FakeRouter]:
    router = FakeRouter()
    router.hold.set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(router))
    server.daemon_threads = True
    # HAProxy resets the connections of its health checks.
    server.handle_error = lambda request, client_address: None
    router.port = server.server_port
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield router
    router.hold.set()
    server.shutdown()


StartGateway = Callable[..., Gateway]


@pytest.fixture
def start_gateway(tmp_path: Path, fake_router: FakeRouter) -> Iterator[StartGateway]:
    """Starts gateways with the fake router in their first slot."""
    started: list[Gateway] = []

    def start(tenants: dict[str, str] | None = None, capacity: int = 0, **settings: Any) -> Gateway:
        folder = tmp_path / f"gateway{len(started)}"
        gateway = Gateway.start("127.0.0.1", free_port(), folder, GatewaySettings(**settings), tenants)
        started.append(gateway)
        gateway.attach(0, [("127.0.0.1", fake_router.port)], 128, capacity)
        deadline = time.monotonic() + 20
        while "UP" not in gateway.command("show stat").split("slot0.0")[1].split("\n")[0]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return gateway

    yield start
    for gateway in started:
        gateway.child.stop()
