"""Records of a file of conversations, one after another: JSON lines, other JSON, Parquet, or a log."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from strop.serving.formats import BadRow, vllm_log
from strop.serving.sessions import MAX_LINE_BYTES

Layout = Literal["lines", "values", "parquet", "log"]
Read = tuple[int, Any]
"""Where it stands (a byte of lines and logs, else the number of the record), and a record or a BadRow."""


def layout_of(start: bytes, kind: str) -> Layout:
    """How a file is laid out, from its first bytes and the format it is said to be of."""
    if start.startswith(b"PAR1"):
        return "parquet"
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    array = text.startswith(b"[") and text[1:].lstrip()[:1] in (b"{", b"]")
    if kind == "vllm" or not (array or text.startswith(b"{")):
        return "log"
    printed = text.split(b"\n", 1)[0].strip() == b"{"
    return "values" if array or printed else "lines"


def lines_in(file: Path, start: int, end: int) -> Iterator[Read]:
    """JSON records of the lines that begin within bytes `start` to `end`, so that ranges share none."""
    for place, line in _lines(file, start, end):
        if line is None:
            yield place, BadRow(f"longer than {MAX_LINE_BYTES >> 20} MiB")
            continue
        try:
            yield place, orjson.loads(line)
        except orjson.JSONDecodeError as error:
            # What was cut from the line is kept with the reason.
            yield place, BadRow(f"not JSON: {str(error).split(':')[0]}")


def records_of(file: Path, layout: Layout) -> Iterator[tuple[float, Read]]:
    """Records with the share of the file that has been read; what cannot be read ends in a BadRow."""
    size = max(1, file.stat().st_size)
    if layout == "log":
        lines = ((at, (line or b"").decode(errors="replace")) for at, line in _lines(file, 0, size))
        yield from ((place / size, (place, found)) for place, found in vllm_log(lines))
    elif layout == "parquet":
        yield from _parquet(file)
    else:
        yield from _values(file, size)


def _lines(file: Path, start: int, end: int) -> Iterator[tuple[int, bytes | None]]:
    """Lines that hold something with their first byte; None for one above the size bound."""
    with file.open("rb") as data:
        data.seek(max(0, start - 1))
        place = start
        if start:  # The line that began before is the last range's.
            while (skipped := data.readline(MAX_LINE_BYTES)) and not skipped.endswith(b"\n"):
                pass
            place = data.tell()
        while place < end and (line := data.readline(MAX_LINE_BYTES + 1)):
            whole = len(line) <= MAX_LINE_BYTES
            while not line.endswith(b"\n") and len(line) > MAX_LINE_BYTES:
                line = data.readline(MAX_LINE_BYTES + 1)
            if not whole or line.strip():
                yield place, line.removeprefix(codecs.BOM_UTF8) if whole else None
            place = data.tell()


def _values(file: Path, size: int) -> Iterator[tuple[float, Read]]:
    """JSON values in an array or one after another, without holding more than one."""
    decode, decoder = codecs.getincrementaldecoder("utf-8-sig")("replace"), json.JSONDecoder()
    text, number, read = "", 0, 0
    with file.open("rb") as data:
        while True:
            chunk = data.read(1 << 20)
            read += len(chunk)
            text += decode.decode(chunk, final=not chunk)
            while True:
                text = text.lstrip(" \t\r\n,[]")
                try:
                    value, end = decoder.raw_decode(text)
                except (json.JSONDecodeError, RecursionError):
                    break
                yield read / size, (number, value)
                text, number = text[end:], number + 1
            if text and (not chunk or len(text) > MAX_LINE_BYTES):
                yield 1.0, (number, BadRow("not JSON, or longer than 16 MiB; from here on nothing was read"))
                return
            if not chunk:
                return


def _parquet(file: Path) -> Iterator[tuple[float, Read]]:
    number = 0
    try:
        with pq.ParquetFile(file) as data:
            rows = max(1, data.metadata.num_rows)
            for batch in data.iter_batches(64):
                for row in batch.to_pylist():
                    yield number / rows, (number, row)
                    number += 1
    except (pa.ArrowInvalid, OSError) as error:
        reason = str(error).splitlines()[0]
        yield 1.0, (number, BadRow(f"not readable as Parquet: {reason}; from here on nothing was read"))
