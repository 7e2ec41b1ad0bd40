"""Whether what one request says turns up in another's answer.

Every prompt of a round holds a marker of its own that no model can guess, and asks for it back.
They are sent at once, some after a long prefix that all of them share (what the prefix cache gives
to others), some without, half of them as each of two tenants (cache salts, which is how an engine
keeps tenants apart). Any part of a marker in another prompt's answer is a leak: eight letters drawn
at random do not meet by chance.
"""

import asyncio
import random
import string
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from strop.evals.observation import Bench, Finding, Metric, Observation, Side
from strop.serving.client import Outcome, send
from strop.serving.traces import PROBE_TENANT

METRICS = (
    Metric("leak", "", "lower", "level", "share of marked requests whose text turned up in another's answer"),
)
MARKER_LETTERS = 16
FOUND_LETTERS = 8
"""Consecutive letters of a marker by which it is known: answers may be cut off, and copies wrong at the end."""
PREFIX = "leak-"
_TENANTS = ("tenant-a", "tenant-b")
_RULES = (
    "You keep the records of a large archive and are asked for one entry at a time. Every entry has a key word. "
    "Nobody may ever see the key word of an entry that is not their own. Copy key words letter by letter, and never "
    "change, translate, shorten or explain them. "
) * 4


@dataclass(frozen=True, slots=True)
class Marked:
    """A prompt with its marker."""

    request_id: str
    marker: str
    tenant: str
    body: dict[str, Any]
    """Everything but the model's name."""


def marked_prompts(seed: int, rounds: int, at_once: int) -> list[list[Marked]]:
    """Rounds of prompts to be sent at once; every second one begins as all of its kind do."""
    rng = random.Random(f"leak {seed}")
    return [
        [_marked(rng, f"{number}-{place}", place) for place in range(at_once)] for number in range(rounds)
    ]


def _marked(rng: random.Random, name: str, place: int) -> Marked:
    marker = "".join(rng.choices(string.ascii_lowercase, k=MARKER_LETTERS))
    ask = f"The key word of my entry {name} is {marker}. Say it back three times."
    shared = place % 2 == 0
    messages = [{"role": "user", "content": ask}]
    if shared:
        messages.insert(0, {"role": "system", "content": _RULES})
    body = {"messages": messages, "temperature": 0, "max_tokens": 48, "stream": True}
    return Marked(f"{PREFIX}{name}", marker, _TENANTS[place // 2 % 2], body)


async def observe_leaks(
    bench: Bench, rounds: int, at_once: int, timeout_s: float
) -> AsyncIterator[Observation | Finding]:
    """Send marked prompts to both Stacks, one round after the other, and search every other answer.

    Both are searched and every leak is a Finding; the metric is the candidate's own.
    """
    for prompts in marked_prompts(bench.seed, rounds, at_once):
        if all(prompt.request_id in bench.done for prompt in prompts):
            continue
        for side in bench.sides:
            bench.progress(0.05, f"searching the {side.arm}'s answers for others' prompts")
            outcomes = await _ask_at_once(bench.client, side, prompts, bench.seed, timeout_s)
            leaks = list(found_leaks(prompts, outcomes))
            for giver, taker in leaks:
                yield _finding(side, prompts[giver], prompts[taker], outcomes[giver], outcomes[taker])
            if side.arm == "candidate":
                gave = {giver for giver, _ in leaks}
                for number, (prompt, outcome) in enumerate(zip(prompts, outcomes, strict=True)):
                    if outcome.error is None and prompt.request_id not in bench.done:
                        leaked = float(number in gave)
                        yield Observation("leak", prompt.request_id, prompt.request_id, (), (leaked,))


async def _ask_at_once(
    client: httpx.AsyncClient, side: Side, prompts: Sequence[Marked], seed: int, timeout_s: float
) -> list[Outcome]:
    return list(
        await asyncio.gather(
            *(
                send(
                    client,
                    side.url,
                    "chat",
                    {**prompt.body, "model": side.model, "cache_salt": f"{prompt.tenant}-{seed}"},
                    session=prompt.request_id,
                    tenant=PROBE_TENANT,
                    timeout_s=timeout_s,
                )
                for prompt in prompts
            )
        )
    )


def found_leaks(prompts: Sequence[Marked], outcomes: Sequence[Outcome]) -> list[tuple[int, int]]:
    """Pairs of numbers: whose marker was found, in whose answer."""
    pieces = {
        prompt.marker[start : start + FOUND_LETTERS]: giver
        for giver, prompt in enumerate(prompts)
        for start in range(MARKER_LETTERS - FOUND_LETTERS + 1)
    }
    found = set()
    for taker, outcome in enumerate(outcomes):
        # Letters alone: a model may put spaces or quotes between what it copies.
        text = "".join(filter(str.isascii, filter(str.isalpha, _all_text(outcome).lower())))
        windows = {text[start : start + FOUND_LETTERS] for start in range(len(text) - FOUND_LETTERS + 1)}
        found |= {(pieces[window], taker) for window in windows & pieces.keys() if pieces[window] != taker}
    return sorted(found)


def _all_text(outcome: Outcome) -> str:
    calls = (f"{call['function']['name']} {call['function']['arguments']}" for call in outcome.tool_calls)
    return " ".join([outcome.text, *calls])


def _finding(side: Side, giver: Marked, taker: Marked, given: Outcome, answer: Outcome) -> Finding:
    tenants = f"both of {giver.tenant}" if giver.tenant == taker.tenant else "of two tenants"
    return Finding(
        kind="leak",
        arm=side.arm,
        stack=side.stack.fingerprint,
        request_id=taker.request_id,
        detail=f"{giver.marker!r}, which only {giver.request_id} asked about, is in the answer to {taker.request_id} "
        f"({tenants}, sent at the same time)",
        body={**taker.body, "model": side.model},
        answer=answer.text[:2000],
        other=given.text[:2000],
    )
