"""The fleet: the replicas of each Stack, a router in front of them, a gateway in front of the routers.

One Ray actor, `Fleet`, owns the gateway and the routers; one Ray actor per replica owns a vLLM
process, so Ray's resources decide on which machine it runs. Every process is supervised: when
its actor dies it dies too.
"""

import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from strop.serving.engine import cores_of_replica, engine_command, engine_environment
from strop.serving.gateway import FULL_WEIGHT, SLOTS, Gateway
from strop.serving.monitoring import keep_targets, target
from strop.serving.process import Child, ProcessError, free_port
from strop.serving.router import add_worker, remove_worker, wait_until_idle
from strop.serving.settings import ServingSettings
from strop.serving.stack import Stack


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    url: str
    alive: bool
    rss_bytes: int
    started_in_s: float


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """One Stack in the fleet."""

    fingerprint: str
    url: str
    """Its router: requests sent here reach this Stack whatever the gateway's weights are."""
    share: float
    requests_under_way: int
    replicas: list[ReplicaStatus]


@dataclass(frozen=True, slots=True)
class FleetStatus:
    gateway: str
    metrics: str
    alive: bool
    pools: list[PoolStatus]


class Replica:
    """Owns one vLLM server. Runs as a Ray actor."""

    def __init__(self, stack_json: str, index: int, settings: ServingSettings, home: str, head_ip: str):
        self.stack = Stack.from_json(stack_json)
        self.stack.verify()
        self.settings = settings
        self.index = index
        # A replica on another machine has to be reached from the router's.
        address = ray.util.get_node_ip_address()
        self.host = "127.0.0.1" if address == head_ip else address
        self.home = Path(home)
        self.started_in_s = 0.0
        self.child: Child | None = None
        self.url = ""

    def start(self) -> str:
        """Start the server and wait until it answers; returns its URL. Raises ProcessError."""
        port = free_port(self.host)
        self.url = f"http://{self.host}:{port}"
        capture = self.settings.capture
        configuration = {
            "root": str(self.home / "traces"),
            "stack": self.stack.fingerprint,
            **capture.model_dump(exclude={"enabled"}),
        }
        self.child = Child.start(
            f"vLLM (stack {self.stack.fingerprint[:12]}, replica {self.index})",
            engine_command(self.stack, self.host, port, capture.enabled),
            self.home / "logs" / f"vllm-{self.stack.fingerprint[:12]}-{self.index}.log",
            engine_environment(
                self.stack,
                self.settings.kv_cache_gib,
                # Replicas added later share the cores of those that were there.
                cores_of_replica(self.index % self.stack.topology.replicas, self.stack.topology.replicas),
                configuration if capture.enabled else None,
            ),
            grace_s=self.settings.drain_timeout_s,
        )
        self.started_in_s = self.child.wait_until_answers(f"{self.url}/health", self.settings.start_timeout_s)
        return self.url

    def status(self) -> ReplicaStatus:
        child = self.child
        return ReplicaStatus(
            self.url, child is not None and child.alive, child.rss_bytes() if child else 0, self.started_in_s
        )

    def stop(self) -> None:
        if self.child:
            self.child.stop()


@dataclass(slots=True)
class _Pool:
    stack: Stack
    slot: int
    replicas: list[Any]
    router: Child | None = None
    host_port: tuple[str, int] = ("127.0.0.1", 0)
    metrics_port: int = 0
    share: float = 0.0
    lease_ends: float | None = None
    urls: list[str] = field(default_factory=list)


