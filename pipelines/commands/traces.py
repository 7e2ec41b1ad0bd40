"""`strop traces`: look at what was served, and take it elsewhere."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from strop.pipelines.commands import datasets, upkeep
from strop.serving.home import home, write_atomic

if TYPE_CHECKING:
    from strop.serving.traces import Trace, TraceStore

app = typer.Typer(help="Look at recorded requests, export and delete them.", no_args_is_help=True)
app.command()(upkeep.delete)
app.command()(upkeep.prune)
app.add_typer(datasets.app, name="dataset")
console = Console()
complaints = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
SELECTABLE = ("tenant", "session", "stack", "endpoint", "model", "status")


@app.command("ls")
def list_files(as_json: AsJson = False) -> None:
    """Days and Stacks that traces exist of."""
    import pyarrow.parquet as pq

    groups: dict[tuple[str, str], dict[str, int]] = {}
    for path in _store().files():
        day, stack = (part.partition("=")[2] for part in path.parts[-3:-1])
        group = groups.setdefault((day, stack), {"files": 0, "rows": 0, "bytes": 0})
        try:
            group["bytes"] += path.stat().st_size
            group["files"] += 1
            group["rows"] += pq.read_metadata(path).num_rows
        except (OSError, ValueError) as error:
            complaints.print(f"{path} cannot be read: {error}", markup=False)
    rows = [{"day": day, "stack": stack, **group} for (day, stack), group in sorted(groups.items())]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table("day", "Stack")
    for name in ("files", "rows", "bytes"):
        table.add_column(name, justify="right")
    for row in rows:
        numbers = (f"{row[name]:,}" for name in ("files", "rows", "bytes"))
        table.add_row(row["day"], row["stack"], *numbers)
    console.print(table if rows else f"No traces in {_root()} yet.")


@app.command()
def show(request_id: str, as_json: AsJson = False) -> None:
    """One request: what was asked, what was answered, and how fast."""
    from strop.serving.traces import to_jsonable

    found = [to_jsonable(trace) for trace in _scan(lambda trace: trace.request_id == request_id)]
    if not found:
        _fail(
            f"No trace has the request id {request_id!r}. An answer carries its id in the header X-Request-Id."
        )
    if as_json:
        for record in found:
            typer.echo(json.dumps(record, ensure_ascii=False))
        return
    for record in found:
        table = Table("field", "value", title=request_id, show_lines=True)
        for name, value in record.items():
            if value not in (None, []):
                table.add_row(name, _shown(value))
        console.print(table)


@app.command()
def stats(as_json: AsJson = False) -> None:
    """Requests, tokens, latency, cache use and acceptance length of every Stack."""
    groups: dict[str, list[Trace]] = {}
    for trace in _scan():
        groups.setdefault(trace.stack, []).append(trace)
    rows = [{"stack": stack, **summary(traces)} for stack, traces in groups.items()]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    if not rows:
        console.print(f"No traces in {_root()} yet.")
        return
    table = Table("", *(str(row["stack"])[:12] for row in rows))
    for name in rows[0]:
        if name != "stack":
            table.add_row(name, *(_number(row[name]) for row in rows))
    console.print(table)


@app.command()
def export(
    out: Annotated[Path, typer.Argument(help="JSONL file to write.")],
    where: Annotated[str, typer.Option(help=f"Comma-separated field=value of {', '.join(SELECTABLE)}.")] = "",
) -> None:
    """Chats with their answers as OpenAI chat JSONL, one object a line."""
    matches = selection(where)
    traces = list(_scan(matches))
    lines = [json.dumps(chat, ensure_ascii=False) + "\n" for chat in map(chat_of, traces) if chat]
    try:
        write_atomic(out, "".join(lines))
    except OSError as error:
        _fail(f"{out} cannot be written: {error.strerror}.")
    left_out = len(traces) - len(lines)
    console.print(
        f"{len(lines)} chats in {out}"
        + (f"; {left_out} failed, were not chats or hold no content." if left_out else ".")
    )


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="JSON lines, JSON, Parquet, or a log of vLLM.")],
    kind: Annotated[str, typer.Option("--format", help="auto, openai, sharegpt, otel or vllm.")] = "auto",
    model: Annotated[
        Path | None, typer.Option(help="Folder of the model that tokenises (default: strop.yaml's).")
    ] = None,
    tenant: Annotated[str, typer.Option(help="Tenant that the traces get.")] = "imported",
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Configuration file (default: ./strop.yaml).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Add conversations from elsewhere as traces; those that are there already are left as they are."""
    from dataclasses import asdict

    from rich.progress import Progress

    from strop.pipelines.importing import import_file
    from strop.pipelines.settings import load_settings
    from strop.serving.formats import FORMATS

    if kind not in ("auto", *FORMATS):
        raise typer.BadParameter(f"{kind!r} is not auto, {', '.join(FORMATS)}.")
    settings = load_settings(config)
    with Progress(console=complaints) as bar:
        task = bar.add_task(file.name, total=1.0)
        folder, address = model or settings.model_path, settings.serving.ray_address
        found = import_file(
            home(), file, kind, folder, tenant, address, lambda done: bar.update(task, completed=done)
        )
    if as_json:
        typer.echo(json.dumps({**asdict(found), "set_aside": str(found.set_aside or "") or None}))
        return
    console.print(f"{found.added:,} traces added, {found.known:,} were there, {found.bad:,} bad rows.")
    for reason, count in list(found.reasons.items())[:10]:
        console.print(f"  {count:,}: {reason}", markup=False)
    if found.set_aside:
        console.print(f"Set aside in {found.set_aside}", markup=False)


