"""What serves and how it is replaced: the champion, an operator's cut-over, a fleet for a while."""

import asyncio
import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import ray

from strop.evals.losslessness import outputs_agree
from strop.evals.regressions import cases_of_traces, remember
from strop.pipelines.registry import Registry, Version
from strop.pipelines.settings import Settings
from strop.serving.cluster import FleetUnavailable, RemoteFleet, connect, start_fleet, start_ray
from strop.serving.journal import recover
from strop.serving.process import free_port
from strop.serving.rollout import Event, Rollout, roll_out
from strop.serving.settings import GatewaySettings
from strop.serving.stack import Stack, Topology
from strop.serving.traces import PROBE_TENANT, Trace, TraceStore

logger = logging.getLogger(__name__)


class DeploymentError(RuntimeError):
    """The fleet is not in a state to be worked with; the message says what to do."""


def serving_stack(settings: Settings, home: Path, registry: Registry) -> Stack:
    """The Stack that serves now: the fleet's, else the registry's champion if it fits strop.yaml, else the plain model."""
    try:
        fleet = connect(home)
        return champion_of(fleet)
    except FleetUnavailable:
        pass
    plain = plain_stack(settings)
    champion = registry.champion()
    if champion and champion.numerics == plain.numerics:
        return plain.model_copy(update={"speculator": champion.speculator})
    return plain


def plain_stack(settings: Settings) -> Stack:
    """The Stack that strop.yaml describes, with nothing learned in it. Raises StackError."""
    serving = settings.serving
    return Stack.build(
        settings.model_path,
        serving.served_model,
        serving.dtype,
        dict(serving.engine_args),
        Topology(replicas=serving.replicas, disaggregation=serving.disaggregation),
    )


def cut_over(
    settings: Settings, home: Path, registry: Registry, version: Version, on_event: Callable[[Event], None]
) -> Rollout:
    """Make a registered version the champion by an operator's word: checked and warmed, without a canary."""
    candidate = registry.stack(version.fingerprint)
    try:
        fleet = connect(home)
    except FleetUnavailable:
        registry.promote(version.number)
        return Rollout(True, "no fleet is running, so it takes effect at the next `strop serve`", [])
    champion = champion_of(fleet)
    if champion.fingerprint == candidate.fingerprint:
        result = Rollout(True, "it was already serving", [])
    else:
        recent = recent_traces(home, champion)
        result = roll_out(
            fleet,
            champion,
            candidate,
            store=TraceStore(home / "traces"),
            check=checker(champion, candidate, recent),
            warm=warm_prompts(recent),
            settings=settings.serving.canary,
            canary=False,
            on_event=on_event,
        )
    if result.promoted:
        registry.promote(version.number)
    return result


def recent_traces(home: Path, stack: Stack, limit: int = 64) -> list[Trace]:
    """Some of the newest requests that `stack` served."""
    recover(home / "traces")
    served = TraceStore(home / "traces").scan(
        lambda t: t.stack == stack.fingerprint and t.tenant != PROBE_TENANT
    )
    return list(deque(served, maxlen=limit))


def remember_taken_back(home: Path, candidate: Stack, since: datetime) -> int:
    """Keep the requests that a candidate failed before it was taken back; returns how many are new."""
    recover(home / "traces")
    served = TraceStore(home / "traces").scan(
        lambda t: t.stack == candidate.fingerprint and t.started_at >= since
    )
    try:
        return remember(home, cases_of_traces(served))
    except OSError as error:
        # The candidate is gone either way, and its loop has more to do.
        logger.warning("What the candidate failed could not be kept: %s", error)
        return 0


def champion_of(fleet: RemoteFleet) -> Stack:
    """The Stack that a running fleet gives most sessions to."""
    status = fleet.status()
    pool = max(status.pools, key=lambda p: p.share, default=None)
    if pool is None or pool.share == 0:
        raise DeploymentError(
            "The fleet runs but serves no Stack yet; wait until `strop serve` says it is ready."
        )
    return fleet.stacks()[pool.fingerprint]


@contextmanager
def temporary_fleet(settings: Settings, home: Path, champion: Stack) -> Iterator[RemoteFleet]:
    """A fleet on ports of its own that serves `champion` for the duration of a `with` block."""
    start_ray(home, settings.serving.ray_address)
    try:
        serving = settings.serving.model_copy(
            update={"port": free_port(), "host": "127.0.0.1", "gateway": GatewaySettings()}
        )
        fleet = start_fleet(serving, home, announce=False)
        try:
            fleet.add(champion)
            fleet.route({champion.fingerprint: 1.0})
            yield fleet
        finally:
            fleet.shutdown()
    finally:
        ray.shutdown()


def checker(champion: Stack, candidate: Stack, traces: Iterable[Trace]) -> Callable[[str, str], list[str]]:
    """A check for `roll_out`: a few of the requests in `traces` must be answered alike (none: nothing to compare)."""

    def check(champion_url: str, candidate_url: str) -> list[str]:
        if not any(trace.has_content for trace in traces):
            return []
        agreement = asyncio.run(outputs_agree(champion, champion_url, candidate, candidate_url, traces))
        different = agreement.losslessness.different if agreement.losslessness else 0
        differs = (
            f"{different} of {agreement.losslessness.requests} greedy requests"
            if agreement.losslessness
            else ""
        )
        return [*agreement.errors, *([f"{differs} came out differently"] if different else [])]

    return check


def warm_prompts(traces: Iterable[Trace], limit: int = 8) -> list[dict[str, Any]]:
    """Chat bodies whose prompts begin as the newest sessions' do, one for each distinct beginning."""
    seen: dict[str, dict[str, Any]] = {}
    for trace in traces:
        if trace.endpoint == "chat" and trace.has_content:
            seen.setdefault(trace.messages[:4096], {"messages": json.loads(trace.messages)})
    return list(seen.values())[-limit:]
