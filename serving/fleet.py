"""The fleet: the replicas of each Stack, routers in front of them, a gateway in front of the routers.

One Ray actor, `Fleet`, owns the gateway and the routers; one Ray actor per replica owns a vLLM
process, so Ray's resources decide on which machine it runs. No process depends on another one to
go on: each is started again when it dies, and serves on while the actor that owns it is started
again. What the fleet has to know for that is in `run/fleet-state.json`.
"""

import json
import sys
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from strop.serving.gateway import FULL_WEIGHT, ROUTERS, SLOTS, Gateway
from strop.serving.home import write_atomic
from strop.serving.process import Child, ProcessError, free_port
from strop.serving.replica import ORPHAN_S, Replica, ReplicaStatus
from strop.serving.retention import keep_bounded
from strop.serving.settings import ServingSettings
from strop.serving.stack import Stack

NAMESPACE = "strop"
WATCH_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """One Stack in the fleet."""

    fingerprint: str
    url: str
    """One of its routers: requests sent here reach this Stack whatever the gateway's weights are."""
    share: float
    requests_under_way: int
    replicas: list[ReplicaStatus]


@dataclass(frozen=True, slots=True)
class FleetStatus:
    gateway: str
    metrics: str
    alive: bool
    pools: list[PoolStatus]


@dataclass(slots=True)
class _Router:
    port: int
    child: Child


@dataclass(slots=True)
class _Pool:
    stack: Stack
    slot: int
    replicas: dict[str, Any] = field(default_factory=dict)
    """Actors by name."""
    routers: list[_Router] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    """Of the replicas, as the routers know them."""
    share: float = 0.0
    lease_s: float | None = None
    lease_ends: float | None = None
    ready: bool = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.routers[0].port}" if self.routers else ""

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [("127.0.0.1", router.port) for router in self.routers]


