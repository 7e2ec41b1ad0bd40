"""Kinds of traffic that a request belongs to: damage by a cheaper model hides in the rare ones."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import orjson

from strop.evals.replay import kind_of
from strop.serving.traces import Trace

CONTEXT_BANDS = ((256, "prompt<256"), (1024, "prompt 256-1k"), (4096, "prompt 1k-4k"))
LONGEST_BAND = "prompt 4k+"

_MOST_CHARACTERS = 20_000
"""Of a text; its slice is clear by then."""
_SCRIPT_SHARE = 0.2
_MIN_LETTERS = 8
_THINKING = ("<think>", "</think>", "<thinking>", "<|channel|>analysis", "[THINK]", "◁think▷")
_FENCE = re.compile(r"^[ \t]*(```|~~~)", re.MULTILINE)
# Lines that begin or end like this are code in nearly every language that is written today.
_CODE_LINE = re.compile(
    r"^\s*(?:def |class |import |from \S+ import |return\b|if .*[:{]$|for .*[:{]$|while .*[:{]$|else[:{ ]|#include|"
    r"(?:public|private|static|const|let|var|func|fn|function|struct|enum) |[\w.\[\]]+ [-+*/]?= |@\w+|SELECT |</?\w+)"
    r"|[;{}]\s*$"
)
_CODE_SHARE = 0.4
_MIN_CODE_LINES = 2
# The first word of a script's letters as Unicode names them, and what the slice is called.
_SCRIPTS = {
    "CJK": "cjk",
    "HIRAGANA": "cjk",
    "KATAKANA": "cjk",
    "HANGUL": "cjk",
    "CYRILLIC": "cyrillic",
    "GREEK": "greek",
    "ARABIC": "arabic",
    "HEBREW": "hebrew",
    "THAI": "thai",
    "DEVANAGARI": "indic",
    "BENGALI": "indic",
    "TAMIL": "indic",
    "TELUGU": "indic",
    "GUJARATI": "indic",
    "GURMUKHI": "indic",
    "KANNADA": "indic",
    "MALAYALAM": "indic",
}
# The most frequent function words: English prose is over a third of these, other Latin prose hardly any.
_ENGLISH = frozenset(
    (
        "the", "of", "and", "to", "a", "in", "is", "that", "it", "for", "was", "on", "are", "as", "with", "be",
        "this", "by", "at", "from", "or", "have", "an", "not", "which", "you", "can", "if", "i", "what", "how", "they",
        "we", "will", "has", "but", "its", "your", "all", "do", "when", "there", "more", "one", "would", "about", "so", "up",
        "out", "should", "these", "then", "into", "no", "write", "list", "use", "each", "give",
    )
)  # fmt: skip
_ENGLISH_SHARE = 0.15
_MIN_WORDS = 12


def slices(trace: Trace) -> tuple[str, ...]:
    """Names of all slices that a request belongs to, besides `all`.

    What was asked for (`json`, `tool_call`), what the answer holds (`prose`, `code`, `reasoning`), the
    language of both (`english`, `latin` for other languages in Latin letters, `cjk`, `cyrillic`, ...)
    and the length of the prompt in tokens (`CONTEXT_BANDS`). An answer that is nothing else is `prose`.
    Never raises: content that cannot be read belongs to no slice but its length.
    """
    try:
        kind = kind_of(trace)
    except (ValueError, AttributeError, TypeError):
        kind = "chat"
    answers = [choice.text[:_MOST_CHARACTERS] for choice in trace.choices]
    called = kind == "tools" or any(choice.tool_calls for choice in trace.choices)
    answer = "\n".join(answers)
    prompt = prompt_text(trace)
    names = list(content_slices(answer if answer.strip() else prompt))
    if called:
        names = ["tool_call", *(name for name in names if name != "prose")]
    if kind == "json" and "json" not in names:
        names = ["json", *(name for name in names if name != "prose")]
    if "reasoning" not in names and any(_reasons(message) for message in _messages(trace)):
        names.append("reasoning")
    names += languages(f"{prompt}\n{answer}" if {"prose", "reasoning"} & set(names) else prompt)
    return (*names, context_band(len(trace.prompt_token_ids)))


def content_slices(answer: str) -> tuple[str, ...]:
    """`json`, `code`, `reasoning`, or else `prose`."""
    answer = answer[:_MOST_CHARACTERS]
    names = []
    reasons = any(tag in answer for tag in _THINKING)
    for tag in _THINKING if reasons else ():
        answer = answer.replace(tag, "")
    if _is_json(answer):
        names.append("json")
    elif _holds_code(answer):
        names.append("code")
    if reasons:
        names.append("reasoning")
    return tuple(names) or ("prose",)


def context_band(prompt_tokens: int) -> str:
    """Slice of the prompt's length, tokens."""
    return next((name for below, name in CONTEXT_BANDS if prompt_tokens < below), LONGEST_BAND)