def selection(where: str) -> "Callable[[Trace], bool]":
    """Predicate of `field=value,field=value`; a Stack matches by any prefix. Raises typer.BadParameter."""
    wanted: dict[str, str] = {}
    for part in filter(None, where.split(",")):
        name, equals, value = part.partition("=")
        if not equals or name not in SELECTABLE:
            raise typer.BadParameter(f"{part!r} is not field=value with a field of {', '.join(SELECTABLE)}.")
        wanted[name] = value

    def matches(trace: "Trace") -> bool:
        here = {name: str(getattr(trace, name)) for name in wanted}
        return all(here[n].startswith(v) if n == "stack" else here[n] == v for n, v in wanted.items())

    return matches


def chat_of(trace: "Trace") -> dict[str, Any] | None:
    """The conversation with the first answer as its last message; None for failures, plain completions and no content."""
    if trace.endpoint != "chat" or trace.error or not trace.choices or not trace.has_content:
        return None
    choice = trace.choices[0]
    answer: dict[str, Any] = {"role": "assistant", "content": choice.text}
    if choice.tool_calls:
        answer["tool_calls"] = json.loads(choice.tool_calls)
    chat: dict[str, Any] = {"messages": [*json.loads(trace.messages), answer]}
    if trace.format and (tools := json.loads(trace.format).get("tools")):
        chat["tools"] = tools
    return chat


def summary(traces: "Iterable[Trace]") -> dict[str, float | int | None]:
    """Figures of some traces; None where nothing was measured. Times in seconds."""
    import numpy as np

    def percentile(values: list[float], percent: int) -> float | None:
        return round(float(np.percentile(values, percent)), 6) if values else None

    traces = list(traces)
    ttft = [t.ttft_s for t in traces if t.ttft_s is not None]
    gaps = [gap for t in traces for gap in t.inter_token_s]
    cached = [(t.cached_tokens, len(t.prompt_token_ids)) for t in traces if t.cached_tokens is not None]
    prompt_tokens_with_cache = sum(total for _, total in cached)
    drafts = [t.speculation for t in traces if t.speculation]
    steps = sum(d.steps for d in drafts)
    return {
        "requests": len(traces),
        "errors": sum(t.error is not None for t in traces),
        "sessions": len({(t.tenant, t.session) for t in traces}),
        "tenants": len({t.tenant for t in traces}),
        "prompt_tokens": sum(len(t.prompt_token_ids) for t in traces),
        "output_tokens": sum(len(choice.token_ids) for t in traces for choice in t.choices),
        "ttft_p50_s": percentile(ttft, 50),
        "ttft_p95_s": percentile(ttft, 95),
        "inter_token_p50_s": percentile(gaps, 50),
        "inter_token_p95_s": percentile(gaps, 95),
        "cached_share": sum(c for c, _ in cached) / prompt_tokens_with_cache
        if prompt_tokens_with_cache
        else None,
        "acceptance_length": 1 + sum(d.accepted for d in drafts) / steps if steps else None,
    }


def _root() -> Path:
    return home() / "traces"


def _store() -> "TraceStore":
    from strop.serving.journal import recover
    from strop.serving.traces import TraceStore

    recovered = recover(_root())
    if recovered.torn:
        complaints.print(
            f"{recovered.torn} torn lines were set aside in {_root() / 'quarantine'}.", markup=False
        )
    return TraceStore(_root())


def _scan(where: "Callable[[Trace], bool]" = lambda _: True) -> "Iterator[Trace]":
    return _store().scan(where, lambda _, problem: complaints.print(f"Set aside: {problem}", markup=False))


def _fail(message: str) -> NoReturn:
    complaints.print(message, style="red", markup=False)
    raise typer.Exit(2)


def _shown(value: Any) -> str:
    from rich.markup import escape

    return escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _number(value: float | int | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
