"""Traces: one record a request, kept as Parquet that pyarrow, `datasets` and Ray Data read.

A `TraceStore` is the growing folder that capture writes into; a `TraceSet` is an immutable
selection from it, which learners and evals take. Files appear by rename, so a reader never
sees half of one; a file that is torn all the same is set aside and named, not fatal.
"""

import hashlib
import json
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from strop.serving.home import sync_folder, write_atomic

WITHHELD = -1
"""Stands in lists of token ids for a token that is not kept: numbers and places of tokens stay right."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer of the model."""

    index: int
    token_ids: list[int]
    """Every token the engine produced, the end-of-turn token included; `WITHHELD` where it is not kept."""
    text: str
    finish_reason: str | None
    tool_calls: str | None = None
    """The parsed tool calls as JSON, if the answer had any."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """Per-request statistics of speculative decoding, as vLLM counts them."""

    steps: int
    drafted: int
    accepted: int
    accepted_by_position: list[int]

    @property
    def acceptance_length(self) -> float:
        """Tokens per target step, the bonus token included."""
        return 1 + self.accepted / self.steps if self.steps else 1.0


@dataclass(frozen=True, slots=True)
class Trace:
    """One request as it was served. Times are in seconds, measured inside the server."""

    request_id: str
    started_at: datetime
    """When the request arrived, UTC."""
    tenant: str
    session: str
    stack: str
    """Fingerprint of the Stack that served it."""
    endpoint: str
    """`chat` or `completions`."""
    stream: bool
    model: str
    sampling: str
    """JSON of temperature, top_p, max_tokens, seed, stop and the like."""
    format: str | None
    """JSON of tools, tool_choice and response_format."""
    messages: str
    """JSON of the chat messages, or of the text prompt; empty where content is not kept."""
    prompt_token_ids: list[int]
    choices: list[Choice]
    status: int
    """HTTP status of the answer; 499 where the client went away."""
    error: str | None = None
    queue_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    inter_token_s: list[float] = field(default_factory=list)
    """Gaps between successive chunks of a stream; empty for answers that came whole."""
    cached_tokens: int | None = None
    speculation: Speculation | None = None
    kept_for: str | None = None
    """Why it was kept though its session was not in the sample: `failure`, `low acceptance`, `rare format`.
    None for records of the sample, which alone say how traffic is on the whole."""

    @property
    def has_content(self) -> bool:
        """Whether what was asked is kept."""
        return bool(self.messages)

    @property
    def output_token_ids(self) -> list[int]:
        """Token ids of the first choice; empty if the request failed."""
        return self.choices[0].token_ids if self.choices else []

    def to_row(self) -> dict[str, Any]:
        row = _shallow(self)
        row["choices"] = [_shallow(choice) for choice in self.choices]
        row["speculation"] = self.speculation and _shallow(self.speculation)
        return row

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> "Trace":
        known: dict[str, Any] = {f.name: row.get(f.name) for f in fields(cls) if f.name in row}
        known["choices"] = [Choice(**choice) for choice in row.get("choices") or []]
        known["inter_token_s"] = row.get("inter_token_s") or []
        speculation = row.get("speculation")
        known["speculation"] = Speculation(**speculation) if speculation else None
        if isinstance(known["started_at"], str):
            known["started_at"] = datetime.fromisoformat(known["started_at"])
        return cls(**known)


SCHEMA = pa.schema(
    [
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("started_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("tenant", pa.string(), nullable=False),
        pa.field("session", pa.string(), nullable=False),
        pa.field("stack", pa.string(), nullable=False),
        pa.field("endpoint", pa.string(), nullable=False),
        pa.field("stream", pa.bool_(), nullable=False),
        pa.field("model", pa.string()),
        pa.field("sampling", pa.string()),
        pa.field("format", pa.string()),
        pa.field("messages", pa.string()),
        pa.field("prompt_token_ids", pa.list_(pa.int32())),
        pa.field(
            "choices",
            pa.list_(
                pa.struct(
                    [
                        pa.field("index", pa.int32()),
                        pa.field("token_ids", pa.list_(pa.int32())),
                        pa.field("text", pa.string()),
                        pa.field("finish_reason", pa.string()),
                        pa.field("tool_calls", pa.string()),
                    ]
                )
            ),
        ),
        pa.field("status", pa.int32()),
        pa.field("error", pa.string()),
        pa.field("queue_s", pa.float64()),
        pa.field("ttft_s", pa.float64()),
        pa.field("e2e_s", pa.float64()),
        pa.field("inter_token_s", pa.list_(pa.float32())),
        pa.field("cached_tokens", pa.int32()),
        pa.field(
            "speculation",
            pa.struct(
                [
                    pa.field("steps", pa.int32()),
                    pa.field("drafted", pa.int32()),
                    pa.field("accepted", pa.int32()),
                    pa.field("accepted_by_position", pa.list_(pa.int32())),
                ]
            ),
        ),
        pa.field("kept_for", pa.string()),
    ],
    metadata={"strop.traces": "1"},
)


PROBE_TENANT = "strop"
"""Tenant of strop's own requests (checks, warming, judging): never learned from, never judged as traffic."""

