"""The `strop` command."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from strop.pipelines.commands import cost, fleet, kernels, loop, prompts, replay, serve, stack, traces
from strop.pipelines.commands import eval as evaluation

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Keep a served language model keen: learn from its traffic, prove what was learned, roll it out.\n\n"
    "Start with `strop demo`, or write a strop.yaml (`strop config`) and run `strop serve`, then `strop loop run`.",
)
app.add_typer(loop.app, name="loop")
app.add_typer(evaluation.app, name="eval")
app.add_typer(traces.app, name="traces")
app.add_typer(stack.app, name="stack")
app.add_typer(fleet.app, name="fleet")
app.add_typer(prompts.app, name="prompts")
app.add_typer(kernels.app, name="kernels")
app.command()(serve.serve)
app.command()(fleet.top)
app.command()(replay.replay)
app.command()(cost.cost)
app.command()(loop.promote)
app.command()(loop.rollback)

Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="Configuration file (default: ./strop.yaml).")
]


@app.command()
def config() -> None:
    """Print a commented strop.yaml with every key and its default."""
    from strop.pipelines.settings import describe

    typer.echo(describe())


@app.command()
def doctor(config: Config = None, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Check whether this machine can serve and learn, and say what to do where it cannot."""
    from strop.pipelines.doctor import checks, show

    raise typer.Exit(show(checks(config), as_json))


@app.command()
def demo(
    minutes: Annotated[
        float, typer.Option(help="Minutes of traffic to collect before learning.", min=0.1)
    ] = 5,
    train_minutes: Annotated[float, typer.Option(help="Most minutes to train the draft model.", min=0.1)] = 6,
    port: Annotated[
        int, typer.Option(help="Port of the OpenAI-compatible endpoint.", min=1, max=65535)
    ] = 8000,
) -> None:
    """Serve a small model, send it real traffic, run one loop, and show what became faster.

    Interrupted, it goes on where it was when called again. Everything lies in `STROP_HOME/demo`.
    """
    from strop.pipelines.demo import run

    raise typer.Exit(run(minutes, train_minutes, port))


@app.command()
def ui(
    config: Config = None,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 5000,
    of_demo: Annotated[bool, typer.Option("--demo", help="Show the demo's runs.")] = False,
) -> None:
    """Open the MLflow UI (on loopback) over the loops, stages and Stacks of this home."""
    from strop.pipelines.registry import Registry
    from strop.pipelines.settings import load_settings
    from strop.serving.home import home

    registry = Registry(home() / "demo" if of_demo else home(), load_settings(config).experiment)
    typer.echo(f"MLflow UI of {registry.uri} at http://127.0.0.1:{port} (Ctrl-C ends it)")
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", registry.uri]
    os.execv(sys.executable, [*command, "--host", "127.0.0.1", "--port", str(port)])


def main() -> int:
    """Run the command line: an error we know is one sentence and exit code 2, an interruption 130."""
    try:
        # Without its standalone mode click returns the code of an Exit; commands themselves return nothing.
        return app(standalone_mode=False) or 0
    except (typer.Abort, KeyboardInterrupt):
        print("\nstrop: interrupted; the same command goes on from here.", file=sys.stderr)
        return 130
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            error.show()  # type: ignore[attr-defined]  # a usage error: click knows how to say it
            return error.exit_code  # type: ignore[attr-defined]
        if type(error).__module__.startswith("strop.") or isinstance(error, OSError):
            print(f"strop: {error}", file=sys.stderr)
            return 2
        if "ray" in sys.modules:
            # Ray's own exception hook waits for a cluster that may be what failed.
            sys.modules["ray"].shutdown()
        raise


if __name__ == "__main__":
    sys.exit(main())
