"""Traces from elsewhere: read as a stream, tokenised with the model's own template, kept once.

What is imported was not said by a Stack of ours, so it names none: its `stack` is `imported-FORMAT`,
which no champion's numerics equal. A loop therefore neither learns from it by itself nor judges on
it; a dataset may choose it with `stack LIKE 'imported-%'`.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from strop.pipelines.scale import Item, Rows, spread
from strop.serving.formats import BadRow, Exchange, exchanges, kind_of
from strop.serving.home import write_atomic
from strop.serving.records import Read, layout_of, lines_in, records_of
from strop.serving.tokens import Tokens
from strop.serving.traces import IMPORTED, SCHEMA, Choice, Trace, TraceStore, to_table

RANGE_BYTES = 8 << 20
BATCH = 256
KEPT_CHARS = 4096
"""Of a row that is set aside."""
MAX_SET_ASIDE = 10_000
"""Rows that are set aside with their text; further ones are counted only."""
_ID = "import-"


class TraceImportError(ValueError):
    """A file that cannot be read; the message says why."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of a file."""

    added: int
    known: int
    """Answers that were in the store already."""
    bad: int
    reasons: dict[str, int]
    """Bad rows by reason, the most frequent first."""
    set_aside: Path | None
    """File with place, reason and beginning of each bad row, one JSON object a line."""


