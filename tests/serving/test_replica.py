"""A replica's actor, with a server that only looks like vLLM."""

import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import RayActorError

from strop.serving.settings import ServingSettings
from strop.serving.stack import Stack

pytestmark = pytest.mark.slow

HEALTHY = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def _actor(forgotten_s: float) -> Any:
    # Inside a function, so that it travels to Ray's worker by value.
    class Quick:
        def __init__(self, *arguments: Any):
            import sys

            from strop.serving import replica

            replica.FORGOTTEN_S = forgotten_s
            replica.engine_command = lambda stack, host, port, *_: [sys.executable, "-c", HEALTHY, str(port)]
            self.real = replica.Replica(*arguments)

        def start(self) -> str:
            return self.real.start()

        def status(self) -> Any:
            return self.real.status()

    return ray.remote(Quick).options(num_cpus=0, max_concurrency=4, max_restarts=-1)


def test_a_replica_that_nobody_asks_for_any_more_ends_with_its_server(
    tiny_model: Path, tmp_path: Path
) -> None:
    ray.shutdown()
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        stack = Stack.build(tiny_model, "tiny")
        settings = ServingSettings(start_timeout_s=60)
        head = ray.util.get_node_ip_address()
        actor = _actor(8.0).remote("replica-x", stack.to_json(), 0, settings, str(tmp_path), head)
        url = str(ray.get(actor.start.remote()))
        note = tmp_path / "run" / "replica-x.json"
        servers = [
            p for p in psutil.process_iter(["cmdline"]) if url.rpartition(":")[2] in (p.info["cmdline"] or [])
        ]
        assert servers and note.is_file()
        # Asked for, it stays longer than it would be missed.
        until = time.monotonic() + 20
        while time.monotonic() < until:
            status: Any = ray.get(actor.status.remote())
            assert status.alive
            time.sleep(2)
        until = time.monotonic() + 60
        while any(p.is_running() for p in servers) and time.monotonic() < until:
            time.sleep(0.5)
        assert not any(p.is_running() for p in servers) and not note.exists()
        with pytest.raises(RayActorError):
            ray.get(actor.status.remote(), timeout=30)
    finally:
        ray.shutdown()
