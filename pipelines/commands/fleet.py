"""`strop fleet` and `strop top`."""

import json
import time
from collections import deque
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from strop.serving.stack import Stack

app = typer.Typer(no_args_is_help=True, help="Look at the running fleet and change it.")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
_WINDOW_S = 60.0


@app.command("ls")
def list_pools(as_json: AsJson = False) -> None:
    """List the Stacks that serve, their share of sessions and their replicas."""
    from rich.console import Console
    from rich.table import Table

    from strop.serving.cluster import connect
    from strop.serving.home import home

    status = connect(home()).status()
    if as_json:
        typer.echo(json.dumps(asdict(status)))
        return
    table = Table("stack", "share", "under way", "replica", "state", "memory", title=status.gateway)
    for pool in status.pools:
        for number, replica in enumerate([*pool.replicas, *pool.prefill]):
            first = number == 0
            prefill = " (prefill)" if number >= len(pool.replicas) else ""
            table.add_row(
                pool.fingerprint[:12] if first else "",
                f"{pool.share:.0%}" if first else "",
                str(pool.requests_under_way) if first else "",
                f"{replica.url}{prefill}",
                "alive" if replica.alive else "[red]dead[/red]",
                f"{replica.rss_bytes / 2**30:.1f} GiB",
            )
    Console().print(table)


@app.command()
def drain(
    stack: Annotated[str, typer.Argument(help="Beginning of a Stack's fingerprint (`strop fleet ls`).")],
) -> None:
    """Take a Stack out: its sessions go to the others, requests under way are finished."""
    from strop.pipelines.deployment import DeploymentError
    from strop.serving.cluster import connect
    from strop.serving.home import home

    fleet = connect(home())
    leaving = _find(fleet.stacks(), stack)
    rest = {p.fingerprint: p.share for p in fleet.status().pools if p.fingerprint != leaving.fingerprint}
    total = sum(rest.values())
    if not total:
        raise DeploymentError(
            f"Nothing but {leaving.fingerprint[:12]} has sessions. `strop promote` replaces it by another Stack, "
            "and ending `strop serve` drains it."
        )
    fleet.route({fingerprint: share / total for fingerprint, share in rest.items()})
    fleet.remove(leaving)
    typer.echo(f"{leaving.fingerprint[:12]} is drained and gone.")


@app.command()
def scale(
    replicas: Annotated[int, typer.Argument(help="Replicas that shall run.", min=1)],
    stack: Annotated[
        str, typer.Option(help="Beginning of a fingerprint (default: the Stack with most sessions).")
    ] = "",
) -> None:
    """Add replicas, or take some out after they have finished their requests.

    Lasts until the fleet ends or another Stack is rolled out; serving.replicas is for longer.
    """
    from strop.serving.cluster import connect
    from strop.serving.home import home

    fleet = connect(home())
    fingerprint = _find(fleet.stacks(), stack).fingerprint if stack else None
    before = fleet.scale(replicas, fingerprint)
    typer.echo(f"{before} -> {replicas} replicas")


@app.command()
def reload(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Configuration file (default: ./strop.yaml).")
    ] = None,
) -> None:
    """Take the gateway's keys and certificate anew from where strop.yaml says; no connection is dropped."""
    from strop.pipelines.settings import load_settings
    from strop.serving.cluster import connect
    from strop.serving.home import home
    from strop.serving.keys import take_keys

    tenants = take_keys(load_settings(config).serving.gateway.keys_file)
    connect(home()).reload(tenants)
    typer.echo(f"{len(tenants)} key(s) of {len(set(tenants.values()))} tenant(s) are valid from now on.")


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one look, since the start, and end.")] = False,
    as_json: AsJson = False,
    every_s: Annotated[float, typer.Option("--every", help="Seconds between looks.", min=0.5)] = 2,
) -> None:
    """Watch the fleet: load, latency, acceptance length, cache hits, capture. Figures are of the last minute."""
    from rich.console import Console
    from rich.live import Live

    from strop.pipelines.top import figures, table, take_sample
    from strop.serving.home import home

    if once:
        shown = figures(take_sample(home()))
        if as_json:
            typer.echo(json.dumps(asdict(shown)))
        else:
            Console().print(table(shown))
        return
    samples = deque([take_sample(home())])
    shown = nullcontext() if as_json else Live(table(figures(samples[-1])), screen=True, auto_refresh=False)
    with suppress(KeyboardInterrupt), shown as live:
        while True:
            time.sleep(every_s)
            samples.append(take_sample(home()))
            while len(samples) > 2 and samples[-1].clock - samples[0].clock > _WINDOW_S:
                samples.popleft()
            now = figures(samples[-1], samples[0])
            if live is None:
                typer.echo(json.dumps(asdict(now)))
            else:
                live.update(table(now), refresh=True)


def _find(stacks: "dict[str, Stack]", beginning: str) -> "Stack":
    from strop.pipelines.deployment import DeploymentError

    found = [stack for fingerprint, stack in stacks.items() if fingerprint.startswith(beginning)]
    if len(found) != 1:
        known = ", ".join(fingerprint[:12] for fingerprint in stacks)
        raise DeploymentError(
            f"{len(found)} Stacks of the fleet begin with {beginning!r}; it serves {known}."
        )
    return found[0]
