"""Which held-out requests to score: few, but of many sessions and of every kind of traffic."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from strop.evals.replay import Request, rebuild
from strop.evals.settings import EvalSettings
from strop.evals.slices import slices
from strop.serving.traces import PROBE_TENANT, WITHHELD, Trace

_NEWEST = 2000
"""Held-out requests that are looked through."""


@dataclass(frozen=True, slots=True)
class Picked:
    """A held-out request, and the token ids that were recorded of it."""

    request: Request
    slices: tuple[str, ...]
    prompt: list[int]
    """Empty where there is none, or some tokens were withheld."""
    output: list[int]


def choose(
    traces: Sequence[Trace], max_requests: int, max_output_tokens: int, max_tokens: int
) -> list[Picked]:
    """One request of each session before any second, of these the rarest slices first, of these the newest.

    `max_tokens` bounds the tokens of all together, prompts and answers; a first request is taken whatever
    its length. The same for the same traces. Those that were not answered, hold no prompt or cannot be read
    are left out, as are strop's own.
    """
    settings = EvalSettings(max_output_tokens=max(2, max_output_tokens))
    turns: Counter[str] = Counter()
    waiting: list[tuple[int, Picked]] = []
    answered = [t for t in traces if t.status == 200 and t.tenant != PROBE_TENANT]
    for trace in answered[: -_NEWEST - 1 : -1]:
        try:
            request = rebuild(trace, settings)
        except (ValueError, AttributeError, TypeError):
            continue
        prompt, output = trace.prompt_token_ids, trace.output_token_ids
        if WITHHELD in prompt or WITHHELD in output:
            prompt, output = [], []
        picked = Picked(request, slices(trace), list(prompt), list(output[:max_output_tokens]))
        waiting.append((turns[request.session], picked))
        turns[request.session] += 1
    counts: Counter[str] = Counter()
    chosen: list[Picked] = []
    left = max_tokens
    while waiting and len(chosen) < max_requests:
        place = min(range(len(waiting)), key=lambda i: (waiting[i][0], _rarity(waiting[i][1], counts), i))
        picked = waiting.pop(place)[1]
        tokens = len(picked.prompt) + (len(picked.output) or max_output_tokens)
        if tokens > left and chosen:
            continue
        left -= tokens
        counts.update(picked.slices)
        chosen.append(picked)
    return chosen


def _rarity(picked: Picked, counts: Counter[str]) -> int:
    return min(counts[name] for name in picked.slices)
