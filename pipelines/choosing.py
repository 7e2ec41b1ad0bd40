"""Choosing among traces without holding them: what is known of each, who is new, and which side it goes to."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from strop.pipelines.scale import Item, Rows
from strop.serving import dedup
from strop.serving.selection import Condition
from strop.serving.traces import PROBE_TENANT, SCHEMA


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """What is known of some traces while choosing among them; one entry a trace, about 300 bytes."""

    file: np.ndarray
    row: np.ndarray
    started_us: np.ndarray
    request: np.ndarray
    """Digest of the request's id; orders traces of the same instant."""
    session: np.ndarray
    """Digest of tenant and session."""
    identity: np.ndarray
    signature: np.ndarray

    @classmethod
    def of(cls, parts: Iterable[Rows]) -> "Index":
        columns: dict[str, list[np.ndarray]] = {name: [] for name in cls.__slots__}
        for part in parts:
            for name, found in columns.items():
                found.append(part[name])
        return cls(**{name: np.concatenate(found) for name, found in columns.items()})

    @classmethod
    def empty(cls) -> "Index":
        return _indexed(SCHEMA.empty_table(), np.zeros(0, np.int64), 0)

    def rows(self) -> Rows:
        return {name: getattr(self, name) for name in self.__slots__}

    def take(self, rows: np.ndarray) -> "Index":
        return Index(*(getattr(self, name)[rows] for name in self.__slots__))

    def __len__(self) -> int:
        return len(self.file)


def index_file(item: Item, condition: Condition | None = None) -> Rows:
    """The `Index` of one Parquet file's clients' traces for which `condition` holds."""
    wanted = {"request_id", "started_at", "tenant", "session", *dedup.SOURCES}
    wanted |= set(condition.sources) if condition else set()
    parts = [Index.empty()]
    first = 0
    with pq.ParquetFile(str(item["path"])) as file:
        for batch in file.iter_batches(1024, columns=sorted(wanted), use_threads=False):
            table = pa.Table.from_batches([batch])
            kept = zip(table["tenant"].to_pylist(), table["messages"].to_pylist(), strict=True)
            # A record without content says nothing that could be learned, and equals every other one.
            mask = np.array([tenant != PROBE_TENANT and said != "" for tenant, said in kept], dtype=bool)
            mask &= condition.holds(table) if condition else True
            rows = np.flatnonzero(mask)
            parts.append(_indexed(table.take(rows), rows + first, int(item["file"])))
            first += table.num_rows
    return Index.of(part.rows() for part in parts).rows()


def _indexed(table: pa.Table, rows: np.ndarray, file: int) -> Index:
    sessions = zip(table["tenant"].to_pylist(), table["session"].to_pylist(), strict=True)
    return Index(
        file=np.full(len(rows), file, np.int32),
        row=rows.astype(np.int32),
        started_us=table["started_at"].cast(pa.int64()).to_numpy(),
        request=_digests(table["request_id"].to_pylist()),
        session=_digests(json.dumps(pair) for pair in sessions),
        identity=dedup.identities(table),
        signature=dedup.signatures(dedup.texts(table)),
    )


def distinct_rows(index: Index) -> tuple[np.ndarray, int, int]:
    """Rows that say something new, of an index in order of time; and how many were equal or nearly so."""
    _, first = np.unique(index.identity, return_index=True)
    first.sort()
    new = dedup.earlier_like(index.signature[first]) < 0
    return first[new], len(index) - len(first), int((~new).sum())


def split_rows(index: Index, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows to learn from and rows to hold out: no session in both, the newest `share` of them held out.

    Sessions are ordered by their first request, as in `serving.traces.split_by_session`.
    """
    sessions, first_row, member = np.unique(index.session, return_index=True, return_inverse=True)
    by_age = np.argsort(first_row)
    held = np.zeros(len(sessions), dtype=bool)
    held[by_age[len(sessions) - round(len(sessions) * share) :]] = True
    return np.flatnonzero(~held[member]), np.flatnonzero(held[member])


def _digests(values: Iterable[str]) -> np.ndarray:
    digests = [hashlib.blake2b(value.encode(), digest_size=8).digest() for value in values]
    return np.frombuffer(b"".join(digests), np.uint64).copy()