class Fleet:
    """Owns the gateway and one pool per Stack. Runs as a named Ray actor with several threads."""

    def __init__(self, settings: ServingSettings, home: str, tenants: dict[str, str] | None = None):
        self.settings = settings
        self.home = Path(home)
        self.pools: dict[str, _Pool] = {}
        self.lock = threading.RLock()
        self.scaling = threading.Lock()
        run = self.home / "run"
        self.gateway = Gateway.start(settings.host, settings.port, run, settings.gateway, tenants)
        threading.Thread(target=keep_targets, args=(run, self.targets), daemon=True).start()
        threading.Thread(target=self._end_expired_leases, daemon=True).start()

    def add(self, stack_json: str, lease_s: float | None = None) -> str:
        """Start a Stack's replicas and router without giving it traffic; returns the router's URL.

        With `lease_s`, the pool is taken back when `renew` is not called in time: a candidate
        whose rollout died does not stay. Raises ProcessError if a replica does not come up, with
        everything that had started stopped again.
        """
        stack = Stack.from_json(stack_json)
        with self.lock:
            if stack.fingerprint in self.pools:
                self._lease(stack.fingerprint, lease_s)
                return self._url(self.pools[stack.fingerprint])
            used = {pool.slot for pool in self.pools.values()}
            free = [slot for slot in range(SLOTS) if slot not in used]
            if not free:
                raise ProcessError(f"The gateway already serves {SLOTS} Stacks; remove one first.")
            pool = _Pool(stack, free[0], [])
            self.pools[stack.fingerprint] = pool
            # The pool's start-up does not count against its lease.
            self._lease(stack.fingerprint, lease_s and lease_s + self.settings.start_timeout_s)
        stack.save(self.home / "stacks" / stack.fingerprint[:16] / "stack.json")
        try:
            self._start(pool)
        except BaseException:
            self.remove(stack.fingerprint, drain=False)
            raise
        self._lease(stack.fingerprint, lease_s)
        return self._url(pool)

    def renew(self, fingerprint: str, lease_s: float | None) -> None:
        """Extend a pool's lease; None makes it permanent."""
        self._lease(fingerprint, lease_s)

    def route(self, shares: dict[str, float]) -> None:
        """Set the share of sessions each Stack gets; Stacks not named get none. Shares add up to 1."""
        with self.lock:
            unknown = set(shares) - set(self.pools)
            if unknown:
                raise ProcessError(f"No such Stack in the fleet: {', '.join(f[:12] for f in unknown)}")
            # Those that gain first: there is no moment at which nobody has weight.
            for fingerprint, pool in sorted(self.pools.items(), key=lambda item: -shares.get(item[0], 0.0)):
                pool.share = shares.get(fingerprint, 0.0)
                self.gateway.set_weight(pool.slot, round(pool.share * FULL_WEIGHT))

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
        for replica in pool.replicas:
            try:
                ray.get(replica.stop.remote())
            except RayError:
                pass  # The actor is gone, and its server with it.
            ray.kill(replica)
        if pool.router:
            pool.router.stop()
        with self.lock:
            self.pools.pop(fingerprint, None)

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
                    self._url(pool),
                    pool.share,
                    self.gateway.requests_under_way(pool.slot),
                    [_status_of(replica) for replica in pool.replicas],
                )
                for pool in pools
            ],
        )

    def stacks(self) -> dict[str, str]:
        """Manifests (JSON) by fingerprint."""
        return {fingerprint: pool.stack.to_json() for fingerprint, pool in self.pools.items()}

    def scale(self, replicas: int, fingerprint: str | None = None) -> int:
        """Set the number of replicas of a pool (None: the one with most sessions); returns what it was.

        New replicas join when they answer; leaving ones get no new requests and finish theirs. The
        Stack's manifest stays as it is. Raises ProcessError if there is no such pool, or if a new
        replica does not come up, with the pool as it was.
        """
        if replicas < 1:
            raise ProcessError("A Stack needs at least one replica; `strop fleet drain` takes it out.")
        with self.scaling:
            with self.lock:
                champion = max(self.pools, key=lambda f: self.pools[f].share, default="")
                pool = self.pools.get(fingerprint or champion)
            if pool is None or pool.router is None:
                raise ProcessError(f"No Stack {(fingerprint or '')[:12]} serves in this fleet.")
            before = len(pool.replicas)
            if replicas > before:
                self._grow(pool, replicas)
            for _ in range(before - replicas):
                self._shrink(pool)
        return before

    def reload(self, tenants: dict[str, str]) -> None:
        """Exchange the gateway's keys (by their SHA-256), and read its certificate again. Raises ProcessError."""
        if tenants:
            self.gateway.replace_tenants(tenants)
        self.gateway.replace_certificate()

    def targets(self) -> list[dict[str, Any]]:
        """What Prometheus can scrape, as its file-based service discovery wants it."""
        with self.lock:
            found = [target("gateway", self.gateway.metrics_url)]
            for pool in self.pools.values():
                stack = pool.stack.fingerprint[:12]
                if pool.router:
                    found.append(
                        target("router", f"http://127.0.0.1:{pool.metrics_port}", stack, slot=pool.slot)
                    )
                found += [target("engine", url, stack, replica=index) for index, url in enumerate(pool.urls)]
        return found

    def shutdown(self) -> None:
        """Stop everything, the gateway first so that clients are refused and not cut off."""
        for pool in list(self.pools.values()):
            self.remove(pool.stack.fingerprint)
        self.gateway.child.stop()

    def _replica(self, stack: Stack, index: int) -> Any:
        actor = ray.remote(Replica).options(
            num_cpus=self.settings.cpus_per_replica,
            num_gpus=self.settings.gpus_per_replica,
            max_concurrency=4,
        )
        head = ray.util.get_node_ip_address()
        return actor.remote(stack.to_json(), index, self.settings, str(self.home), head)

    def _grow(self, pool: _Pool, replicas: int) -> None:
        added = [self._replica(pool.stack, index) for index in range(len(pool.replicas), replicas)]
        try:
            urls = ray.get([replica.start.remote() for replica in added])
            for url in urls:
                add_worker(self._url(pool), url)
            with self.lock:
                if self.pools.get(pool.stack.fingerprint) is not pool:
                    raise ProcessError("The Stack was taken out of the fleet meanwhile.")
                pool.replicas += added
                pool.urls += urls
                self.gateway.set_capacity(pool.slot, _capacity(pool.stack, len(pool.replicas)))
        except BaseException:
            # The router finds out by its health checks about one that it had been told of.
            for replica in added:
                ray.kill(replica)
            raise

    def _shrink(self, pool: _Pool) -> None:
        with self.lock:
            replica, url = pool.replicas.pop(), pool.urls.pop()
            self.gateway.set_capacity(pool.slot, _capacity(pool.stack, len(pool.replicas)))
        remove_worker(self._url(pool), url)
        wait_until_idle(url, self.settings.drain_timeout_s)
        try:
            ray.get(replica.stop.remote())
        except RayError:
            pass  # The actor is gone, and its server with it.
        ray.kill(replica)

    def _start(self, pool: _Pool) -> None:
        pool.replicas = [self._replica(pool.stack, index) for index in range(pool.stack.topology.replicas)]
        pool.urls = ray.get([replica.start.remote() for replica in pool.replicas])
        host, port = "127.0.0.1", free_port()
        pool.host_port, pool.metrics_port = (host, port), free_port()
        pool.router = Child.start(
            f"vllm-router (stack {pool.stack.fingerprint[:12]})",
            [
                sys.executable, "-m", "vllm_router.launch_router",
                "--host", host, "--port", str(port), "--policy", "cache_aware",
                "--worker-urls", *pool.urls,
                "--prometheus-host", "127.0.0.1", "--prometheus-port", str(pool.metrics_port),
                "--health-check-interval-secs", "2", "--health-failure-threshold", "2",
                "--log-level", "warning", "--request-timeout-secs", "3600",
            ],
            self.home / "logs" / f"router-{pool.stack.fingerprint[:12]}.log",
            grace_s=10,
        )  # fmt: skip
        pool.router.wait_until_answers(f"http://{host}:{port}/health", 60)
        with self.lock:
            self.gateway.attach(pool.slot, host, port, 0, _capacity(pool.stack, len(pool.urls)))

    def _lease(self, fingerprint: str, lease_s: float | None) -> None:
        with self.lock:
            pool = self.pools.get(fingerprint)
            if pool is None:
                raise ProcessError(f"Stack {fingerprint[:12]} is no longer in the fleet.")
            pool.lease_ends = None if lease_s is None else time.monotonic() + lease_s

    def _end_expired_leases(self) -> None:
        while True:
            time.sleep(1)
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

    @staticmethod
    def _url(pool: _Pool) -> str:
        return f"http://{pool.host_port[0]}:{pool.host_port[1]}"


def _capacity(stack: Stack, replicas: int) -> int:
    """Requests a pool takes at once: what its engines run, and as many again that wait to join the batch."""
    # Unset, vLLM takes up to 1024 at once, by the machine.
    return 2 * replicas * int(stack.engine.args.get("max-num-seqs") or 1024)


def _status_of(replica: Any) -> ReplicaStatus:
    try:
        status: Any = ray.get(replica.status.remote(), timeout=10)
        return status
    except (RayError, GetTimeoutError):
        return ReplicaStatus("", False, 0, 0.0)
