"""What is plainly wrong with one answer, seen beside what others answered to the same request.

No judge and no model: every fault is read from tokens, characters and brackets, so that two Stacks are
measured alike. What the prompt or the other answers do as well is no fault. Answers may be code, so
nothing here takes an odd character or a short line for a failure by itself.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import orjson

from strop.serving.client import Outcome
from strop.serving.quality import LOOP_TIMES, LOOP_TOKENS, Loop, find_loops

FaultKind = Literal["error", "empty", "truncated", "loop", "premature_stop", "garbage", "language_switch"]
LONGEST_PERIOD = 1024
"""Tokens of a passage whose repetition is still looked for."""
PASSAGE_TOKENS = 8
"""Different tokens that make a passage: an answer that ended by itself may repeat less, as cells of a table."""
SHORT_SHARE = 0.25
"""An answer shorter than this share of every other answer stopped too soon, if it lacks `SHORT_TOKENS`."""
SHORT_TOKENS = 32
FOREIGN_SHARE = 0.1
"""Share of an answer's letters in a script that nobody else used, from which on it switched languages."""
FOREIGN_LETTERS = 12


@dataclass(frozen=True, slots=True)
class Fault:
    kind: FaultKind
    detail: str
    """In plain words, with the numbers."""


@dataclass(frozen=True, slots=True)
class Said:
    """What an answer is compared with: another arm's answer, or the one that was recorded."""

    text: str
    tokens: int
    by_itself: bool
    """Whether it ended by itself, so that its length says how long an answer should be."""


def said(outcome: Outcome) -> Said:
    calls = "".join(_arguments(outcome))
    return Said(outcome.text + calls, outcome.output_tokens, outcome.finish_reason in ("stop", "tool_calls"))


def faults(body: dict[str, Any], outcome: Outcome, others: Sequence[Said]) -> tuple[Fault, ...]:
    """All faults of an answer; `others` are answers to the same request, none of which need be there.

    Of a request that failed, that is the only fault.
    """
    if outcome.error is not None:
        kind = "truncated" if outcome.error.startswith("truncated") else "error"
        return (Fault(kind, outcome.error[:500]),)
    found = (
        _empty(outcome),
        _cut_off(body, outcome),
        _loop(outcome),
        _premature(body, outcome, others),
        _garbage(body, outcome),
        _switched(body, outcome, others),
    )
    return tuple(fault for fault in found if fault is not None)


def _empty(outcome: Outcome) -> Fault | None:
    if outcome.text.strip() or outcome.tool_calls:
        return None
    return Fault(
        "empty",
        f"neither text nor a tool call in {outcome.output_tokens} tokens (finish {outcome.finish_reason})",
    )


def _cut_off(body: dict[str, Any], outcome: Outcome) -> Fault | None:
    wanted = body.get("max_completion_tokens") or body.get("max_tokens")
    if outcome.finish_reason in ("abort", "error"):
        return Fault(
            "truncated", f"ended with {outcome.finish_reason!r} after {outcome.output_tokens} tokens"
        )
    if outcome.finish_reason == "length" and wanted and 0 < outcome.output_tokens < wanted:
        return Fault("truncated", f"cut off after {outcome.output_tokens} of the {wanted} tokens allowed")
    return None


def stuck(token_ids: Sequence[int], finish_reason: str | None) -> Loop | None:
    """The repetition that an answer did not get out of, or repeats whole passages in; the longest one.

    A repetition that runs to the point where the answer was cut off is a loop whatever it repeats.
    One that the model left, or ended with, is a loop if the passage is more than `PASSAGE_TOKENS`
    different tokens: rows of zeros, rules of dashes and empty cells are what tables are made of.
    """
    loops = [
        loop
        for loop in find_loops(token_ids, LONGEST_PERIOD)
        if len(set(token_ids[loop.start : loop.start + loop.period])) >= PASSAGE_TOKENS
        or (finish_reason == "length" and loop.start + loop.tokens >= len(token_ids) - 1)
    ]
    return max(loops, key=lambda loop: loop.tokens, default=None)


def _loop(outcome: Outcome) -> Fault | None:
    unit = "tokens"
    units: Sequence[int] = outcome.token_ids or []
    if not units:
        # Without token ids, words stand in for tokens.
        unit, words = "words", outcome.text.split()
        numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
        units = [numbers[word] for word in words]
    loop = stuck(units, outcome.finish_reason)
    if loop is None:
        return None
    return Fault(
        "loop",
        f"from {unit[:-1]} {loop.start} on, {loop.tokens} of {len(units)} {unit} repeat with period {loop.period} "
        f"({loop.tokens / loop.period:.1f} times; counted from {LOOP_TIMES} times and {LOOP_TOKENS} {unit} on)",
    )


