"""One Stack in the fleet: its replicas and the routers in front of them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import GetTimeoutError, RayError

from strop.serving.disaggregation import Link, LMCacheServer
from strop.serving.gateway import FULL_WEIGHT, ROUTERS
from strop.serving.process import free_port
from strop.serving.replica import NAMESPACE, ORPHAN_S, ReplicaStatus
from strop.serving.router import Router
from strop.serving.stack import Disaggregation, Stack


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """One Stack in the fleet."""

    fingerprint: str
    url: str
    """One of its routers: requests sent here reach this Stack whatever the gateway's weights are."""
    share: float
    requests_under_way: int
    replicas: list[ReplicaStatus]
    """Those that answer."""
    prefill: list[ReplicaStatus]
    """Those that only compute prompts."""


@dataclass(slots=True, kw_only=True)
class Group:
    """Replicas that do the same, and the routers in front of them."""

    name: str
    """Of its routers."""
    log: Path
    """Of its routers."""
    replicas: dict[str, Any] = field(default_factory=dict)
    """Actors by name."""
    urls: list[str] = field(default_factory=list)
    """Of the replicas, in the same order."""
    routers: list[Router] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.routers[0].url if self.routers else ""

    def statuses(self) -> list[ReplicaStatus]:
        return [status_of(replica) for replica in list(self.replicas.values())]

    def start_router(self, ports: tuple[int, int] | None = None) -> Router:
        return Router.start(self.name, self.urls, self.log, ORPHAN_S, ports)

    def to_dict(self) -> dict[str, Any]:
        """What `take_over` needs in another process."""
        return {
            "replicas": list(self.replicas),
            "urls": self.urls,
            "routers": [router.to_dict() for router in self.routers],
        }

    def take_over(self, known: dict[str, Any]) -> None:
        """Find again what another process knew; routers that are gone are started anew."""
        self.urls = known["urls"]
        for name in known["replicas"]:
            try:
                self.replicas[name] = ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:
                continue
        for router in known["routers"]:
            found = Router.adopt(self.name, router, self.log)
            self.routers.append(found or self.start_router(tuple(router["ports"])))

    def stop(self) -> None:
        for replica in self.replicas.values():
            end(replica)
        for router in self.routers:
            router.child.stop()


@dataclass(slots=True)
class PrefillGroup:
    """The replicas of a Stack that compute long prompts for the others."""

    group: Group
    ports: tuple[int, int]
    """Of their router, which those that answer are told before it is there."""
    lmcache: LMCacheServer | None

    @classmethod
    def start(cls, stack: Stack, how: Disaggregation, logs: Path) -> "PrefillGroup":
        """Start LMCache, if it is to carry the KV; the replicas are up to the fleet. Raises ProcessError."""
        server = _start_lmcache(stack, how, logs) if how.transfer == "lmcache" else None
        return cls(_prefill_group(stack, logs), (free_port(), free_port()), server)

    def link(self, role: Literal["prefill", "decode"]) -> Link:
        return Link(role, f"http://127.0.0.1:{self.ports[0]}", self.lmcache.port if self.lmcache else None)

    def start_router(self) -> None:
        """Once the replicas answer. Raises ProcessError."""
        self.group.routers = [self.group.start_router(self.ports)]
        self.group.routers[0].wait_until_ready()

    def to_dict(self) -> dict[str, Any]:
        """What `of` needs in another process."""
        server = self.lmcache.to_dict() if self.lmcache else None
        return {"group": self.group.to_dict(), "ports": self.ports, "lmcache": server}

    @classmethod
    def of(cls, stack: Stack, known: dict[str, Any], logs: Path) -> "PrefillGroup":
        """Find again what another process knew."""
        server, how = known["lmcache"], stack.topology.disaggregation
        if server and how:
            adopted = LMCacheServer.adopt(*_lmcache_of(stack, logs), server)
            server = adopted or _start_lmcache(stack, how, logs, tuple(server["ports"]))
        found = cls(_prefill_group(stack, logs), tuple(known["ports"]), server)
        found.group.take_over(known["group"])
        return found

    def stop(self) -> None:
        self.group.stop()
        if self.lmcache:
            self.lmcache.child.stop()