def languages(text: str) -> tuple[str, ...]:
    """Scripts that make up a fifth of the letters or more; Latin ones are `english` or `latin` by their words.

    Scripts as in Unicode Standard Annex 24, read from the character names.
    """
    # Names in code are words of no language.
    text = " ".join(text[:_MOST_CHARACTERS].split("```")[::2])
    scripts = Counter(filter(None, map(_script, text)))
    letters = sum(scripts.values())
    if letters < _MIN_LETTERS:
        return ()
    found = {name for name, count in scripts.items() if count >= _SCRIPT_SHARE * letters}
    if "latin" in found:
        words = re.findall(r"[a-z]+", text.lower())
        english = sum(word in _ENGLISH for word in words)
        if len(words) < _MIN_WORDS or english >= _ENGLISH_SHARE * len(words):
            found = (found - {"latin"}) | {"english"}
    return tuple(sorted(found))


def prompt_text(trace: Trace) -> str:
    """The words of the last user message, or the end of a text prompt: what sets the answer's language."""
    messages = _messages(trace)
    if not messages:
        prompt = _json(trace.messages)
        return prompt[-_MOST_CHARACTERS:] if isinstance(prompt, str) else ""
    users = [message for message in messages if message.get("role") == "user"]
    return "\n".join(_texts((users or messages)[-1].get("content")))[-_MOST_CHARACTERS:]


def _messages(trace: Trace) -> list[dict[str, Any]]:
    content = _json(trace.messages)
    return [m for m in content if isinstance(m, dict)] if isinstance(content, list) else []


def _texts(content: object) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from (p["text"] for p in content if isinstance(p, dict) and isinstance(p.get("text"), str))


def _reasons(message: dict[str, Any]) -> bool:
    return bool(message.get("reasoning_content") or message.get("reasoning"))


def _json(text: str | None) -> Any:
    try:
        return orjson.loads(text or "")
    except (orjson.JSONDecodeError, TypeError, UnicodeEncodeError):
        return None


def _is_json(text: str) -> bool:
    stripped = text.strip()
    if stripped.startswith("```json"):
        stripped = stripped.removeprefix("```json").removesuffix("```").strip()
    # An answer that was cut off is JSON as far as it goes.
    return isinstance(_json(stripped), dict | list) or bool(re.match(r'[\[{]\s*(?:[\[{]\s*)*"', stripped))


def _holds_code(text: str) -> bool:
    if _FENCE.search(text):
        return True
    lines = [line for line in text.splitlines() if line.strip()]
    code = sum(bool(_CODE_LINE.search(line[:400])) for line in lines)
    return code >= _MIN_CODE_LINES and code >= _CODE_SHARE * len(lines)


@cache
def _script(character: str) -> str | None:
    if not character.isalpha():
        return None
    word = unicodedata.name(character, "").split(" ")[0].split("-")[0]
    return "latin" if word == "LATIN" else _SCRIPTS.get(word, "other script")
