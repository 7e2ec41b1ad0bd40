"""What prefill replicas of their own do for the tokens of short requests while long prompts arrive.

    python benchmarks/disaggregation.py [--quick] [--model FOLDER]

One fleet serves two Stacks of the same model with the same number of vLLM processes: one in which all
of them do both, and one in which some compute long prompts only, and LMCache carries the KV to the
others. In rounds that alternate between the two, a few clients ask for short answers one after the
other, while requests with long prompts, each of its own, arrive at a steady rate. The last pass asks
both for greedy answers to the same long prompts.

A long prompt stops the streams beside it for one gap each, so the p99 of all gaps sees it only where
prompts come often enough to be more than one gap in a hundred; what a reader sees of it is the share of
the time that streams stand still.

Keys of the last line: itl_p99_ratio (p99 of the times between tokens of the short requests, apart over
together; below 1 is better), itl_p99_ratio_rounds (of each pair of rounds), itl_p50_ratio,
itl_p999_ratio, still_share (of the streaming time, in gaps of over 0.5 s, by Stack), short_ttft_p99_ratio,
long_ttft_p50_ratio, short_tokens_ratio (tokens of short requests per second), itl_p99_s, loaded_share (share of the prompt tokens of long requests that the answering replica loaded),
same (of how many greedy answers to long prompts), requests, failed.
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from strop.pipelines import demo_model
from strop.pipelines.deployment import plain_stack, temporary_fleet
from strop.pipelines.settings import Settings
from strop.serving.client import Outcome, send
from strop.serving.cluster import RemoteFleet
from strop.serving.monitoring import scrape
from strop.serving.pool import PoolStatus
from strop.serving.settings import ServingSettings
from strop.serving.stack import Disaggregation, Stack, Topology

WORDS = (
    "river stone lamp garden letter winter harbour copper signal meadow pocket thunder velvet window "
    "marble engine orchard ribbon saddle timber anchor basket candle drawer ember feather"
)
SHORT_TOKENS = 48
console = Console(stderr=True)


@dataclass
class Side:
    """What one of the Stacks did, over all of its rounds."""

    name: str
    url: str
    rounds: list[list[Outcome]] = field(default_factory=list)
    long: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def short(self) -> list[Outcome]:
        return [outcome for one in self.rounds for outcome in one]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one pair of rounds of 15 s")
    parser.add_argument("--model", type=Path, help="model folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of rounds")
    parser.add_argument("--seconds", type=float, default=30, help="length of a round")
    parser.add_argument("--clients", type=int, default=4, help="clients that ask for short answers")
    parser.add_argument("--long-words", type=int, default=700, help="words of a long prompt")
    parser.add_argument("--every", type=float, default=2.5, help="seconds between two long prompts")
    parser.add_argument("--replicas", type=int, default=2, help="vLLM processes of each Stack")
    parser.add_argument("--seed", type=int, default=11)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.pairs, arguments.seconds = 1, 15.0
    with tempfile.TemporaryDirectory(prefix="strop-") as folder:
        home = Path(folder)
        os.environ["STROP_HOME"] = folder
        model = arguments.model or demo_model.fetch(home / "models")
        serving = ServingSettings(served_model="model", replicas=arguments.replicas)
        settings = Settings(model=str(model), serving=serving)
        together = plain_stack(settings)
        apart = together.model_copy(
            update={"topology": Topology(replicas=arguments.replicas - 1, disaggregation=Disaggregation())}
        )
        console.print("starting both Stacks")
        with temporary_fleet(settings, home, together) as fleet:
            fleet.add(apart)
            result = _measure(fleet, together, apart, arguments)
    print(json.dumps(result))


def _measure(
    fleet: RemoteFleet, together: Stack, apart: Stack, arguments: argparse.Namespace
) -> dict[str, object]:
    pools = {pool.fingerprint: pool for pool in fleet.status().pools}
    sides = [Side(n, pools[s.fingerprint].url) for n, s in (("together", together), ("apart", apart))]
    rng = random.Random(arguments.seed)
    for side in sides:
        asyncio.run(_round(side, arguments, rng, 5.0))
    for side in sides:
        side.rounds.clear()
        side.long.clear()
        side.seconds = 0.0
    before = _loaded(pools[apart.fingerprint])
    for pair in range(arguments.pairs):
        for side in sides if pair % 2 == 0 else sides[::-1]:
            asyncio.run(_round(side, arguments, rng, arguments.seconds))
            console.print(
                f"round {pair}, {side.name}: p99 between tokens {_p(_gaps(side.rounds[-1]), 99):.3f} s, "
                f"{len(side.rounds[-1])} short requests, {len(side.long)} long ones so far"
            )
    loaded = _loaded(pools[apart.fingerprint]) - before
    same, compared = asyncio.run(_compare(sides, arguments, rng))
    together_, apart_ = sides
    everything = [o for side in sides for o in (*side.short, *side.long)]
    table = Table("", *(side.name for side in sides))
    figures = {
        "short: p50 between tokens, s": [_p(_gaps(s.short), 50) for s in sides],
        "short: p99 between tokens, s": [_p(_gaps(s.short), 99) for s in sides],
        "short: p99.9 between tokens, s": [_p(_gaps(s.short), 99.9) for s in sides],
        "short: share of the time in gaps over 0.5 s": [_still(_gaps(s.short)) for s in sides],
        "short: p99 to the first token, s": [_p(_ttft(s.short), 99) for s in sides],
        "short: tokens/s": [sum(o.output_tokens for o in s.short) / s.seconds for s in sides],
        "long: p50 to the first token, s": [_p(_ttft(s.long), 50) for s in sides],
    }
    for name, row in figures.items():
        table.add_row(name, *(f"{value:.4g}" for value in row))
    console.print(table)

    def ratio(name: str) -> float:
        return round(figures[name][1] / figures[name][0], 4)

    return {
        "itl_p99_ratio": ratio("short: p99 between tokens, s"),
        "itl_p99_ratio_rounds": [
            round(_p(_gaps(a), 99) / _p(_gaps(t), 99), 4)
            for t, a in zip(together_.rounds, apart_.rounds, strict=True)
        ],
        "itl_p50_ratio": ratio("short: p50 between tokens, s"),
        "itl_p999_ratio": ratio("short: p99.9 between tokens, s"),
        "still_share": {s.name: round(_still(_gaps(s.short)), 4) for s in sides},
        "short_ttft_p99_ratio": ratio("short: p99 to the first token, s"),
        "long_ttft_p50_ratio": ratio("long: p50 to the first token, s"),
        "short_tokens_ratio": ratio("short: tokens/s"),
        "itl_p99_s": {s.name: round(_p(_gaps(s.short), 99), 4) for s in sides},
        "loaded_share": round(loaded / max(1, sum(o.prompt_tokens for o in apart_.long)), 4),
        "same": same,
        "compared": compared,
        "requests": len(everything),
        "failed": sum(o.error is not None for o in everything),
    }


async def _round(side: Side, arguments: argparse.Namespace, rng: random.Random, seconds: float) -> None:
    short: list[Outcome] = []
    began = time.monotonic()
    async with httpx.AsyncClient(trust_env=False) as client:

        async def ask_short(number: int) -> None:
            turn = 0
            while time.monotonic() - began < seconds:
                turn += 1
                short.append(await _ask(client, side, _text(rng, 12), SHORT_TOKENS, f"{number}-{turn}"))

        async def ask_long(number: int) -> None:
            await asyncio.sleep(1 + number * arguments.every)
            text = _text(rng, arguments.long_words)
            side.long.append(await _ask(client, side, text, 4, f"long-{number}"))

        arrivals = range(int((seconds - 1) // arguments.every) + 1)
        await asyncio.gather(*map(ask_short, range(arguments.clients)), *map(ask_long, arrivals))
    side.rounds.append(short)
    side.seconds += time.monotonic() - began


async def _ask(client: httpx.AsyncClient, side: Side, text: str, tokens: int, session: str) -> Outcome:
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    return await send(client, side.url, "chat", body, session=f"{side.name}-{session}")


async def _compare(
    sides: Sequence[Side], arguments: argparse.Namespace, rng: random.Random
) -> tuple[int, int]:
    """How many greedy answers to long prompts come out the same, of how many."""
    texts = [_text(rng, arguments.long_words) for _ in range(2 if arguments.quick else 6)]
    async with httpx.AsyncClient(trust_env=False) as client:
        answers = [
            [await _ask(client, side, text, 24, f"same-{number}") for side in sides]
            for number, text in enumerate(texts)
        ]
    return sum(one.text == other.text and not one.error for one, other in answers), len(texts)


def _loaded(pool: PoolStatus) -> float:
    """Tokens whose KV the answering replicas have loaded so far."""
    return sum(
        scrape(f"{r.url}/metrics").total("vllm:external_prefix_cache_hits_total") for r in pool.replicas
    )


def _text(rng: random.Random, words: int) -> str:
    return f"{rng.random()} Tell a story about: " + " ".join(rng.choice(WORDS.split()) for _ in range(words))


def _gaps(outcomes: Sequence[Outcome]) -> list[float]:
    return [gap for outcome in outcomes for gap in outcome.inter_token_s]


def _still(gaps: Sequence[float]) -> float:
    return sum(gap for gap in gaps if gap > 0.5) / sum(gaps)


def _ttft(outcomes: Sequence[Outcome]) -> list[float]:
    return [outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None]


def _p(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else float("nan")


if __name__ == "__main__":
    main()
