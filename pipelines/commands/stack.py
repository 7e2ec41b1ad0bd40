"""`strop stack`: look at Stack manifests, compare them, check that their files are unchanged."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from strop.serving.stack import Stack

app = typer.Typer(help="Look at Stacks: what exactly serves.", no_args_is_help=True)
console = Console()

StackPath = Annotated[str, typer.Argument(help="A manifest, a model folder, or - for a manifest on stdin.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


@app.command(name="ls")
def list_versions(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Configuration file.")] = None,
    as_json: AsJson = False,
) -> None:
    """The registered Stacks, newest first, and which of them serves."""
    from dataclasses import asdict
    from datetime import UTC, datetime

    from strop.pipelines.registry import Registry
    from strop.pipelines.settings import load_settings
    from strop.serving.home import home

    versions = Registry(home(), load_settings(config).experiment).versions()
    if as_json:
        typer.echo(json.dumps([asdict(version) for version in versions]))
        return
    table = Table("version", "fingerprint", "aliases", "made by", "registered (UTC)")
    for v in versions:
        at = datetime.fromtimestamp(v.created_ms / 1000, UTC)
        table.add_row(
            v.number, v.fingerprint[:16], ", ".join(v.aliases), v.loop or "hand", f"{at:%Y-%m-%d %H:%M}"
        )
    console.print(table)


@app.command()
def show(path: StackPath, as_json: AsJson = False) -> None:
    """The manifest and its identities. Files are not checked: see `verify`."""
    stack = read(path)
    identities = {name: getattr(stack, name) for name in ("fingerprint", "numerics", "kv_identity")}
    if as_json:
        typer.echo(json.dumps({**json.loads(stack.to_json()), **identities}))
        return
    for name, value in identities.items():
        console.print(f"{name:<12} {value}", soft_wrap=True, highlight=False)
    table = Table("field", "value")
    for name, value in stack.model_dump(mode="json").items():
        if value not in (None, [], {}):
            table.add_row(name, escape(value if isinstance(value, str) else json.dumps(value, indent=1)))
    console.print(table)


@app.command()
def diff(a: StackPath, b: StackPath, as_json: AsJson = False) -> None:
    """What differs between two Stacks, and whether that can change what the model says."""
    first, second = read(a), read(b)
    differences = first.diff(second)
    same_logits = first.numerics == second.numerics
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "differences": {name: list(pair) for name, pair in differences.items()},
                    "same_numerics": same_logits,
                    "same_kv": first.kv_identity == second.kv_identity,
                }
            )
        )
        return
    if not differences:
        console.print("The same Stack.")
        return
    table = Table("field", a, b)
    for name, (here, there) in differences.items():
        table.add_row(name, *("–" if value is None else escape(str(value)) for value in (here, there)))
    console.print(table)
    console.print("The logits are the same." if same_logits else "The logits may differ.")


@app.command()
def verify(path: StackPath) -> None:
    """Check every file of a Stack against its recorded bytes."""
    from strop.serving.stack import StackError

    stack = read(path)
    try:
        stack.verify()
    except StackError as error:
        _fail(str(error))
    console.print(f"{stack.fingerprint} is as it was made.")


def read(path: str) -> "Stack":
    """The Stack in a manifest file or on stdin (`-`), or the plain Stack of a model folder. Exits with 2."""
    from strop.serving.stack import Stack, StackError

    try:
        if path == "-":
            return Stack.from_json(sys.stdin.read(), "stdin")
        if Path(path).is_dir():
            return Stack.build(Path(path), served_model=Path(path).absolute().name)
        return Stack.from_json(Path(path).read_text(encoding="utf-8"), path)
    except StackError as error:
        _fail(str(error))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        _fail(f"{path} cannot be read: {reason}. Give a Stack manifest or a model folder.")


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print(message, style="red", markup=False, highlight=False)
    raise typer.Exit(2)
