"""Whether strop's client and vLLM's own benchmark measure the same times on the same server.

    python benchmarks/load_engines.py [--quick] [--model FOLDER]

One vLLM server; in turns, `vllm bench serve` and `strop.serving.replay` send it the same prompts at the
same concurrency, each round with prompts of its own so that nobody finds the other's prefixes cached.
`vllm bench` counts the chunk that only names the role as the first token, which the server sends
together with the first one; so the time per token is taken from both as the time from the first chunk
to the last over the tokens after the first.

This is a check, not a second engine of strop: `vllm bench` sends prompts without sessions, formats or
tools and does not say how long a request waited in the engine, and its command needs a package that
the CPU build does not have (it is called as a module here).

Keys of the last line: ttft_ratio and itl_ratio (strop over vllm bench, medians of all requests;
1 is the same), ttft_s and itl_s (strop's medians), requests (of each), rounds.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tiny_model import make_tiny_model

from strop.serving.engine import cores_of_replica, engine_command, engine_environment
from strop.serving.process import OFFLINE, Child, free_port
from strop.serving.replay import replay
from strop.serving.sessions import Session, Turn
from strop.serving.stack import Stack

BENCH = (
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser()\nadd_cli_args(parser)\nmain(parser.parse_args())\n"
)
WORDS = (
    "river stone lamp garden letter winter harbour copper signal meadow pocket thunder velvet window "
    "marble engine orchard ribbon saddle timber anchor basket candle drawer ember feather"
)
OUTPUT_TOKENS = 32
CONCURRENCY = 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2 rounds of 16 requests")
    parser.add_argument("--model", type=Path, help="model folder (default: a tiny random one)")
    parser.add_argument("--rounds", type=int, default=4, help="of each")
    parser.add_argument("--requests", type=int, default=40, help="in a round")
    arguments = parser.parse_args()
    rounds, requests = (2, 16) if arguments.quick else (arguments.rounds, arguments.requests)
    with tempfile.TemporaryDirectory(prefix="strop-") as folder:
        home = Path(folder)
        model = arguments.model or make_tiny_model(home / "model")
        engine = {"max-model-len": 1024, "max-num-seqs": 8, "enforce-eager": True}
        stack = Stack.build(model.absolute(), "bench", engine_args=engine)
        port = free_port()
        child = Child.start(
            "engine",
            engine_command(stack, "127.0.0.1", port, capture=False),
            home / "engine.log",
            engine_environment(stack, 1, cores_of_replica(0, 1), None),
        )
        try:
            url = f"http://127.0.0.1:{port}"
            child.wait_until_answers(f"{url}/health", 240)
            found = _measure(url, model, home, rounds, requests)
        finally:
            child.stop()
    table = Table("engine", "requests", "TTFT p50 ms", "per token p50 ms")
    medians: dict[str, tuple[float, float]] = {}
    for name, rows in found.items():
        ttft_s, itl_s = (statistics.median(column) for column in zip(*rows, strict=True))
        medians[name] = (ttft_s, itl_s)
        table.add_row(name, str(len(rows)), f"{1000 * ttft_s:.2f}", f"{1000 * itl_s:.2f}")
    Console().print(table)
    ours, theirs = medians["strop"], medians["vllm bench"]
    result = {
        "ttft_ratio": round(ours[0] / theirs[0], 4),
        "itl_ratio": round(ours[1] / theirs[1], 4),
        "ttft_s": round(ours[0], 5),
        "itl_s": round(ours[1], 5),
        "requests": len(found["strop"]),
        "rounds": rounds,
    }
    print(json.dumps(result))


def _measure(
    url: str, model: Path, home: Path, rounds: int, requests: int
) -> dict[str, list[tuple[float, float]]]:
    """Time to the first token and per token after it, of every request, by engine."""
    _strop(url, _prompts("warm-up", CONCURRENCY * 2))
    found: dict[str, list[tuple[float, float]]] = {"strop": [], "vllm bench": []}
    for number in range(rounds):
        names = list(found) if number % 2 == 0 else list(found)[::-1]
        for name in names:
            prompts = _prompts(f"{name} {number}", requests)
            found[name] += _strop(url, prompts) if name == "strop" else _bench(url, model, home, prompts)
    return found


def _prompts(name: str, count: int) -> list[str]:
    draw = random.Random(name)
    return [f"{name} {number} " + " ".join(draw.choices(WORDS.split(), k=60)) for number in range(count)]


def _strop(url: str, prompts: list[str]) -> list[tuple[float, float]]:
    options = {"model": "bench", "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    sessions = [
        Session(f"s{number}", (Turn("chat", ({"role": "user", "content": text},), options),))
        for number, text in enumerate(prompts)
    ]
    outcomes = asyncio.run(replay(url, sessions, concurrency=CONCURRENCY))
    if failed := [outcome.error for outcome in outcomes if outcome.error]:
        raise SystemExit(f"{len(failed)} of {len(outcomes)} requests failed: {failed[0]}")
    return [(o.ttft_s or 0.0, sum(o.inter_token_s) / (o.output_tokens - 1)) for o in outcomes]


def _bench(url: str, model: Path, home: Path, prompts: list[str]) -> list[tuple[float, float]]:
    dataset = home / "prompts.jsonl"
    dataset.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    arguments = [
        "--backend", "openai-chat", "--base-url", url, "--endpoint", "/v1/chat/completions",
        "--model", str(model), "--served-model-name", "bench", "--tokenizer", str(model),
        "--dataset-name", "custom", "--dataset-path", str(dataset), "--skip-chat-template",
        "--custom-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(len(prompts)),
        "--max-concurrency", str(CONCURRENCY), "--temperature", "0", "--ignore-eos",
        "--disable-tqdm", "--save-result", "--save-detailed",
        "--result-dir", str(home), "--result-filename", "bench.json",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", BENCH, *arguments],
        env={**os.environ, **OFFLINE, "PYTHONSAFEPATH": "1"},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise SystemExit(f"vllm bench failed: {done.stderr[-2000:]}")
    result = json.loads((home / "bench.json").read_text())
    if result["failed"]:
        raise SystemExit(f"{result['failed']} requests of vllm bench failed: {max(result['errors'])}")
    columns = (result["ttfts"], result["itls"], result["output_lens"])
    return [(ttft, sum(itl) / (tokens - 1)) for ttft, itl, tokens in zip(*columns, strict=True)]


if __name__ == "__main__":
    main()
