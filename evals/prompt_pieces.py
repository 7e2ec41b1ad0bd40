"""What changes between two prompts that were made by one template, read from their text.

Texts are cut at punctuation into pieces. What a template always says are the pieces that most of its
prompts have, so prompts are of one template if those are the same; the pieces that one prompt has and
another has not are what changes. Everything is linear in the text.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

Kind = Literal["time", "id", "counter", "tool order", "key order", "order", "name", "text"]
Where = Literal["system prompt", "tools", "earlier turn", "prompt"]

VOLATILE: tuple[Kind, ...] = ("time", "id", "counter", "order")
"""Kinds that are no content wherever they stand; a name or a text that changes is, outside of a system prompt."""
NAME_BYTES = 64
MIN_PIECE = 4
"""Shorter pieces stand anywhere, and tell nothing about where a text comes from."""
_CUT = bytes.maketrans(b"\t\r.!?;,{}[]()|<>", b"\n" * 16)
_AROUND = 30


@dataclass(frozen=True, slots=True)
class Parts:
    """A prompt as text, UTF-8."""

    system: bytes
    """All that the system says before the first turn; of a plain completion, the whole prompt."""
    tools: bytes
    """JSON of the tools as they were sent."""
    turns: tuple[bytes, ...]
    is_chat: bool = True

    @property
    def head(self) -> tuple[bytes, bytes]:
        return self.system, self.tools

    @property
    def size(self) -> int:
        """Bytes of everything."""
        return len(self.system) + len(self.tools) + sum(map(len, self.turns))


@dataclass(frozen=True, slots=True)
class Change:
    """Something that is not what it was in the prompt before."""

    kind: Kind
    where: Where
    context: str
    """The fixed words before it, by which the same place is known in other prompts."""
    value: str
    excerpt: str
    start: int
    """Bytes of the head before it, or of the turns."""
    shared_after: int
    """Bytes behind it, up to the next user turn, that both prompts have."""


def parts_of(messages: str, format_: str | None) -> Parts:
    """The text of a trace's prompt; what is broken in it is left out."""
    found, wanted = _loads(messages), _loads(format_)
    if isinstance(found, str):
        return Parts(found.encode(errors="replace"), b"", (), is_chat=False)
    said = [m for m in found if isinstance(m, dict)] if isinstance(found, list) else []
    first = next((n for n, m in enumerate(said) if m.get("role") not in ("system", "developer")), len(said))
    tools = wanted.get("tools") if isinstance(wanted, dict) else None
    return Parts(
        system=b"\n".join(_text(m) for m in said[:first]),
        tools=orjson.dumps(tools) if isinstance(tools, list) and tools else b"",
        turns=tuple(str(m.get("role")).encode(errors="replace") + b"\n" + _text(m) for m in said[first:]),
    )


def _loads(text: str | None) -> Any:
    try:
        return orjson.loads(text or "null")
    except orjson.JSONDecodeError:
        return None


def _text(message: dict[str, Any]) -> bytes:
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    text = content.encode(errors="replace") if isinstance(content, str) else b""
    return text + (orjson.dumps(calls) if calls else b"")


def templates(prompts: Sequence[Parts]) -> list[int]:
    """For each prompt a number that is the same for prompts of one template.

    The pieces of a template stand in as many texts as it made, those that change in fewer. So a
    text's template is told by its pieces that are no rarer than its median one, by length. That
    takes a text of which more than half is fixed.
    """
    frequency: Counter[bytes] = Counter()
    for system in {prompt.system for prompt in prompts}:
        frequency.update(_telling(system))
    numbers: dict[object, int] = {}
    known: dict[bytes, frozenset[bytes]] = {}
    names: dict[bytes, tuple[str, ...]] = {}
    found = []
    for prompt in prompts:
        if prompt.system not in known:
            known[prompt.system] = _fixed(prompt.system, frequency)
        if prompt.tools not in names:
            names[prompt.tools] = tuple(sorted(_tool_names(prompt.tools)))
        key = (prompt.is_chat, known[prompt.system], names[prompt.tools])
        found.append(numbers.setdefault(key, len(numbers)))
    return found


def _fixed(system: bytes, frequency: Counter[bytes]) -> frozenset[bytes]:
    ordered = sorted(_telling(system), key=lambda piece: frequency[piece])
    half, seen, median = sum(map(len, ordered)) / 2, 0, 0
    for piece in ordered:
        seen += len(piece)
        if seen >= half:
            median = frequency[piece]
            break
    return frozenset(piece for piece in ordered if frequency[piece] >= median)


