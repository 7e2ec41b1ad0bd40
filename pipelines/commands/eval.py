"""`strop eval`: may this Stack replace that one, on this traffic, by these gates?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from strop.pipelines.commands.eval_replay import replay

if TYPE_CHECKING:
    from strop.evals.evaluation import Evaluation

EXIT_CODES = {"passed": 0, "failed": 1, "not enough data": 2}
IMPOSSIBLE = 3
_COMPARE = "compare"
_START_S = 120.0


class _ComparesUnlessTold(TyperGroup):
    """`strop eval A B` is `strop eval compare A B`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [_COMPARE, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_ComparesUnlessTold,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Compare two served Stacks: fidelity, behaviour, failures, speed; then decide by gates.\n\n"
    "`strop eval STACK_A STACK_B` evaluates B against A (`strop eval compare --help` has its options).",
)

STACK = (
    "A manifest, a model folder, a registered Stack (`champion`, `previous`, a number, the beginning of a "
    "fingerprint), or the address of a running OpenAI-compatible server."
)


@app.command(name=_COMPARE)
def compare(
    reference: Annotated[str, typer.Argument(metavar="STACK_A", help=f"The reference. {STACK}")],
    candidate: Annotated[str, typer.Argument(metavar="STACK_B", help="The candidate; the same choices.")],
    suite: Annotated[
        str, typer.Option(help="quick, full, or a YAML file (`strop eval suites` has them).")
    ] = "quick",
    traces: Annotated[
        str | None,
        typer.Option(
            help="Held-out traffic: a dataset, a folder of Parquet files, or an SQLite condition on the recorded "
            "traces. By default the newest recorded sessions."
        ),
    ] = None,
    stack: Annotated[
        list[Path] | None,
        typer.Option(help="Manifest of what an address serves; once for each address, in their order."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Folder for report.html, report.md and evaluation.json.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Ask everything anew, even what is already known.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the evaluation as JSON.")] = False,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Configuration file (default: ./strop.yaml).")
    ] = None,
) -> None:
    """Evaluate STACK_B against STACK_A; one that was interrupted goes on where it was.

    Exits with 0 if every gate is shown to hold, 1 if one is shown not to, 2 if there is not enough
    data to say, 3 if no evaluation was possible.
    """
    from strop.evals.observation import EvalError
    from strop.pipelines.datasets import DatasetError
    from strop.pipelines.registry import RegistryError
    from strop.pipelines.settings import ConfigError
    from strop.serving.process import ProcessError
    from strop.serving.selection import SelectionError
    from strop.serving.stack import StackError

    known = (
        EvalError, StackError, RegistryError, DatasetError, SelectionError, ProcessError, ConfigError, OSError,
    )  # fmt: skip
    try:
        evaluation, folder = _compare(
            (reference, candidate), suite, traces, stack or [], report, again, config
        )
    except known as error:
        typer.echo(f"strop: {error}", err=True)
        raise typer.Exit(IMPOSSIBLE) from None
    if as_json:
        typer.echo(evaluation.model_dump_json())
    else:
        _show(evaluation, folder)
    raise typer.Exit(EXIT_CODES[evaluation.verdict])


@app.command()
def suites(
    name: Annotated[str | None, typer.Argument(help="quick, full, or a YAML file; none lists them.")] = None,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="Print the file, to begin your own from.")] = False,
) -> None:
    """The suites there are, or what is in one: parts with their options, metrics and gates."""
    from strop.evals import suite

    if name is None:
        for shipped in suite.SHIPPED:
            plan = suite.load(shipped)
            parts = ", ".join(f"{each.part.name} {each.seconds:g} s" for each in plan.parts)
            typer.echo(f"{shipped}: {parts}; {len(plan.gates)} gates")
        typer.echo(
            "`strop eval suites quick` says what is in one, `--yaml` prints it to begin your own from."
        )
    elif as_yaml:
        typer.echo(suite.text(name), nl=False)
    else:
        typer.echo(suite.describe(name))


def _compare(
    names: tuple[str, str],
    suite: str,
    traces: str | None,
    manifests: list[Path],
    report: Path | None,
    again: bool,
    config: Path | None,
) -> "tuple[Evaluation, Path]":
    import shutil
    from contextlib import ExitStack

    from strop.evals.evaluate import evaluate, findings_of, identity, is_finished
    from strop.evals.observation import Side
    from strop.evals.regressions import remember_evaluation
    from strop.evals.suite import load
    from strop.pipelines.eval_report import write
    from strop.pipelines.evaluating import find, heldout, served
    from strop.pipelines.progress import Board
    from strop.pipelines.settings import load_settings
    from strop.serving.home import home

    plan = load(suite)
    settings = load_settings(config)
    traffic = heldout(traces, settings, home())
    found = find(names, manifests, settings, home())
    stacks = [each.stack if isinstance(each, Side) else each for each in found]
    folder = home() / "evals" / identity(stacks[0], stacks[1], plan, traffic)
    finished = is_finished(plan, folder)
    # What an address serves may have changed since: only what was cut short is gone on with.
    if again or (finished and any(isinstance(each, Side) for each in found)):
        shutil.rmtree(folder, ignore_errors=True)
        finished = False
    board = Board({"start": _START_S, "ask": sum(p.seconds for p in plan.parts), "report": 5.0}, home())
    with board.shown(), ExitStack() as while_used:
        if finished:
            # Only the gates are decided anew.
            sides = Side("reference", stacks[0], ""), Side("candidate", stacks[1], "")
            board.skip("start", "everything was asked before; --again asks anew")
        else:
            with board.stage("start"):
                serving = served(found, settings, home(), lambda text: board.update(0.0, text))
                sides = while_used.enter_context(serving)
        with board.stage("ask"):
            evaluation = evaluate(*sides, traffic, plan, folder, board.update)
        with board.stage("report"):
            for each in {folder, report or folder}:
                write(evaluation, each, settings.cost)
            remember_evaluation(home(), findings_of(folder), traffic)
    return evaluation, report or folder


def _show(evaluation: "Evaluation", folder: Path) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from strop.evals.summary import bound_words, figure_words

    console = Console(highlight=False)
    table = Table("gate", "slice", "candidate (interval)", "bound", "sessions", "answer")
    colours = {"passed": "green", "failed": "red", "not enough data": "yellow"}
    for gate in evaluation.gates:
        if not gate.required and gate.answer != "failed":
            continue
        name = gate.metric if gate.statistic == "mean" else f"{gate.metric} {gate.statistic}"
        found = figure_words(gate.figure) if gate.figure else "–"
        sessions = str(gate.figure.samples) if gate.figure else "0"
        answer = f"[{colours[gate.answer]}]{gate.answer}[/]"
        table.add_row(name, escape(gate.slice), found, f"{gate.side} {bound_words(gate)}", sessions, answer)
    console.print(table)
    console.print(escape(evaluation.summary))
    console.print(f"report: {folder / 'report.html'}", soft_wrap=True, markup=False)


app.command()(replay)
