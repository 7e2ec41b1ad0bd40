"""What a running fleet does right now, from its Prometheus endpoints."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from strop.serving.cluster import FleetUnavailable
from strop.serving.gateway import ROUTERS
from strop.serving.monitoring import TARGETS, Metrics, MetricsError, quantile, scrape

_STACKS = {"proxy": "stacks"}
_GATEWAY = {"proxy": "gateway"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One scrape of the whole fleet; None in place of the metrics of a part that does not answer."""

    clock: float
    """Seconds on the monotonic clock."""
    parts: list[tuple[dict[str, str], Metrics | None]]
    """Labels and metrics of each target."""

    def of(self, labels: dict[str, str]) -> Metrics | None:
        return next((metrics for known, metrics in self.parts if known == labels), None)


@dataclass(frozen=True, slots=True)
class GatewayFigures:
    requests: float
    requests_per_s: float | None
    refused: float
    """Answers 4xx: no key, too large, too many."""
    failed: float
    """Answers 5xx."""
    waiting: float
    """Requests in the gateway's queue."""


@dataclass(frozen=True, slots=True)
class StackFigures:
    stack: str
    share: float
    """Of sessions."""
    under_way: float
    up: bool


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """Times in seconds; rates, quantiles and ratios are over the interval, None where nothing happened."""

    stack: str
    replica: int
    up: bool
    running: float = 0
    waiting: float = 0
    requests: float = 0
    tokens_per_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    itl_p50_s: float | None = None
    acceptance_length: float | None = None
    """Tokens per target step, the bonus token included."""
    prefix_hit_rate: float | None = None
    kv_use: float = 0
    """Share of the KV blocks in use."""
    capture_recorded: float = 0
    capture_lost: float = 0
    """Records dropped, failed on disk or lost to an error of capture."""
    prefill: bool = False
    """Whether it computes prompts for the others."""
    loaded_rate: float | None = None
    """Share of prompt tokens, of those not in its own cache, whose KV came from other replicas."""


@dataclass(frozen=True, slots=True)
class Figures:
    interval_s: float | None
    """None: since each process started."""
    gateway: GatewayFigures
    stacks: list[StackFigures]
    replicas: list[ReplicaFigures]


def take_sample(home: Path) -> Sample:
    """Scrape every part of the fleet of `home`. Raises FleetUnavailable if its gateway does not answer."""
    try:
        targets = json.loads((home / "run" / TARGETS).read_text())
    except (OSError, ValueError):
        raise FleetUnavailable(f"No fleet runs with {home}. Start it with `strop serve`.") from None
    with ThreadPoolExecutor(16) as pool:
        metrics = list(pool.map(lambda t: _scrape(t["targets"][0]), targets))
    sample = Sample(time.monotonic(), [(t["labels"], m) for t, m in zip(targets, metrics, strict=True)])
    if sample.of({"part": "gateway"}) is None:
        raise FleetUnavailable(f"The fleet of {home} is no longer running. Start it with `strop serve`.")
    return sample


def figures(now: Sample, before: Sample | None = None) -> Figures:
    """The figures of the interval between two samples; of the whole life of each process without `before`."""
    interval_s = now.clock - before.clock if before else None
    gateway_now = now.of({"part": "gateway"})
    assert gateway_now is not None
    # A Stack has several routers in its slot; the first stands for it.
    stacks = [part for part in now.parts if part[0].get("router") == "0"]
    weights = {labels["slot"]: _server(gateway_now, "weight", labels["slot"]) for labels, _ in stacks}
    total = sum(weights.values())
    return Figures(
        interval_s,
        _gateway(gateway_now, before.of({"part": "gateway"}) if before else None, interval_s),
        [
            StackFigures(
                labels["stack"],
                weights[labels["slot"]] / total if total else 0.0,
                _server(gateway_now, "current_sessions", labels["slot"]),
                bool(_server(gateway_now, "status", labels["slot"], state="UP")),
            )
            for labels, _ in stacks
        ],
        [
            _replica(labels, metrics, before.of(labels) if before else None, interval_s)
            for labels, metrics in now.parts
            if labels["part"] in ("engine", "prefill")
        ],
    )


def _scrape(address: str) -> Metrics | None:
    try:
        return scrape(f"http://{address}/metrics", timeout_s=2)
    except MetricsError:
        return None


def _server(metrics: Metrics, name: str, slot: str, **labels: str) -> float:
    return sum(
        metrics.total(f"haproxy_server_{name}", server=f"slot{slot}.{router}", **_STACKS, **labels)
        for router in range(ROUTERS)
    )


