"""Loops that start by themselves: on a schedule inside the fleet's Ray cluster, or as Ray jobs."""

import os
import re
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import ray

from strop.serving.cluster import NAMESPACE, connect
from strop.serving.process import OFFLINE, Child

ACTOR = "schedule"
_AGENT_STARTS_S = 60.0
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class ScheduleError(ValueError):
    """A schedule that makes no sense or cannot be set; the message says what to write."""


def parse_interval(text: str) -> timedelta:
    """`30m`, `6h`, `1d` as a timedelta. Raises ScheduleError."""
    match = re.fullmatch(r"(\d+)([smhd])", text.strip())
    if not match or int(match[1]) == 0:
        raise ScheduleError(f"{text!r} is not an interval. Write a number and s, m, h or d, e.g. 6h.")
    return timedelta(seconds=int(match[1]) * _UNITS[match[2]])


def next_start(now: datetime, every: str | None, cron: str | None) -> datetime:
    """When the next loop is due after `now` (UTC). Raises ScheduleError."""
    if every:
        return now + parse_interval(every)
    from cronsim import CronSim, CronSimError

    try:
        return next(CronSim(cron or "", now))
    except (CronSimError, StopIteration):
        raise ScheduleError(f"{cron!r} is not a cron expression of five fields, e.g. '0 3 * * *'.") from None


class Schedule:
    """Runs `strop loop run` when due. Lives as a named Ray actor, one per fleet."""

    def __init__(self, home: str, config: str | None, every: str | None, cron: str | None):
        self.home, self.config, self.every, self.cron = home, config, every, cron
        self.due = next_start(datetime.now(UTC), every, cron)
        self.runs = 0
        self.last = "none yet"
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._keep, daemon=True)
        self.thread.start()

    def describe(self) -> str:
        rule = f"every {self.every}" if self.every else f"cron {self.cron!r} (UTC)"
        return (
            f"{rule}; next at {self.due:%Y-%m-%d %H:%M:%S} UTC; runs so far: {self.runs}; last: {self.last}"
        )

    def stop(self) -> None:
        """End the schedule; a loop that is running is stopped and can be resumed."""
        self.over.set()
        self.thread.join()

    def _keep(self) -> None:
        while not self.over.wait(max(0.0, (self.due - datetime.now(UTC)).total_seconds())):
            loop = start_loop(Path(self.home), self.config, "scheduled-loops")
            while loop.alive and not self.over.wait(1):
                pass
            if loop.alive:
                loop.stop()
            self.runs += 1
            self.last = f"exit code {loop.process.wait()}, log {loop.log}"
            self.due = next_start(datetime.now(UTC), self.every, self.cron)


def start_loop(home: Path, config: str | None, log: str) -> Child:
    """Start `strop loop run` as a process of its own that writes to `logs/LOG.log`."""
    command = [sys.executable, "-m", "strop.pipelines.cli", "loop", "run"]
    if config:
        command += ["--config", config]
    return Child.start(log, command, home / "logs" / f"{log}.log", {"STROP_HOME": str(home)})


def configure(home: Path, config: Path | None, every: str | None, cron: str | None, stop: bool) -> str:
    """Set, show or end the schedule of the fleet that runs with `home`; returns a sentence about it.

    Raises ScheduleError, FleetUnavailable.
    """
    if every and cron:
        raise ScheduleError("Give --every or --cron, not both.")
    if every or cron:
        next_start(datetime.now(UTC), every, cron)
    connect(home)
    try:
        current: Any = ray.get_actor(ACTOR, namespace=NAMESPACE)
    except ValueError:
        current = None
    if not (every or cron or stop):
        return str(ray.get(current.describe.remote())) if current else "no schedule is set"
    if current:
        ray.get(current.stop.remote())
        ray.kill(current)
        while _exists():
            time.sleep(0.1)
    if stop:
        return "the schedule is ended"
    actor = ray.remote(Schedule).options(
        name=ACTOR, namespace=NAMESPACE, lifetime="detached", num_cpus=0, max_concurrency=4
    )
    schedule: Any = actor.remote(str(home), str(config.absolute()) if config else None, every, cron)
    return str(ray.get(schedule.describe.remote()))


def submit(address: str, config: Path | None, wait: bool = False) -> tuple[str, str]:
    """Submit one loop as a Ray job; returns its id and state. Raises ScheduleError if nothing answers.

    The job's working folder holds only the configuration: the cluster's machines have strop
    installed, and see the home (traces, models) on a file system they share.
    """
    from ray.job_submission import JobSubmissionClient

    try:
        client = JobSubmissionClient(address)
    except (ConnectionError, RuntimeError) as error:
        raise ScheduleError(f"No Ray dashboard answers at {address}: {str(error).splitlines()[0]}") from None
    with tempfile.TemporaryDirectory() as folder:
        entrypoint = f"{sys.executable} -m strop.pipelines.cli loop run"
        if config:
            from strop.pipelines.settings import load_settings

            # Read here, so that a mistake in it is told here; relative paths become absolute.
            (Path(folder) / "strop.yaml").write_text(load_settings(config).model_dump_json())
            entrypoint += " --config strop.yaml"
        env = {**OFFLINE, "STROP_HOME": os.environ.get("STROP_HOME", str(Path(".strop").absolute()))}
        deadline = time.monotonic() + _AGENT_STARTS_S
        while True:
            try:
                job = client.submit_job(
                    entrypoint=entrypoint, runtime_env={"working_dir": folder, "env_vars": env}
                )
                break
            except RuntimeError as error:
                # A cluster that has just started answers before it can run jobs.
                if "No available agent" not in str(error) or time.monotonic() > deadline:
                    raise ScheduleError(
                        f"The cluster at {address} did not take the job: {str(error).splitlines()[0]}"
                    ) from None
                time.sleep(1)
    state = client.get_job_status(job)
    while wait and not state.is_terminal():
        time.sleep(1)
        state = client.get_job_status(job)
    return job, str(state.value)


def _exists() -> bool:
    try:
        ray.get_actor(ACTOR, namespace=NAMESPACE)
    except ValueError:
        return False
    return True
