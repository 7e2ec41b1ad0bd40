"""Which traces say the same: equal after normalisation, or nearly equal by MinHash.

Equal are requests with the same conversation, format and answer. Nearly equal are two whose last
message together with the answer share most of their 8-byte shingles: the conversation before it is
left out, since a system prompt that every request carries would make all of them alike.

The signatures are MinHash by one permutation (Li, Owen and Zhang, One permutation hashing, NIPS 2012)
with empty bins filled by rotation (Shrivastava and Li, Densifying one permutation hashing via
rotation for fast near neighbor search, ICML 2014); the share of equal entries of two signatures
estimates the Jaccard similarity of the shingle sets with a standard error of at most 0.063.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from strop.serving.selection import compute, first_choice

BINS = 64
BANDS = 16
SIMILAR = 0.8
SHINGLE_BYTES = 8
MIN_SHINGLES = 64
"""Texts with fewer are compared for equality only: two short answers are alike by chance."""
MAX_TEXT = 8192
"""Characters of a question (its end) and of an answer (its beginning) that are compared."""

SOURCES = ("messages", "format", "choices.list.element.text", "choices.list.element.tool_calls")
"""Columns of the Parquet files that are read."""

_EMPTY = np.uint32(0xFFFFFFFF)
_ROTATED = np.uint32(0x9E3779B1)


def identities(table: pa.Table) -> np.ndarray:
    """uint64 [traces]: equal for requests that are equal but for case, white space and Unicode form."""
    parts = [table["messages"], table["format"], *_answers(table)]
    whole = [normalised(part) for part in parts]
    return np.array([_digest("\0".join(row)) for row in zip(*whole, strict=True)], dtype=np.uint64)


def texts(table: pa.Table) -> list[bytes]:
    """What is compared for near equality, as normalised UTF-8: last message and answer."""
    questions = [_last_message(messages)[-MAX_TEXT:] for messages in table["messages"].to_pylist()]
    answers, calls = (column.to_pylist() for column in _answers(table))
    pairs = zip(questions, answers, calls, strict=True)
    joined = [
        f"{question}\n{(answer or '') + (call or '')}"[: 2 * MAX_TEXT] for question, answer, call in pairs
    ]
    return [text.encode() for text in normalised(pa.array(joined, pa.string()))]


def normalised(column: Any) -> list[str]:
    """Lower case, compatible Unicode forms made one, white space folded; null becomes empty."""
    folded = compute.utf8_lower(compute.utf8_normalize(compute.fill_null(column, ""), form="NFKC"))
    return compute.utf8_trim_whitespace(
        compute.replace_substring_regex(folded, pattern=r"\s+", replacement=" ")
    ).to_pylist()


def signatures(rows: Sequence[bytes]) -> np.ndarray:
    """uint32 [rows, BINS] MinHash signatures; all ones where a row has fewer than MIN_SHINGLES."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    shingles = np.where(lengths - SHINGLE_BYTES + 1 >= MIN_SHINGLES, lengths - SHINGLE_BYTES + 1, 0)
    signature = np.full(len(rows) * BINS, _EMPTY)
    starts = np.cumsum(lengths) - lengths
    within = np.arange(shingles.sum()) - np.repeat(np.cumsum(shingles) - shingles, shingles)
    data = np.frombuffer(b"".join(rows) + bytes(SHINGLE_BYTES), np.uint8)
    every = np.ndarray((len(data) - SHINGLE_BYTES + 1,), np.dtype("<u8"), data, strides=(1,))
    mixed = _mixed(every[np.repeat(starts, shingles) + within])
    bins = np.repeat(np.arange(len(rows)) * BINS, shingles) + (mixed % BINS).astype(np.int64)
    # One below the mark of an empty bin at most.
    np.minimum.at(
        signature, bins, np.minimum(mixed >> np.uint64(32), _EMPTY - np.uint32(1)).astype(np.uint32)
    )
    return _densified(signature.reshape(len(rows), BINS))


def _densified(signature: np.ndarray) -> np.ndarray:
    usable = (signature != _EMPTY).any(axis=1)
    filled = signature[usable]
    while (empty := filled == _EMPTY).any():
        neighbour = np.roll(filled, -1, axis=1)
        borrowed = np.where(neighbour == _EMPTY, _EMPTY, neighbour + _ROTATED)
        filled = np.where(empty, borrowed, filled)
    signature[usable] = filled
    return signature


def usable(signature: np.ndarray) -> np.ndarray:
    """bool [rows]: whether a row was long enough to have a signature."""
    return (signature != _EMPTY).any(axis=1)


def earlier_like(signature: np.ndarray, similar: float = SIMILAR) -> np.ndarray:
    """int64 [rows]: an earlier row that a row nearly equals, -1 if none was found.

    Candidates share one of `BANDS` bands (Leskovec, Rajaraman and Ullman, Mining of Massive Datasets,
    section 3.4): of two with similarity 0.9 all but 1 in 10^7 are seen, of two with 0.8 all but 1 in
    4,000. Within a bucket a row is compared with the first and with the one before it, which keeps a
    bucket of any size linear and follows a chain of small changes.
    """
    found = np.full(len(signature), -1, dtype=np.int64)
    able = np.flatnonzero(usable(signature))
    width = BINS // BANDS
    for band in range(BANDS):
        part = np.ascontiguousarray(signature[able, band * width : (band + 1) * width]).view(np.uint64)
        key = _mixed(part[:, 0].copy()) ^ part[:, 1]
        order = np.argsort(key, kind="stable")
        new = np.r_[True, key[order][1:] != key[order][:-1]] if len(order) else np.zeros(0, bool)
        head = order[np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))]
        for other in (head, np.r_[order[:1], order[:-1]]):
            open_ = np.flatnonzero(~new & (found[able[order]] < 0))
            for piece in np.array_split(open_, len(open_) // 65536 + 1):
                here, there = able[order[piece]], able[other[piece]]
                close = (signature[here] == signature[there]).mean(axis=1) >= similar
                found[here[close]] = there[close]
    return found


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64, in place."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _answers(table: pa.Table) -> tuple[Any, Any]:
    first = first_choice(table)
    return compute.struct_field(first, "text"), compute.struct_field(first, "tool_calls")


def _last_message(messages: str | None) -> str:
    try:
        content = orjson.loads(messages or '""')
    except orjson.JSONDecodeError:
        return messages or ""
    if isinstance(content, list) and content and isinstance(content[-1], dict):
        content = content[-1].get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else orjson.dumps(content).decode()