class Fleet:
    """Owns the gateway and one pool per Stack. Runs as a named Ray actor with several threads."""

    def __init__(self, settings: ServingSettings, home: str):
        self.settings = settings
        self.home = Path(home)
        self.file = self.home / "run" / "fleet-state.json"
        self.pools: dict[str, _Pool] = {}
        self.lock = threading.RLock()
        known = self._known() if ray.get_runtime_context().was_current_actor_reconstructed else None
        adopted = Gateway.adopt(known["gateway"]) if known else None
        self.gateway = adopted or Gateway.start(settings.host, settings.port, self.home / "run", ORPHAN_S)
        if known:
            self._take_over(known)
        self._save()
        threading.Thread(target=self._watch, daemon=True).start()
        threading.Thread(target=keep_bounded, args=(self.home, settings.retention), daemon=True).start()

    def add(self, stack_json: str, lease_s: float | None = None) -> str:
        """Start a Stack's replicas and routers without giving it traffic; returns a router's URL.

        With `lease_s`, the pool is taken back when `renew` is not called in time: a candidate
        whose rollout died does not stay. Raises ProcessError if a replica does not come up, with
        everything that had started stopped again.
        """
        stack = Stack.from_json(stack_json)
        with self.lock:
            known = self.pools.get(stack.fingerprint)
            pool = known or _Pool(stack, self._free_slot())
            self.pools[stack.fingerprint] = pool
            # The pool's start-up does not count against its lease.
            self._lease(stack.fingerprint, lease_s and lease_s + self.settings.start_timeout_s)
        if known:
            self._wait_until_ready(known)
        else:
            stack.save(self.home / "stacks" / stack.fingerprint[:16] / "stack.json")
            try:
                self._start(pool)
            except BaseException:
                self.remove(stack.fingerprint, drain=False)
                raise
        self._lease(stack.fingerprint, lease_s)
        return pool.url

    def renew(self, fingerprint: str, lease_s: float | None) -> None:
        """Extend a pool's lease; None makes it permanent."""
        self._lease(fingerprint, lease_s)

    def route(self, shares: dict[str, float]) -> None:
        """Set the share of sessions each Stack gets; Stacks not named get none. Shares add up to 1."""
        with self.lock:
            unknown = set(shares) - set(self.pools)
            if unknown:
                raise ProcessError(f"No such Stack in the fleet: {', '.join(f[:12] for f in unknown)}")
            for fingerprint, pool in self.pools.items():
                pool.share = shares.get(fingerprint, 0.0)
                self.gateway.set_weight(pool.slot, _weight(pool))
            self._save()

    def remove(self, fingerprint: str, drain: bool = True) -> None:
        """Take a Stack out: no new requests, wait for those under way, stop its processes."""
        with self.lock:
            pool = self.pools.get(fingerprint)
            if pool is None:
                return
            pool.lease_ends = None
            self.gateway.drain(pool.slot)
        deadline = time.monotonic() + (self.settings.drain_timeout_s if drain else 0)
        while self.gateway.requests_under_way(pool.slot) and time.monotonic() < deadline:
            time.sleep(0.2)
        with self.lock:
            self.gateway.detach(pool.slot)
            self.pools.pop(fingerprint, None)
            self._save()
        for replica in pool.replicas.values():
            _end(replica)
        for router in pool.routers:
            router.child.stop()

    def status(self) -> FleetStatus:
        with self.lock:
            pools = list(self.pools.values())
        return FleetStatus(
            self.gateway.url,
            self.gateway.metrics_url,
            self.gateway.child.alive,
            [
                PoolStatus(
                    pool.stack.fingerprint,
                    pool.url,
                    pool.share,
                    self.gateway.requests_under_way(pool.slot),
                    [_status_of(replica) for replica in pool.replicas.values()],
                )
                for pool in pools
            ],
        )

    def stacks(self) -> dict[str, str]:
        """Manifests (JSON) by fingerprint."""
        return {fingerprint: pool.stack.to_json() for fingerprint, pool in self.pools.items()}

    def shutdown(self) -> None:
        """Finish the requests under way and stop everything, the gateway last."""
        for pool in list(self.pools.values()):
            self.remove(pool.stack.fingerprint)
        with self.lock:
            self.gateway.child.stop()
            self.file.unlink(missing_ok=True)

    # -- starting -------------------------------------------------------------------------

    def _free_slot(self) -> int:
        free = set(range(SLOTS)) - {pool.slot for pool in self.pools.values()}
        if not free:
            raise ProcessError(f"The gateway already serves {SLOTS} Stacks; remove one first.")
        return min(free)

    def _wait_until_ready(self, pool: _Pool) -> None:
        while not pool.ready:
            time.sleep(0.2)
            if self.pools.get(pool.stack.fingerprint) is not pool:
                raise ProcessError(
                    f"Stack {pool.stack.fingerprint[:12]}, started by another, did not come up."
                )

    def _start(self, pool: _Pool) -> None:
        prefix = f"replica-{pool.stack.fingerprint[:12]}-{uuid.uuid4().hex[:8]}"
        head = ray.util.get_node_ip_address()
        for index in range(pool.stack.topology.replicas):
            name = f"{prefix}-{index}"
            actor = ray.remote(Replica).options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached",  # It outlives this actor, and ends itself when it is forgotten.
                max_restarts=-1,
                num_cpus=self.settings.cpus_per_replica,
                num_gpus=self.settings.gpus_per_replica,
                max_concurrency=4,
            )
            pool.replicas[name] = actor.remote(
                name, pool.stack.to_json(), index, self.settings, str(self.home), head
            )
        self._save()
        pool.urls = ray.get([replica.start.remote() for replica in pool.replicas.values()])
        self._put_routers(pool)

    def _put_routers(self, pool: _Pool) -> None:
        """New routers for the replicas there are; those there were finish what they have."""
        before = pool.routers
        started = [self._start_router(pool, free_port()) for _ in range(ROUTERS)]
        for router in started:
            router.child.wait_until_answers(f"http://127.0.0.1:{router.port}/health", 60)
        with self.lock:
            pool.routers, pool.ready = started, True
            self.gateway.attach(pool.slot, pool.addresses, _weight(pool))
            self._save()
        for router in before:
            threading.Thread(target=router.child.stop, daemon=True).start()

    def _start_router(self, pool: _Pool, port: int) -> _Router:
        child = Child.start(
            f"vllm-router (stack {pool.stack.fingerprint[:12]})",
            [
                sys.executable, "-m", "vllm_router.launch_router",
                "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware",
                "--worker-urls", *pool.urls,
                "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()),
                "--health-check-interval-secs", "2", "--health-failure-threshold", "2",
                "--log-level", "warning", "--request-timeout-secs", "3600",
            ],
            self.home / "logs" / f"router-{pool.stack.fingerprint[:12]}.log",
            grace_s=10,
            restart=True,
            orphan_s=ORPHAN_S,
        )  # fmt: skip
        return _Router(port, child)

    # -- watching -------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            time.sleep(WATCH_EVERY_S)
            try:
                self._end_expired_leases()
                with self.lock:
                    ready = [pool for pool in self.pools.values() if pool.ready]
                for pool in ready:
                    self._heal(pool)
            except (ProcessError, RayError, OSError) as error:
                print(f"watching the fleet: {error}", file=sys.stderr, flush=True)

    def _heal(self, pool: _Pool) -> None:
        """Being asked tells the replicas that they are wanted; one that moved gets new routers."""
        urls = [_status_of(replica).url for replica in pool.replicas.values()]
        if all(urls) and urls != pool.urls:
            pool.urls = urls
            self._put_routers(pool)
        for number, router in enumerate(pool.routers):
            if not router.child.alive and pool.stack.fingerprint in self.pools:
                pool.routers[number] = self._start_router(pool, router.port)
                self._save()

    def _end_expired_leases(self) -> None:
        with self.lock:
            now = time.monotonic()
            ended = [f for f, p in self.pools.items() if p.lease_ends is not None and p.lease_ends < now]
            kept = {f: p.share for f, p in self.pools.items() if f not in ended and p.lease_ends is None}
            if ended and kept:
                total = sum(kept.values())
                even = 1 / len(kept)
                self.route({f: share / total if total else even for f, share in kept.items()})
        for fingerprint in ended:
            self.remove(fingerprint)

    def _lease(self, fingerprint: str, lease_s: float | None) -> None:
        with self.lock:
            pool = self.pools.get(fingerprint)
            if pool is None:
                raise ProcessError(f"Stack {fingerprint[:12]} is no longer in the fleet.")
            changed = (pool.lease_s is None) != (lease_s is None)
            pool.lease_s = lease_s
            pool.lease_ends = None if lease_s is None else time.monotonic() + lease_s
            if changed:
                self._save()

    # -- being started again --------------------------------------------------------------

    def _save(self) -> None:
        with self.lock:
            pools = [
                {
                    "stack": pool.stack.to_json(),
                    "slot": pool.slot,
                    "replicas": list(pool.replicas),
                    "routers": [{"port": r.port, "folder": str(r.child.folder)} for r in pool.routers],
                    "urls": pool.urls,
                    "share": pool.share,
                    "lease_s": pool.lease_s,
                    "ready": pool.ready,
                }
                for pool in self.pools.values()
            ]
            write_atomic(self.file, json.dumps({"gateway": self.gateway.to_dict(), "pools": pools}))

    def _known(self) -> dict[str, Any] | None:
        try:
            return json.loads(self.file.read_text())
        except (OSError, ValueError):
            return None

    def _take_over(self, known: dict[str, Any]) -> None:
        """Go on with the pools that were serving; one that was only starting is taken back."""
        for entry in known["pools"]:
            pool = _Pool(Stack.from_json(entry["stack"]), entry["slot"], urls=entry["urls"])
            for name in entry["replicas"]:
                try:
                    pool.replicas[name] = ray.get_actor(name, namespace=NAMESPACE)
                except ValueError:
                    continue
            if not entry["ready"]:
                for replica in pool.replicas.values():
                    _end(replica)
                continue
            pool.share, pool.ready = entry["share"], True
            self.pools[pool.stack.fingerprint] = pool
            self._lease(pool.stack.fingerprint, entry["lease_s"])
            for router in entry["routers"]:
                folder = Path(router["folder"])
                log = folder.parent / f"router-{pool.stack.fingerprint[:12]}.log"
                child = Child.adopt(f"vllm-router (stack {pool.stack.fingerprint[:12]})", log, folder)
                pool.routers.append(
                    _Router(router["port"], child) if child else self._start_router(pool, router["port"])
                )
            self.gateway.attach(pool.slot, pool.addresses, _weight(pool))


def _weight(pool: _Pool) -> int:
    return round(pool.share * FULL_WEIGHT)


def _status_of(replica: Any) -> ReplicaStatus:
    try:
        status: Any = ray.get(replica.status.remote(), timeout=10)
        return status
    except (RayError, GetTimeoutError):
        return ReplicaStatus("", False, 0, 0.0, 0)


def _end(replica: Any) -> None:
    try:
        ray.get(replica.stop.remote())
    except RayError:
        pass  # The actor is gone, and its server with it.
    ray.kill(replica, no_restart=True)
