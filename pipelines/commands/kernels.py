"""`strop kernels`: the kernels that were proposed, what is known of them, and who decides."""

import getpass
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from strop.kernels.promotion import Promotion
    from strop.kernels.verify import Verification

app = typer.Typer(
    no_args_is_help=True,
    help="Look at proposed kernels, verify them, approve or reject them. Nothing serves that no one approved.",
)

Identity = Annotated[str, typer.Argument(help="Beginning of a kernel's identity (`strop kernels ls`).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
By = Annotated[str | None, typer.Option(help="Who decides (default: your login name).")]
Reason = Annotated[str, typer.Option(help="Why; kept with the decision.")]


@app.command("ls")
def list_kernels(as_json: AsJson = False) -> None:
    """List the kernels that were proposed, oldest first."""
    from rich.console import Console
    from rich.table import Table

    found = _promotions().all()
    if as_json:
        typer.echo(json.dumps([_summary(promotion) for promotion in found]))
        return
    table = Table("kernel", "operator", "state", "verified", "predicted", "in the engine", "proposed by")
    for promotion in found:
        of = _summary(promotion)
        gain = of["credited_gain"]
        table.add_row(
            of["identity"][:12],
            of["contract"],
            of["state"],
            "yes" if of["verified"] else "no",
            f"{of['predicted_gain']:.2f}x",
            f"{gain:.2f}x" if gain else "not shown",
            of["proposed_by"],
        )
    Console().print(table)


@app.command()
def review(identity: Identity, as_json: AsJson = False) -> None:
    """All there is to know of a kernel before it is approved: source, checks, times, and what speaks against it."""
    promotions = _promotions()
    promotion = promotions.get(identity)
    against = promotions.objections(promotion)
    if as_json:
        content = promotion.model_dump(mode="json")
        typer.echo(json.dumps({**_summary(promotion), **content, "objections": against}))
        return
    record = promotion.record
    typer.echo(record.code)
    typer.echo(f"kernel      {record.identity}")
    typer.echo(f"object      sha256 {record.object}")
    typer.echo(f"proposed    by {record.proposed_by}, {record.proposed_at:%Y-%m-%d %H:%M}")
    _show_verification(record.verification)
    typer.echo(f"predicted   {record.predicted_gain:.3f} times as fast ({record.share:.0%} of the time)")
    if promotion.engine:
        low, high = promotion.engine.interval
        typer.echo(
            f"measured    {promotion.engine.gain:.3f} times as fast in the engine ({low:.3f} to {high:.3f}; "
            f"the same twice: {promotion.engine.noise:.3f}); fidelity: {promotion.engine.fidelity}"
        )
    if decision := promotion.decision:
        typer.echo(f"{decision.state:<11} by {decision.by}, {decision.at:%Y-%m-%d %H:%M} {decision.reason}")
    for each in against:
        typer.echo(f"against it  {each}")


@app.command()
def approve(identity: Identity, by: By = None, reason: Reason = "", as_json: AsJson = False) -> None:
    """Let a kernel serve. What speaks against it cannot be waived: `review` lists it."""
    promotion = _promotions().approve(identity, by or getpass.getuser(), reason)
    _decided(promotion, as_json)


@app.command()
def reject(identity: Identity, by: By = None, reason: Reason = "", as_json: AsJson = False) -> None:
    """Keep a kernel from serving, also one that was approved."""
    promotion = _promotions().reject(identity, by or getpass.getuser(), reason)
    _decided(promotion, as_json)


@app.command()
def verify(
    kernel: Annotated[str, typer.Argument(help="Beginning of an identity, or a C++ file.")],
    operator: Annotated[
        str | None, typer.Option(help="What a file shall compute; without it, the operators are listed.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads that it may use.", min=1)] = 1,
    as_json: AsJson = False,
) -> None:
    """Verify a kernel on this machine, anew: exits with 0 if it is right and faster, else with 1.

    A file exports a function that is named like the operator.
    """
    from dataclasses import replace

    from strop.kernels.build import Source
    from strop.kernels.contract import CONTRACTS
    from strop.kernels.verify import verify as hold
    from strop.serving.home import home

    if Path(kernel).is_file():
        if operator not in CONTRACTS:
            raise typer.BadParameter(f"is one of {', '.join(CONTRACTS)}", param_hint="--operator")
        contract = CONTRACTS[operator]
        source = Source(contract.name, Path(kernel).read_text(encoding="utf-8", errors="replace"))
    else:
        record = _promotions().get(kernel).record
        contract = replace(CONTRACTS[record.contract], served=record.served)
        source, threads = record.source, record.verification.threads
    found = hold(source, contract, home() / "kernels" / "built", threads)
    if as_json:
        typer.echo(json.dumps({**found.model_dump(mode="json"), "passed": found.passed}))
    else:
        _show_verification(found)
    raise typer.Exit(0 if found.passed else 1)


def _promotions() -> Any:
    from strop.kernels.promotion import Promotions
    from strop.serving.home import home

    return Promotions(home())


def _summary(promotion: "Promotion") -> dict[str, Any]:
    record = promotion.record
    return {
        "identity": record.identity,
        "contract": record.contract,
        "state": promotion.state,
        "verified": record.verification.passed,
        "predicted_gain": record.predicted_gain,
        "credited_gain": promotion.credited_gain,
        "proposed_by": record.proposed_by,
    }


def _show_verification(found: "Verification") -> None:
    for check in found.checks:
        typer.echo(f"{'passed' if check.passed else 'FAILED':<11} {check.name}: {check.detail}")
    for timing in found.timings:
        typer.echo(
            f"timed       {timing.shape}: {timing.kernel_s * 1e6:.1f} us, the reference {timing.reference_s * 1e6:.1f} us: "
            f"{timing.speedup:.2f} times as fast ({timing.low:.2f} to {timing.high:.2f})"
        )
    if not found.isolated:
        typer.echo("not isolated: this machine cannot confine what it runs")


def _decided(promotion: "Promotion", as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_summary(promotion)))
    else:
        typer.echo(f"{promotion.record.identity[:12]} is {promotion.state}.")