def _pieces(text: bytes) -> list[bytes]:
    return text.translate(_CUT).split(b"\n")


def _bare(text: bytes) -> set[bytes]:
    return {piece.strip() for piece in _pieces(text)}


def _telling(text: bytes) -> set[bytes]:
    return {piece for piece in _bare(text) if len(piece) >= MIN_PIECE}


def _tool_names(tools: bytes) -> Iterable[str]:
    for tool in _loads(tools.decode()) or [] if tools else []:
        function = tool.get("function") if isinstance(tool, dict) else None
        yield str(function.get("name") if isinstance(function, dict) else tool)


def changes(before: Parts, after: Parts, shared_bytes: float) -> list[Change]:
    """What changed between two prompts of one template, in order; nothing of what one of them only adds.

    `shared_bytes` is about how much of both prompts' beginnings is the same: it tells whether the
    chat template puts the tools before the system prompt or behind it.
    """
    if before.head == after.head:
        return _turn_changes(before, after)
    where: Where = "system prompt" if after.is_chat else "prompt"
    tools = _tool_changes(before.tools, after.tools)
    system = _text_changes(before.system, after.system, where)
    if not after.is_chat:
        return [change for change in system if change.kind in VOLATILE]
    if _tools_first(before, after, shared_bytes):
        return _behind(tools, after.tools, system, after.system)
    return _behind(system, after.system, tools, after.tools)


def _tools_first(before: Parts, after: Parts, shared_bytes: float) -> bool:
    in_tools = common_bytes(before.tools, after.tools)
    in_system = common_bytes(before.system, after.system)
    if before.tools == after.tools:
        in_tools = len(after.tools) + in_system
    if before.system == after.system:
        in_system = len(after.system) + in_tools
    return abs(shared_bytes - in_tools) < abs(shared_bytes - in_system)


def _behind(first: list[Change], text: bytes, then: list[Change], last: bytes) -> list[Change]:
    """Changes of two texts as of one; what the second shares is behind every change in the first."""
    shared = then[0].start + then[0].shared_after if then else len(last)
    moved = [_with(change, 0, shared) for change in first]
    return moved + [_with(change, len(text), 0) for change in then]


def _with(change: Change, start: int, shared: int) -> Change:
    return Change(
        change.kind, change.where, change.context, change.value, change.excerpt, change.start + start,
        change.shared_after + shared,
    )  # fmt: skip


def _turn_changes(before: Parts, after: Parts) -> list[Change]:
    """What changed in turns that were said before: the session's next request begins otherwise."""
    if len(after.turns) < len(before.turns):
        return []
    start = 0
    for number, (here, there) in enumerate(zip(before.turns, after.turns, strict=False)):
        if here != there:
            found = [c for c in _text_changes(here, there, "earlier turn") if c.kind in VOLATILE]
            rest = zip(before.turns[number + 1 :], after.turns[number + 1 :], strict=False)
            follows = sum(len(b) for a, b in rest if a == b)
            return [_with(change, start, follows) for change in found]
        start += len(there)
    return []


def _tool_changes(before: bytes, after: bytes) -> list[Change]:
    if before == after:
        return []
    here, there = ([_sorted(tool) for tool in _loads(tools.decode()) or []] for tools in (before, after))
    if sorted(here) != sorted(there):
        return _text_changes(before, after, "tools")
    start = common_bytes(before, after)
    kind: Kind = "key order" if here == there else "tool order"
    names = ", ".join(_tool_names(after))
    value = names if kind == "tool order" else _decoded(after[start : start + NAME_BYTES])
    excerpt = _excerpt(after, start, min(len(after), start + NAME_BYTES))
    return [Change(kind, "tools", "", value[:200], excerpt, start, len(after) - start)]


