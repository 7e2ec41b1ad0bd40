import json
from io import StringIO
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from rich.console import Console

from strop.pipelines.cli import main
from strop.pipelines.top import figures, table, take_sample
from strop.serving.cluster import FleetUnavailable
from strop.serving.gateway import Gateway
from strop.serving.monitoring import target
from strop.serving.process import free_port


class Engine:
    """An engine's metrics, by the names of vLLM 0.32."""

    def __init__(self, port: int):
        self.port = port
        self.registry = registry = CollectorRegistry()
        self.running = Gauge("vllm:num_requests_running", "", registry=registry)
        self.kv = Gauge("vllm:kv_cache_usage_perc", "", registry=registry)
        self.started = Gauge("process_start_time_seconds", "", registry=registry)
        self.tokens = Counter("vllm:generation_tokens", "", registry=registry)
        self.drafts = Counter("vllm:spec_decode_num_drafts", "", registry=registry)
        self.accepted = Counter("vllm:spec_decode_num_accepted_tokens", "", registry=registry)
        self.queries = Counter("vllm:prefix_cache_queries", "", registry=registry)
        self.hits = Counter("vllm:prefix_cache_hits", "", registry=registry)
        self.success = Counter("vllm:request_success", "", ["finished_reason"], registry=registry)
        self.ttft = Histogram(
            "vllm:time_to_first_token_seconds", "", registry=registry, buckets=[0.1, 0.2, 1]
        )
        self.dropped = Counter("strop_capture_dropped", "", registry=registry)
        self.server, _ = start_http_server(port, "127.0.0.1", registry)

    def serve(self, requests: int) -> None:
        for _ in range(requests):
            self.success.labels("stop").inc()
            self.ttft.observe(0.15)
        self.tokens.inc(30 * requests)
        self.drafts.inc(10 * requests)
        self.accepted.inc(20 * requests)
        self.queries.inc(100 * requests)
        self.hits.inc(75 * requests)


@pytest.fixture
def fleet(strop_home: Path):
    engine = Engine(free_port())
    gateway = Gateway.start("127.0.0.1", free_port(), strop_home / "run")
    gateway.attach(0, [("127.0.0.1", engine.port)], 96)
    gateway.attach(1, [("127.0.0.1", engine.port)], 32)
    targets = [
        target("gateway", gateway.metrics_url),
        target("router", "http://127.0.0.1:1", "aaa", slot=0, router=0),
        target("router", "http://127.0.0.1:2", "aaa", slot=0, router=1),
        target("engine", f"http://127.0.0.1:{engine.port}", "aaa", replica=0),
        target("router", "http://127.0.0.1:1", "bbb", slot=1, router=0),
        target("engine", f"http://127.0.0.1:{free_port()}", "bbb", replica=0),
    ]
    (strop_home / "run" / "targets.json").write_text(json.dumps(targets))
    yield engine
    gateway.child.stop()
    engine.server.shutdown()


def test_figures_are_those_of_the_interval(fleet: Engine, strop_home: Path) -> None:
    fleet.serve(2)
    before = take_sample(strop_home)
    fleet.serve(6)
    fleet.dropped.inc(2)
    fleet.running.set(3)
    fleet.kv.set(0.5)
    now = take_sample(strop_home)
    shown = figures(now, before)
    up, down = shown.replicas
    assert (up.stack, up.replica, up.up) == ("aaa", 0, True)
    assert (up.requests, up.running, up.kv_use, up.capture_lost) == (6, 3, 0.5, 2)
    assert up.acceptance_length == pytest.approx(3)
    assert up.prefix_hit_rate == pytest.approx(0.75)
    assert up.tokens_per_s == pytest.approx(180 / (now.clock - before.clock))
    assert up.ttft_p50_s == pytest.approx(0.15)
    assert up.itl_p50_s is None
    assert not down.up
    assert [(s.stack, s.share) for s in shown.stacks] == [("aaa", 0.75), ("bbb", 0.25)]
    assert figures(now).replicas[0].requests == 8
    assert shown.gateway.waiting == 0


def test_an_engine_that_was_started_anew_counts_from_zero(fleet: Engine, strop_home: Path) -> None:
    fleet.serve(2)
    before = take_sample(strop_home)
    fleet.started.set(5)
    fleet.serve(1)
    [replica, _] = figures(take_sample(strop_home), before).replicas
    assert replica.requests == 3 and replica.tokens_per_s is None


def test_the_command_prints_what_scripts_and_people_read(
    fleet: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.serve(1)
    monkeypatch.setattr("sys.argv", ["strop", "top", "--once", "--json"])
    assert main() == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["replicas"][0]["acceptance_length"] == 3
    assert shown["interval_s"] is None and shown["stacks"][0]["share"] == 0.75


def test_the_table_shows_who_is_down(fleet: Engine, strop_home: Path) -> None:
    console = Console(width=200, record=True, file=StringIO())
    console.print(table(figures(take_sample(strop_home))))
    text = console.export_text()
    assert "bbb/0 down" in text and "aaa/0" in text and "since the start" in text


def test_no_fleet_is_one_clear_sentence(strop_home: Path) -> None:
    with pytest.raises(FleetUnavailable, match="Start it with `strop serve`"):
        take_sample(strop_home)
    (strop_home / "run").mkdir()
    (strop_home / "run" / "targets.json").write_text(
        json.dumps([target("gateway", f"http://127.0.0.1:{free_port()}")])
    )
    with pytest.raises(FleetUnavailable, match="no longer running"):
        take_sample(strop_home)
