"""Replicas that join and leave a running vllm-router."""

import time

import httpx

from strop.serving.monitoring import MetricsError, scrape
from strop.serving.process import ProcessError


def add_worker(router: str, worker: str) -> None:
    """Let `router` send requests to `worker`, which must answer already. Raises ProcessError."""
    _change(router, "add_worker", worker)


def remove_worker(router: str, worker: str) -> None:
    """No new requests go to `worker`; those under way go on. Raises ProcessError."""
    _change(router, "remove_worker", worker)


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


def _change(router: str, action: str, worker: str) -> None:
    try:
        answer = httpx.post(f"{router}/{action}", params={"url": worker}, timeout=60)
    except httpx.HTTPError as error:
        raise ProcessError(
            f"The router at {router} did not answer to {action} of {worker}: {error}"
        ) from None
    if answer.status_code >= 400:
        raise ProcessError(f"The router refused {action} of {worker}: {answer.text.strip()[:300]}")
