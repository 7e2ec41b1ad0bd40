"""What capture adds to a request: the same short requests to two vLLM servers, one with it and one without.

The servers run side by side and take turns request by request, so that what disturbs the machine
disturbs both. Prints a table and, as its last line, one JSON object with `p50_added_ms`.
"""

import argparse
import http.client
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tiny_model import make_tiny_model

from strop.serving.engine import cores_of_replica, engine_command, engine_environment
from strop.serving.process import Child, free_port
from strop.serving.stack import Stack
from strop.serving.traces import TraceStore

START_TIMEOUT_S = 240
WARM_UP = 10
KINDS = {"whole": {"max_tokens": 4}, "stream": {"max_tokens": 8, "stream": True}}
# New with every answer, and told only to those who ask.
VOLATILE = frozenset({"id", "created", "metrics", "prompt_tokens_details"})


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument(
        "--model", type=Path, help="Model folder; a tiny random-weight Llama if not given."
    )
    arguments.add_argument("--pairs", type=int, default=200, help="Pairs of requests of each kind.")
    arguments.add_argument("--quick", action="store_true", help="60 pairs of each kind.")
    options = arguments.parse_args()
    pairs = 60 if options.quick else options.pairs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.model or make_tiny_model(folder / "model")
        args = {"max-model-len": 1024, "max-num-seqs": 4, "enforce-eager": True}
        stack = Stack.build(model, "bench", engine_args=args)
        with servers(stack, folder) as (bare, captured):
            same = [ask(bare, kind, 0)[1] == ask(captured, kind, 0)[1] for kind in KINDS]
            times = {kind: measure(bare, captured, kind, pairs) for kind in KINDS}
        # The server was stopped a moment after its last answer.
        lost = len(KINDS) * (1 + WARM_UP + pairs) - sum(1 for _ in TraceStore(folder / "traces").scan())
    report(times, same, lost)


@contextmanager
def servers(stack: Stack, folder: Path) -> Iterator[list[http.client.HTTPConnection]]:
    """Connections to a server without capture and one with it."""
    with ExitStack() as stopping:
        started = []
        recording: dict[str, object] = {"root": str(folder / "traces"), "stack": stack.fingerprint}
        for number, (name, capture) in enumerate((("bare", None), ("captured", recording))):
            port = free_port()
            child = Child.start(
                name,
                engine_command(stack, "127.0.0.1", port, capture=capture is not None),
                folder / f"{name}.log",
                engine_environment(stack, 1, cores_of_replica(number, 2), capture),
            )
            stopping.callback(child.stop)
            started.append((child, port))
        for child, port in started:
            child.wait_until_answers(f"http://127.0.0.1:{port}/health", START_TIMEOUT_S)
        yield [http.client.HTTPConnection("127.0.0.1", port, timeout=60) for _, port in started]


def ask(server: http.client.HTTPConnection, kind: str, number: int) -> tuple[float, Any]:
    """One request; returns its seconds to the last byte and what the answer says."""
    message = {"role": "user", "content": f"Write Python code that sorts list {number}."}
    body = {"model": "bench", "messages": [message], "temperature": 0, "ignore_eos": True, **KINDS[kind]}
    encoded = json.dumps(body).encode()
    started = time.perf_counter()
    server.request("POST", "/v1/chat/completions", encoded, {"Content-Type": "application/json"})
    response = server.getresponse()
    raw = response.read()
    seconds = time.perf_counter() - started
    if response.status != 200:
        raise SystemExit(f"The server refused a request: {raw[:300]!r}")
    lines = raw.split(b"\n\n") if kind == "stream" else [raw]
    parts = [line.removeprefix(b"data: ") for line in lines if line]
    return seconds, [scrub(json.loads(part)) for part in parts if part != b"[DONE]"]


def scrub(value: Any) -> Any:
    if isinstance(value, list):
        return [scrub(item) for item in value]
    if isinstance(value, dict):
        return {k: scrub(v) for k, v in value.items() if k not in VOLATILE}
    return value


def measure(
    bare: http.client.HTTPConnection, captured: http.client.HTTPConnection, kind: str, pairs: int
) -> np.ndarray:
    """Milliseconds [pairs, 2] without and with capture; which server goes first alternates."""
    for number in range(WARM_UP):
        for server in (bare, captured):
            ask(server, kind, number)
    times = np.empty((pairs, 2))
    for number in range(pairs):
        order = [(0, bare), (1, captured)]
        for column, server in order if number % 2 else reversed(order):
            times[number, column] = ask(server, kind, number)[0] * 1e3
    return times


def median_interval(differences: np.ndarray) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(differences, (4000, len(differences))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(low), float(high)


def report(times: dict[str, np.ndarray], same: list[bool], lost: int) -> None:
    table = Table(
        "answer",
        "pairs",
        "p50 without",
        "p50 with",
        "p95 without",
        "p95 with",
        "added p50 (95 % interval), ms",
    )
    result: dict[str, Any] = {"answers_equal": all(same), "records_lost": lost}
    for kind, both in times.items():
        added = both[:, 1] - both[:, 0]
        low, high = median_interval(added)
        p50, p95 = (np.percentile(both, q, axis=0) for q in (50, 95))
        result[kind] = {
            "pairs": len(both), "p50_ms": p50.round(3).tolist(), "p95_ms": p95.round(3).tolist(),
            "added_p50_ms": round(float(np.median(added)), 3), "interval_ms": [round(low, 3), round(high, 3)],
        }  # fmt: skip
        table.add_row(
            kind,
            str(len(both)),
            *(f"{v:.2f}" for v in (*p50, *p95)),
            f"{np.median(added):+.3f} ({low:+.3f} to {high:+.3f})",
        )
    result["p50_added_ms"] = max(result[kind]["added_p50_ms"] for kind in times)
    console = Console()
    console.print(table)
    console.print(f"Both servers say the same: {result['answers_equal']}. Records lost: {lost}.")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
