"""Long contexts: find one sentence in a long dull text, at several lengths and depths.

The test is Kamradt's needle in a haystack (github.com/gkamradt/LLMTest_NeedleInAHaystack, 2023); text
and wording are strop's own, made from the seed.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, product

from strop.evals.behaviour.tasks import Answer, Grade, Task, ask, right, wrong
from strop.evals.observation import Metric

METRICS = (
    Metric(
        "retrieval_right", "", "higher", "difference", "share of answers that name what the long prompt says"
    ),
)

MAX_TOKENS = 32
OVERHEAD_TOKENS = 160
"""Template, question and needle, and what estimates may be wrong by."""

_PEOPLE = (
    "The keeper",
    "A neighbour",
    "The baker",
    "An old teacher",
    "The gardener",
    "A clerk",
    "The miller",
)
_DOINGS = (
    "counted",
    "cleaned",
    "carried",
    "looked for",
    "talked about",
    "drew",
    "sold",
    "repaired",
    "painted",
)
_THINGS = (
    "the baskets",
    "a ladder",
    "the lamps",
    "two letters",
    "the fence",
    "a wooden boat",
    "the curtains",
)
_TIMES = (
    "before noon",
    "after the rain",
    "on a quiet Tuesday",
    "late in autumn",
    "while the shop was closed",
)
_PLACES = ("harbour", "mill", "orchard", "chapel", "quarry", "bridge", "station", "garden")
_WORDS = (
    "amber",
    "falcon",
    "meadow",
    "copper",
    "willow",
    "lantern",
    "marble",
    "thistle",
    "saffron",
    "pebble",
)

PROMPT = """\
Read this text. A question about it follows.

{text}

Question: What is the code word of the {place}? Answer with the code word alone."""


def tasks(
    count: int,
    lengths: Sequence[int],
    depths: Sequence[float],
    longest: int,
    tokens: Callable[[str], int],
    seed: int,
) -> Iterator[Task]:
    """`count` tasks, over the lengths (prompt tokens) that fit into `longest` and the depths (0 to 1) in turn.

    `tokens` counts or estimates the tokens of a text.
    """
    fitting = [length for length in lengths if length + MAX_TOKENS <= longest]
    # Depths vary faster, so that a few tasks already see the whole of a text.
    for number, (length, depth) in enumerate(islice(_cycle(fitting, depths), count if fitting else 0)):
        rng = random.Random(f"retrieval/{seed}/{number}")
        place, word = rng.choice(_PLACES), f"{rng.choice(_WORDS)}-{rng.randrange(100, 1000)}"
        text = haystack(rng, length - OVERHEAD_TOKENS, depth, needle(place, word), tokens)
        yield Task(
            id=f"retrieval/{seed}-{number}-{length}-{depth:g}",
            kind="retrieval",
            body=ask(PROMPT.format(text=text, place=place), MAX_TOKENS),
            grade=lambda answer, word=word: grade(answer, word),
            slices=(f"{length} tokens", f"depth {depth:.0%}"),
        )


def _cycle(lengths: Sequence[int], depths: Sequence[float]) -> Iterator[tuple[int, float]]:
    while True:
        yield from product(lengths, depths)


def needle(place: str, word: str) -> str:
    return f"The code word of the {place} is {word}."


def haystack(
    rng: random.Random, budget_tokens: int, depth: float, sentence: str, tokens: Callable[[str], int]
) -> str:
    """Sentences that fill the budget, with `sentence` after the share `depth` of them."""
    sample = [_filler(rng) for _ in range(64)]
    each = max(tokens(" ".join(sample)) / len(sample), 1.0)
    count = max(int(budget_tokens / each), 1)
    sentences = [*sample, *(_filler(rng) for _ in range(count - len(sample)))][:count]
    at = round(depth * count)
    return " ".join([*sentences[:at], sentence, *sentences[at:]])


def _filler(rng: random.Random) -> str:
    return f"{rng.choice(_PEOPLE)} {rng.choice(_DOINGS)} {rng.choice(_THINGS)} {rng.choice(_TIMES)}."


def grade(answer: Answer, word: str) -> tuple[Grade]:
    if re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", answer.text, re.IGNORECASE):
        return (right("retrieval_right"),)
    said = answer.text.strip()[:80]
    return (wrong("retrieval_right", f"says {said!r}, not {word}" if said else f"says nothing, not {word}"),)
