"""What redaction costs a server under load, whose threads share one interpreter with it.

One real vLLM server that redacts what it records; a header switches capture off. Windows of load
alternate: clients at a fixed concurrency, whose prompts are full of personal data, recorded and
redacted or not recorded at all. A small random model makes the server's own work, which is where
redaction competes, the larger part of a request; a real model hides more of it.

Keys of the last line: throughput_ratio (requests per second, redacted over unrecorded) with its
95 % interval over pairs of windows, p50_ratio and p99_ratio of the latency, control_ratio (the
unrecorded windows, odd over even), records, redacted_share (records without the address).
"""

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
from capture_overhead import serving
from rich.console import Console
from rich.table import Table
from tiny_model import make_tiny_model

from strop.serving.traces import TraceStore

TEXT = (
    "Dear support, my name is of no matter, write to jane.roe{n}@example.com or call +1 (415) 555-{n:04d}. "
    "My card 4111 1111 1111 1111 was charged twice from 192.168.7.{b}, my number is 078-05-1120. "
)
console = Console(stderr=True)


@dataclass
class Windows:
    """Of one arm."""

    rates: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="3 pairs of windows of 4 s")
    parser.add_argument("--model", type=Path, help="model folder (default: a tiny random-weight Llama)")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--window", type=float, default=8.0, help="seconds")
    parser.add_argument("--concurrency", type=int, default=8)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.pairs, arguments.window = 3, 4.0
    arms = {"redacted": Windows(), "unrecorded": Windows()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = arguments.model or make_tiny_model(folder / "model")
        with serving(model, folder, arguments.concurrency, redact=True) as server:
            url = f"http://127.0.0.1:{server.port}"
            asyncio.run(_window(url, "redacted", arguments.concurrency, 3.0, Windows()))
            for pair in range(arguments.pairs):
                for arm in list(arms) if pair % 2 == 0 else list(arms)[::-1]:
                    asyncio.run(_window(url, arm, arguments.concurrency, arguments.window, arms[arm]))
                    console.print(f"pair {pair}, {arm}: {arms[arm].rates[-1]:.1f} requests/s")
                    # What waits to be redacted belongs to the window that made it.
                    time.sleep(1)
        traces = list(TraceStore(folder / "traces").scan())
    with_, without = arms["redacted"], arms["unrecorded"]
    ratios = np.array(with_.rates) / np.array(without.rates)
    rng = np.random.default_rng(0)
    means = rng.choice(ratios, (4000, len(ratios))).mean(axis=1)
    quantiles = {
        q: float(np.percentile(with_.seconds, q) / np.percentile(without.seconds, q)) for q in (50, 99)
    }
    result = {
        "throughput_ratio": round(float(ratios.mean()), 4),
        "interval": [round(float(v), 4) for v in np.percentile(means, [2.5, 97.5])],
        "p50_ratio": round(quantiles[50], 4),
        "p99_ratio": round(quantiles[99], 4),
        "control_ratio": round(float(np.mean(without.rates[1::2]) / np.mean(without.rates[0::2])), 4),
        "requests_per_s": {arm: round(float(np.mean(w.rates)), 1) for arm, w in arms.items()},
        "records": len(traces),
        "redacted_share": round(float(np.mean(["jane.roe" not in t.messages for t in traces])), 4),
    }
    table = Table("figure", "value")
    for key, value in result.items():
        table.add_row(key, str(value))
    Console().print(table)
    print(json.dumps(result))


async def _window(url: str, arm: str, concurrency: int, seconds: float, into: Windows) -> None:
    until = time.perf_counter() + seconds
    took: list[float] = []
    headers = {"X-Bare": "1"} if arm == "unrecorded" else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60, trust_env=False) as client:

        async def ask(number: int) -> None:
            while time.perf_counter() < until:
                number += concurrency
                text = TEXT.format(n=number % 10_000, b=number % 250) * 3
                body = {
                    "model": "bench", "messages": [{"role": "user", "content": text}],
                    "max_tokens": 8, "ignore_eos": True, "temperature": 0,
                }  # fmt: skip
                began = time.perf_counter()
                (await client.post("/v1/chat/completions", json=body)).raise_for_status()
                took.append(time.perf_counter() - began)

        began = time.perf_counter()
        await asyncio.gather(*map(ask, range(concurrency)))
        into.rates.append(len(took) / (time.perf_counter() - began))
    into.seconds += took


if __name__ == "__main__":
    main()
