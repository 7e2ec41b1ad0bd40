"""`strop loop`, `strop promote`, `strop rollback`."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from strop.pipelines.loop import LoopResult

app = typer.Typer(no_args_is_help=True, help="Learn from the traffic, judge what was learned, roll it out.")

Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="Configuration file (default: ./strop.yaml).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


@app.command()
def run(config: Config = None, as_json: AsJson = False) -> None:
    """Run one loop; one that was interrupted is resumed.

    With `strop serve` running, a candidate that passes is rolled out in that fleet by canary.
    """
    from strop.pipelines.loop import STAGES, run_loop
    from strop.pipelines.progress import Board
    from strop.pipelines.settings import load_settings
    from strop.serving.home import home

    settings = load_settings(config)
    board = Board(dict(STAGES), home())
    with board.shown():
        result = run_loop(settings, home(), board)
    _say(result, as_json)


@app.command()
def resume(config: Config = None, as_json: AsJson = False) -> None:
    """Go on with the loop that was interrupted, redoing no finished stage."""
    from strop.pipelines.loop import LoopError

    if not _registry(config).unfinished():
        raise LoopError("There is no interrupted loop. `strop loop run` starts one.")
    run(config, as_json)


@app.command()
def status(config: Config = None, as_json: AsJson = False) -> None:
    """Show the newest loop stage by stage."""
    from rich.console import Console
    from rich.table import Table

    from strop.pipelines.loop import LoopError
    from strop.pipelines.registry import LoopJournal

    registry = _registry(config)
    loops = registry.loops()
    if not loops:
        raise LoopError("No loop has run yet. `strop loop run` starts one.")
    newest = loops[0]
    stages = LoopJournal(registry, newest["loop"], newest["run_id"]).stages()
    if as_json:
        typer.echo(json.dumps({**newest, "stages": stages}))
        return
    table = Table(
        "stage",
        "state",
        "seconds",
        title=f"{newest['loop']}: {newest['outcome'] or newest['status'].lower()}",
    )
    for stage in stages:
        ended = stage["ended_ms"]
        table.add_row(
            stage["stage"],
            stage["status"].lower(),
            f"{(ended - stage['started_ms']) / 1000:.0f}" if ended else "…",
        )
    Console().print(table)


@app.command()
def history(config: Config = None, as_json: AsJson = False) -> None:
    """List all loops and what came of them, newest first."""
    from rich.console import Console
    from rich.table import Table

    loops = _registry(config).loops()
    if as_json:
        typer.echo(json.dumps(loops))
        return
    table = Table("loop", "outcome", "minutes", "report")
    for loop in loops:
        minutes = f"{(loop['ended_ms'] - loop['started_ms']) / 60000:.1f}" if loop["ended_ms"] else "…"
        table.add_row(loop["loop"], loop["outcome"] or loop["status"].lower(), minutes, loop["report"] or "")
    Console().print(table)


@app.command()
def schedule(
    every: Annotated[str | None, typer.Option(help="Interval: a number and s, m, h or d, e.g. 6h.")] = None,
    cron: Annotated[
        str | None, typer.Option(help="Five-field cron expression in UTC, e.g. '0 3 * * *'.")
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="End the schedule.")] = False,
    config: Config = None,
) -> None:
    """Run the loop by itself, inside the fleet's Ray cluster, for as long as the fleet runs.

    Without options, shows the schedule that is set.
    """
    from strop.pipelines import schedule as scheduling
    from strop.serving.home import home

    typer.echo(scheduling.configure(home(), config, every, cron, stop))


@app.command()
def watch(
    every: Annotated[str, typer.Option(help="Interval: a number and s, m, h or d.")] = "30s",
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Look at what is recorded for drift, and run a loop when an alarm holds and the budget allows."""
    import time
    from dataclasses import asdict

    from strop.pipelines.schedule import parse_interval, start_loop
    from strop.pipelines.settings import load_settings
    from strop.pipelines.watch import Watch
    from strop.serving.home import home

    pause_s = parse_interval(every).total_seconds()
    watching = Watch(home(), load_settings(config), _registry(config))
    while True:
        look = watching.look()
        evidence = ", ".join(f"{name} {value}" for name, value in look.evidence.items())
        line = f"{look.at} {look.sessions} sessions; {look.decision}; evidence {evidence or 'none'}"
        typer.echo(json.dumps(asdict(look)) if as_json else f"{line} (alarm at {look.alarm_at})")
        if look.start:
            loop = start_loop(home(), str(config.absolute()) if config else None, "watched-loops")
            try:
                code = loop.process.wait()
            finally:
                if loop.alive:
                    loop.stop()
            typer.echo(f"the loop ended with exit code {code}, log {loop.log}", err=True)
            if code:
                watching.failed()
        if once:
            return
        time.sleep(pause_s)


@app.command()
def submit(
    address: Annotated[
        str, typer.Option(help="The cluster's dashboard, e.g. http://head:8265.")
    ] = "http://127.0.0.1:8265",
    config: Config = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job until it ends.")] = False,
) -> None:
    """Run one loop as a Ray job on a cluster where strop is installed."""
    from strop.pipelines import schedule as scheduling

    job, state = scheduling.submit(address, config, wait)
    typer.echo(f"job {job}: {state}. Follow it with `ray job logs --address {address} {job}`.")
    if state in ("FAILED", "STOPPED"):
        raise typer.Exit(1)


def promote(
    name: Annotated[str, typer.Argument(help="Version number, alias or beginning of a fingerprint.")],
    config: Config = None,
) -> None:
    """Make a registered Stack the champion, without a loop; a running fleet is cut over to it."""
    _cut_over(name, config)


def rollback(config: Config = None) -> None:
    """Make the previous champion the champion again; a running fleet is cut over to it."""
    _cut_over("previous", config)


def _cut_over(name: str, config: Path | None) -> None:
    from rich.console import Console

    from strop.pipelines.deployment import cut_over
    from strop.pipelines.loop import LoopError
    from strop.pipelines.settings import load_settings
    from strop.serving.home import home

    console = Console(stderr=True)
    settings = load_settings(config)
    registry = _registry(config)
    version = registry.find(name)
    result = cut_over(settings, home(), registry, version, lambda e: console.print(f"{e.event}: {e.detail}"))
    if not result.promoted:
        raise LoopError(f"Version {version.number} was taken back: {result.reason}.")
    typer.echo(f"champion: version {version.number} ({version.fingerprint[:12]}); {result.reason}")


def _registry(config: Path | None) -> Any:
    from strop.pipelines.registry import Registry
    from strop.pipelines.settings import load_settings
    from strop.serving.home import home

    return Registry(home(), load_settings(config).experiment)


def _say(result: "LoopResult", as_json: bool) -> None:
    if as_json:
        content = {
            "loop": result.loop,
            "outcome": result.outcome,
            "reason": result.reason,
            "report": str(result.report),
            "verdict": result.verdict.model_dump(mode="json") if result.verdict else None,
            "at": datetime.now(UTC).isoformat(),
        }
        typer.echo(json.dumps(content))
    else:
        typer.echo(f"{result.loop}: {result.outcome}: {result.reason}")
        if result.verdict:
            typer.echo(result.verdict.summary)
        typer.echo(f"report: {result.report}")
