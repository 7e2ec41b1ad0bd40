"""`strop traces delete` and `strop traces prune`: what is kept of the traffic, and for how long."""

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from strop.serving.home import home

console = Console()
complaints = Console(stderr=True)

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
