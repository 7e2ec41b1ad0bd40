"""When sessions start: random arrivals, or those of a recorded production trace."""

import gzip
import math
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import orjson

MAX_LINE_BYTES = 4 << 20
AZURE_HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


class ArrivalsError(ValueError):
    """An arrival file that cannot be used; the message names file, line and reason."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a recorded trace."""

    at_s: float
    """Seconds since the first request of the trace."""
    input_tokens: int
    output_tokens: int
    prefix_blocks: tuple[int, ...] = ()
    """Mooncake: ids of the prompt's 512-token blocks; equal ids are equal prefixes."""


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Endless arrival times in seconds of a Poisson process with `rate` arrivals a second."""
    if not rate > 0:
        raise ArrivalsError(f"an arrival rate of {rate:g} a second starts nothing: give one above 0")
    rng = random.Random(seed)
    return accumulate(rng.expovariate(rate) for _ in count())


def scaled(arrivals: Iterable[Arrival], scale: float) -> Iterator[float]:
    """Arrival times in seconds, `scale` times as fast as recorded."""
    if not scale > 0:
        raise ArrivalsError(f"a scale of {scale:g} would never arrive: give one above 0")
    return (arrival.at_s / scale for arrival in arrivals)


def load_arrivals(path: Path) -> list[Arrival]:
    """Read a trace by its name: `*.jsonl` as Mooncake's, `*.csv` as Azure's, either with `.gz`.

    Formats: kvcache-ai/Mooncake (timestamp in ms, input_length, output_length, hash_ids) and
    Azure/AzurePublicDataset LLM inference traces (TIMESTAMP, ContextTokens, GeneratedTokens).
    Raises ArrivalsError.
    """
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix == ".jsonl":
        return _load(path, _mooncake)
    if suffix == ".csv":
        return _load(path, _azure, header=AZURE_HEADER)
    raise ArrivalsError(f"{path} is neither *.jsonl (Mooncake) nor *.csv (Azure), plain or with .gz")


def _load(
    path: Path, parse: Callable[[bytes], tuple[float, Arrival]], header: list[str] | None = None
) -> list[Arrival]:
    found: list[tuple[float, Arrival]] = []
    for number, line in _lines(path):
        try:
            if header and number == 1:
                _check_header(line, header)
            elif line.strip():
                found.append(parse(line))
        except (ValueError, OverflowError) as reason:
            raise ArrivalsError(f"{path}, line {number}: {reason}") from None
    if not found:
        raise ArrivalsError(f"{path} holds no arrival")
    found.sort(key=lambda pair: pair[0])
    first = found[0][0]
    return [
        Arrival(at - first, arrival.input_tokens, arrival.output_tokens, arrival.prefix_blocks)
        for at, arrival in found
    ]


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise ArrivalsError(f"{path}, line {number}: longer than {MAX_LINE_BYTES >> 20} MiB")
                yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise ArrivalsError(f"{path} cannot be read: {error}") from None


def _mooncake(line: bytes) -> tuple[float, Arrival]:
    record = orjson.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__} where an object is needed")
    at_ms = record.get("timestamp")
    if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not math.isfinite(at_ms):
        raise ValueError(f'"timestamp" is {at_ms!r}, not milliseconds')
    blocks = record.get("hash_ids", [])
    if not isinstance(blocks, list):
        raise ValueError('"hash_ids" is not a list')
    return at_ms / 1000, Arrival(
        0.0,
        _count(record.get("input_length"), "input_length"),
        _count(record.get("output_length"), "output_length"),
        tuple(_count(block, "hash_ids") for block in blocks),
    )


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f'"{name}" is {value!r}, not a count')
    return value


def _check_header(line: bytes, header: list[str]) -> None:
    if line.decode("utf-8-sig").strip().split(",") != header:
        raise ValueError(f"the header is not {','.join(header)}")


def _azure(line: bytes) -> tuple[float, Arrival]:
    cells = line.decode().strip().split(",")
    if len(cells) != len(AZURE_HEADER):
        raise ValueError(f"{len(cells)} columns where {len(AZURE_HEADER)} are needed")
    at = datetime.fromisoformat(cells[0])
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    input_tokens, output_tokens = (
        _count(int(cell), name) for cell, name in zip(cells[1:], AZURE_HEADER[1:], strict=True)
    )
    return at.timestamp(), Arrival(0.0, input_tokens, output_tokens)
