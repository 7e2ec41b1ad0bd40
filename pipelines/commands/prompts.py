"""`strop prompts`: look at how prompts are made."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from strop.serving.home import home

if TYPE_CHECKING:
    from strop.evals.prompt_lint import Breaker, Lint

app = typer.Typer(help="Look at how prompts are made.", no_args_is_help=True)
console = Console(highlight=False)


@app.callback()
def prompts() -> None:
    """Look at how prompts are made."""


@app.command()
def lint(
    newest: Annotated[int, typer.Option(min=2, help="Look at so many requests, the newest.")] = 20_000,
    block: Annotated[
        int,
        typer.Option(
            min=1,
            help="Tokens in a block of the prefix cache: 16 on GPUs, 128 on CPUs unless the Stack says otherwise.",
        ),
    ] = 16,
    price: Annotated[
        float | None, typer.Option("--price-per-million", min=0, help="Price of a million prompt tokens.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Look at this tenant's prompts only.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Show what in prompts keeps the prefix cache from being used, what that costs, and what to do.

    Exits with 1 if something was found.
    """
    from strop.evals.prompt_lint import lint as look_at
    from strop.evals.prompt_lint import read_prompts
    from strop.serving.journal import recover
    from strop.serving.traces import TraceStore

    recover(home() / "traces")
    found = read_prompts(TraceStore(home() / "traces"), newest, tenant)
    result = look_at(found, block)
    if as_json:
        typer.echo(json.dumps(as_row(result, price)))
    else:
        _show(result, price)
    if result.breakers:
        raise typer.Exit(1)


def as_row(found: "Lint", price_per_million: float | None) -> dict[str, Any]:
    """All that was found as JSON types; `cost` in the price's currency, None without a price."""

    def costs(tokens: int) -> dict[str, float | None]:
        cost = None if price_per_million is None else tokens * price_per_million / 1e6
        return {"wasted_s": found.seconds(tokens), "cost": cost}

    return {
        **asdict(found),
        **costs(found.wasted_tokens),
        "breakers": [{**asdict(b), **costs(b.wasted_tokens)} for b in found.breakers],
    }


def _show(found: "Lint", price: float | None) -> None:
    if not found.prompts:
        console.print(f"No prompts with content in {home() / 'traces'} yet.", markup=False)
        return
    tokens = max(1, found.prompt_tokens)
    console.print(
        f"{found.prompts:,} prompts of {found.prompt_tokens:,} tokens; {found.shared_tokens / tokens:.0%} could come from "
        f"a prefix cache with blocks of {found.block_tokens} tokens.",
        markup=False,
    )
    if not found.breakers:
        console.print("Nothing in them keeps others from sharing their beginning.")
        return
    table = Table("", "what changes", show_lines=True)
    for name in ("at token", "requests", "tokens again"):
        table.add_column(name, justify="right")
    table.add_column("what to do")
    for breaker in found.breakers:
        table.add_row(*_cells(breaker, found, price))
    console.print(table)
    console.print(
        f"Together: {_cost(found.wasted_tokens, found, price)}, {found.wasted_tokens / tokens:.0%} of all prompt tokens.",
        markup=False,
    )


def _cells(breaker: "Breaker", found: "Lint", price: float | None) -> list[str]:
    examples = "; ".join(breaker.examples)
    cells = [
        f"{breaker.kind}\n{breaker.where}\n{breaker.tenant}, {breaker.model}",
        f"{breaker.excerpt}\ne.g. {examples}\nin request {breaker.request_id}",
        f"{breaker.position:,}",
        f"{breaker.requests:,}",
        _cost(breaker.wasted_tokens, found, price),
        breaker.fix,
    ]
    return [escape(_visible(cell)) for cell in cells]


def _cost(tokens: int, found: "Lint", price: float | None) -> str:
    seconds = found.seconds(tokens)
    parts = [f"{tokens:,} tokens"]
    parts += [f"{seconds:,.1f} s of prefill"] if seconds is not None else []
    parts += [f"{tokens * price / 1e6:,.4f} in money"] if price is not None else []
    return ", ".join(parts)


def _visible(text: str) -> str:
    """Without control characters: what prompts hold must not reach the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
