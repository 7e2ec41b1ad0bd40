"""What the size of KV blocks on a CPU does to prefill and decode.

Two vLLM servers of the same model, one with blocks of 32 tokens and one with vLLM's 128, are asked in
turns: a prompt of its own each time for one token, and again for 65 with the prompt in the cache.

Keys of the last line: ttft_ratio (32 over 128, seconds per new prompt) and decode_ratio (tokens per
second), each a median over rounds with its quartiles, and rounds.
"""

import argparse
import json
import os
import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from strop.pipelines import demo_model
from strop.serving.engine import cores_of_replica, engine_command, engine_environment
from strop.serving.process import Child, free_port
from strop.serving.stack import Stack

SIZES = (32, 128)
WORDS = "river stone lamp garden letter winter harbour copper"
TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 12")
    parser.add_argument("--model", type=Path, help="model folder (default: SmolLM2-135M-Instruct)")
    arguments = parser.parse_args()
    rounds = 3 if arguments.quick else 12
    with tempfile.TemporaryDirectory(prefix="strop-") as name, ExitStack() as stopping:
        os.environ["STROP_HOME"] = name
        model = arguments.model or demo_model.fetch(Path(name) / "models")
        urls = {size: _start(model, size, Path(name), stopping) for size in SIZES}
        rng = random.Random(0)
        times = np.array([_round(urls, number, rng) for number in range(-1, rounds)])[1:]
    figures = {"ttft_ratio": times[:, 0, 0] / times[:, 1, 0], "decode_ratio": times[:, 0, 1] / times[:, 1, 1]}
    result: dict[str, object] = {"rounds": rounds}
    table = Table("figure", "median", "quartiles")
    for name, values in figures.items():
        low, median, high = (round(float(v), 3) for v in np.percentile(values, [25, 50, 75]))
        result |= {name: median, f"{name}_quartiles": [low, high]}
        table.add_row(name, str(median), f"{low} to {high}")
    Console().print(table)
    print(json.dumps(result))


def _start(model: Path, size: int, folder: Path, stopping: ExitStack) -> str:
    stack = Stack.build(model, "model", engine_args={"enforce-eager": True, "block-size": size})
    port = free_port()
    child = Child.start(
        f"blocks of {size}",
        engine_command(stack, "127.0.0.1", port, capture=False),
        folder / f"blocks-{size}.log",
        engine_environment(stack, 1, cores_of_replica(0, 1), None),
    )
    stopping.callback(child.stop)
    child.wait_until_answers(f"http://127.0.0.1:{port}/health", 300)
    return f"http://127.0.0.1:{port}"


def _round(urls: dict[int, str], number: int, rng: random.Random) -> list[list[float]]:
    """Seconds to one token of a new prompt, and tokens a second after it, by size."""
    text = f"{number} " + " ".join(rng.choice(WORDS.split()) for _ in range(700))
    found = {size: [0.0, 0.0] for size in SIZES}
    for size in SIZES if number % 2 == 0 else SIZES[::-1]:
        first_s, again_s, all_s = (_ask(urls[size], text, tokens) for tokens in (1, 1, TOKENS + 1))
        found[size] = [first_s, TOKENS / (all_s - again_s)]
    return [found[size] for size in SIZES]


def _ask(url: str, text: str, tokens: int) -> float:
    body = {
        "model": "model", "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
    }  # fmt: skip
    began = time.perf_counter()
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).raise_for_status()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
