"""Metrics read without Prometheus, targets for it, and workers that join and leave a router."""

import json
import math
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from strop.serving.capture import Counts
from strop.serving.capture_metrics import CaptureCollector, publish
from strop.serving.journal import WriterCounts
from strop.serving.monitoring import MetricsError, keep_targets, quantile, scrape, target
from strop.serving.process import free_port
from strop.serving.router import wait_until_idle


class Server:
    """Serves a registry at /metrics; answers POSTs as a router would and keeps their targets."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.posts: list[str] = []
        self.status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, generate_latest(outer.registry))

            def do_POST(self) -> None:
                outer.posts.append(self.path)
                self._answer(outer.status, b"no such worker")

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.server.shutdown()


def test_a_scrape_adds_up_what_was_counted(server: Server) -> None:
    counter = Counter("vllm:prompt_tokens", "", ["model_name", "engine"], registry=server.registry)
    counter.labels("a", "0").inc(3)
    counter.labels("a", "1").inc(4)
    metrics = scrape(f"{server.url}/metrics")
    assert metrics.total("vllm:prompt_tokens_total") == 7
    assert metrics.total("vllm:prompt_tokens_total", engine="1") == 4
    assert metrics.total("vllm:nothing") == 0


def test_an_endpoint_that_is_gone_is_an_error_that_names_it() -> None:
    url = f"http://127.0.0.1:{free_port()}/metrics"
    with pytest.raises(MetricsError, match=url):
        scrape(url)


BOUNDS = [0.01, 0.1, 0.5, 1.0, 2.5, 10.0]


@given(st.lists(st.floats(0, 20), min_size=1, max_size=50), st.floats(0.01, 1))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    registry = CollectorRegistry()
    histogram = Histogram("h", "", registry=registry, buckets=BOUNDS)
    for value in values:
        histogram.observe(value)
    [family] = registry.collect()
    buckets = {float(s.labels["le"]): s.value for s in family.samples if s.name == "h_bucket"}
    found = quantile(buckets, share)
    true = sorted(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)]
    place = bisect_left(BOUNDS, true)
    assert found is not None
    if place == len(BOUNDS):
        assert found == BOUNDS[-1]
    else:
        assert (BOUNDS[place - 1] if place else 0.0) <= found <= BOUNDS[place]


def test_no_observation_has_no_quantile() -> None:
    assert quantile({}, 0.5) is None
    assert quantile({1.0: 0.0, math.inf: 0.0}, 0.5) is None


def test_capture_counts_are_read_when_they_are_asked_for(server: Server) -> None:
    counts, writer = Counts(), WriterCounts()
    server.registry.register(CaptureCollector(counts, writer))
    counts.recorded, writer.dropped = 5, 2
    metrics = scrape(f"{server.url}/metrics")
    for name, value in {"recorded": 5, "dropped": 2, "failed": 0, "errors": 0, "passed_untouched": 0, "written": 0}.items():  # fmt: skip
        assert f"strop_capture_{name}" in metrics.families
        assert metrics.total(f"strop_capture_{name}_total") == value


def test_capture_is_on_the_registry_that_vllm_serves_and_only_once() -> None:
    for recorded in (1, 2):
        publish(Counts(recorded=recorded), WriterCounts())
        assert REGISTRY.get_sample_value("strop_capture_recorded_total") == recorded


def test_targets_are_written_when_they_change(tmp_path) -> None:
    found = [target("gateway", "http://127.0.0.1:9/metrics")]
    threading.Thread(target=keep_targets, args=(tmp_path, lambda: found), daemon=True).start()
    file = tmp_path / "targets.json"

    def written(expected: list[dict[str, object]]) -> None:
        deadline = time.monotonic() + 10
        while not file.is_file() or json.loads(file.read_text()) != expected:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    written([{"targets": ["127.0.0.1:9"], "labels": {"part": "gateway"}}])
    found.append(target("engine", "http://10.0.0.1:8", "ab", replica=1))
    written(
        [
            {"targets": ["127.0.0.1:9"], "labels": {"part": "gateway"}},
            {"targets": ["10.0.0.1:8"], "labels": {"part": "engine", "stack": "ab", "replica": "1"}},
        ]
    )


def test_a_replica_is_waited_for_until_it_has_no_requests(server: Server) -> None:
    running = Gauge("vllm:num_requests_running", "", registry=server.registry)
    running.set(1)
    assert not wait_until_idle(server.url, 1)
    threading.Timer(0.7, lambda: running.set(0)).start()
    started = time.monotonic()
    assert wait_until_idle(server.url, 20)
    assert 0.7 < time.monotonic() - started < 10
    assert wait_until_idle(f"http://127.0.0.1:{free_port()}", 1)
