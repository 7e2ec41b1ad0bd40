"""A fleet over two Ray nodes, one of which is lost and replaced, as a user of a cluster would have it."""

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from strop.serving.process import Child, free_port

from .conftest import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CLIENTS = 2
RAY = str(Path(sys.executable).parent / "ray")
OWN = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN_PATH": ""}


@dataclass(frozen=True)
class Node:
    child: Child

    @classmethod
    def start(cls, folder: Path, number: int, *arguments: str) -> "Node":
        command = [
            RAY, "start", "--block", "--num-cpus", "1", "--object-store-memory", str(200 << 20), "--disable-usage-stats",
            "--dashboard-agent-listen-port", str(free_port()), *arguments,
        ]  # fmt: skip
        return cls(Child.start(f"Ray node {number}", command, folder / f"node-{number}.log", OWN))

    def replicas(self) -> list[psutil.Process]:
        return [p for p in self.child.process.children(recursive=True) if _name(p).startswith("ray::Replica")]

    def lose(self) -> None:
        """Everything on it is gone at once, as with a machine."""
        everything = [self.child.process, *self.child.process.children(recursive=True)]
        for process in everything:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        self.child.stop()


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, list[Node]]]:
    port = free_port()
    head = Node.start(tmp_path, 0, "--head", "--port", str(port), "--include-dashboard", "false",
                      "--ray-client-server-port", str(free_port()))  # fmt: skip
    address = f"127.0.0.1:{port}"
    nodes = [head]
    try:
        wait_for(lambda: "--block" in head.child.log.read_text(), 60)
        nodes.append(Node.start(tmp_path, 1, "--address", address))
        yield address, nodes
    finally:
        for node in reversed(nodes):
            node.child.stop()


def test_a_lost_node_costs_the_requests_on_it_and_nothing_more(
    cluster: tuple[str, list[Node]], tiny_model: Path, tmp_path: Path
) -> None:
    address, nodes = cluster
    home, port = tmp_path / "home", free_port()
    home.mkdir()
    serving = {
        "port": port, "served_model": "tiny", "ray_address": address, "replicas": 2, "cpus_per_replica": 1,
        "engine_args": {"max-model-len": 512, "max-num-seqs": 8, "enforce-eager": True},
    }  # fmt: skip
    (home / "strop.yaml").write_text(yaml.safe_dump({"model": str(tiny_model), "serving": serving}))
    wait_for(lambda: "--block" in nodes[1].child.log.read_text(), 60)
    serve = Child.start(
        "strop serve",
        [sys.executable, "-m", "strop.pipelines.cli", "serve", "--config", str(home / "strop.yaml")],
        home / "serve.log",
        {"STROP_HOME": str(home), **OWN},
        grace_s=120,
    )
    url = f"http://127.0.0.1:{port}/v1"
    answers: list[int] = []
    over = threading.Event()

    def ask(client: int) -> None:
        number = 0
        while not over.is_set():
            number += 1
            body = {
                "model": "tiny",
                "messages": [{"role": "user", "content": f"{client} {number}"}],
                "max_tokens": 8,
            }
            try:
                answer = httpx.post(f"{url}/chat/completions", json=body, timeout=120)
                answers.append(answer.status_code)
            except httpx.HTTPError:
                answers.append(0)

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(CLIENTS)]
    try:
        serve.wait_until_answers(f"{url}/models", 300)
        assert [len(node.replicas()) for node in nodes] == [1, 1]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(answers) > 20, 60)
        nodes[1].lose()
        lost = len(answers)
        wait_for(lambda: len(answers) > lost + 40, 120)
        nodes[1] = Node.start(tmp_path, 2, "--address", address)
        wait_for(lambda: len(nodes[1].replicas()) == 1, 120)
        wait_for(lambda: _serves(home, nodes[1]), 180)
        back = len(answers)
        wait_for(lambda: len(answers) > back + 20, 60)
    finally:
        over.set()
        for thread in threads:
            if thread.is_alive():
                thread.join()
        serve.stop()
    assert len(answers) > 80 and sum(code != 200 for code in answers) <= CLIENTS, answers


def _serves(home: Path, node: Node) -> bool:
    """Whether the routers know the replica on that node: its server's port is among theirs."""
    ports = {
        connection.laddr.port
        for process in node.child.process.children(recursive=True)
        for connection in _listening(process)
    }
    state = json.loads((home / "run" / "fleet-state.json").read_text())
    return any(int(url.rpartition(":")[2]) in ports for url in state["pools"][0]["urls"])


def _listening(process: psutil.Process) -> list:
    with suppress(psutil.Error):
        return [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return []
