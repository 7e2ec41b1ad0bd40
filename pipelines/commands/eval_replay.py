"""`strop eval replay`: ask any server again what an evaluation found fault with."""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from strop.evals.findings import Replayed
    from strop.evals.observation import Finding
    from strop.serving.stack import Stack

console = Console(highlight=False)
complaints = Console(stderr=True, highlight=False)
_START_S = 600


def replay(
    finding: Annotated[
        str, typer.Argument(help="FILE of findings, or FILE:ID for one of them (its id or request id).")
    ],
    url: Annotated[str | None, typer.Option(help="Server to ask, without /v1.")] = None,
    stack: Annotated[
        Path | None, typer.Option(help="Manifest of a Stack to start and ask, instead of --url.")
    ] = None,
    times: Annotated[int, typer.Option(min=1, help="Ask so often, to see whether the answer changes.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line an answer.")] = False,
) -> None:
    """Send exactly a finding's request to a server, and show the answer beside those that were found.

    A file with several findings is listed. Exits with 1 if the server did not answer.
    """
    from strop.evals.findings import find_findings

    found = find_findings(finding)
    if url is None and stack is None:
        _list(found, as_json)
        return
    if url is not None and stack is not None:
        raise typer.BadParameter("--url and --stack exclude each other: give one.")
    if len(found) != 1:
        _list(found, as_json)
        complaints.print(
            f"{finding} holds {len(found)} findings: name one of them as FILE:ID.",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(2)
    if stack is not None:
        with _served(stack) as (address, manifest):
            answers = asyncio.run(_ask(found[0], address, manifest.served_model, times))
    else:
        assert url is not None
        answers = asyncio.run(_ask(found[0], url, None, times))
    if as_json:
        for answer in answers:
            sys.stdout.write(json.dumps(asdict(answer)) + "\n")
    else:
        _show(answers)
    if any(answer.outcome.error for answer in answers):
        raise typer.Exit(1)


async def _ask(finding: "Finding", url: str, model: str | None, times: int) -> "list[Replayed]":
    from strop.evals.findings import replay_finding
    from strop.pipelines.commands.replay import model_to_ask

    asked = await model_to_ask(url, model)
    return [await replay_finding(finding, url, model=asked) for _ in range(times)]


@contextmanager
def _served(path: Path) -> "Iterator[tuple[str, Stack]]":
    """The URL of one replica of a Stack, for the duration of a `with` block."""
    from strop.serving.engine import cores_of_replica, engine_command, engine_environment
    from strop.serving.home import home
    from strop.serving.process import Child, free_port
    from strop.serving.stack import Stack

    manifest, port = Stack.load(path), free_port()
    child = Child.start(
        "engine",
        engine_command(manifest, "127.0.0.1", port, capture=False),
        home() / "logs" / "eval-replay.log",
        engine_environment(manifest, 1, cores_of_replica(0, 1), None),
    )
    try:
        with complaints.status(f"starting {manifest.served_model} ({manifest.fingerprint[:12]})"):
            child.wait_until_answers(f"http://127.0.0.1:{port}/health", _START_S)
        yield f"http://127.0.0.1:{port}", manifest
    finally:
        child.stop()


def _list(findings: "list[Finding]", as_json: bool) -> None:
    from strop.evals.findings import finding_id

    rows = [
        {"id": finding_id(f), "kind": f.kind, "arm": f.arm, "request": f.request_id, "detail": f.detail}
        for f in findings
    ]
    if as_json:
        sys.stdout.write("".join(json.dumps(row) + "\n" for row in rows))
        return
    table = Table("id", "kind", "arm", "request", "detail")
    for row in rows:
        table.add_row(*map(_plain, row.values()))
    console.print(table if rows else "No findings in it.")


def _show(answers: "list[Replayed]") -> None:
    finding = answers[0].finding
    console.print(
        f"{finding.kind} by the {finding.arm} ({finding.stack[:12]}), request {finding.request_id}: {finding.detail}",
        markup=False,
        soft_wrap=True,
    )
    _titled(f"What the {finding.arm} answered then", finding.answer)
    if finding.other:
        _titled("What the other answered then", finding.other)
    for number, answer in enumerate(answers, 1):
        outcome = answer.outcome
        _titled(
            f"Answer {number} now: {outcome.output_tokens} tokens, finish {outcome.finish_reason}",
            outcome.error or _said(outcome.text, outcome.tool_calls),
        )
    if len(answers) > 1:
        said = {(_said(a.outcome.text, a.outcome.tool_calls), a.outcome.error) for a in answers}
        console.print(f"{len(said)} different answers in {len(answers)}.")


def _said(text: str, tool_calls: list[dict[str, object]]) -> str:
    calls = [json.dumps(call.get("function"), ensure_ascii=False) for call in tool_calls]
    return "\n".join([text, *calls])


def _titled(title: str, text: str) -> None:
    console.rule(_plain(title), align="left")
    console.print(_visible(text) or "(nothing)", markup=False, soft_wrap=True)


def _visible(text: str) -> str:
    """Control characters as escapes: what an answer holds must not reach the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(_visible(text))
