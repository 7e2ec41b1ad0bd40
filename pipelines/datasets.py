"""Named, immutable selections of traces: chosen, freed of duplicates, split, and checked for leaks.

A dataset lies in `STROP_HOME/datasets/NAME`: `train/` and `heldout/` are TraceSets in the order of
time, `dataset.json` says what they hold and from what. Its digest covers the bytes of every file, so
the same selection from the same traces has the same digest wherever and whenever it is made.
"""

import hashlib
import json
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from strop.pipelines.choosing import Index, distinct_rows, index_file, split_rows
from strop.pipelines.scale import Item, Rows, spread
from strop.serving import dedup
from strop.serving.home import sync_folder, write_atomic
from strop.serving.journal import recover
from strop.serving.selection import Condition
from strop.serving.tombstones import epoch
from strop.serving.traces import SCHEMA, TraceSet, TraceStore, write_table

SPLITS: tuple[str, ...] = ("train", "heldout")
ROWS_PER_FILE = 4096
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")

Progress = Callable[[float, str], None]


class DatasetError(ValueError):
    """A dataset that cannot be made or read; the message says why and what to do."""


class Split(BaseModel):
    """One side of a dataset."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    requests: int
    sessions: int
    prompt_tokens: int
    output_tokens: int
    first: datetime | None
    last: datetime | None
    stacks: dict[str, int]
    """Requests by what served them: fingerprints, or `imported-FORMAT`."""


class Dataset(BaseModel):
    """`dataset.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str
    digest: str
    """SHA-256 over the names and SHA-256 of all Parquet files."""
    where: str
    split_share: float
    created_at: datetime
    read: int
    """Traces in the store at that time."""
    selected: int
    """Of those, clients' traces for which the condition holds."""
    identical: int
    """Left out because an earlier trace is equal after normalisation."""
    similar: int
    """Left out because an earlier trace is nearly equal."""
    unreadable: list[str]
    """Files of the store that could not be read."""
    splits: dict[str, Split]
    files: dict[str, str]
    """SHA-256 by path inside the dataset's folder."""


def create(
    home: Path,
    name: str,
    where: str = "status = 200",
    split_share: float = 0.2,
    address: str | None = None,
    progress: Progress = lambda *_: None,
) -> Dataset:
    """Make a dataset; one of the same name and content is returned as it is.

    Of traces that say the same the earliest stays. The newest `split_share` of the sessions is held
    out; strop's own requests are never taken. Raises SelectionError, or DatasetError for a name that
    is taken by other content and for a condition that nothing fulfils.
    """
    if not _NAME.fullmatch(name):
        raise DatasetError(f"{name!r} is not a name: small letters, digits, dots and dashes, at most 64.")
    condition = Condition.parse(where)
    folder = home / "datasets" / name
    # A deletion waits until the dataset is whole, and then finds it.
    with epoch(home / "traces"):
        return _create(home, name, folder, condition, where, split_share, address, progress)


def _create(
    home: Path,
    name: str,
    folder: Path,
    condition: Condition,
    where: str,
    split_share: float,
    address: str | None,
    progress: Progress,
) -> Dataset:
    if folder.is_dir() and ((old := load(home, name)).where, old.split_share) != (where, split_share):
        raise _taken(old)
    recover(home / "traces")
    paths, read, unreadable = _readable(TraceStore(home / "traces").files())
    if not paths:
        raise DatasetError(f"There are no traces in {home / 'traces'} yet.")
    items: list[Item] = [{"file": number, "path": str(path)} for number, path in enumerate(paths)]
    found = []
    for part in spread(partial(index_file, condition=condition), items, home, address):
        found.append(part)
        progress(0.6 * len(found) / len(items), "choosing")
    index = Index.of(found)
    if not len(index):
        raise DatasetError(
            f"None of {read:,} traces fulfils {where!r}. `strop traces stats` shows what is there."
        )
    index = index.take(np.lexsort((index.request, index.started_us)))
    progress(0.6, f"comparing {len(index):,}")
    distinct, identical, similar = distinct_rows(index)
    kept = index.take(distinct)
    sides: dict[str, np.ndarray] = dict(zip(SPLITS, split_rows(kept, split_share), strict=True))
    temporary = folder.with_name(f".{name}.{uuid.uuid4().hex[:8]}")
    try:
        for split in SPLITS:
            (temporary / split).mkdir(parents=True)
        files, splits = _write(temporary, kept, sides, paths, home, address, progress)
        dataset = Dataset(
            name=name,
            digest=_digest(files),
            where=where,
            split_share=split_share,
            created_at=datetime.now(UTC),
            read=read,
            selected=len(index),
            identical=identical,
            similar=similar,
            unreadable=unreadable,
            splits=splits,
            files=files,
        )
        if folder.is_dir():
            old = load(home, name)
            if old.digest != dataset.digest:
                raise _taken(old)
            return old
        write_atomic(temporary / "dataset.json", dataset.model_dump_json(indent=1))
        temporary.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return dataset


def load(home: Path, name: str) -> Dataset:
    """Raises DatasetError if there is none of that name."""
    try:
        return Dataset.model_validate_json((home / "datasets" / name / "dataset.json").read_text())
    except (OSError, ValueError):
        raise DatasetError(f"There is no dataset {name!r}. `strop traces dataset ls` lists them.") from None


def every(home: Path) -> list[Dataset]:
    """All datasets, oldest first."""
    names = [path.parent.name for path in (home / "datasets").glob("[!.]*/dataset.json")]
    return sorted((load(home, name) for name in names), key=lambda d: d.created_at)


def split_of(home: Path, name: str, split: str) -> TraceSet:
    """One side of a dataset. Raises DatasetError."""
    load(home, name)
    return TraceSet(home / "datasets" / name / split)


def changed_files(home: Path, dataset: Dataset) -> list[str]:
    """Files that are no longer what they were when the dataset was made."""
    folder = home / "datasets" / dataset.name
    return [name for name, digest in dataset.files.items() if _sha256(folder / name) != digest]


@dataclass(frozen=True, slots=True)
class Leaks:
    """What the held-out side shares with the other."""

    sessions: int
    """Sessions on both sides."""
    identical: int
    """Held-out requests that equal one to learn from after normalisation."""
    similar: int
    """Held-out requests that nearly equal one to learn from."""

    @property
    def any(self) -> bool:
        return bool(self.sessions or self.identical or self.similar)


def leaks(home: Path, name: str, address: str | None = None) -> Leaks:
    """Compare the two sides of a dataset anew, from its files."""
    load(home, name)
    sides = []
    for split in SPLITS:
        files = TraceSet(home / "datasets" / name / split).files
        items: list[Item] = [{"file": number, "path": str(path)} for number, path in enumerate(files)]
        sides.append(Index.of([Index.empty().rows(), *spread(index_file, items, home, address)]))
    train, heldout = sides
    equal = np.isin(heldout.identity, train.identity)
    like = dedup.earlier_like(np.concatenate([train.signature, heldout.signature]))[len(train) :]
    similar = ~equal & (like >= 0) & (like < len(train))
    return Leaks(len(np.intersect1d(train.session, heldout.session)), int(equal.sum()), int(similar.sum()))


def _write(
    folder: Path,
    index: Index,
    sides: dict[str, np.ndarray],
    paths: list[Path],
    home: Path,
    address: str | None,
    progress: Progress,
) -> tuple[dict[str, str], dict[str, Split]]:
    items: list[Item] = []
    for split, rows in sides.items():
        for number, start in enumerate(range(0, len(rows), ROWS_PER_FILE)):
            chosen = rows[start : start + ROWS_PER_FILE]
            places = np.stack([index.file[chosen], index.row[chosen]]).astype(np.int32)
            items.append({"name": f"{split}/part-{number:05d}.parquet", "places": places.tobytes()})
    files: dict[str, str] = {}
    counts = {split: Counter[str]() for split in SPLITS}
    stacks = {split: Counter[str]() for split in SPLITS}
    work = partial(_write_part, folder=str(folder), paths=[str(path) for path in paths])
    for part in spread(work, items, home, address):
        for name, digest, prompt, output, served in zip(*part.values(), strict=True):
            split = str(name).partition("/")[0]
            files[str(name)] = str(digest)
            counts[split].update(prompt=int(prompt), output=int(output))
            stacks[split].update(json.loads(str(served)))
        progress(0.65 + 0.35 * len(files) / len(items), "writing")
    times = {split: index.started_us[rows] for split, rows in sides.items()}
    splits = {
        split: Split(
            requests=len(rows),
            sessions=len(np.unique(index.session[rows])),
            prompt_tokens=counts[split]["prompt"],
            output_tokens=counts[split]["output"],
            first=_time(times[split].min()) if len(rows) else None,
            last=_time(times[split].max()) if len(rows) else None,
            stacks=dict(sorted(stacks[split].items())),
        )
        for split, rows in sides.items()
    }
    return dict(sorted(files.items())), splits


def _write_part(item: Item, folder: str, paths: list[str]) -> Rows:
    places = np.frombuffer(item["places"], np.int32).reshape(2, -1)  # type: ignore[arg-type]
    tables, order = [], []
    for file in np.unique(places[0]):
        here = np.flatnonzero(places[0] == file)
        table = pq.read_table(paths[file], schema=SCHEMA, partitioning=None, use_threads=False)  # pyright: ignore[reportArgumentType]
        tables.append(table.take(places[1, here]))
        order.append(here)
    table = pa.concat_tables(tables).take(np.argsort(np.concatenate(order))).combine_chunks()
    path = Path(folder) / str(item["name"])
    write_table(path, table)
    choices = table["choices"].combine_chunks()
    return {
        "name": np.array([item["name"]]),
        "digest": np.array([_sha256(path)]),
        "prompt": np.array([len(table["prompt_token_ids"].combine_chunks().flatten())]),
        "output": np.array([len(choices.flatten().field("token_ids").flatten())]),
        "stacks": np.array([json.dumps(Counter(table["stack"].to_pylist()))]),
    }


def _readable(files: list[Path]) -> tuple[list[Path], int, list[str]]:
    paths, rows, unreadable = [], 0, []
    for path in files:
        try:
            rows += pq.read_metadata(path).num_rows
            paths.append(path)
        except (OSError, pa.ArrowInvalid):
            unreadable.append(path.name)
    return paths, rows, unreadable


def _taken(old: Dataset) -> DatasetError:
    return DatasetError(
        f"A dataset {old.name!r} of other content exists (digest {old.digest[:12]}, where {old.where!r}); "
        f"datasets do not change. Choose another name, e.g. {old.name}-2."
    )


def _digest(files: dict[str, str]) -> str:
    return hashlib.sha256(
        "".join(f"{name} {digest}\n" for name, digest in files.items()).encode()
    ).hexdigest()


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def _time(microseconds: Any) -> datetime:
    return datetime.fromtimestamp(int(microseconds) / 1e6, UTC)