IMPORTED = "imported-"
"""How `stack` begins where no Stack of ours served the request; the format it came in follows."""


class TraceError(ValueError):
    """Traces that cannot be read or a selection that makes no sense; the message says what to do."""


@dataclass(frozen=True, slots=True)
class TraceSet:
    """An immutable selection of traces: a folder of Parquet files that nobody writes to any more."""

    folder: Path

    @classmethod
    def create(cls, folder: Path, traces: Iterable[Trace]) -> "TraceSet":
        """Materialise a selection. A folder that exists is taken as finished, since it appeared by rename."""
        if not folder.is_dir():
            temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
            temporary.mkdir(parents=True)
            for number, batch in enumerate(_batches(traces, 1024)):
                write_parquet(temporary / f"part-{number:05d}.parquet", batch)
            temporary.rename(folder)
            sync_folder(folder.parent)
        return cls(folder)

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.parquet"))

    @property
    def digest(self) -> str:
        """SHA-256 over the request ids in order: equal for equal selections."""
        digest = hashlib.sha256()
        for file in self.files:
            for request_id in pq.read_table(file, columns=["request_id"]).column(0).to_pylist():
                digest.update(request_id.encode() + b"\n")
        return digest.hexdigest()

    def __len__(self) -> int:
        return sum(pq.read_metadata(file).num_rows for file in self.files)

    def __iter__(self) -> Iterator[Trace]:
        for file in self.files:
            yield from read_parquet(file)

    def to_dataset(self) -> Any:
        """The same rows as a `datasets.Dataset`."""
        import datasets

        return datasets.Dataset.from_parquet([str(f) for f in self.files])

    def to_ray(self) -> Any:
        """The same rows as a Ray Data dataset (Ray must be initialised)."""
        import ray.data

        return ray.data.read_parquet([str(f) for f in self.files])


