"""`strop traces dataset`: named, immutable selections of traces."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from strop.serving.home import home, write_atomic

if TYPE_CHECKING:
    from strop.pipelines.datasets import Dataset

app = typer.Typer(
    no_args_is_help=True,
    help="Named, immutable selections of traces: split by session and time, free of duplicates, logged in MLflow.",
)
console = Console()

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="Configuration file (default: ./strop.yaml).")
]


@app.command()
def create(
    name: str,
    where: Annotated[
        str, typer.Option(help="SQLite expression over the fields of a trace (docs/datasets.md).")
    ] = "status = 200",
    split_share: Annotated[
        float, typer.Option(help="Newest share of sessions that is held out.", min=0, max=0.9)
    ] = 0.2,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Make a dataset of the recorded traces for which a condition holds."""
    from rich.progress import Progress

    from strop.pipelines import datasets
    from strop.pipelines.registry import Registry
    from strop.pipelines.settings import load_settings

    settings = load_settings(config)
    registry = Registry(home(), settings.experiment)
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("reading", total=1.0)
        dataset = datasets.create(
            home(),
            name,
            where,
            split_share,
            settings.serving.ray_address,
            lambda done, text: bar.update(task, completed=done, description=text),
        )
    splits = {split: found.requests for split, found in dataset.splits.items()}
    registry.log_dataset(home() / "datasets" / name, name, dataset.digest, splits)
    _say(dataset, as_json)


@app.command("ls")
def list_datasets(as_json: AsJson = False) -> None:
    """All datasets, oldest first."""
    from strop.pipelines import datasets

    found = datasets.every(home())
    if as_json:
        typer.echo(json.dumps([dataset.model_dump(mode="json", exclude={"files"}) for dataset in found]))
        return
    table = Table("name", "digest", "created", "train", "heldout", "where")
    for dataset in found:
        requests = [f"{dataset.splits[split].requests:,}" for split in datasets.SPLITS]
        created = f"{dataset.created_at:%Y-%m-%d %H:%M}"
        table.add_row(dataset.name, dataset.digest[:12], created, *requests, _plain(dataset.where))
    console.print(table if found else "No dataset has been made yet.")


@app.command()
def show(name: str, as_json: AsJson = False) -> None:
    """What a dataset holds, and whether its files are what they were."""
    from strop.pipelines import datasets

    dataset = datasets.load(home(), name)
    changed = datasets.changed_files(home(), dataset)
    _say(dataset, as_json)
    if changed:
        raise datasets.DatasetError(
            f"{len(changed)} files of {name} are not what they were, e.g. {changed[0]}: do not use it."
        )


@app.command()
def export(
    name: str, out: Annotated[Path, typer.Argument(help="Folder for train.jsonl and heldout.jsonl.")]
) -> None:
    """Chats with their answers as OpenAI chat JSONL, a file for each side."""
    from strop.pipelines import datasets
    from strop.pipelines.commands.traces import chat_of

    for split in datasets.SPLITS:
        chats = list(filter(None, map(chat_of, datasets.split_of(home(), name, split))))
        lines = (json.dumps(chat, ensure_ascii=False) + "\n" for chat in chats)
        write_atomic(out / f"{split}.jsonl", "".join(lines))
        console.print(f"{len(chats)} chats in {out / f'{split}.jsonl'}", markup=False)


@app.command()
def check(name: str, config: Config = None, as_json: AsJson = False) -> None:
    """Look for what both sides share; exit code 1 if there is any."""
    from dataclasses import asdict

    from strop.pipelines import datasets
    from strop.pipelines.settings import load_settings

    found = datasets.leaks(home(), name, load_settings(config).serving.ray_address)
    if as_json:
        typer.echo(json.dumps(asdict(found)))
    else:
        console.print(
            f"On both sides of {name}: {found.sessions} sessions; {found.identical} held-out requests that equal "
            f"one to learn from, {found.similar} that nearly do."
        )
    raise typer.Exit(1 if found.any else 0)


def _say(dataset: "Dataset", as_json: bool) -> None:
    if as_json:
        typer.echo(dataset.model_dump_json())
        return
    sides = Table("", "requests", "sessions", "prompt tokens", "output tokens", "first", "last")
    for name, split in dataset.splits.items():
        counts = (split.requests, split.sessions, split.prompt_tokens, split.output_tokens)
        times = (f"{time:%Y-%m-%d %H:%M:%S}" if time else "–" for time in (split.first, split.last))
        sides.add_row(name, *(f"{count:,}" for count in counts), *times)
    console.print(f"{dataset.name}, digest {dataset.digest[:12]}, where {dataset.where}", markup=False)
    console.print(
        f"{dataset.read:,} read, {dataset.selected:,} selected, left out as equal {dataset.identical:,}, "
        f"as nearly equal {dataset.similar:,}; {home() / 'datasets' / dataset.name}",
        markup=False,
    )
    for file in dataset.unreadable:
        console.print(f"not readable: {file}", markup=False)
    console.print(sides)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
