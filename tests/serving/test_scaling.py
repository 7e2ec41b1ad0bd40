"""A fleet that grows and shrinks under load: real Ray, HAProxy and vllm-router, replicas that only look like vLLM."""

import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray

from strop.serving.fleet import Fleet
from strop.serving.process import ProcessError, free_port
from strop.serving.replica import ReplicaStatus
from strop.serving.settings import ServingSettings
from strop.serving.stack import Stack

pytestmark = pytest.mark.slow


def _replica_class(fails: bool) -> Any:
    # Inside a function, so that it travels to Ray's workers by value.
    class Replica:
        def start(self) -> str:
            import json
            from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

            if fails:
                raise ProcessError("it ran out of memory")
            under_way = [0]

            class Handler(BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    if self.path == "/metrics":
                        self.answer(f"vllm:num_requests_running {under_way[0]}\n".encode())
                    else:
                        self.answer(json.dumps({"object": "list", "data": [{"id": "tiny"}]}).encode())

                def do_POST(self) -> None:
                    self.rfile.read(int(self.headers["Content-Length"]))
                    under_way[0] += 1
                    time.sleep(0.3)
                    self.answer(json.dumps({"port": server.server_port}).encode())
                    under_way[0] -= 1

                def answer(self, body: bytes) -> None:
                    self.send_response(200)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

                def log_message(self, format: str, *args: object) -> None:
                    pass

            self.server = server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            self.url = f"http://127.0.0.1:{server.server_port}"
            return self.url

        def status(self) -> ReplicaStatus:
            return ReplicaStatus(self.url, True, 0, 0.0, 0)

        def stop(self) -> None:
            self.server.shutdown()
            self.server.server_close()

    return ray.remote(Replica).options(num_cpus=0, max_concurrency=4)


@pytest.fixture
def fleet(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    ray.shutdown()  # The session's fleet may have left its connection open.
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    monkeypatch.setattr(Fleet, "_replica", lambda *_: (uuid.uuid4().hex, _replica_class(False).remote()))
    started = Fleet(ServingSettings(port=free_port(), served_model="tiny"), str(tmp_path))
    stack = Stack.build(tiny_model, "tiny", engine_args={"max-num-seqs": 8})
    started.add(stack.to_json())
    started.route({stack.fingerprint: 1.0})
    yield started
    started.shutdown()
    ray.shutdown()


def test_replicas_come_and_go_and_no_request_is_lost(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []
    ports: set[int] = set()
    over = threading.Event()

    def ask(client: int) -> None:
        number = 0
        while not over.is_set():
            number += 1
            body = {"model": "tiny", "messages": [{"role": "user", "content": f"{client} {number}" * 50}]}
            answer = httpx.post(f"{fleet.gateway.url}/v1/chat/completions", json=body, timeout=30)
            statuses.append(answer.status_code)
            ports.add(answer.json().get("port", 0))

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for client in clients:
        client.start()
    try:
        assert fleet.scale(3) == 1
        [pool] = fleet.status().pools
        assert len({r.url for r in pool.replicas}) == 3
        engines = [t["targets"][0] for t in fleet.targets() if t["labels"]["part"] == "engine"]
        assert [f"http://{address}" for address in engines] == [r.url for r in pool.replicas]
        time.sleep(3)
        assert len(ports) >= 2
        assert fleet.scale(1) == 3
        ports.clear()
        time.sleep(1)
        assert ports <= {int(fleet.status().pools[0].replicas[0].url.rpartition(":")[2])}
    finally:
        over.set()
        for client in clients:
            client.join()
    assert len(statuses) > 20 and set(statuses) == {200}

    # One that does not come up leaves the pool as it was.
    monkeypatch.setattr(Fleet, "_replica", lambda *_: (uuid.uuid4().hex, _replica_class(True).remote()))
    with pytest.raises(Exception, match="out of memory"):
        fleet.scale(2)
    assert len(fleet.status().pools[0].replicas) == 1
    with pytest.raises(ProcessError, match="at least one"):
        fleet.scale(0)
    with pytest.raises(ProcessError, match="No Stack abc"):
        fleet.scale(2, "abc")


def test_routers_are_not_told_of_a_replica_that_does_not_answer_yet(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for it, and the fleet for them, while nobody asks for the other replicas."""
    (pool,) = fleet.pools.values()
    before = list(pool.urls)
    starting = ReplicaStatus("http://127.0.0.1:9", False, 0, 0.0, 1)
    monkeypatch.setattr("strop.serving.fleet.status_of", lambda _: starting)
    began = time.monotonic()
    fleet._heal(pool)
    assert pool.urls == before and time.monotonic() - began < 5
