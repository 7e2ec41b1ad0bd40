"""`strop replay`: send traffic to a running server and show how it is served."""

import asyncio
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from strop.serving.arrivals import ArrivalsError, load_arrivals, poisson, scaled
from strop.serving.client import Outcome, auth_headers
from strop.serving.home import write_atomic
from strop.serving.replay import Percentiles, Summary, summarise
from strop.serving.replay import replay as play
from strop.serving.sessions import Session, WorkloadError, load_jsonl
from strop.serving.source_code import SourceError
from strop.serving.workload import code_assistant

DEFAULT_SESSIONS = 40
DEFAULT_CONCURRENCY = 8
REFRESH_S = 1.0
LIVE_REQUESTS = 256
"""The live table sums up this many of the latest requests: cheap enough not to disturb what it measures."""


class ReplayError(RuntimeError):
    """Nothing can be sent; the message says why and what to do."""


@dataclass(slots=True)
class Heard:
    """What the replay has told so far: (kind, turn, outcome) of every answered request."""

    rows: list[tuple[str, int, Outcome]] = field(default_factory=list)
    started: int = 0

    def on_start(self, session: Session, turn: int) -> None:
        self.started += 1

    def on_outcome(self, session: Session, turn: int, outcome: Outcome) -> None:
        self.rows.append((session.turns[turn].kind, turn, outcome))

    @property
    def outcomes(self) -> list[Outcome]:
        return [outcome for _, _, outcome in self.rows]


