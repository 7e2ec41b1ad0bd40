"""Instructions that a program can check: how long, in what form, with which words.

The idea is IFEval's (Zhou et al., arXiv 2311.07911); instructions, wording and checks are strop's own.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from strop.evals.behaviour.tasks import Answer, Grade, Task, ask, json_value
from strop.evals.observation import Metric

METRICS = (
    Metric(
        "instructions_kept", "", "higher", "difference", "share of a prompt's checkable instructions kept"
    ),
)

Check = Callable[[str], str]
"""Why a text does not keep an instruction; empty if it does."""


@dataclass(frozen=True, slots=True)
class Instruction:
    kind: str
    words: str
    """As the prompt puts it."""
    check: Check


def count_words(text: str) -> int:
    """Runs of letters and digits, with what joins them: "don't" and "well-known" are one each."""
    return len(re.findall(r"[^\W_]+(?:['’\-][^\W_]+)*", text))


def at_least(words: int) -> Instruction:
    def check(text: str) -> str:
        found = count_words(text)
        return "" if found >= words else f"{found} words, at least {words} were asked for"

    return Instruction("at_least", f"Use at least {words} words.", check)


def at_most(words: int) -> Instruction:
    def check(text: str) -> str:
        found = count_words(text)
        if not found:
            return "no words at all"
        return "" if found <= words else f"{found} words, at most {words} were asked for"

    return Instruction("at_most", f"Use no more than {words} words.", check)


def _has(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def with_word(word: str) -> Instruction:
    return Instruction(
        "with_word",
        f'The word "{word}" must occur in your answer.',
        lambda text: "" if _has(text, word) else f"the word {word!r} is missing",
    )


def without_word(word: str) -> Instruction:
    def check(text: str) -> str:
        if not text.strip():
            return "no text at all"
        return f"the word {word!r} occurs" if _has(text, word) else ""

    return Instruction("without_word", f'Do not use the word "{word}".', check)


def lowercase() -> Instruction:
    def check(text: str) -> str:
        if not any(letter.isalpha() for letter in text):
            return "no letters at all"
        capital = next((letter for letter in text if letter != letter.lower()), None)
        return f"the capital {capital!r} occurs" if capital else ""

    return Instruction("lowercase", "Write everything in lowercase letters, without any capital.", check)


_BULLET = re.compile(r"^[ \t]*[-*•][ \t]+\S", re.MULTILINE)


def bullets(count: int) -> Instruction:
    def check(text: str) -> str:
        found = len(_BULLET.findall(text))
        return "" if found == count else f"{found} bullet points instead of {count}"

    return Instruction(
        "bullets", f'Give exactly {count} bullet points, each on a line that begins with "- ".', check
    )


def ends_with(sentence: str) -> Instruction:
    return Instruction(
        "ends_with",
        f'End your answer with this sentence, and write nothing after it: "{sentence}"',
        lambda text: "" if text.rstrip(' \n\t"*”').endswith(sentence.rstrip()) else "it ends otherwise",
    )


def starts_with(opening: str) -> Instruction:
    return Instruction(
        "starts_with",
        f'Begin your answer with the words "{opening}".',
        lambda text: "" if text.lstrip(' \n\t"*“').startswith(opening) else "it begins otherwise",
    )


def json_only(*keys: str) -> Instruction:
    def check(text: str) -> str:
        value, why = json_value(re.sub(r"^\s*```(?:json)?\s*\n(.*?)\n?```\s*$", r"\1", text, flags=re.DOTALL))
        if why:
            return f"not JSON alone: {why}"
        missing = [key for key in keys if not isinstance(value, dict) or key not in value]
        return f"no JSON object with the keys {', '.join(missing)}" if missing else ""

    names = " and ".join(f'"{key}"' for key in keys)
    return Instruction("json_only", f"Answer with one JSON object alone that has the keys {names}.", check)


def paragraphs(count: int) -> Instruction:
    def check(text: str) -> str:
        found = len([part for part in re.split(r"\n[ \t]*\n", text) if part.strip()])
        return "" if found == count else f"{found} paragraphs instead of {count}"

    return Instruction(
        "paragraphs", f"Write exactly {count} paragraphs, with one empty line between them.", check
    )


SUBJECTS = (
    ("a lighthouse", "light"), ("how bread is baked", "flour"), ("riding a bicycle in winter", "ice"),
    ("why leaves change their colour", "tree"), ("an old clock tower", "bell"), ("how a sailing boat moves", "wind"),
    ("keeping bees", "honey"), ("a train journey by night", "window"), ("growing tomatoes", "water"),
    ("what a librarian does", "book"), ("a mountain hut", "snow"), ("learning to play the violin", "string"),
    ("how rivers are measured", "flow"), ("a market in the morning", "fruit"), ("repairing shoes", "leather"),
    ("why ships are painted", "rust"),
)  # fmt: skip
ENDINGS = ("That is all there is to say.", "Nothing more needs to be added.", "Ask again if you want more.")
OPENINGS = ("Let us begin", "To put it simply", "Here is my answer")


def _drawn(rng: random.Random, subject_word: str) -> list[Instruction]:
    """One or two instructions that can be kept together."""
    few, many = rng.choice((15, 25, 40)), rng.choice((30, 45, 60))
    count = rng.choice((2, 3, 4))
    chosen = rng.choice(
        (
            [at_least(many)],
            [at_most(few)],
            [with_word(subject_word)],
            [without_word(subject_word)],
            [lowercase()],
            [bullets(count)],
            [ends_with(rng.choice(ENDINGS))],
            [starts_with(rng.choice(OPENINGS))],
            [json_only("title", "summary")],
            [paragraphs(rng.choice((2, 3)))],
            [at_most(few), with_word(subject_word)],
            [bullets(count), without_word("and")],
            [lowercase(), at_most(few)],
            [starts_with(rng.choice(OPENINGS)), ends_with(rng.choice(ENDINGS))],
            [paragraphs(2), with_word(subject_word)],
        )
    )
    return list(chosen)


def tasks(count: int, max_tokens: int, seed: int) -> Iterator[Task]:
    for number in range(count):
        rng = random.Random(f"instructions/{seed}/{number}")
        subject, word = rng.choice(SUBJECTS)
        chosen = _drawn(rng, word)
        prompt = f"Write about {subject}. {' '.join(each.words for each in chosen)}"
        yield Task(
            id=f"instructions/{seed}-{number}",
            kind="instructions",
            body=ask(prompt, max_tokens),
            grade=lambda answer, chosen=chosen: grade(answer, chosen),
            slices=tuple(each.kind for each in chosen),
        )


def grade(answer: Answer, instructions: list[Instruction]) -> tuple[Grade]:
    """The share of the instructions that the text keeps."""
    reasons = [why for each in instructions if (why := each.check(answer.text))]
    kept = 1 - len(reasons) / len(instructions)
    return (Grade("instructions_kept", kept, "; ".join(reasons) + (answer.cut_off if reasons else "")),)
