"""Whether capture keeps up with 500 requests a second on one core.

The middleware and its writer run in this process, held to one core, around an app that answers at
once with what a real vLLM answered (one whole chat, one stream of eight events). Requests come at a
fixed rate whether the last one is done or not. The processor time of the same app without capture is
taken off, so `cpu_share` is the share of the core that recording takes, its thread included. Prints a
table and, as its last line, one JSON object with `requests_per_s`, `dropped` and `cpu_share`.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from strop.serving.capture import Capture, Message, Receive, Send
from strop.serving.traces import TraceStore

RATE = 500
SECONDS, QUICK_SECONDS = 60, 5
App = Callable[[Message, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Case:
    body: bytes
    kind: bytes
    answer: tuple[bytes, ...]
    """Body messages."""


def cases() -> list[Case]:
    """A whole chat and a stream, as recorded from vLLM 0.32 when asked for token ids."""
    recorded = Path(__file__).parents[1] / "tests" / "serving" / "vllm_wire.jsonl"
    by_name = {case["case"]: case for case in map(json.loads, recorded.read_text().splitlines())}
    whole, stream = by_name["chat whole"], by_name["chat stream"]
    events = tuple(event.encode() + b"\n\n" for event in stream["ids"].split("\n\n") if event)
    return [
        Case(json.dumps(whole["request"]).encode(), b"application/json", (whole["ids"].encode(),)),
        Case(json.dumps(stream["request"]).encode(), b"text/event-stream", events),
    ]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true", help=f"{QUICK_SECONDS} s instead of {SECONDS} s.")
    arguments.add_argument("--rate", type=int, default=RATE, help="Requests a second.")
    options = arguments.parse_args()
    seconds = QUICK_SECONDS if options.quick else SECONDS
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    given = cases()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "traces"
        os.environ["STROP_CAPTURE"] = json.dumps({"root": str(root), "stack": "5a" * 32})
        bare_share, _, _ = asyncio.run(drive(answer, given, options.rate, seconds))
        capture = Capture(answer)
        share, rate, late = asyncio.run(drive(capture, given, options.rate, seconds))
        closing = time.process_time()
        capture.writer.close()
        share += (time.process_time() - closing) / seconds
        counts = capture.writer.counts
        stored = sum(1 for _ in TraceStore(root).scan())
    report(
        options.rate * seconds,
        rate,
        late,
        share - bare_share,
        bare_share,
        counts.dropped,
        counts.failed,
        stored,
    )


async def answer(scope: Message, receive: Receive, send: Send) -> None:
    """The inner app: reads the body, sends the recorded answer."""
    while (await receive()).get("more_body"):
        pass
    case: Case = scope["case"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", case.kind)]})
    for piece in case.answer:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def drive(app: App, given: list[Case], rate: int, seconds: float) -> tuple[float, float, float]:
    """Share of the core, requests answered a second, and the most seconds that a request was late."""
    tasks: set[asyncio.Task[None]] = set()
    began, cpu = time.perf_counter(), time.process_time()
    late = 0.0
    for number in range(int(rate * seconds)):
        due = began + number / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        late = max(late, time.perf_counter() - due)
        task = asyncio.create_task(one(app, given[number % len(given)], number))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    took = time.perf_counter() - began
    return (time.process_time() - cpu) / took, rate * seconds / took, late


async def one(app: App, case: Case, number: int) -> None:
    incoming = [{"type": "http.request", "body": case.body, "more_body": False}]
    headers = [
        (b"content-length", str(len(case.body)).encode()),
        (b"x-session-id", str(number // 3).encode()),
        (b"x-request-id", f"r{number}".encode()),
    ]

    async def receive() -> Any:
        return incoming.pop() if incoming else {"type": "http.disconnect"}

    async def send(_: Message) -> None:
        pass

    path = {"type": "http", "method": "POST", "path": "/v1/chat/completions"}
    await app({**path, "headers": headers, "case": case}, receive, send)


def report(
    asked: int, rate: float, late: float, share: float, bare: float, dropped: int, failed: int, stored: int
) -> None:
    result = {
        "requests": asked,
        "requests_per_s": round(rate, 1),
        "dropped": dropped,
        "failed": failed,
        "stored": stored,
        "cpu_share": round(share, 3),
        "cpu_share_of_app": round(bare, 3),
        "latest_start_ms": round(late * 1e3, 1),
    }
    table = Table("", "", title="Capture on one core")
    for name, value in result.items():
        table.add_row(name.replace("_", " "), f"{value:,}")
    Console().print(table)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
