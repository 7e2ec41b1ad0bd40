"""Ray and the fleet in it: starting them, finding them, keeping a Stack there on a lease."""

import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._raylet import Config  # pyright: ignore[reportAttributeAccessIssue]
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from strop.serving.fleet import Fleet, FleetStatus
from strop.serving.home import write_atomic
from strop.serving.process import OFFLINE, ProcessError
from strop.serving.replica import NAMESPACE
from strop.serving.settings import ServingSettings
from strop.serving.stack import Stack

ACTOR = "fleet"
LEASE_S = 30.0


class FleetUnavailable(RuntimeError):
    """No fleet runs where we looked; the message says how to start one."""


@dataclass(frozen=True, slots=True)
class RemoteFleet:
    """The fleet, called as if it were in this process; errors that crossed Ray come as ProcessError in plain words."""

    actor: Any

    def add(self, stack: Stack, lease_s: float | None = None) -> str:
        return self._call("add", stack.to_json(), lease_s)

    def renew(self, stack: Stack, lease_s: float | None) -> None:
        self._call("renew", stack.fingerprint, lease_s)

    def route(self, shares: dict[str, float]) -> None:
        self._call("route", shares)

    def remove(self, stack: Stack) -> None:
        self._call("remove", stack.fingerprint)

    def scale(self, replicas: int, fingerprint: str | None = None) -> int:
        return self._call("scale", replicas, fingerprint)

    def reload(self, tenants: dict[str, str]) -> None:
        self._call("reload", tenants)

    def targets(self) -> list[dict[str, Any]]:
        return self._call("targets")

    def status(self) -> FleetStatus:
        return self._call("status")

    def stacks(self) -> dict[str, Stack]:
        """Stacks by fingerprint."""
        return {f: Stack.from_json(text) for f, text in self._call("stacks").items()}

    def shutdown(self) -> None:
        self._call("shutdown")

    def _call(self, method: str, *arguments: object) -> Any:
        try:
            return ray.get(getattr(self.actor, method).remote(*arguments))
        except RayError as error:
            raise ProcessError(explain(error)) from None


def start_ray(home: Path, address: str | None, background: bool = False) -> None:
    """Join the Ray cluster at `address`, or start Ray on this machine for the life of this process.

    Work in the `background` takes one task a core, at Ray's own low priority. Ray started here asks
    for a token that lies in `home`; for a cluster of yours, set RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH
    as it wants them.
    """
    # Ray would run its workers, and so the engines, at the lowest priority.
    os.environ.update(OFFLINE if background else OFFLINE | {"RAY_worker_niceness": "0"})
    extra: dict[str, Any] = {}
    if not address:
        _use_token(home)
        cpus = os.cpu_count() if background else 8
        extra = {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": 512 << 20}
        # Ray's sockets lie in its session folder, and a socket's path is limited to 107 bytes.
        if len(str(home)) < 36:
            extra["_temp_dir"] = str(home / "ray")
    # Ray puts the folder it is started from on its workers' path. From a checkout of strop that would
    # make the folder `kernels` importable, which transformers takes for a package of that name.
    home.mkdir(parents=True, exist_ok=True)
    with chdir(home):
        ray.init(
            address=address or "local",
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": OFFLINE},
            **extra,
        )


def _use_token(home: Path) -> None:
    token = home / "run" / "ray-token"
    if not token.is_file():
        write_atomic(token, secrets.token_hex(32))
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    # Ray read its environment when it was imported; this makes it look again.
    Config.initialize("")


def start_fleet(
    settings: ServingSettings, home: Path, announce: bool = True, tenants: dict[str, str] | None = None
) -> "RemoteFleet":
    """Start the fleet actor (Ray must be initialised); with `announce`, `connect` finds it.

    `tenants` are those of the gateway, by the SHA-256 of their keys; none asks for no keys. Raises
    ProcessError if the gateway's port is taken or if anybody could reach it.
    """
    # On this machine: its address and port are what serving.host and serving.port are about.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(Fleet).options(
        name=ACTOR, namespace=NAMESPACE, num_cpus=0, max_concurrency=16, scheduling_strategy=here,
        # Every method can be called again: what it asks for is then there already.
        max_restarts=-1, max_task_retries=-1,
    )  # fmt: skip
    fleet = RemoteFleet(actor.remote(settings, str(home), tenants))
    gateway = fleet.status().gateway
    if announce:
        address = ray.get_runtime_context().gcs_address
        note = {"ray": address, "own_ray": settings.ray_address is None, "gateway": gateway}
        write_atomic(home / "run" / "fleet.json", json.dumps(note))
    return fleet


def connect(home: Path) -> "RemoteFleet":
    """Connect to the fleet that runs with this home. Raises FleetUnavailable."""
    note = home / "run" / "fleet.json"
    hint = "Start it with `strop serve`."
    try:
        content = json.loads(note.read_text())
        address, own_ray = content["ray"], content["own_ray"]
    except (OSError, ValueError, KeyError):
        raise FleetUnavailable(f"No fleet runs with {home}. {hint}") from None
    if not _reachable(address):
        raise FleetUnavailable(f"The fleet of {home} is no longer running. {hint}")
    if not ray.is_initialized():
        if own_ray:
            _use_token(home)
        start_ray(home, address)
    try:
        return RemoteFleet(ray.get_actor(ACTOR, namespace=NAMESPACE))
    except ValueError:
        raise FleetUnavailable(f"Ray at {address} runs, but no fleet does. {hint}") from None


@contextmanager
def leased(fleet: RemoteFleet, stack: Stack) -> Iterator[str]:
    """Add `stack` to the fleet and keep it while the block runs and `LEASE_S` longer; yields its router's URL.

    Raises ProcessError if its replicas do not come up.
    """
    url = fleet.add(stack, LEASE_S)
    with renewing(fleet, stack):
        yield url


@contextmanager
def renewing(fleet: RemoteFleet, stack: Stack, lease_s: float = LEASE_S) -> Iterator[None]:
    """Renew the lease of `stack`, which is in the fleet, while the block runs."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(lease_s / 3):
            try:
                fleet.renew(stack, lease_s)
            except ProcessError:
                return  # It is gone, which whoever uses it will find out.

    fleet.renew(stack, lease_s)
    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def explain(error: BaseException) -> str:
    """The message of an error that may have crossed Ray, without the stack around it."""
    cause = error
    while isinstance(cause, RayTaskError) and isinstance(cause.cause, BaseException):
        cause = cause.cause
    if isinstance(cause, RayActorError) and "ProcessError: " in str(cause):
        # The error of an actor's constructor comes as text only.
        return str(cause).split("ProcessError: ")[-1].strip()
    return str(cause).strip() or type(cause).__name__


def _reachable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=3):
            return True
    except OSError:
        return False
