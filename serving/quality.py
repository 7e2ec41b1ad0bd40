"""What is plainly wrong with an answer, read from its trace alone."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from strop.serving.traces import WITHHELD, Choice, Trace

LOOP_TOKENS = 48
"""A repetition shorter than this is taken for style: rules of dashes, rows of a table."""
LOOP_TIMES = 4
"""How often a passage must stand in a row to be called a loop."""
LONGEST_PERIOD = 96
_TOOL_MARKUP = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")


@dataclass(frozen=True, slots=True)
class Flags:
    """Faults of an answer; None where there is nothing that could be faulty, or nothing to see it by."""

    empty: bool
    """Neither text nor a tool call."""
    loop: bool | None
    """Some passage is repeated over and over."""
    invalid_json: bool | None
    """JSON was asked for and the text is not JSON (an answer cut off at max_tokens is not either)."""
    invalid_tool_call: bool | None
    """Tools were offered, and a call names none of them, has arguments that are no JSON object, was
    left in the text as markup, or is missing where one was required."""


@dataclass(frozen=True, slots=True)
class Loop:
    """`tokens` tokens from `start` on repeat with `period`."""

    start: int
    period: int
    tokens: int


def flags(trace: Trace) -> Flags:
    """Faults of a request that was served (status below 400); any faulty choice counts.

    Of a record without content only the number of tokens can be judged.
    """
    if not trace.messages:
        return Flags(not trace.output_token_ids, None, None, None)
    format_ = _object(trace.format) or {}
    tools = None if format_.get("tool_choice") == "none" else format_.get("tools")
    names = set(map(_name_of, tools)) if isinstance(tools, list) else set()
    required = format_.get("tool_choice") not in (None, "auto")
    return Flags(
        empty=not trace.choices or any(not c.text.strip() and not c.tool_calls for c in trace.choices),
        loop=any(find_loop(c.token_ids) is not None for c in trace.choices),
        invalid_json=_any(_is_no_json(c, _wants_object(format_)) for c in trace.choices if not c.tool_calls)
        if _wants_json(format_)
        else None,
        invalid_tool_call=any(_is_wrong_call(c, names, required) for c in trace.choices) if names else None,
    )


def find_loop(token_ids: list[int]) -> Loop | None:
    """The first stretch of the shortest period that repeats `LOOP_TIMES` over at least `LOOP_TOKENS`."""
    return next(find_loops(token_ids), None)


def find_loops(token_ids: Sequence[int], longest_period: int = LONGEST_PERIOD) -> Iterator[Loop]:
    """All such stretches, shortest periods first. One of a multiple of a period inside of its stretch is none."""
    ids = np.asarray(token_ids)
    found: list[Loop] = []
    for period in range(1, min(longest_period, len(ids) // LOOP_TIMES) + 1):
        needed = max(LOOP_TOKENS, LOOP_TIMES * period)
        if len(ids) < needed:
            break
        repeated = (ids[period:] == ids[:-period]) & (ids[period:] != WITHHELD)
        same = np.concatenate(([False], repeated, [False]))
        starts, ends = np.flatnonzero(np.diff(same.astype(np.int8))).reshape(-1, 2).T
        for run in np.flatnonzero(ends - starts + period >= needed):
            loop = Loop(int(starts[run]), period, int(ends[run] - starts[run] + period))
            if not any(period % known.period == 0 and _within(loop, known) for known in found):
                found.append(loop)
                yield loop


def _within(loop: Loop, other: Loop) -> bool:
    return other.start <= loop.start and loop.start + loop.tokens <= other.start + other.tokens


def _any(faults: Iterable[bool]) -> bool | None:
    found = list(faults)
    return any(found) if found else None


def _wants_json(format_: dict[str, Any]) -> bool:
    kind = _member(format_.get("response_format"), "type")
    constraints = format_.get("structured_outputs")
    structured = isinstance(constraints, dict) and (
        constraints.get("json") is not None or constraints.get("json_object")
    )
    return kind in ("json_object", "json_schema") or bool(structured)


def _wants_object(format_: dict[str, Any]) -> bool:
    return _member(format_.get("response_format"), "type") == "json_object"


def _is_no_json(choice: Choice, must_be_object: bool) -> bool:
    try:
        value = orjson.loads(choice.text)
    except orjson.JSONDecodeError:
        return True
    return must_be_object and not isinstance(value, dict)


def _is_wrong_call(choice: Choice, names: set[str], required: bool) -> bool:
    if not choice.tool_calls:
        return required or any(markup in choice.text for markup in _TOOL_MARKUP)
    calls = orjson.loads(choice.tool_calls)
    return any(_name_of(call) not in names or _object(_arguments(call)) is None for call in calls)


def _name_of(tool: object) -> str:
    return str(_member(_member(tool, "function"), "name"))


def _arguments(call: object) -> str | None:
    return _member(_member(call, "function"), "arguments")


def _member(value: object, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _object(text: str | None) -> dict[str, Any] | None:
    try:
        value = orjson.loads(text or "")
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
