"""Which traces: a condition in SQLite's expression language over the fields of a trace.

SQLite parses and evaluates it, in a database that exists in memory only. Its authorizer refuses
everything but reading the one table there and calling functions, and its limits bound what a value,
a pattern or an expression may grow to, so that a condition from anybody can do no more than be false.
"""

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

# Its functions are made at import, where pyright does not see them.
compute: Any = pyarrow.compute

MAX_VALUE_BYTES = 64 << 20
MAX_CONDITION_BYTES = 16 << 10
MAX_PATTERN_BYTES = 256
_REFUSED_FUNCTIONS = frozenset({"load_extension", "random", "randomblob", "zeroblob"})


class SelectionError(ValueError):
    """A condition that SQLite does not accept; the message says why and what may be asked."""


@dataclass(frozen=True, slots=True)
class Field:
    """What a condition may ask for."""

    kind: str
    """SQLite's type."""
    source: str
    """Column of the Parquet files."""
    values: Callable[[pa.Table], Any]
    """An Arrow array with one value a trace."""


def first_choice(table: pa.Table) -> pa.StructArray:
    """The first answer of every trace; null where there is none."""
    choices = table["choices"].combine_chunks()
    offsets = choices.offsets.to_numpy()
    none = (offsets[1:] == offsets[:-1]) | choices.is_null().to_numpy(zero_copy_only=False)
    return choices.values.take(pa.array(offsets[:-1], mask=none))


def _acceptance_length(table: pa.Table) -> Any:
    speculation = table["speculation"].combine_chunks()
    steps = compute.struct_field(speculation, "steps")
    accepted = compute.struct_field(speculation, "accepted").cast(pa.float64())
    some = compute.if_else(compute.greater(steps, 0), steps, None)
    return compute.add(1.0, compute.divide(accepted, some))


def _column(name: str, kind: str) -> Field:
    return Field(kind, name, lambda table: table[name])


def _of_choice(part: str) -> Field:
    return Field("TEXT", "choices", lambda table: compute.struct_field(first_choice(table), part))


FIELDS: dict[str, Field] = {
    **{name: _column(name, "TEXT") for name in ("request_id", "tenant", "session", "stack")},
    "started_at": Field(
        "TEXT", "started_at", lambda table: compute.strftime(table["started_at"], "%Y-%m-%d %H:%M:%S")
    ),
    **{name: _column(name, "TEXT") for name in ("endpoint", "model", "sampling", "format", "messages")},
    **{name: _column(name, "INTEGER") for name in ("stream", "status", "cached_tokens")},
    "error": _column("error", "TEXT"),
    **{name: _column(name, "REAL") for name in ("queue_s", "ttft_s", "e2e_s")},
    "answer": _of_choice("text"),
    "finish_reason": _of_choice("finish_reason"),
    "tool_calls": _of_choice("tool_calls"),
    "prompt_tokens": Field(
        "INTEGER", "prompt_token_ids", lambda table: compute.list_value_length(table["prompt_token_ids"])
    ),
    "output_tokens": Field(
        "INTEGER",
        "choices",
        lambda table: compute.list_value_length(compute.struct_field(first_choice(table), "token_ids")),
    ),
    "acceptance_length": Field("REAL", "speculation", _acceptance_length),
}
"""Times are UTC, `YYYY-MM-DD HH:MM:SS.ffffff`; `sampling`, `format`, `messages` and `tool_calls` are JSON."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition that SQLite accepted."""

    text: str
    fields: tuple[str, ...]
    """Those it reads."""

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """Raises SelectionError for anything that is not a condition over `FIELDS`."""
        if not text.strip() or len(text.encode()) > MAX_CONDITION_BYTES:
            raise SelectionError(f"A condition has 1 to {MAX_CONDITION_BYTES:,} bytes, e.g. status = 200.")
        read: set[str] = set()
        database = _database(tuple(FIELDS))
        database.set_authorizer(_authorizer(read))
        try:
            database.execute(_query(text)).fetchall()
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            raise SelectionError(
                f"{text!r} is not a condition: {error}. Write a SQLite expression over {', '.join(FIELDS)}."
            ) from None
        return cls(text, tuple(name for name in FIELDS if name in read))

    @property
    def sources(self) -> list[str]:
        """Columns of the Parquet files that are needed to decide."""
        return sorted({FIELDS[name].source for name in self.fields})

    def holds(self, table: pa.Table) -> np.ndarray:
        """bool [traces]: where it is true. Raises SelectionError where SQLite gives up on a value."""
        mask = np.zeros(table.num_rows, dtype=bool)
        columns = [FIELDS[name].values(table).to_pylist() for name in self.fields]
        database = _database(self.fields)
        places = ", ".join("?" * (1 + len(columns)))
        database.executemany(
            f"INSERT INTO traces VALUES ({places})", zip(range(table.num_rows), *columns, strict=True)
        )
        database.set_authorizer(_authorizer(set()))
        try:
            found = database.execute(_query(self.text)).fetchall()
        except sqlite3.Error as error:
            raise SelectionError(f"{self.text!r} cannot be evaluated: {error}.") from None
        finally:
            database.close()
        mask[[number for (number,) in found]] = True
        return mask


def _query(text: str) -> str:
    # On a line of its own, so that a comment at its end does not swallow the bracket.
    return f"SELECT number FROM traces WHERE (\n{text}\n)"


def _database(fields: tuple[str, ...]) -> sqlite3.Connection:
    database = sqlite3.connect(":memory:", isolation_level=None)
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    database.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, MAX_PATTERN_BYTES)
    database.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    columns = "".join(f", {name} {FIELDS[name].kind}" for name in fields)
    database.execute(f"CREATE TABLE traces (number INTEGER PRIMARY KEY{columns})")
    return database


def _authorizer(read: set[str]) -> Callable[..., int]:
    """Allows one SELECT that reads `traces` and calls functions; notes the fields it reads."""
    selects = 0

    def decide(action: int, first: str | None, second: str | None, *_: object) -> int:
        nonlocal selects
        if action == sqlite3.SQLITE_SELECT:
            selects += 1
            return sqlite3.SQLITE_OK if selects == 1 else sqlite3.SQLITE_DENY
        if action == sqlite3.SQLITE_READ and first == "traces":
            read.add(second or "")
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_FUNCTION and second not in _REFUSED_FUNCTIONS:
            return sqlite3.SQLITE_OK
        return sqlite3.SQLITE_DENY

    return decide
