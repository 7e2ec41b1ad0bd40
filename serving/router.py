"""vllm-router, which chooses a replica inside a Stack, and the replicas that join and leave it."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from strop.serving.monitoring import MetricsError, scrape
from strop.serving.process import Child, ProcessError, answers, free_port


@dataclass(slots=True)
class Router:
    """A router process; it is started again when it dies."""

    port: int
    metrics_port: int
    child: Child
    restarts: int = 0
    """Of those that `restore` has seen."""

    @classmethod
    def start(
        cls,
        name: str,
        workers: Sequence[str],
        log: Path,
        orphan_s: float,
        ports: tuple[int, int] | None = None,
    ) -> "Router":
        """Start a router for `workers` on its `ports` (of requests, of metrics) and wait until it answers.

        Raises ProcessError.
        """
        port, metrics_port = ports or (free_port(), free_port())
        child = Child.start(
            name,
            [
                sys.executable, "-m", "vllm_router.launch_router",
                "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware",
                "--worker-urls", *workers,
                "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port),
                "--health-check-interval-secs", "2", "--health-failure-threshold", "2",
                "--log-level", "warning", "--request-timeout-secs", "3600",
            ],
            log,
            grace_s=10,
            restart=True,
            orphan_s=orphan_s,
        )  # fmt: skip
        return cls(port, metrics_port, child)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def to_dict(self) -> dict[str, Any]:
        """What `adopt` needs in another process."""
        return {"ports": [self.port, self.metrics_port], "folder": str(self.child.folder)}

    @classmethod
    def adopt(cls, name: str, known: dict[str, Any], log: Path) -> "Router | None":
        """Take over a router whose owner is gone; None if it is gone too."""
        child = Child.adopt(name, log, Path(known["folder"]))
        port, metrics_port = known["ports"]
        return cls(port, metrics_port, child) if child else None

    def wait_until_ready(self) -> None:
        """Raises ProcessError."""
        self.child.wait_until_answers(f"{self.url}/readiness", 60)

    def restore(self, workers: Sequence[str]) -> None:
        """After a restart it knows the workers of its first start: tell it those of now. Raises ProcessError."""
        restarts = self.child.restarts
        if restarts != self.restarts and answers(f"{self.url}/liveness"):
            set_workers(self.url, workers)
            self.restarts = restarts


def set_workers(router: str, workers: Sequence[str]) -> None:
    """Add the workers that `router` lacks, which must answer already, and take out all others.

    Requests under way on a worker that leaves go on. Raises ProcessError.
    """
    known = set(_ask(router, "GET", "list_workers").json()["urls"])
    for worker in workers:
        if worker not in known:
            _ask(router, "POST", "add_worker", worker)
    for worker in known - set(workers):
        _ask(router, "POST", "remove_worker", worker)


def wait_until_idle(worker: str, timeout_s: float) -> bool:
    """Wait until an engine has no requests, or is gone; False if it still has some after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    quiet = 0
    while time.monotonic() < deadline:
        try:
            metrics = scrape(f"{worker}/metrics")
        except MetricsError:
            return True
        busy = metrics.total("vllm:num_requests_running") + metrics.total("vllm:num_requests_waiting")
        quiet = 0 if busy else quiet + 1
        # Twice: a request may have been between the router and the engine.
        if quiet == 2:
            return True
        time.sleep(0.5)
    return False


def _ask(router: str, method: str, action: str, worker: str | None = None) -> httpx.Response:
    about = f" of {worker}" if worker else ""
    try:
        answer = httpx.request(
            method, f"{router}/{action}", params={"url": worker} if worker else None, timeout=60
        )
    except httpx.HTTPError as error:
        raise ProcessError(f"The router at {router} did not answer to {action}{about}: {error}") from None
    if answer.status_code >= 400:
        raise ProcessError(f"The router refused {action}{about}: {answer.text.strip()[:300]}")
    return answer
