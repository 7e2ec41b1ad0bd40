"""The public files that some kinds of tasks are made of, as their publishers name them."""

import gzip
import zlib
from pathlib import Path
from typing import Any

import orjson

from strop.evals.observation import EvalError

FILES: dict[str, tuple[str, ...]] = {
    "structured": ("jsonschemabench_sample.jsonl.gz",),
    "tools": (
        "BFCL_v4_simple_python.json.gz",
        "BFCL_v4_simple_python.answers.json.gz",
        "BFCL_v4_parallel.json.gz",
        "BFCL_v4_parallel.answers.json.gz",
        "BFCL_v4_irrelevance.json.gz",
    ),
    "coding": ("HumanEval.jsonl.gz",),
}
MAX_BYTES = 256 << 20


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    """The objects of a gzipped file of JSON lines.

    Raises EvalError that names file and line.
    """
    path = folder / name
    try:
        with gzip.open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise EvalError(f"{path} cannot be read: {error}") from None
    if len(data) > MAX_BYTES:
        raise EvalError(f"{path} unpacks to more than {MAX_BYTES >> 20} MiB.")
    return [_row(path, number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = orjson.loads(line)
    except ValueError as error:
        raise EvalError(f"{path}, line {number}: {error}") from None
    if not isinstance(row, dict):
        raise EvalError(f"{path}, line {number} is no JSON object.")
    return row