class TraceStore:
    """What capture writes: `day=YYYY-MM-DD/stack_id=<16 hex>/*.parquet`, `journal/`, `quarantine/`."""

    def __init__(self, root: Path):
        self.root = root

    def append(self, traces: list[Trace]) -> list[Path]:
        """Write one Parquet file for each day and Stack among `traces`; returns the new files."""
        return self.append_table(to_table(traces), uuid.uuid4().hex)

    def append_table(self, table: pa.Table, name: str, keep: list[bool] | None = None) -> list[Path]:
        """The same for a table of `SCHEMA`. The same table under the same name replaces its own files.

        Rows for which `keep` is False are left out; the names are those that the whole table has.
        """
        days = table["started_at"].cast(pa.timestamp("us")).cast(pa.date32()).to_pylist()
        groups: dict[tuple[str, str], list[int]] = {}
        for row, (day, stack) in enumerate(zip(days, table["stack"].to_pylist(), strict=True)):
            groups.setdefault((day.isoformat(), stack[:16] or "unknown"), []).append(row)
        written = []
        for (day, stack_id), rows in groups.items():
            time = table["started_at"][rows[0]].as_py().astimezone(UTC)
            path = self.root / f"day={day}" / f"stack_id={stack_id}" / f"{time:%H%M%S}-{name}.parquet"
            kept = [row for row in rows if keep is None or keep[row]]
            if kept:
                write_table(path, table.take(kept))
                written.append(path)
            else:
                path.unlink(missing_ok=True)
        return written

    def files(self) -> list[Path]:
        return sorted(self.root.glob("day=*/stack_id=*/*.parquet"))

    def scan(
        self,
        where: Callable[[Trace], bool] = lambda _: True,
        on_bad_file: Callable[[Path, str], None] = lambda *_: None,
    ) -> Iterator[Trace]:
        """All traces for which `where` holds, in order of file time.

        A file that cannot be read is moved to `quarantine/` and reported through `on_bad_file`.
        """
        for path in self.files():
            try:
                traces = list(read_parquet(path))
            except FileNotFoundError:
                continue  # Pruned or deleted meanwhile.
            except TraceError as error:
                self._set_aside(path)
                on_bad_file(path, str(error))
                continue
            yield from (trace for trace in traces if where(trace))

    def fresh(self, moment: datetime, stack: str, seen: set[Path]) -> Iterator[Trace]:
        """Clients' traces of one Stack that started after `moment`, of files that are not in `seen` yet.

        Those that were kept for their interest are left out: rates and medians would be wrong by them.
        Adds the files it has read to `seen`: a file never changes once it has its name.
        """
        first_day = f"day={moment.astimezone(UTC):%Y-%m-%d}"
        days = [folder for folder in self.root.glob("day=*") if folder.name >= first_day]
        for path in sorted(path for day in days for path in day.glob(f"stack_id={stack[:16]}/*.parquet")):
            if path in seen:
                continue
            try:
                traces = [] if path.stat().st_mtime < moment.timestamp() else list(read_parquet(path))
            except (OSError, TraceError):
                continue  # scan() sets torn files aside; here the next look will do.
            seen.add(path)
            yield from (
                t
                for t in traces
                if t.started_at >= moment and t.tenant != PROBE_TENANT and t.kept_for is None
            )

    def _set_aside(self, path: Path) -> None:
        quarantine = self.root / "quarantine"
        quarantine.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):
            path.rename(quarantine / path.name)


def write_parquet(path: Path, traces: list[Trace]) -> None:
    """Write traces so that the file is whole or absent."""
    write_table(path, to_table(traces))


def to_table(traces: list[Trace]) -> pa.Table:
    return pa.Table.from_pylist([t.to_row() for t in traces], schema=SCHEMA)


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table of traces so that the file is whole or absent; equal tables make equal files."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_atomic(path, sink.getvalue().to_pybytes())


def read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    """The file alone, without columns made of the names of its folders."""
    with pq.ParquetFile(path) as file:
        return file.read(columns, use_threads=False)


def read_parquet(path: Path) -> Iterator[Trace]:
    """Traces of one file. Raises TraceError if it is torn or holds something else, FileNotFoundError."""
    try:
        yield from (Trace.from_row(row) for row in read_table(path).to_pylist())
    except FileNotFoundError:
        raise
    except (pa.ArrowInvalid, OSError, TypeError, KeyError) as error:
        raise TraceError(f"{path} is not a readable trace file: {str(error).splitlines()[0]}") from None


def split_by_session(traces: Iterable[Trace], heldout_share: float = 0.2) -> tuple[list[Trace], list[Trace]]:
    """Train and a newer held-out part that share no session.

    Sessions are ordered by their first request; the newest `heldout_share` of them are held out.
    """
    sessions: dict[tuple[str, str], list[Trace]] = {}
    for trace in traces:
        sessions.setdefault((trace.tenant, trace.session), []).append(trace)
    ordered = sorted(sessions.values(), key=lambda group: min(t.started_at for t in group))
    cut = len(ordered) - round(len(ordered) * heldout_share)
    train, heldout = ordered[:cut], ordered[cut:]
    return [t for group in train for t in group], [t for group in heldout for t in group]


def to_jsonable(trace: Trace) -> dict[str, Any]:
    """A trace as plain JSON types, the times in ISO 8601."""
    row = trace.to_row()
    row["started_at"] = trace.started_at.isoformat()
    for name in ("sampling", "format", "messages"):
        row[name] = json.loads(row[name]) if row[name] else None
    return row


def _shallow(record: Trace | Choice | Speculation) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in fields(record)}


def _batches(items: Iterable[Trace], size: int) -> Iterator[list[Trace]]:
    batch: list[Trace] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