def _gateway(now: Metrics, before: Metrics | None, interval_s: float | None) -> GatewayFigures:
    def count(name: str, **labels: str) -> float:
        earlier = before.total(name, **_GATEWAY, **labels) if before else 0.0
        return now.total(name, **_GATEWAY, **labels) - earlier

    requests = count("haproxy_frontend_http_requests_total")
    return GatewayFigures(
        requests,
        requests / interval_s if interval_s else None,
        count("haproxy_frontend_http_responses_total", code="4xx"),
        count("haproxy_frontend_http_responses_total", code="5xx"),
        now.total("haproxy_backend_current_queue", **_STACKS),
    )


def _replica(
    labels: dict[str, str], now: Metrics | None, before: Metrics | None, interval_s: float | None
) -> ReplicaFigures:
    stack, replica, prefill = labels["stack"], int(labels["replica"]), labels["part"] == "prefill"
    if now is None:
        return ReplicaFigures(stack, replica, False, prefill=prefill)
    started = "process_start_time_seconds"
    if before and before.total(started) != now.total(started):
        before = None  # It was started anew, and counts from zero.

    def count(name: str) -> float:
        return now.total(name) - (before.total(name) if before else 0.0)

    def at(name: str, share: float) -> float | None:
        earlier = before.buckets(name) if before else {}
        return quantile({bound: n - earlier.get(bound, 0.0) for bound, n in now.buckets(name).items()}, share)

    steps, queries = count("vllm:spec_decode_num_drafts_total"), count("vllm:prefix_cache_queries_total")
    asked = count("vllm:external_prefix_cache_queries_total")
    return ReplicaFigures(
        stack,
        replica,
        True,
        now.total("vllm:num_requests_running"),
        now.total("vllm:num_requests_waiting"),
        count("vllm:request_success_total"),
        count("vllm:generation_tokens_total") / interval_s if before and interval_s else None,
        at("vllm:time_to_first_token_seconds", 0.5),
        at("vllm:time_to_first_token_seconds", 0.95),
        at("vllm:inter_token_latency_seconds", 0.5),
        1 + count("vllm:spec_decode_num_accepted_tokens_total") / steps if steps else None,
        count("vllm:prefix_cache_hits_total") / queries if queries else None,
        now.total("vllm:kv_cache_usage_perc"),
        count("strop_capture_recorded_total"),
        sum(count(f"strop_capture_{name}_total") for name in ("dropped", "failed", "errors")),
        prefill,
        count("vllm:external_prefix_cache_hits_total") / asked if asked else None,
    )


def table(shown: Figures) -> Group:
    """The figures for a terminal."""
    over = f"last {shown.interval_s:.0f} s" if shown.interval_s else "since the start"
    gateway = shown.gateway
    head = Text(
        f"{over}: {gateway.requests:.0f} requests"
        + (f" ({gateway.requests_per_s:.2f}/s)" if gateway.requests_per_s is not None else "")
        + f", {gateway.refused:.0f} refused (4xx), {gateway.failed:.0f} failed (5xx), {gateway.waiting:.0f} waiting at the gateway"
    )
    stacks = Table("stack", "share", "under way", "router")
    for stack in shown.stacks:
        state = "up" if stack.up else Text("down", style="red")
        stacks.add_row(stack.stack, f"{stack.share:.0%}", f"{stack.under_way:.0f}", state)
    replicas = Table(
        "replica", "run", "wait", "requests", "tok/s", "TTFT p50", "p95", "ITL p50", "AL", "prefix hits", "loaded", "KV", "recorded", "lost"
    )  # fmt: skip
    for one in shown.replicas:
        name = f"{one.stack}/{'prefill ' if one.prefill else ''}{one.replica}"
        if not one.up:
            replicas.add_row(Text(f"{name} down", style="red"))
            continue
        replicas.add_row(
            name, f"{one.running:.0f}", f"{one.waiting:.0f}", f"{one.requests:.0f}", _number(one.tokens_per_s, "{:.1f}"),
            _number(one.ttft_p50_s, "{:.3f} s"), _number(one.ttft_p95_s, "{:.3f} s"),
            _number(one.itl_p50_s and one.itl_p50_s * 1e3, "{:.1f} ms"), _number(one.acceptance_length, "{:.2f}"),
            _number(one.prefix_hit_rate, "{:.0%}"), _number(one.loaded_rate, "{:.0%}"), f"{one.kv_use:.0%}", f"{one.capture_recorded:.0f}",
            Text(f"{one.capture_lost:.0f}", style="red" if one.capture_lost else ""),
        )  # fmt: skip
    return Group(head, stacks, replicas)


def _number(value: float | None, how: str) -> str:
    return "–" if value is None else how.format(value)
