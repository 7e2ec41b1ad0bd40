"""Does a fleet lose requests when its replicas are replaced, or when parts of it are killed?

Clients ask a small random model without a pause, in streams and for whole answers, while every
replica is replaced twice (a cut-over to another Stack and back). Then each part is killed with
SIGKILL in turn, and the fleet has to become whole again by itself: a router, HAProxy, the Ray actor
of the fleet, that of a replica, a replica's server. Only requests on the killed process may fail.

Keys of the last line: requests, failed, truncated (of the replacement), minutes, and kills: for each
victim the failed and truncated requests, how many were under way, and whole_s, the seconds until the
fleet was whole.
"""

import argparse
import asyncio
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table
from tiny_model import make_tiny_model

from strop.pipelines.deployment import plain_stack, temporary_fleet
from strop.pipelines.settings import Settings
from strop.serving.client import Outcome, send
from strop.serving.cluster import RemoteFleet
from strop.serving.rollout import roll_out
from strop.serving.settings import ServingSettings
from strop.serving.stack import Speculator
from strop.serving.traces import TraceStore

CLIENTS = 4
ENGINE = {"max-model-len": 1024, "max-num-seqs": 8, "enforce-eager": True}
console = Console()


@dataclass(slots=True)
class Load:
    """Clients that ask as long as it is `running`."""

    gateway: str
    outcomes: list[Outcome] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator["Load"]:
        thread = threading.Thread(target=lambda: asyncio.run(self._ask_all()))
        thread.start()
        try:
            yield self
        finally:
            self.over.set()
            thread.join()

    def wait_for(self, requests: int) -> None:
        wanted = len(self.outcomes) + requests
        while len(self.outcomes) < wanted:
            time.sleep(0.05)

    def bad_since(self, first: int) -> tuple[int, int]:
        """Failed and truncated answers from `first` on."""
        errors = [o.error for o in self.outcomes[first:] if o.error]
        truncated = sum(error.startswith("truncated") for error in errors)
        return len(errors) - truncated, truncated

    async def _ask_all(self) -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            await asyncio.gather(*(self._ask(client, number) for number in range(CLIENTS)))

    async def _ask(self, client: httpx.AsyncClient, number: int) -> None:
        turn = 0
        while not self.over.is_set():
            turn += 1
            body = {
                "model": "tiny",
                "messages": [{"role": "user", "content": f"client {number}, turn {turn}"}],
                "max_tokens": 4 + turn % 13,
                "ignore_eos": True,
                "stream": turn % 2 == 0,
            }
            self.outcomes.append(
                await send(client, self.gateway, "chat", body, session=f"{number}-{turn}", timeout_s=120)
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="at least 200 requests instead of 2,000")
    parser.add_argument("--replicas", type=int, default=2)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="strop-") as folder:
        home = Path(folder)
        os.environ["STROP_HOME"] = folder
        model = make_tiny_model(home / "model")
        serving = ServingSettings(served_model="tiny", replicas=arguments.replicas, engine_args=ENGINE)
        settings = Settings(model=str(model), serving=serving)
        console.print("starting the fleet")
        with (
            temporary_fleet(settings, home, plain_stack(settings)) as fleet,
            Load(fleet.status().gateway).running() as load,
        ):
            load.wait_for(20)
            _replace_twice(fleet, settings, home, load, 200 if arguments.quick else 2000)
            failed, truncated = load.bad_since(0)
            requests = len(load.outcomes)
            console.print(
                f"{requests} requests, {failed} failed, {truncated} truncated while all replicas were replaced twice"
            )
            kills = {name: _kill(fleet, load, find, home) for name, find in VICTIMS.items()}
    table = Table("killed", "under way", "failed", "truncated", "whole again after, s")
    for name, row in kills.items():
        table.add_row(name, *(str(row[key]) for key in ("under_way", "failed", "truncated", "whole_s")))
    console.print(table)
    minutes = round((time.monotonic() - began) / 60, 1)
    print(
        json.dumps(
            {
                "requests": requests,
                "failed": failed,
                "truncated": truncated,
                "minutes": minutes,
                "kills": kills,
            }
        )
    )


def _replace_twice(fleet: RemoteFleet, settings: Settings, home: Path, load: Load, requests: int) -> None:
    champion = plain_stack(settings)
    other = champion.model_copy(update={"speculator": Speculator(method="ngram", draft_tokens=2)})
    for old, new in ((champion, other), (other, champion)):
        load.wait_for(requests // 4)
        result = roll_out(
            fleet,
            old,
            new,
            store=TraceStore(home / "traces"),
            check=lambda *_: [],
            warm=[],
            settings=settings.serving.canary,
            canary=False,
        )
        if not result.promoted:
            raise SystemExit(f"The replacement was taken back: {result.reason}")
    load.wait_for(max(20, requests - len(load.outcomes)))


def _kill(fleet: RemoteFleet, load: Load, find: Callable[[Path], int], home: Path) -> dict[str, Any]:
    load.wait_for(20)
    first = len(load.outcomes)
    pid = find(home)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    while not _whole(fleet, find, home, pid):
        if time.monotonic() - killed > 300:
            raise SystemExit(f"The fleet was not whole within 300 s of the end of process {pid}.")
        time.sleep(0.2)
    whole_s = time.monotonic() - killed
    load.wait_for(40)
    failed, truncated = load.bad_since(first)
    return {"failed": failed, "truncated": truncated, "under_way": CLIENTS, "whole_s": round(whole_s, 1)}


def _whole(fleet: RemoteFleet, find: Callable[[Path], int], home: Path, dead: int) -> bool:
    try:
        if find(home) == dead:
            return False
    except (OSError, ValueError):
        return False
    status = fleet.status()
    return status.alive and all(replica.alive for pool in status.pools for replica in pool.replicas)


def _state(home: Path) -> dict[str, Any]:
    return json.loads((home / "run" / "fleet-state.json").read_text())


def _child(folder: str) -> int:
    return json.loads((Path(folder) / "state").read_text())["pid"]


def _replica(home: Path) -> int:
    note = sorted((home / "run").glob("replica-*.json"))[0]
    return _child(json.loads(note.read_text())["folder"])


def _actor(kind: str) -> int:
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # It may have ended meanwhile.
            if " ".join(process.cmdline()).startswith(f"ray::{kind}"):
                return process.pid
    raise ValueError(f"no actor {kind}")


VICTIMS: dict[str, Callable[[Path], int]] = {
    "router": lambda home: _child(_state(home)["pools"][0]["routers"][0]["folder"]),
    "HAProxy": lambda home: _child(_state(home)["gateway"]["folder"]),
    "the fleet's actor": lambda _: _actor("Fleet"),
    "a replica's actor": lambda _: _actor("Replica"),
    "a replica's server": _replica,
}


if __name__ == "__main__":
    main()
