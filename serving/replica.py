"""One replica of a Stack: a Ray actor that owns a vLLM server."""

import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import ray

from strop.serving.disaggregation import Link
from strop.serving.engine import cores_of_replica, engine_command, engine_environment
from strop.serving.home import write_atomic
from strop.serving.process import Child, answers, free_port
from strop.serving.settings import ServingSettings
from strop.serving.stack import Stack

NAMESPACE = "strop"
ORPHAN_S = 20.0
"""How long a server outlives the actor that owns it; longer than Ray takes to start that again."""
FORGOTTEN_S = 180.0
"""Longer than a fleet that is busy with something else may leave it alone."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    url: str
    alive: bool
    """Whether it answers; a server that died is started again, so this can become true once more."""
    rss_bytes: int
    started_in_s: float
    restarts: int
    """How often the server died and was started again."""


class Replica:
    """Owns one vLLM server. Runs as a Ray actor that is started again when it dies, and then finds its server again.

    The server is started again when it dies. Both end when the fleet has not asked for `status` for a while.
    """

    def __init__(
        self,
        name: str,
        stack_json: str,
        index: int,
        settings: ServingSettings,
        home: str,
        head_ip: str,
        link: Link | None = None,
    ):
        self.stack = Stack.from_json(stack_json)
        self.settings = settings
        self.link = link
        # A replica on another machine has to be reached from the router's.
        address = ray.util.get_node_ip_address()
        self.host = "127.0.0.1" if address == head_ip else address
        self.home = Path(home)
        self.started_in_s = 0.0
        self.child: Child | None = None
        self.url = ""
        self.note = self.home / "run" / f"{name}.json"
        prefills = link is not None and link.role == "prefill"
        which = f"prefill-{index}" if prefills else str(index)
        self.log = self.home / "logs" / f"vllm-{self.stack.fingerprint[:12]}-{which}.log"
        self.title = f"vLLM (stack {self.stack.fingerprint[:12]}, replica {which})"
        # What a prefill replica is asked is recorded where it is answered.
        self.records = settings.capture.enabled and not prefills
        topology = self.stack.topology
        # Replicas added later share the cores of those that were there.
        place = topology.replicas + index if prefills else index % topology.replicas
        together = topology.replicas
        if topology.disaggregation:
            together += topology.disaggregation.prefill_replicas
        self.cores = cores_of_replica(place, together)
        self.heard = time.monotonic()
        threading.Thread(target=self._end_when_forgotten, daemon=True).start()
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self._find_again()

    def start(self) -> str:
        """Start the server and wait until it answers; returns its URL. Raises ProcessError, StackError."""
        self.stack.verify()
        port = free_port(self.host)
        self.url = f"http://{self.host}:{port}"
        capture = self.settings.capture
        configuration = {
            "root": str(self.home / "traces"),
            "stack": self.stack.fingerprint,
            "model": self.stack.model.location,
            **capture.model_dump(exclude={"enabled"}),
        }
        self.child = Child.start(
            self.title,
            engine_command(self.stack, self.host, port, self.records, self.link),
            self.log,
            engine_environment(
                self.stack,
                self.settings.kv_cache_gib,
                self.cores,
                configuration if self.records else None,
                self.link,
            ),
            grace_s=self.settings.drain_timeout_s,
            restart=True,
            orphan_s=ORPHAN_S,
        )
        self.started_in_s = self.child.wait_until_answers(f"{self.url}/health", self.settings.start_timeout_s)
        known = {"url": self.url, "folder": str(self.child.folder), "started_in_s": self.started_in_s}
        write_atomic(self.note, json.dumps(known))
        self.heard = time.monotonic()
        return self.url

    def status(self) -> ReplicaStatus:
        self.heard = time.monotonic()
        child = self.child
        if child is None:
            return ReplicaStatus(self.url, False, 0, self.started_in_s, 0)
        alive = child.alive and answers(f"{self.url}/health")
        return ReplicaStatus(self.url, alive, child.rss_bytes(), self.started_in_s, child.restarts)

    def stop(self) -> None:
        if self.child:
            self.child.stop()
        self.note.unlink(missing_ok=True)

    def _find_again(self) -> None:
        known = json.loads(self.note.read_text()) if self.note.is_file() else None
        if known:
            self.url, self.started_in_s = known["url"], known["started_in_s"]
            self.child = Child.adopt(self.title, self.log, Path(known["folder"]))
        if known and self.child is None:
            # It was on another machine, or nobody adopted it in time.
            threading.Thread(target=self.start, daemon=True).start()

    def _end_when_forgotten(self) -> None:
        limit_s = FORGOTTEN_S + self.settings.start_timeout_s
        while time.monotonic() - self.heard < limit_s:
            time.sleep(5)
            limit_s = FORGOTTEN_S + (0 if self.started_in_s else self.settings.start_timeout_s)
        self.stop()
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
