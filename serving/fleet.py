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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from strop.serving.gateway import SLOTS, Gateway
from strop.serving.home import write_atomic
from strop.serving.monitoring import keep_targets, target
from strop.serving.pool import Pool, PoolStatus, PrefillGroup, end, status_of
from strop.serving.process import ProcessError
from strop.serving.replica import NAMESPACE, ORPHAN_S, Replica
from strop.serving.retention import keep_bounded
from strop.serving.router import set_workers, wait_until_idle
from strop.serving.settings import ServingSettings
from strop.serving.stack import Stack

WATCH_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class FleetStatus:
    gateway: str
    metrics: str
    alive: bool
    pools: list[PoolStatus]


class Fleet:
    """Owns the gateway and one pool per Stack. Runs as a named Ray actor with several threads."""

    def __init__(self, settings: ServingSettings, home: str, tenants: dict[str, str] | None = None):
        self.settings = settings
        self.run, self.logs, self.stacks_folder = (Path(home) / name for name in ("run", "logs", "stacks"))
        self.home = home
        self.file = self.run / "fleet-state.json"
        self.pools: dict[str, Pool] = {}
        self.lock = threading.RLock()
        self.scaling = threading.Lock()
        context = ray.get_runtime_context()
        again = bool(context.get_actor_id()) and context.was_current_actor_reconstructed
        known = self._known() if again else None
        self.tenants = known["tenants"] if known else tenants
        adopted = Gateway.adopt(known["gateway"]) if known else None
        self.gateway = adopted or Gateway.start(
            settings.host, settings.port, self.run, settings.gateway, self.tenants, ORPHAN_S
        )
        for entry in known["pools"] if known else []:
            self._take_over(entry)
        self._save()
        threading.Thread(target=keep_targets, args=(self.run, self.targets), daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()
        threading.Thread(target=keep_bounded, args=(Path(home), settings.retention), daemon=True).start()

    def add(self, stack_json: str, lease_s: float | None = None) -> str:
        """Start a Stack's replicas and routers without giving it traffic; returns a router's URL.

        With `lease_s`, the pool is taken back when `renew` is not called in time: a candidate
        whose rollout died does not stay. Raises ProcessError if a replica does not come up, with
        everything that had started stopped again.
        """
        stack = Stack.from_json(stack_json)
        with self.lock:
            known = self.pools.get(stack.fingerprint)
            pool = known or Pool.new(stack, self._free_slot(), self.logs)
            self.pools[stack.fingerprint] = pool
            # The pool's start-up does not count against its lease.
            self._lease(stack.fingerprint, lease_s and lease_s + self.settings.start_timeout_s)
        if known:
            self._wait_until_ready(known)
        else:
            stack.save(self.stacks_folder / stack.fingerprint[:16] / "stack.json")
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
            # Those that gain first: there is no moment at which nobody has weight.
            for fingerprint, pool in sorted(self.pools.items(), key=lambda item: -shares.get(item[0], 0.0)):
                pool.share = shares.get(fingerprint, 0.0)
                self.gateway.set_weight(pool.slot, pool.weight)
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
            if self.pools.pop(fingerprint, None) is None:
                return
            self.gateway.detach(pool.slot)
            self._save()
        pool.stop()

    def status(self) -> FleetStatus:
        with self.lock:
            pools = list(self.pools.values())
        return FleetStatus(
            self.gateway.url,
            self.gateway.metrics_url,
            self.gateway.child.alive,
            [pool.status(self.gateway.requests_under_way(pool.slot)) for pool in pools],
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
            if pool is None or not pool.ready:
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
            self.tenants = tenants
            self._save()
        self.gateway.replace_certificate()

    def targets(self) -> list[dict[str, Any]]:
        """What Prometheus can scrape, as its file-based service discovery wants it."""
        with self.lock:
            found = [target("gateway", self.gateway.metrics_url)]
            for pool in self.pools.values():
                stack = pool.stack.fingerprint[:12]
                for number, router in enumerate(pool.routers):
                    url = f"http://127.0.0.1:{router.metrics_port}"
                    found.append(target("router", url, stack, slot=pool.slot, router=number))
                found += [target("engine", url, stack, replica=index) for index, url in enumerate(pool.urls)]
                ahead = pool.prefill.group.urls if pool.prefill else []
                found += [target("prefill", url, stack, replica=index) for index, url in enumerate(ahead)]
        return found

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

    def _wait_until_ready(self, pool: Pool) -> None:
        while not pool.ready:
            time.sleep(0.2)
            if self.pools.get(pool.stack.fingerprint) is not pool:
                raise ProcessError(
                    f"Stack {pool.stack.fingerprint[:12]}, started by another, did not come up."
                )

    def _start(self, pool: Pool) -> None:
        how = pool.stack.topology.disaggregation
        if how:
            pool.prefill = PrefillGroup.start(pool.stack, how, self.logs)
            for index in range(how.prefill_replicas):
                name, replica = self._replica(pool, index, "prefill")
                pool.prefill.group.replicas[name] = replica
        pool.replicas = dict(self._replica(pool, index) for index in range(pool.stack.topology.replicas))
        self._save()
        urls = [[replica.start.remote() for replica in group.replicas.values()] for group in pool.groups]
        for group, of_group in zip(pool.groups, urls, strict=True):
            group.urls = ray.get(of_group)
        pool.start_routers()
        with self.lock:
            pool.ready = True
            self.gateway.attach(pool.slot, pool.addresses, pool.weight, pool.capacity)
            self._save()

    def _replica(
        self, pool: Pool, index: int, role: Literal["prefill", "decode"] = "decode"
    ) -> tuple[str, Any]:
        stack, link = pool.stack, pool.prefill.link(role) if pool.prefill else None
        kind = "prefill" if role == "prefill" else "replica"
        name = f"{kind}-{stack.fingerprint[:12]}-{index}-{uuid.uuid4().hex[:8]}"
        # LMCache hands KV over on one machine, which is the one that it was started on.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ray.remote(Replica).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",  # It outlives this actor, and ends itself when it is forgotten.
            max_restarts=-1,
            num_cpus=self.settings.cpus_per_replica,
            num_gpus=self.settings.gpus_per_replica,
            max_concurrency=4,
            scheduling_strategy=here if link and link.lmcache_port else "DEFAULT",
        )
        head = ray.util.get_node_ip_address()
        return name, actor.remote(name, stack.to_json(), index, self.settings, self.home, head, link)

    def _grow(self, pool: Pool, replicas: int) -> None:
        added = [self._replica(pool, index) for index in range(len(pool.replicas), replicas)]
        try:
            urls = ray.get([replica.start.remote() for _, replica in added])
            with self.lock:
                if self.pools.get(pool.stack.fingerprint) is not pool:
                    raise ProcessError("The Stack was taken out of the fleet meanwhile.")
                for router in pool.routers:
                    set_workers(router.url, [*pool.urls, *urls])
                pool.replicas |= dict(added)
                pool.urls = [*pool.urls, *urls]
                self.gateway.set_capacity(pool.slot, pool.capacity)
                self._save()
        except BaseException:
            # The routers find out by their health checks about one that they had been told of.
            for _, replica in added:
                end(replica)
            raise

    def _shrink(self, pool: Pool) -> None:
        with self.lock:
            name = list(pool.replicas)[-1]
            replica, url = pool.replicas.pop(name), pool.urls[-1]
            pool.urls = pool.urls[:-1]
            self.gateway.set_capacity(pool.slot, pool.capacity)
            for router in pool.routers:
                set_workers(router.url, pool.urls)
            self._save()
        wait_until_idle(url, self.settings.drain_timeout_s)
        end(replica)

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

    def _heal(self, pool: Pool) -> None:
        for group in pool.groups:
            asked = dict(group.replicas)
            statuses = [status_of(replica) for replica in asked.values()]
            urls = [status.url for status in statuses]
            with self.lock:
                if self.pools.get(pool.stack.fingerprint) is not pool:
                    return
                answering = all(status.alive for status in statuses)
                if asked == group.replicas and answering and urls != group.urls:
                    # A replica was started again on another machine. A router that is told of one that
                    # does not answer yet is busy with it for a minute, and so would we be.
                    group.urls = urls
                    for router in group.routers:
                        set_workers(router.url, urls)
                    self._save()
                for number, router in enumerate(group.routers):
                    router.restore(group.urls)
                    if not router.child.alive:
                        group.routers[number] = group.start_router((router.port, router.metrics_port))
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
            known = {
                "gateway": self.gateway.to_dict(),
                "tenants": self.tenants,
                "pools": [pool.to_dict() for pool in self.pools.values()],
            }
            write_atomic(self.file, json.dumps(known))

    def _known(self) -> dict[str, Any] | None:
        try:
            return json.loads(self.file.read_text())
        except (OSError, ValueError):
            return None

    def _take_over(self, entry: dict[str, Any]) -> None:
        """Go on with a pool that was serving; one that was only starting is taken back."""
        pool = Pool.of(entry, self.logs)
        if not pool.ready:
            pool.stop()
            return
        self.pools[pool.stack.fingerprint] = pool
        self._lease(pool.stack.fingerprint, pool.lease_s)
        self.gateway.attach(pool.slot, pool.addresses, pool.weight, pool.capacity)