def import_file(
    home: Path,
    file: Path,
    kind: str,
    model: Path,
    tenant: str,
    address: str | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> Imported:
    """Add the answers of a file that are not in the store yet; `kind` is a format or `auto`.

    Bad rows are set aside and counted. Raises TraceImportError, TokenizerError.
    """
    tokens = Tokens(str(model.expanduser().absolute()))
    assert tokens.tokenizer
    store = TraceStore(home / "traces")
    seen = _imported_before(store)
    added = before = 0
    reasons: Counter[str] = Counter()
    set_aside: list[bytes] = []
    for table, bad, done in _converted(file, kind, tokens, tenant, home, address):
        new = []
        for row, request_id in enumerate(table["request_id"].to_pylist()):
            number = int(request_id.removeprefix(_ID), 16)
            if number not in seen:
                seen.add(number)
                new.append(row)
        added, before = added + len(new), before + table.num_rows - len(new)
        if new:
            fresh = table.take(new)
            store.append_table(fresh, _ID + _digest(fresh["request_id"].to_pylist()))
        reasons.update(orjson.loads(line)["reason"] for line in bad)
        set_aside += bad[: MAX_SET_ASIDE - len(set_aside)]
        progress(done)
    path = home / "traces" / "rejected" / f"{file.name}.jsonl"
    if set_aside:
        write_atomic(path, b"\n".join(set_aside) + b"\n")
    most = dict(reasons.most_common())
    return Imported(added, before, reasons.total(), most, path if set_aside else None)


def _converted(
    file: Path, kind: str, tokens: Tokens, tenant: str, home: Path, address: str | None
) -> Iterator[tuple[pa.Table, list[bytes], float]]:
    """Traces, bad rows, and the share of the file that is done; JSON lines in ranges, on Ray if there are many."""
    try:
        status = file.stat()
        with file.open("rb") as data:
            layout = layout_of(data.read(1 << 20), kind)
    except OSError as error:
        raise TraceImportError(f"{file} cannot be read: {error.strerror}.") from None
    kind = "vllm" if layout == "log" else kind
    written = datetime.fromtimestamp(status.st_mtime, UTC)
    convert = partial(convert_records, kind=kind, tokens=tokens, tenant=tenant, written=written)
    if layout == "lines":
        starts = range(0, status.st_size, RANGE_BYTES)
        items: list[Item] = [{"start": first, "end": first + RANGE_BYTES} for first in starts]
        done = 0
        for part in spread(partial(_of_range, file=file, convert=convert), items, home, address):
            for table, bad in zip(part["traces"], part["bad"], strict=True):
                done += 1
                yield pa.ipc.open_stream(bytes(table)).read_all(), bytes(bad).splitlines(), done / len(items)
        return
    records = records_of(file, layout)
    while batch := list(islice(records, BATCH)):
        yield *convert([read for _, read in batch]), batch[-1][0]


def _of_range(
    item: Item, file: Path, convert: Callable[[Iterable[Read]], tuple[pa.Table, list[bytes]]]
) -> Rows:
    table, bad = convert(lines_in(file, int(item["start"]), int(item["end"])))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    found = {"traces": sink.getvalue().to_pybytes(), "bad": b"\n".join(bad)}
    return {name: np.array([value], dtype=object) for name, value in found.items()}


def convert_records(
    records: Iterable[Read], kind: str, tokens: Tokens, tenant: str, written: datetime
) -> tuple[pa.Table, list[bytes]]:
    """Traces of some records, and a line of JSON for each record that is none.

    A record without a time gets that of the file, in the order of the file.
    """
    tables, traces, bad = [SCHEMA.empty_table()], list[Trace](), list[bytes]()
    for place, record in records:
        try:
            if isinstance(record, BadRow):
                raise record
            at = written + timedelta(microseconds=place)
            if isinstance(record, Exchange):
                traces += _traces([record], kind, tokens, tenant, at)
            else:
                named = kind_of(record) if kind == "auto" else kind
                traces += _traces(exchanges(record, named), named, tokens, tenant, at)
        except BadRow as reason:
            shown = "" if isinstance(record, BadRow | Exchange) else _text(record)
            bad.append(orjson.dumps({"place": place, "reason": str(reason), "row": shown}))
        if len(traces) >= BATCH:
            tables.append(to_table(traces))
            traces = []
    return pa.concat_tables([*tables, to_table(traces)]), bad


def _traces(found: list[Exchange], kind: str, tokens: Tokens, tenant: str, at: datetime) -> list[Trace]:
    traces: list[Trace] = []
    for turn, exchange in enumerate(found):
        prompt_ids, output_ids = tokens.ids(exchange)
        said = [tenant, exchange.prompt, exchange.answer, exchange.format, prompt_ids, output_ids]
        request_id = _ID + _digest([orjson.dumps(said, option=orjson.OPT_SORT_KEYS).decode()])
        calls = exchange.answer.get("tool_calls")
        text = exchange.answer["content"]
        choice = Choice(
            0, output_ids, text, exchange.finish_reason, orjson.dumps(calls).decode() if calls else None
        )
        traces.append(
            Trace(
                request_id=request_id,
                started_at=exchange.at or at + timedelta(microseconds=turn),
                tenant=tenant,
                session=exchange.session or (traces[0].session if traces else request_id),
                stack=IMPORTED + kind,
                endpoint="completions" if isinstance(exchange.prompt, str) else "chat",
                stream=False,
                model=exchange.model,
                sampling=orjson.dumps(exchange.sampling).decode(),
                format=orjson.dumps(exchange.format).decode() if exchange.format else None,
                messages=orjson.dumps(exchange.prompt).decode(),
                prompt_token_ids=prompt_ids,
                choices=[choice],
                status=200,
                e2e_s=exchange.e2e_s,
            )
        )
    return traces


def _imported_before(store: TraceStore) -> set[int]:
    """The ids of all imported traces, as numbers; about 80 bytes each."""
    seen: set[int] = set()
    for path in store.root.glob(f"day=*/stack_id={IMPORTED}*/*.parquet"):
        try:
            ids = pq.read_table(path, columns=["request_id"], partitioning=None)["request_id"]  # pyright: ignore[reportArgumentType]
        except (pa.ArrowInvalid, OSError):
            continue  # `TraceStore.scan` sets torn files aside; what was in them comes again.
        seen.update(int(request_id.removeprefix(_ID), 16) for request_id in ids.to_pylist())
    return seen


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _text(record: object) -> str:
    try:
        return orjson.dumps(record, default=str).decode()[:KEPT_CHARS]
    except (TypeError, ValueError):
        return repr(record)[:KEPT_CHARS]