def _sorted(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def common_bytes(a: bytes, b: bytes) -> int:
    """Length of the common beginning, by halving: comparing slices is what memory does fastest."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(slots=True)
class _Run:
    """Consecutive pieces that the other text has not."""

    start: int
    end: int
    fixed_before: bytes
    shared_before: int
    """Bytes of the pieces before it that both texts have."""


def _text_changes(before: bytes, after: bytes, where: Where) -> list[Change]:
    if before == after:
        return []
    old, _ = _runs(before, _bare(after))
    new, shared = _runs(after, _bare(before))
    if not new:
        # The same pieces in another order, or some were left out.
        start = common_bytes(before, after)
        kind: Kind = "text" if old else "order"
        end = min(len(after), start + NAME_BYTES)
        value, excerpt = _decoded(after[start:end]), _excerpt(after, start, end)
        return [Change(kind, where, "", value, excerpt, start, len(after) - start)]
    found = []
    for number, run in enumerate(new):
        other = before[old[number].start : old[number].end] if number < len(old) else b""
        start, end = _trimmed(other, after, run)
        kind, start, end = _classified(after, start, end)
        context = after[run.start : start]
        if sum(c.isalpha() for c in _decoded(context)) < 3:
            context = run.fixed_before
        follows = shared - run.shared_before
        found.append(
            Change(
                kind,
                where,
                _decoded(context[-40:]).strip(),
                _decoded(after[start:end])[:200],
                _excerpt(after, start, end),
                start,
                follows,
            )
        )
    return found


def _runs(text: bytes, known: set[bytes]) -> tuple[list[_Run], int]:
    """Runs of pieces that are not `known`, and the bytes of all that are, each with the sign that ends it."""
    runs: list[_Run] = []
    place = shared = 0
    fixed, open_ = b"", False
    for piece in _pieces(text):
        end = place + len(piece)
        bare = piece.strip()
        if not bare or bare in known:
            shared += len(piece) + 1
            if bare:
                fixed, open_ = bare, False
        elif open_:
            runs[-1].end = end
        else:
            runs.append(_Run(place, end, fixed, shared))
            open_ = True
        place = end + 1
    return runs, min(shared, len(text))


def _trimmed(other: bytes, text: bytes, run: _Run) -> tuple[int, int]:
    """Where a run differs from the other text's: without the common beginning and end."""
    own = text[run.start : run.end]
    front = common_bytes(other, own)
    back = common_bytes(other[front:][::-1], own[front:][::-1])
    return run.start + front, max(run.start + front + 1, run.end - back)


_MONTH = rb"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_UUID = re.compile(rb"\b[0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}\b")
_TIME = re.compile(
    rb"\d{4}-\d\d?-\d\d?(?:[T _]\d\d?:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?)?"
    rb"|\b\d{8}T\d{6}Z?\b|\d\d?:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?[AaPp]\.?[Mm]\b)?|\b\d\d?([/.])\d\d?\1(?:\d{4}|\d\d)\b"
    rb"|\b" + _MONTH + rb" \d\d?(?:st|nd|rd|th)?(?:,? \d{4})?\b|\b\d\d?\.? " + _MONTH + rb",? \d{4}\b"
    rb"|\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b|\b1[5-9]\d{8}(?:\d{3}|\d{6})?(?:\.\d+)?\b"
)
_ID = re.compile(rb"\b(?=[\w-]{0,63}[0-9])(?=[\w-]{0,63}[A-Za-z])[\w-]{8,}|\b[0-9]{12,}\b")
_COUNTER = re.compile(rb"\b[0-9][0-9,_]*\b|[0-9]+")
_SHAPES: tuple[tuple[Kind, re.Pattern[bytes]], ...] = (
    ("id", _UUID), ("time", _TIME), ("id", _ID), ("counter", _COUNTER),
)  # fmt: skip
_REACH = 80


def _classified(text: bytes, start: int, end: int) -> tuple[Kind, int, int]:
    """What the changed bytes belong to, and where that begins and ends."""
    low, high = max(0, start - _REACH), min(len(text), end + _REACH)
    if end - start <= _REACH:
        for kind, shape in _SHAPES:
            for found in shape.finditer(text, low, high):
                # All of what changed, or a change in the middle of it, and not a digit in a longer text.
                if found.start() < end and start < found.end() and len(found[0]) >= (end - start) / 2:
                    return kind, min(start, found.start()), max(end, found.end())
    while start > low and _is_word(text[start - 1]):
        start -= 1
    while end < high and _is_word(text[end]):
        end += 1
    word = _decoded(text[start:end])
    if len(word) <= NAME_BYTES and word.strip() and all(c.isalpha() or c in " .'-_@’" for c in word):
        return "name", start, end
    return "text", start, end


def _is_word(byte: int) -> bool:
    return byte >= 0x80 or chr(byte).isalnum() or byte == 0x5F


def _decoded(text: bytes) -> str:
    return text.decode(errors="replace")


def _excerpt(text: bytes, start: int, end: int) -> str:
    """What changes between » and «, with a few words around it, in one line."""
    before = _decoded(text[max(0, start - _AROUND) : start]).lstrip("\ufffd")
    inside = _decoded(text[start : min(end, start + 2 * NAME_BYTES)])
    after = _decoded(text[end : end + _AROUND]).rstrip("\ufffd")
    return " ".join(f"{before}»{inside}«{after}".split())
