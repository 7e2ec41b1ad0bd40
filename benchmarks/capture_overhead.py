"""What capture adds to a request, measured inside one real vLLM server.

A header switches capture off request by request, so both sides share the process, the engine and
the cores: two servers would differ by their cores alone by more than what is measured here. Every
round asks the same thing three times in a rotating order, twice without capture and once with it;
the difference of the two without is the control, which should be nothing. Prints a table and, as
its last line, one JSON object with `p50_added_ms`.

The writer's thread works during requests of both kinds, so its share is not in the difference.
"""

import argparse
import http.client
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tiny_model import make_tiny_model

from strop.serving.capture import Capture, Message, Receive, Send
from strop.serving.engine import CAPTURE, cores_of_replica, engine_command, engine_environment
from strop.serving.process import Child, free_port
from strop.serving.stack import Stack
from strop.serving.traces import TraceStore

START_TIMEOUT_S = 240
WARM_UP = 10
KINDS = {"whole": {"max_tokens": 4}, "stream": {"max_tokens": 8, "stream": True}}
ARMS = ("without", "with", "without again")
# New with every answer, and told only to those who ask.
VOLATILE = frozenset({"id", "created", "metrics", "prompt_tokens_details"})


class Switched(Capture):
    """Capture that steps aside for requests with the header X-Bare."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        bare = scope["type"] == "http" and any(name == b"x-bare" for name, _ in scope["headers"])
        await (self.app if bare else super().__call__)(scope, receive, send)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument(
        "--model", type=Path, help="Model folder; a tiny random-weight Llama if not given."
    )
    arguments.add_argument("--quick", action="store_true", help="60 rounds of each kind instead of 300.")
    options = arguments.parse_args()
    rounds = 60 if options.quick else 300
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.model or make_tiny_model(folder / "model")
        with serving(model, folder) as server:
            equal = all(
                ask(server, kind, 0, "with")[1] == ask(server, kind, 0, "without")[1] for kind in KINDS
            )
            times = {kind: measure(server, kind, rounds) for kind in KINDS}
        # The server was stopped a moment after its last answer.
        lost = len(KINDS) * (1 + WARM_UP + rounds) - sum(1 for _ in TraceStore(folder / "traces").scan())
    report(times, equal, lost)


@contextmanager
def serving(
    model: Path, folder: Path, at_once: int = 4, **how: object
) -> Iterator[http.client.HTTPConnection]:
    """A connection to a server whose capture, which is as `how` says, can be switched off."""
    args = {"max-model-len": 1024, "max-num-seqs": at_once, "enforce-eager": True}
    stack = Stack.build(model, "bench", engine_args=args)
    port = free_port()
    switched = f"capture_overhead.{Switched.__name__}"
    command = [switched if part == CAPTURE else part for part in engine_command(stack, "127.0.0.1", port)]
    capture = {"root": str(folder / "traces"), "stack": stack.fingerprint, "model": str(model), **how}
    environment = engine_environment(stack, 1, cores_of_replica(0, 1), capture)
    path = {"PYTHONPATH": str(Path(__file__).parent)}
    child = Child.start("engine", command, folder / "engine.log", environment | path)
    try:
        child.wait_until_answers(f"http://127.0.0.1:{port}/health", START_TIMEOUT_S)
        yield http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    finally:
        child.stop()


def ask(server: http.client.HTTPConnection, kind: str, number: int, arm: str) -> tuple[float, Any]:
    """One request; returns its milliseconds to the last byte and what the answer says."""
    message = {"role": "user", "content": f"Write Python code that sorts list {number}."}
    body = {"model": "bench", "messages": [message], "temperature": 0, "ignore_eos": True, **KINDS[kind]}
    headers = {"Content-Type": "application/json"} | ({} if arm == "with" else {"X-Bare": "1"})
    encoded = json.dumps(body).encode()
    started = time.perf_counter()
    server.request("POST", "/v1/chat/completions", encoded, headers)
    response = server.getresponse()
    raw = response.read()
    milliseconds = (time.perf_counter() - started) * 1e3
    if response.status != 200:
        raise SystemExit(f"The server refused a request: {raw[:300]!r}")
    lines = raw.split(b"\n\n") if kind == "stream" else [raw]
    parts = [line.removeprefix(b"data: ") for line in lines if line]
    return milliseconds, [scrub(json.loads(part)) for part in parts if part != b"[DONE]"]


def scrub(value: Any) -> Any:
    if isinstance(value, list):
        return [scrub(item) for item in value]
    if isinstance(value, dict):
        return {k: scrub(v) for k, v in value.items() if k not in VOLATILE}
    return value


def measure(server: http.client.HTTPConnection, kind: str, rounds: int) -> np.ndarray:
    """Milliseconds [rounds, arms]."""
    for number in range(WARM_UP):
        ask(server, kind, number, "with")
    times = np.empty((rounds, len(ARMS)))
    for number in range(rounds):
        for position in range(len(ARMS)):
            arm = (number + position) % len(ARMS)
            times[number, arm] = ask(server, kind, number, ARMS[arm])[0]
    return times


def median_and_interval(differences: np.ndarray) -> list[float]:
    """Median, and the ends of its 95 % bootstrap interval."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(differences, (4000, len(differences))), axis=1)
    return [round(float(v), 3) for v in (np.median(differences), *np.percentile(medians, [2.5, 97.5]))]


def report(times: dict[str, np.ndarray], equal: bool, lost: int) -> None:
    table = Table(
        "answer", "rounds", "p50", "p95", "added p50 (95 % interval)", "control", title="milliseconds"
    )
    result: dict[str, Any] = {"answers_equal": equal, "records_lost": lost}
    for kind, arms in times.items():
        without = arms[:, [0, 2]].mean(axis=1)
        added, control = (
            median_and_interval(arms[:, 1] - without),
            median_and_interval(arms[:, 2] - arms[:, 0]),
        )
        p50, p95 = np.percentile(arms[:, :2], [50, 95], axis=0).round(2).tolist()
        result[kind] = {
            "rounds": len(arms),
            "p50_ms": p50,
            "p95_ms": p95,
            "added_ms": added,
            "control_ms": control,
        }
        shown = ("{:+.2f} ({:+.2f} to {:+.2f})".format(*interval) for interval in (added, control))
        table.add_row(kind, str(len(arms)), *("{} → {}".format(*pair) for pair in (p50, p95)), *shown)
    result["p50_added_ms"] = max(result[kind]["added_ms"][0] for kind in times)
    console = Console(width=120)
    console.print(table)
    console.print(f"The same is said with and without: {equal}. Records lost: {lost}.")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