def _premature(body: dict[str, Any], outcome: Outcome, others: Sequence[Said]) -> Fault | None:
    if outcome.finish_reason not in ("stop", "tool_calls"):
        return None
    if not body.get("stop") and (structure := _left_open(body, outcome)):
        return Fault("premature_stop", f"stopped by itself after {outcome.output_tokens} tokens {structure}")
    lengths = [other.tokens for other in others if other.by_itself]
    expected = min(lengths, default=0)
    if (
        outcome.output_tokens < SHORT_SHARE * expected
        and expected - outcome.output_tokens >= SHORT_TOKENS
        and not outcome.tool_calls
    ):
        return Fault(
            "premature_stop",
            f"stopped by itself after {outcome.output_tokens} tokens; the shortest other answer has {expected}",
        )
    return None


def _left_open(body: dict[str, Any], outcome: Outcome) -> str | None:
    """Where an answer stopped, if that is inside of something."""
    if open_fence(outcome.text):
        return "in the middle of a code block"
    for arguments in _arguments(outcome):
        if depth := open_brackets(arguments):
            return f"in the middle of a tool call's arguments ({depth} open)"
    if wants_json(body) and not outcome.tool_calls and (depth := open_brackets(outcome.text)):
        return f"in the middle of JSON ({depth} brackets or strings open)"
    return None


_FENCE = re.compile(r"^ {0,3}(?:[-*+] +|\d+[.)] +|> ?)*\s*(`{3,}|~{3,})(.*)$")


def open_fence(text: str) -> bool:
    """Whether a Markdown code fence (CommonMark 4.5) is open at the end; fences in lists and quotes count."""
    mark = ""
    for line in text.split("\n"):
        found = _FENCE.match(line)
        if not found:
            continue
        fence, rest = found.groups()
        if not mark:
            if fence[0] == "~" or "`" not in rest:
                mark = fence
        elif fence[0] == mark[0] and len(fence) >= len(mark) and not rest.strip():
            mark = ""
    return bool(mark)


def open_brackets(text: str) -> int:
    """Brackets of JSON, and a string, that are open at the end of a text; 0 where closing ones prevail."""
    depth, in_string, escaped = 0, False, False
    for character in text:
        if in_string:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                in_string = False
        elif character == '"':
            in_string = True
        elif character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
    return max(0, depth) + in_string


def wants_json(body: dict[str, Any]) -> bool:
    """Whether a request says that its answer shall be JSON."""
    format_, structured = body.get("response_format"), body.get("structured_outputs")
    kind = format_.get("type") if isinstance(format_, dict) else None
    return kind in ("json_object", "json_schema") or (
        isinstance(structured, dict) and any(structured.get(name) for name in ("json", "json_object"))
    )


def _garbage(body: dict[str, Any], outcome: Outcome) -> Fault | None:
    asked = prompt_text(body)
    signs = list(garbage(outcome.text, asked, cut_off=outcome.finish_reason == "length"))
    written = [*_arguments(outcome), *([outcome.text] if wants_json(body) else [])]
    if halves := sum(len(lone_surrogates(text)) for text in written):
        signs.append(f"{halves} halves of surrogate pairs in JSON escapes")
    return Fault("garbage", "; ".join(signs)) if signs else None


_CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")
# What text that was read in the wrong encoding turns back into; other letters arise by chance (É” is one).
_USUAL = re.compile(
    "[\u00a0-\u017f\u0370-\u04ff\u0590-\u06ff\u0900-\u0dff\u0e00-\u0e7f\u2010-\u2044\u20ac\u2122\u2190-\u21ff"
    "\u2500-\u257f\u2600-\u27bf\u3000-\u30ff\u4e00-\u9fff\uac00-\ud7af\uff00-\uff65\U0001f300-\U0001faff]*"
)


def garbage(text: str, asked: str, cut_off: bool = False) -> Iterator[str]:
    """Signs that bytes and characters went wrong in a text, in words; what was asked may hold the same.

    An answer that was cut off may end in half a character.
    """
    shown = text.rstrip("\ufffd") if cut_off else text
    if (count := shown.count("\ufffd")) and "\ufffd" not in asked:
        yield f"{count} replacement characters (U+FFFD), the first at character {shown.index(chr(0xFFFD))}"
    odd = [found for found in _CONTROL.finditer(text) if found[0] not in asked]
    if odd:
        yield f"{len(odd)} control characters, the first U+{ord(odd[0][0]):04X} at character {odd[0].start()}"
    runs = _NOT_ASCII.findall(text)
    wrong = [(run, right) for run in runs if (right := _read_again(run))]
    if len(wrong) >= 2 and 2 * len(wrong) >= len(runs) and not any(run in asked for run, _ in wrong):
        yield f"{len(wrong)} runs of UTF-8 read as Latin-1, as {wrong[0][0]!r} for {wrong[0][1]!r}"


