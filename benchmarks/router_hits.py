"""What routing by cached prefix saves, against routing in turn, on a real conversation trace.

    python benchmarks/router_hits.py [--trace mooncake_conversation_trace.jsonl.gz] [--quick]

The prompts of the Mooncake trace (github.com/kvcache-ai/Mooncake, Qin et al., arXiv 2407.00079) are
known as blocks of 512 tokens; here each block becomes 32 tokens of text of its own, so that a small
random model can serve them with the same reuse. Two routers stand in front of the same replicas: the
fleet's, which looks for the cached prefix, and one that takes the replicas in turn. They get the same
requests in the same order, alternating in rounds; a salt of its own keeps every round's cache apart.

Keys of the last line: hit_rate, hit_rate_round_robin (prompt tokens found in the prefix cache over
all prompt tokens), hit_rate_possible (one replica with room for everything), requests, replicas,
latency_ratio (mean time to the answer, prefix over in turn), and rounds with each one's rates.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table
from tiny_model import WORDS, make_tiny_model

from strop.pipelines.deployment import plain_stack, temporary_fleet
from strop.pipelines.settings import Settings
from strop.serving.arrivals import load_arrivals
from strop.serving.client import Outcome, send
from strop.serving.process import Child, free_port
from strop.serving.settings import ServingSettings

BLOCK_TOKENS = 32
"""The smallest block of the prefix cache that vLLM has on CPUs."""
LONGEST_BLOCKS = 55
CONCURRENCY = 8
ENGINE = {"max-model-len": 2048, "max-num-seqs": 8, "enforce-eager": True, "block-size": BLOCK_TOKENS}
TRACE = Path(__file__).parents[2] / "shared" / "data" / "mooncake_conversation_trace.jsonl.gz"
VOCABULARY = sorted({word for word in WORDS.split() if word.isalpha()})


@dataclass(frozen=True, slots=True)
class Round:
    policy: str
    hit_rate: float
    mean_s: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, default=TRACE, help="Mooncake's conversation trace")
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2, help="of each policy")
    parser.add_argument("--quick", action="store_true", help="100 requests, 2 replicas, 1 round")
    arguments = parser.parse_args()
    if not arguments.trace.is_file():
        raise SystemExit(
            f"{arguments.trace} is not there; download it from kvcache-ai/Mooncake and give --trace."
        )
    requests, replicas, rounds = arguments.requests, arguments.replicas, arguments.rounds
    if arguments.quick:
        requests, replicas, rounds = 100, 2, 1
    known = [a.prefix_blocks for a in load_arrivals(arguments.trace) if a.prefix_blocks]
    prompts = [ids for ids in known if len(ids) <= LONGEST_BLOCKS][:requests]
    found = _measure(prompts, replicas, rounds)
    table = Table("round", "policy", "hit rate", "mean seconds")
    for number, one in enumerate(found):
        table.add_row(str(number), one.policy, f"{one.hit_rate:.3f}", f"{one.mean_s:.3f}")
    Console().print(table)
    of = {policy: [r for r in found if r.policy == policy] for policy in ("prefix", "in turn")}
    hits = {policy: statistics.mean(r.hit_rate for r in rows) for policy, rows in of.items()}
    times = {policy: statistics.mean(r.mean_s for r in rows) for policy, rows in of.items()}
    result = {
        "hit_rate": round(hits["prefix"], 4),
        "hit_rate_round_robin": round(hits["in turn"], 4),
        "hit_rate_possible": round(_possible(prompts), 4),
        "requests": len(prompts),
        "replicas": replicas,
        "latency_ratio": round(times["prefix"] / times["in turn"], 3),
        "rounds": [[r.policy, round(r.hit_rate, 4), round(r.mean_s, 4)] for r in found],
    }
    print(json.dumps(result))


def _possible(prompts: Sequence[Sequence[int]]) -> float:
    """Hit rate where every block is computed once; an id stands for a block and all that goes before it."""
    seen: set[int] = set()
    hits = blocks = 0
    for ids in prompts:
        hits += len(seen.intersection(ids))
        blocks += len(ids)
        seen.update(ids)
    return hits / blocks


def _measure(prompts: Sequence[Sequence[int]], replicas: int, rounds: int) -> list[Round]:
    with tempfile.TemporaryDirectory(prefix="strop-") as folder:
        home = Path(folder)
        os.environ["STROP_HOME"] = folder
        model = make_tiny_model(home / "model")
        serving = ServingSettings(served_model="tiny", replicas=replicas, engine_args=ENGINE)
        settings = Settings(model=str(model), serving=serving)
        with temporary_fleet(settings, home, plain_stack(settings)) as fleet:
            (pool,) = fleet.status().pools
            port = free_port()
            turn = Child.start(
                "vllm-router in turn",
                [
                    sys.executable, "-m", "vllm_router.launch_router",
                    "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin",
                    "--worker-urls", *(replica.url for replica in pool.replicas),
                    "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()),
                ],
                home / "logs" / "round-robin.log",
            )  # fmt: skip
            try:
                turn.wait_until_answers(f"http://127.0.0.1:{port}/readiness", 60)
                urls = {"prefix": pool.url, "in turn": f"http://127.0.0.1:{port}"}
                return [
                    asyncio.run(_play(policy, url, prompts, f"{number}-{policy}"))
                    for number in range(rounds)
                    for policy, url in urls.items()
                ]
            finally:
                turn.stop()


async def _play(policy: str, url: str, prompts: Sequence[Sequence[int]], salt: str) -> Round:
    gate = asyncio.Semaphore(CONCURRENCY)
    async with httpx.AsyncClient(trust_env=False) as client:

        async def ask(number: int, ids: Sequence[int]) -> Outcome:
            async with gate:
                # The router sees the text and not the salt, so the text says the round too.
                text = f"{salt} " + " ".join(_block(block) for block in ids)
                body = {
                    "model": "tiny", "messages": [{"role": "user", "content": text}],
                    "max_tokens": 1, "cache_salt": salt, "stream": False,
                }  # fmt: skip
                return await send(client, url, "chat", body, session=f"{salt}-{number}", timeout_s=300)

        outcomes = await asyncio.gather(*(ask(number, ids) for number, ids in enumerate(prompts)))
    failed = [o.error for o in outcomes if o.error]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(outcomes)} requests failed: {failed[0]}")
    cached = sum(o.cached_tokens or 0 for o in outcomes)
    rate = cached / sum(o.prompt_tokens for o in outcomes)
    return Round(policy, rate, statistics.mean(o.e2e_s for o in outcomes))


def _block(block: int) -> str:
    draw = random.Random(block)
    return " ".join(draw.choice(VOCABULARY) for _ in range(BLOCK_TOKENS))


if __name__ == "__main__":
    main()
