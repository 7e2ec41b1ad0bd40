"""`strop traces delete` and `strop traces prune`: what is kept of the traffic, and for how long."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from strop.serving.home import home

console = Console()
complaints = Console(stderr=True)

Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="Configuration file (default: ./strop.yaml).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def delete(
    tenant: Annotated[str | None, typer.Option(help="Tenant whose records go.")] = None,
    session: Annotated[
        str | None, typer.Option(help="Session whose records go; with --tenant, that tenant's only.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete all that was recorded of a tenant or a session until now, and look again whether it is gone.

    Exits with 1 if something is left, and says what; the same command completes it.
    """
    from strop.serving.deletion import delete as delete_records

    if tenant is None and session is None:
        raise typer.BadParameter("Say whose records go: --tenant, --session or both.")
    given = (("tenant", tenant), ("session", session))
    whose = " and ".join(f"{name} {value!r}" for name, value in given if value is not None)
    if not yes:
        if not sys.stdin.isatty():
            raise typer.BadParameter("Nobody is there to be asked: add --yes to delete.")
        typer.confirm(f"Delete all records of {whose} in {home()}? They cannot be brought back.", abort=True)
    done = delete_records(home(), tenant, session)
    if as_json:
        typer.echo(json.dumps({"tenant": tenant, "session": session, **asdict(done)}))
    else:
        console.print(
            f"{done.records} records of {whose} removed; {done.files} files, {done.features} folders of hidden "
            f"states and {done.unreadable} damaged pieces touched.",
            markup=False,
        )
        for left in done.left:
            complaints.print(f"Left: {left}", style="red", markup=False)
    if done.left:
        raise typer.Exit(1)


def prune(
    config: Config = None,
    max_age_days: Annotated[
        float | None, typer.Option(help="Days to keep, instead of serving.retention's.", min=0)
    ] = None,
    max_gib: Annotated[
        float | None, typer.Option(help="GiB to keep, instead of serving.retention's.", min=0)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Remove what is older or more than serving.retention allows, the oldest first; a running fleet does so itself."""
    from strop.pipelines.settings import load_settings
    from strop.serving.retention import prune as prune_traces

    kept = load_settings(config).serving.retention
    done = prune_traces(
        home(),
        kept.max_age_days if max_age_days is None else max_age_days,
        kept.max_gib if max_gib is None else max_gib,
    )
    if as_json:
        typer.echo(json.dumps(asdict(done)))
        return
    console.print(
        f"{done.files} files of {done.bytes / 2**20:.1f} MiB and the frozen traffic of {done.loops} loops removed; "
        f"{done.kept_bytes / 2**20:.1f} MiB kept.",
        markup=False,
    )