def _read_again(run: str) -> str | None:
    """What a run of characters says if it is UTF-8 that was read as Windows-1252 or Latin-1; None if it is not."""
    try:
        # The five bytes that Windows-1252 leaves open are read as C1 controls.
        coded = b"".join(c.encode("latin-1" if "\x80" <= c <= "\x9f" else "cp1252") for c in run[:400])
        right = coded.decode()
    except UnicodeError:
        return None
    return right if _USUAL.fullmatch(right) else None


_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.S
)


def lone_surrogates(text: str) -> list[int]:
    """Places of JSON escapes that are half of a surrogate pair (RFC 8259, section 7)."""
    return [found.start() for found in _ESCAPE.finditer(text) if found[1]]


_CODE = re.compile(r"(`{3,}|~{3,}).*?(?:\1|\Z)|`[^`\n]*`|https?://\S+|</?[A-Za-z][^<>\n]*>", re.S)
_EAST_ASIAN = ("CJK", "HIRAGANA", "KATAKANA", "BOPOMOFO")
_SCRIPTS = frozenset(
    {
        "LATIN", "CYRILLIC", "GREEK", "ARMENIAN", "HEBREW", "ARABIC", "SYRIAC", "THAANA", "DEVANAGARI", "BENGALI",
        "GURMUKHI", "GUJARATI", "ORIYA", "TAMIL", "TELUGU", "KANNADA", "MALAYALAM", "SINHALA", "THAI", "LAO",
        "TIBETAN", "MYANMAR", "GEORGIAN", "HANGUL", "ETHIOPIC", "CHEROKEE", "MONGOLIAN", "KHMER",
    }
)  # fmt: skip


@lru_cache(maxsize=1 << 16)
def _script(character: str) -> str | None:
    """Script of a letter, from its name in Unicode; Chinese and Japanese are one. None for symbols."""
    words = unicodedata.name(character, "").split()
    if not words or not character.isalpha():
        return None
    word = words[1] if words[0] in ("FULLWIDTH", "HALFWIDTH") and len(words) > 1 else words[0]
    return "CJK" if word in _EAST_ASIAN else word if word in _SCRIPTS else None


def scripts(text: str) -> Counter[str]:
    """Letters by script, outside of code, links and tags. Single letters, as formulas have them, do not count."""
    counts: Counter[str] = Counter()
    prose = _CODE.sub(" ", text)
    for word in re.findall(r"[^\W\d_]+", prose):
        if word.isascii():
            counts["LATIN"] += len(word) if len(word) > 1 else 0
            continue
        of_word = Counter(filter(None, map(_script, word)))
        counts.update({s: n for s, n in of_word.items() if n > 1 or s in ("CJK", "HANGUL")})
    return counts


def _switched(body: dict[str, Any], outcome: Outcome, others: Sequence[Said]) -> Fault | None:
    here = scripts(outcome.text)
    letters = sum(here.values())
    known: set[str] = set()
    for text in (prompt_text(body), *(other.text for other in others)):
        known |= {script for script, count in scripts(text).items() if count >= 2}
    if not known:
        return None
    foreign = {script: count for script, count in here.items() if script not in known}
    worst = max(foreign, key=lambda script: foreign[script], default=None)
    if worst is None or foreign[worst] < max(FOREIGN_LETTERS, FOREIGN_SHARE * letters):
        return None
    return Fault(
        "language_switch",
        f"{foreign[worst]} of {letters} letters are {worst.title()}, which neither the prompt nor another answer "
        f"uses ({', '.join(sorted(s.title() for s in known))})",
    )


def prompt_text(body: dict[str, Any]) -> str:
    """All text of a request's prompt; tool calls and descriptions of tools included."""
    if isinstance(prompt := body.get("prompt"), str):
        return prompt
    parts = []
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, dict):
            content = message.get("content")
            parts.append(content if isinstance(content, str) else _dumped(content))
            parts.append(_dumped(message.get("tool_calls")))
    return "\n".join([*parts, _dumped(body.get("tools"))])


def _dumped(value: Any) -> str:
    try:
        return orjson.dumps(value).decode() if value else ""
    except TypeError:  # Half a surrogate pair: what is not text says nothing.
        return ""


def _arguments(outcome: Outcome) -> list[str]:
    return [str(call["function"]["arguments"]) for call in outcome.tool_calls]