def _prefill_group(stack: Stack, logs: Path) -> Group:
    which = stack.fingerprint[:12]
    return Group(name=f"vllm-router (prefill of stack {which})", log=logs / f"router-prefill-{which}.log")


def _start_lmcache(
    stack: Stack, how: Disaggregation, logs: Path, ports: tuple[int, int] | None = None
) -> LMCacheServer:
    return LMCacheServer.start(*_lmcache_of(stack, logs), how, stack.hardware.device, ORPHAN_S, ports)


def _lmcache_of(stack: Stack, logs: Path) -> tuple[str, Path]:
    which = stack.fingerprint[:12]
    return f"LMCache (stack {which})", logs / f"lmcache-{which}.log"


@dataclass(slots=True, kw_only=True)
class Pool(Group):
    """What the fleet knows of a Stack."""

    stack: Stack
    slot: int
    prefill: PrefillGroup | None = None
    share: float = 0.0
    lease_s: float | None = None
    lease_ends: float | None = None
    ready: bool = False

    @classmethod
    def new(cls, stack: Stack, slot: int, logs: Path) -> "Pool":
        which = stack.fingerprint[:12]
        name = f"vllm-router (stack {which})"
        return cls(name=name, log=logs / f"router-{which}.log", stack=stack, slot=slot)

    @property
    def groups(self) -> list[Group]:
        return [self, self.prefill.group] if self.prefill else [self]

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [("127.0.0.1", router.port) for router in self.routers]

    @property
    def weight(self) -> int:
        return round(self.share * FULL_WEIGHT)

    @property
    def capacity(self) -> int:
        """Requests it takes at once: what its engines run, and as many again that wait to join the batch."""
        # Unset, vLLM takes up to 1024 at once, by the machine.
        return 2 * len(self.urls) * int(self.stack.engine.args.get("max-num-seqs") or 1024)

    def status(self, requests_under_way: int) -> PoolStatus:
        prefill = self.prefill.group.statuses() if self.prefill else []
        return PoolStatus(
            self.stack.fingerprint, self.url, self.share, requests_under_way, self.statuses(), prefill
        )

    def start_routers(self) -> None:
        """Once the replicas answer. Raises ProcessError."""
        if self.prefill:
            self.prefill.start_router()
        self.routers = [self.start_router() for _ in range(ROUTERS)]
        for router in self.routers:
            router.wait_until_ready()

    def to_dict(self) -> dict[str, Any]:
        """What `of` needs in another process."""
        return {
            **Group.to_dict(self),
            "stack": self.stack.to_json(),
            "slot": self.slot,
            "prefill": self.prefill.to_dict() if self.prefill else None,
            "share": self.share,
            "lease_s": self.lease_s,
            "ready": self.ready,
        }

    @classmethod
    def of(cls, known: dict[str, Any], logs: Path) -> "Pool":
        """Find again what another process knew."""
        pool = cls.new(Stack.from_json(known["stack"]), known["slot"], logs)
        pool.share, pool.lease_s, pool.ready = known["share"], known["lease_s"], known["ready"]
        pool.take_over(known)
        if known["prefill"]:
            pool.prefill = PrefillGroup.of(pool.stack, known["prefill"], logs)
        return pool

    def stop(self) -> None:
        Group.stop(self)
        if self.prefill:
            self.prefill.stop()


def status_of(replica: Any) -> ReplicaStatus:
    """Asking tells the replica that it is wanted; one that does not answer is not alive."""
    try:
        status: Any = ray.get(replica.status.remote(), timeout=10)
        return status
    except (RayError, GetTimeoutError):
        return ReplicaStatus("", False, 0, 0.0, 0)


def end(replica: Any) -> None:
    """Stop a replica's server and its actor."""
    try:
        ray.get(replica.stop.remote())
    except RayError:
        pass  # The actor is gone, and its server with it.
    ray.kill(replica, no_restart=True)
