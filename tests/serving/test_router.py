"""Workers that join and leave a real vllm-router."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from strop.serving.process import Child, ProcessError, free_port
from strop.serving.router import Router, set_workers

pytestmark = pytest.mark.slow
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


class Worker:
    """Answers as an engine would; streams two chunks with a pause between them."""

    def __init__(self) -> None:
        self.pause_s = 0.0
        worker = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(
                    json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()
                )

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path.endswith("/render"):
                    words = " ".join(message["content"] for message in body["messages"]).split()
                    self._answer(json.dumps({"token_ids": [len(word) for word in words]}).encode())
                    return
                if not body.get("stream"):
                    self._answer(json.dumps({"worker": worker.url}).encode())
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                self.wfile.write(b"data: 1\n\n")
                self.wfile.flush()
                time.sleep(worker.pause_s)
                self.wfile.write(b"data: [DONE]\n\n")

            def _answer(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    started = [Worker(), Worker()]
    yield started
    for worker in started:
        worker.server.shutdown()


@pytest.fixture
def router(workers: list[Worker], tmp_path: Path) -> Iterator[str]:
    port = free_port()
    child = Child.start(
        "vllm-router",
        [sys.executable, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port),
         "--policy", "round_robin", "--worker-urls", workers[0].url,
         "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())],
        tmp_path / "router.log",
        grace_s=5,
    )  # fmt: skip
    child.wait_until_answers(f"http://127.0.0.1:{port}/health", 60)
    yield f"http://127.0.0.1:{port}"
    child.stop()


def _served_by(router: str, requests: int = 8) -> set[str]:
    return {httpx.post(f"{router}/v1/chat/completions", json=BODY).json()["worker"] for _ in range(requests)}


def test_a_worker_joins_serves_and_leaves_without_cutting_a_stream(
    router: str, workers: list[Worker]
) -> None:
    first, second = workers
    assert _served_by(router) == {first.url}
    set_workers(router, [first.url, second.url])
    assert _served_by(router) == {first.url, second.url}
    for worker in workers:
        worker.pause_s = 2
    with (
        httpx.stream("POST", f"{router}/v1/chat/completions", json={**BODY, "stream": True}) as one,
        httpx.stream("POST", f"{router}/v1/chat/completions", json={**BODY, "stream": True}) as other,
    ):
        set_workers(router, [first.url])
        assert _served_by(router) == {first.url}
        assert one.read().endswith(b"data: [DONE]\n\n")
        assert other.read().endswith(b"data: [DONE]\n\n")


def _asking(*turns: str) -> dict[str, Any]:
    return {**BODY, "messages": [{"role": "user", "content": turn} for turn in turns]}


def test_a_conversation_goes_where_its_beginning_is_cached(workers: list[Worker], tmp_path: Path) -> None:
    """By the tokens that the engine's `/render` tells, and against the load."""
    router = Router.start("router", [w.url for w in workers], tmp_path / "router.log", orphan_s=60)
    try:
        router.wait_until_ready()

        def serves(*turns: str) -> str:
            url = f"{router.url}/v1/chat/completions"
            return httpx.post(url, json=_asking(*turns)).json()["worker"]

        a, b = "one three fifteen " * 20, "seventeen a bb " * 20
        first = serves(a)
        for worker in workers:
            worker.pause_s = 3
        stream = {**_asking(a), "stream": True}
        with httpx.stream("POST", f"{router.url}/v1/chat/completions", json=stream) as busy:
            second = serves(b)
            assert second != first, "the one with less to do"
            assert serves(a, "and then") == first and serves(b, "and then") == second
            assert busy.read().endswith(b"data: [DONE]\n\n")
    finally:
        router.child.stop()


def test_a_router_that_is_gone_is_named() -> None:
    with pytest.raises(ProcessError, match="did not answer"):
        set_workers(f"http://127.0.0.1:{free_port()}", [])