def replay(
    url: Annotated[str, typer.Option(help="Server to send to.")] = "http://127.0.0.1:8000",
    workload: Annotated[
        str, typer.Option(help="code-assistant, or a JSONL file of OpenAI requests.")
    ] = "code-assistant",
    sessions: Annotated[
        int | None,
        typer.Option(min=1, help=f"Most sessions to play; {DEFAULT_SESSIONS} unless --minutes is given."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the workload and of --rate.")] = 0,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help=f"Sessions at once; {DEFAULT_CONCURRENCY} by default.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Sessions to start a second, at random times.")] = None,
    arrivals: Annotated[
        Path | None, typer.Option(help="Start sessions when requests came in this Mooncake or Azure trace.")
    ] = None,
    scale: Annotated[float, typer.Option(help="How many times as fast as --arrivals was recorded.")] = 1.0,
    minutes: Annotated[float | None, typer.Option(help="Start no request after this time.")] = None,
    model: Annotated[str | None, typer.Option(help="Model to ask for; else the one that is served.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out bad lines of a file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write one JSON line a request to this file.")] = None,
) -> None:
    """Send a workload to a server: every request is answered, measured and summed up.

    Exits with 1 if a request failed, with 2 if nothing could be sent.
    """
    console = Console(stderr=as_json, highlight=False)
    heard = Heard()
    try:
        if sum(choice is not None for choice in (concurrency, rate, arrivals)) > 1:
            raise ReplayError("--concurrency, --rate and --arrivals exclude each other: give one")
        times = _times(rate, arrivals, scale, seed)
        asked = asyncio.run(model_to_ask(url, model))
        limit = sessions or (sys.maxsize if minutes is not None else DEFAULT_SESSIONS)
        if workload == "code-assistant":
            scripts = code_assistant(seed, limit, asked)
        else:
            scripts = islice(_from_file(Path(workload), asked, skip_bad, console), limit)
        asyncio.run(
            _play_and_show(
                url,
                scripts,
                None if times is not None else concurrency or DEFAULT_CONCURRENCY,
                times,
                minutes * 60 if minutes is not None else None,
                heard,
                console,
            )
        )
    except (ReplayError, WorkloadError, ArrivalsError, SourceError) as error:
        console.print(f"[red]{escape(str(error))}[/red]")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        console.print("Stopped. Requests under way were cancelled and are not counted.")
    finally:
        if out is not None and heard.rows:
            write_atomic(out, "".join(_line(*row) for row in heard.rows))
    summary = summarise(heard.outcomes)
    if as_json:
        sys.stdout.write(json.dumps(asdict(summary)) + "\n")
    else:
        console.print(_table(heard.rows, _headline(heard, summary)))
    for reason, times_seen in Counter(o.error for o in heard.outcomes if o.error).most_common(5):
        console.print(f"[red]{times_seen} failed: {escape(reason)}[/red]")
    if summary.errors or not summary.requests:
        raise typer.Exit(1)


async def model_to_ask(url: str, model: str | None) -> str:
    """The model that `url` serves, or `model` if it is among those. Raises ReplayError."""
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
            response = await client.get(f"{url.rstrip('/')}/v1/models", headers=auth_headers())
            response.raise_for_status()
            served = [entry["id"] for entry in response.json()["data"]]
    except httpx.HTTPStatusError as error:
        way_out = " Set STROP_API_KEY." if error.response.status_code in (401, 403) else ""
        raise ReplayError(f"{url}/v1/models answers {error.response.status_code}.{way_out}") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise ReplayError(f"Nothing answers at {url} ({reason}). Run `strop serve` or give --url.") from None
    except (ValueError, KeyError, TypeError):
        raise ReplayError(f"{url}/v1/models is not an OpenAI model list. Give --url of the server.") from None
    if not served:
        raise ReplayError(f"{url} serves no model")
    if model is not None and model not in served:
        raise ReplayError(f"{url} does not serve {model}. Give --model one of: {', '.join(served)}")
    return model or served[0]


def _times(rate: float | None, arrivals: Path | None, scale: float, seed: int) -> Iterable[float] | None:
    if rate is not None:
        return poisson(rate, seed)
    return scaled(load_arrivals(arrivals), scale) if arrivals is not None else None


def _from_file(path: Path, model: str, skip_bad: bool, console: Console) -> Iterator[Session]:
    bad: list[WorkloadError] = []
    found = load_jsonl(path, model=model, on_bad=bad.append if skip_bad else None)
    if bad:
        console.print(f"{len(bad)} bad lines left out, the first: {escape(str(bad[0]))}")
    return iter(found)


async def _play_and_show(
    url: str,
    scripts: Iterable[Session],
    concurrency: int | None,
    times: Iterable[float] | None,
    stop_after_s: float | None,
    heard: Heard,
    console: Console,
) -> None:
    playing = asyncio.create_task(
        play(
            url,
            scripts,
            concurrency=concurrency,
            arrivals=times,
            stop_after_s=stop_after_s,
            on_start=heard.on_start,
            on_outcome=heard.on_outcome,
        )
    )
    try:
        if console.is_terminal:
            with Live(console=console, auto_refresh=False, transient=True) as live:
                while not playing.done():
                    latest = heard.rows[-LIVE_REQUESTS:]
                    headline = _headline(heard, summarise([outcome for _, _, outcome in latest]))
                    live.update(_table(latest, headline), refresh=True)
                    await asyncio.wait([playing], timeout=REFRESH_S)
        await playing
    finally:
        playing.cancel()


def _headline(heard: Heard, summary: Summary) -> str:
    failed = sum(outcome.error is not None for _, _, outcome in heard.rows)
    parts = [f"{len(heard.rows)} requests", f"{failed} failed"]
    if running := heard.started - len(heard.rows):
        parts.append(f"{running} running")
    parts.append(f"{summary.output_tok_s:.1f} output tok/s, {summary.prompt_tok_s:.0f} prompt tok/s")
    if summary.cached_share is not None:
        parts.append(f"{summary.cached_share:.0%} of prompt cached")
    return ", ".join(parts)


def _table(rows: Sequence[tuple[str, int, Outcome]], headline: str) -> Table:
    """One line a kind of request, and one for all."""
    by_kind: defaultdict[str, list[Outcome]] = defaultdict(list)
    for kind, _, outcome in rows:
        by_kind[kind].append(outcome)
    table = Table(title=headline, title_justify="left")
    table.add_column("kind")
    for name in ("requests", "failed", "TTFT p50/p95 ms", "inter-token p50/p95 ms", "per token p50 ms"):
        table.add_column(name, justify="right")
    table.add_column("tokens in/out", justify="right")
    table.add_column("AL", justify="right")
    for kind in sorted(by_kind):
        table.add_row(*_cells(kind, by_kind[kind]))
    if len(by_kind) > 1:
        table.add_section()
        table.add_row(*_cells("all", [outcome for _, _, outcome in rows]))
    return table


def _cells(kind: str, outcomes: list[Outcome]) -> list[str]:
    summary = summarise(outcomes)
    whole = summary.requests - summary.errors
    mean_tokens = f"{summary.prompt_tokens / whole:.0f}/{summary.output_tokens / whole:.0f}" if whole else "-"
    return [
        kind,
        str(summary.requests),
        str(summary.errors),
        _ms(summary.ttft_s),
        _ms(summary.inter_token_s),
        f"{summary.token_s.p50 * 1000:.1f}" if summary.token_s else "-",
        mean_tokens,
        f"{summary.acceptance_length:.2f}" if summary.acceptance_length is not None else "-",
    ]


def _ms(percentiles: Percentiles | None) -> str:
    return f"{percentiles.p50 * 1000:.0f}/{percentiles.p95 * 1000:.0f}" if percentiles else "-"


def _line(kind: str, turn: int, outcome: Outcome) -> str:
    return json.dumps({"kind": kind, "turn": turn, **asdict(outcome)}) + "\n"
