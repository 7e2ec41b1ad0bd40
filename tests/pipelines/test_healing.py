"""Each part of a real fleet is killed while clients ask: only what was on the killed process may fail."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from strop.serving.cluster import connect

from .conftest import Served, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CLIENTS = 3


@contextmanager
def _clients(served: Served) -> Iterator[list[int]]:
    """Clients that ask one request after the other; yields what became of them: status codes, 0 for no answer."""
    answers: list[int] = []
    over = threading.Event()

    def ask(client: int) -> None:
        number = 0
        while not over.is_set():
            number += 1
            try:
                answers.append(
                    served.ask(f"{client} {number}", session=f"heal-{client}-{number}").status_code
                )
            except httpx.HTTPError:
                answers.append(0)

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _state(served: Served) -> dict:
    return json.loads((served.home / "run" / "fleet-state.json").read_text())


def _pid(folder: str) -> int:
    return json.loads((Path(folder) / "state").read_text())["pid"]


def _router(served: Served) -> int:
    return _pid(_state(served)["pools"][0]["routers"][0]["folder"])


def _gateway(served: Served) -> int:
    return _pid(_state(served)["gateway"]["folder"])


def _actor(served: Served, kind: str) -> int:
    mine = psutil.Process(served.server.process.pid).children(recursive=True)
    (pid,) = [p.pid for p in mine if _command(p).startswith(f"ray::{kind}")]
    return pid


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""  # It ended meanwhile.


@pytest.mark.parametrize(
    ("victim", "may_fail"),
    [
        (_router, CLIENTS),
        (_gateway, CLIENTS),
        (lambda served: _actor(served, "Fleet"), 0),
        (lambda served: _actor(served, "Replica"), 0),
    ],
    ids=["router", "gateway", "fleet actor", "replica actor"],
)
def test_what_dies_is_missed_only_by_the_requests_on_it(
    served: Served, victim: Callable[[Served], int], may_fail: int
) -> None:
    fleet = connect(served.home)
    before = fleet.status()
    pid = victim(served)
    with _clients(served) as answers:
        wait_for(lambda: len(answers) > 10)
        os.kill(pid, signal.SIGKILL)
        seen = len(answers)
        wait_for(lambda: len(answers) > seen + 40, 60)
    assert sum(code != 200 for code in answers) <= may_fail, answers
    wait_for(lambda: all(r.alive for p in fleet.status().pools for r in p.replicas), 60)
    after = fleet.status()
    assert [(p.fingerprint, p.share) for p in after.pools] == [(p.fingerprint, p.share) for p in before.pools]
    assert [r.restarts for r in after.pools[0].replicas] == [r.restarts for r in before.pools[0].replicas]
    wait_for(lambda: _alive_again(victim, served, pid), 60)


def _alive_again(victim: Callable[[Served], int], served: Served, dead: int) -> bool:
    try:
        return victim(served) != dead
    except (OSError, ValueError):
        return False


def test_a_server_that_dies_is_started_again(served: Served) -> None:
    fleet = connect(served.home)
    (note,) = (served.home / "run").glob("replica-*.json")
    restarts = fleet.status().pools[0].replicas[0].restarts
    os.kill(_pid(json.loads(note.read_text())["folder"]), signal.SIGKILL)
    wait_for(lambda: fleet.status().pools[0].replicas[0].restarts == restarts + 1, 30)
    wait_for(lambda: fleet.status().pools[0].replicas[0].alive, 120)
    time.sleep(5)  # The routers look every two seconds.
    assert served.ask("back again?").status_code == 200
