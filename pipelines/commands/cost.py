"""`strop cost`: what the recorded traffic costs, by hour of the day, and whether an API would cost less."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from strop.serving.home import home

if TYPE_CHECKING:
    from strop.evals.cost import Bill, HourOfDay, Usage
    from strop.evals.settings import CostSettings
    from strop.pipelines.settings import Settings
    from strop.serving.traces import Trace

console = Console()
complaints = Console(stderr=True)


class CostError(RuntimeError):
    """Nothing can be reckoned; the message says what is missing."""


def cost(
    price_per_hour: Annotated[
        float | None, typer.Option(help="Of one machine, in any currency; all prices in the same.", min=0)
    ] = None,
    machines: Annotated[int | None, typer.Option(help="Machines that serve.", min=1)] = None,
    api_input: Annotated[
        float | None, typer.Option(help="API price of a million input tokens.", min=0)
    ] = None,
    api_cached: Annotated[
        float | None, typer.Option(help="The same for cached input tokens; full price if not given.", min=0)
    ] = None,
    api_output: Annotated[
        float | None, typer.Option(help="API price of a million output tokens.", min=0)
    ] = None,
    imported: Annotated[
        bool, typer.Option("--imported", help="Of imported traffic, instead of what was served here.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Configuration file (default: ./strop.yaml).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """What a request, a session and a completed task cost, and when machines of one's own beat an API.

    Prices come from `cost:` of the configuration where no option gives them. Failed attempts and repeated
    ones are paid for, so they count in the cost of what was completed in the end.
    """
    from strop.evals.settings import CostSettings
    from strop.pipelines.settings import load_settings

    settings = load_settings(config)
    given = {
        "price_per_hour": price_per_hour,
        "machines": machines,
        "api_input": api_input,
        "api_cached": api_cached,
        "api_output": api_output,
    }
    changed = {name: value for name, value in given.items() if value is not None}
    prices = CostSettings.model_validate({**settings.cost.model_dump(), **changed})
    if prices.price_per_hour is None:
        raise CostError("No price is known: give --price-per-hour, or cost.price_per_hour in strop.yaml.")
    result = reckon(_traces(imported), prices, 1.0 if imported else settings.serving.capture.sample_rate)
    if not imported:
        result["promotions"] = _promotions(settings, prices, result)
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        _show(result)


def reckon(traces: Sequence["Trace"], prices: "CostSettings", sample_rate: float = 1.0) -> dict[str, Any]:
    """All that traces and prices say, as JSON types. Raises CostError if there is no trace."""
    from strop.evals import cost as costs

    attempts = [costs.attempt(trace) for trace in traces]
    if not attempts:
        raise CostError(f"There is no recorded traffic in {home() / 'traces'} to reckon with.")
    start_us = min(one.started_us for one in attempts)
    # A window that is empty would have no cost to divide.
    end_us = max(start_us + 1, max(max(one.ended_us, one.started_us + 1) for one in attempts))
    hours = costs.by_hour(attempts, start_us, end_us)
    whole: Bill = costs.bill(attempts, start_us, end_us, prices, sample_rate)
    usage: Usage = whole.usage
    of_day: Sequence[HourOfDay] = costs.by_hour_of_day(hours, prices, sample_rate)
    return {
        "prices": prices.model_dump(),
        "hours": usage.length_us / costs.HOUR_US,
        "sample_rate": sample_rate,
        "requests_per_day": usage.requests / sample_rate * 24 * costs.HOUR_US / usage.length_us,
        "busy_share": usage.busy_share,
        "at_once": usage.at_once,
        "bill": asdict(whole),
        "by_hour_of_day": [
            {**asdict(hour), "dedicated_is_cheaper": hour.dedicated_is_cheaper} for hour in of_day
        ],
        "break_even_requests_per_hour": costs.break_even(usage, prices),
        "served_requests_per_busy_hour": costs.served_per_hour(usage),
    }


def _traces(imported: bool) -> list["Trace"]:
    from strop.serving.journal import recover
    from strop.serving.traces import IMPORTED, PROBE_TENANT, TraceStore

    root = home() / "traces"
    if root.is_dir():
        recover(root)
    # What was kept for its interest would make the rest of the sample look larger than it is.
    return list(
        TraceStore(root).scan(
            lambda t: (
                t.tenant != PROBE_TENANT and t.kept_for is None and t.stack.startswith(IMPORTED) == imported
            ),
            lambda _, problem: complaints.print(f"Set aside: {problem}", markup=False),
        )
    )


def _promotions(settings: "Settings", prices: "CostSettings", result: dict[str, Any]) -> list[dict[str, Any]]:
    """Every loop that promoted a Stack: what it cost, what it saves, when it has paid for itself."""
    import os

    from strop.evals.cost import payback

    if not (os.environ.get("MLFLOW_TRACKING_URI") or (home() / "mlflow" / "mlflow.db").is_file()):
        return []
    from strop.pipelines.registry import LoopJournal, Registry

    registry = Registry(home(), settings.experiment)
    found = []
    for loop in registry.loops():
        if loop["outcome"] != "promoted":
            continue
        journal = LoopJournal(registry, loop["loop"], loop["run_id"])
        produced_s = sum((s["ended_ms"] - s["started_ms"]) / 1000 for s in journal.stages() if s["ended_ms"])
        verdict = (journal.output("judge") or {}).get("verdict") or {}
        saved = [
            c["champion"] - c["candidate"]
            for c in verdict.get("comparisons", ())
            if (c["metric"], c["slice"]) == ("e2e_s", "all")
        ]
        saved_s = saved[0] if saved else 0.0
        # A request's time is the server's only as far as it does not share the server with others.
        paid = payback(produced_s, saved_s / max(1.0, result["at_once"]), result["requests_per_day"], prices)
        found.append(
            {
                "loop": loop["loop"],
                "seconds": produced_s,
                "saved_s_per_request": saved_s,
                **asdict(paid),
            }
        )
    return found


def _show(result: dict[str, Any]) -> None:
    bill, prices = result["bill"], result["prices"]
    console.print(
        f"{result['hours']:.4g} hours of {prices['machines']} machine(s) cost {bill['cost']:.6g}. They were busy "
        f"{result['busy_share']:.0%} of the time, with {result['at_once']:.3g} requests at once.",
        markup=False,
    )
    if result["sample_rate"] < 1:
        console.print(
            f"{result['sample_rate']:.0%} of the sessions were recorded: amounts are scaled, busy times are not."
        )
    table = Table("what", "number", "cost of each")
    for words, number, key in (
        ("requests, failed ones too", bill["usage"]["requests"], "per_request"),
        ("sessions", bill["sessions"], "per_session"),
        ("tasks completed", bill["completed_tasks"], "per_completed_task"),
        ("sessions that ended well", bill["completed_sessions"], "per_completed_session"),
    ):
        table.add_row(words, f"{number:,}", _amount(bill[key]))
    if bill["api_cost"] is not None:
        table.add_row("tasks completed, by the API", "", _amount(bill["api_per_completed_task"]))
    console.print(table)
    _show_hours(result["by_hour_of_day"])
    if (even := result["break_even_requests_per_hour"]) is not None:
        served = result["served_requests_per_busy_hour"]
        reach = f"; while busy, {served:,.0f} an hour were served" if served else ""
        console.print(
            f"From {even:,.0f} requests of this size an hour on, the machines cost less than the API{reach}."
        )
    else:
        console.print("With --api-input and --api-output the table also says what an API would cost.")
    for one in result.get("promotions", ()):
        days = "does not pay back" if one["days"] is None else f"pays back in {one['days']:.3g} days"
        console.print(
            f"{one['loop']} took {one['seconds']:.0f} s ({one['cost']:.6g}), saves "
            f"{one['saved_s_per_request']:.3g} s a request and {days} at {result['requests_per_day']:,.0f} requests a day.",
            markup=False,
        )


def _show_hours(hours: Sequence[dict[str, Any]]) -> None:
    table = Table("hour UTC", title="a mean hour", title_justify="left")
    for name in ("seen", "requests", "busy", "at once", "machines", "API", "cheaper"):
        table.add_column(name, justify="right")
    for hour in hours:
        if not hour["seen"]:
            continue
        cheaper = {None: "–", True: "machines", False: "API"}[hour["dedicated_is_cheaper"]]
        table.add_row(
            f"{hour['hour']:02}",
            f"{hour['seen']:.3g}",
            f"{hour['requests']:,.1f}",
            f"{hour['busy_share']:.0%}",
            f"{hour['at_once']:.2f}",
            _amount(hour["dedicated"]),
            _amount(hour["api"]),
            cheaper,
        )
    console.print(table)


def _amount(value: float | None) -> str:
    return "–" if value is None else f"{value:.6g}"
