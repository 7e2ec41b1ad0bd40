import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from strop.serving.gateway import Gateway
from strop.serving.process import ProcessError, free_port


class _Router(BaseHTTPRequestHandler):
    """Answers with its own port; a POST can be told to break."""

    def do_GET(self) -> None:
        body = f"{self.server.server_port} {self.headers.get('X-Request-Id')}".encode()  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.broken == "close":  # type: ignore[attr-defined]
            self.connection.close()
        elif self.server.broken:  # type: ignore[attr-defined]
            self.send_error(self.server.broken)  # type: ignore[attr-defined]
        else:
            self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass


def _router() -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Router)
    server.broken = None  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture
def routers() -> Iterator[list[ThreadingHTTPServer]]:
    servers = [_router(), _router()]
    yield servers
    for server in servers:
        server.shutdown()


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    started = Gateway.start("127.0.0.1", free_port(), tmp_path)
    yield started
    started.child.stop()


def _where(gateway: Gateway, sessions: int = 200) -> dict[str, str]:
    with httpx.Client() as client:
        return {
            s: client.get(f"{gateway.url}/v1/models", headers={"X-Session-Id": s}).text.split()[0]
            for s in map(str, range(sessions))
        }


def test_sessions_follow_the_weights_and_stick(gateway: Gateway, routers: list[ThreadingHTTPServer]) -> None:
    old, new = (str(server.server_port) for server in routers)
    gateway.attach(0, [("127.0.0.1", int(old))], 128)
    gateway.attach(1, [("127.0.0.1", int(new))], 0)
    assert set(_where(gateway).values()) == {old}
    gateway.set_weight(0, 96)
    gateway.set_weight(1, 32)
    canary = _where(gateway)
    assert 20 <= Counter(canary.values())[new] <= 80
    assert canary == _where(gateway)
    gateway.set_weight(0, 64)
    gateway.set_weight(1, 64)
    half = _where(gateway)
    moved_back = [s for s in canary if canary[s] == new and half[s] == old]
    assert not moved_back
    gateway.set_weight(0, 0)
    assert set(_where(gateway).values()) == {new}


@pytest.mark.parametrize("how", ["close", 500, 503])
def test_a_stack_that_breaks_under_a_request_costs_the_client_nothing(
    gateway: Gateway, routers: list[ThreadingHTTPServer], how: str | int
) -> None:
    for slot, server in enumerate(routers):
        gateway.attach(slot, [("127.0.0.1", server.server_port)], 64)
    routers[1].broken = how  # type: ignore[attr-defined]
    with httpx.Client() as client:
        answers = [
            client.post(f"{gateway.url}/v1/chat/completions", json={"n": i}, headers={"X-Session-Id": str(i)})
            for i in range(40)
        ]
    assert {a.status_code for a in answers} == {200}
    assert {a.text.split()[0] for a in answers} == {str(routers[0].server_port)}


@pytest.mark.parametrize(
    "path",
    ["/collective_rpc", "/pause", "/sleep", "/update_weights", "/list_workers", "/add_worker", "/metrics", "/docs",
     "/v1/../pause", "//pause", "/v1/chat/completions/../../../sleep", "/v1/load_lora_adapter", "/tokenize"],
)  # fmt: skip
def test_only_the_public_api_is_reachable(
    gateway: Gateway, routers: list[ThreadingHTTPServer], path: str
) -> None:
    gateway.attach(0, [("127.0.0.1", routers[0].server_port)], 128)
    import socket

    host, port = gateway.url.removeprefix("http://").split(":")
    for method in ("GET", "POST"):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
            )
            assert connection.recv(64).split()[1] == b"404"


def test_every_request_has_an_id(gateway: Gateway, routers: list[ThreadingHTTPServer]) -> None:
    gateway.attach(0, [("127.0.0.1", routers[0].server_port)], 128)
    first, second = (httpx.get(f"{gateway.url}/v1/models").text.split()[1] for _ in range(2))
    assert first != second and "None" not in (first, second)
    given = httpx.get(f"{gateway.url}/v1/models", headers={"X-Request-Id": "mine"}).text.split()[1]
    assert given == "mine"


def test_a_taken_port_is_one_clear_sentence(tmp_path: Path, routers: list[ThreadingHTTPServer]) -> None:
    with pytest.raises(ProcessError, match=r"Port \d+ on 127.0.0.1 is in use"):
        Gateway.start("127.0.0.1", routers[0].server_port, tmp_path)


def test_refused_commands_are_errors(gateway: Gateway) -> None:
    with pytest.raises(ProcessError, match="HAProxy refused"):
        gateway.attach(0, [("127.0.0.1", free_port())], 1000)


def test_a_killed_gateway_comes_back_as_it_was_and_refuses_nobody(
    gateway: Gateway, routers: list[ThreadingHTTPServer]
) -> None:
    old, new = (str(server.server_port) for server in routers)
    gateway.attach(0, [("127.0.0.1", int(old))], 128)
    gateway.attach(1, [("127.0.0.1", int(new))], 128)
    gateway.set_weight(0, 0)
    (haproxy,) = gateway.child.process.children()
    haproxy.kill()
    haproxy.wait()
    assert set(_where(gateway, 20).values()) == {new}
    assert gateway.child.restarts == 1
    gateway.set_weight(0, 128)
    gateway.drain(1)
    assert set(_where(gateway, 20).values()) == {old}


def test_a_gateway_is_adopted(routers: list[ThreadingHTTPServer], tmp_path: Path) -> None:
    first = Gateway.start("127.0.0.1", free_port(), tmp_path, orphan_s=5)
    first.attach(0, [("127.0.0.1", routers[0].server_port)], 128)
    second = Gateway.adopt(json.loads(json.dumps(first.to_dict())))
    assert second is not None and second.slots == first.slots
    os.close(first.child.lifeline)
    second.attach(1, [("127.0.0.1", routers[1].server_port)], 128)
    second.set_weight(0, 0)
    assert set(_where(second, 20).values()) == {str(routers[1].server_port)}
    second.child.stop()
    assert Gateway.adopt(first.to_dict()) is None


def test_a_dead_router_of_a_stack_costs_no_request(
    gateway: Gateway, routers: list[ThreadingHTTPServer]
) -> None:
    gateway.attach(0, [("127.0.0.1", server.server_port) for server in routers], 128)
    assert len(set(_where(gateway).values())) == 2
    routers[0].shutdown()
    routers[0].server_close()
    assert set(_where(gateway).values()) == {str(routers[1].server_port)}
