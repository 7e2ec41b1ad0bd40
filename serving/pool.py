"""One Stack in the fleet: its replicas and the routers in front of them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from strop.serving.gateway import FULL_WEIGHT, ROUTERS
from strop.serving.replica import NAMESPACE, ORPHAN_S, ReplicaStatus
from strop.serving.router import Router
from strop.serving.stack import Stack


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """One Stack in the fleet."""

    fingerprint: str
    url: str
    """One of its routers: requests sent here reach this Stack whatever the gateway's weights are."""
    share: float
    requests_under_way: int
    replicas: list[ReplicaStatus]


@dataclass(slots=True)
class Pool:
    """What the fleet knows of a Stack."""

    stack: Stack
    slot: int
    replicas: dict[str, Any] = field(default_factory=dict)
    """Actors by name."""
    urls: list[str] = field(default_factory=list)
    """Of the replicas, in the same order."""
    routers: list[Router] = field(default_factory=list)
    share: float = 0.0
    lease_s: float | None = None
    lease_ends: float | None = None
    ready: bool = False

    @property
    def name(self) -> str:
        return f"vllm-router (stack {self.stack.fingerprint[:12]})"

    @property
    def url(self) -> str:
        return self.routers[0].url if self.routers else ""

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
        replicas = [status_of(replica) for replica in list(self.replicas.values())]
        return PoolStatus(self.stack.fingerprint, self.url, self.share, requests_under_way, replicas)

    def start_routers(self, logs: Path) -> None:
        """Start its routers. Raises ProcessError."""
        self.routers = [self.start_router(logs) for _ in range(ROUTERS)]
        for router in self.routers:
            router.wait_until_ready()

    def start_router(self, logs: Path, ports: tuple[int, int] | None = None) -> Router:
        return Router.start(self.name, self.urls, self._log(logs), ORPHAN_S, ports)

    def to_dict(self) -> dict[str, Any]:
        """What `of` needs in another process."""
        return {
            "stack": self.stack.to_json(),
            "slot": self.slot,
            "replicas": list(self.replicas),
            "urls": self.urls,
            "routers": [router.to_dict() for router in self.routers],
            "share": self.share,
            "lease_s": self.lease_s,
            "ready": self.ready,
        }

    @classmethod
    def of(cls, known: dict[str, Any], logs: Path) -> "Pool":
        """Find again what another process knew; routers that are gone are started anew."""
        pool = cls(Stack.from_json(known["stack"]), known["slot"], urls=known["urls"])
        pool.share, pool.lease_s, pool.ready = known["share"], known["lease_s"], known["ready"]
        for name in known["replicas"]:
            try:
                pool.replicas[name] = ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:
                continue
        for router in known["routers"]:
            found = Router.adopt(pool.name, router, pool._log(logs))
            pool.routers.append(found or pool.start_router(logs, tuple(router["ports"])))
        return pool

    def _log(self, logs: Path) -> Path:
        return logs / f"router-{self.stack.fingerprint[:12]}.log"


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
