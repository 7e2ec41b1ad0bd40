"""The report of one loop: a single HTML page that needs nothing but itself."""

import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import jinja2
import numpy as np
from markupsafe import Markup
from pydantic import BaseModel, ConfigDict

from strop.evals.verdict import Comparison, Verdict
from strop.pipelines import charts
from strop.pipelines.charts import Series


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Stage(_Frozen):
    """One stage of the loop as it went."""

    name: str
    status: str
    """`done`, `failed`, `skipped` or `resumed`."""
    seconds: float | None = None
    detail: str = ""


class TraceCounts(_Frozen):
    """How much traffic one split holds."""

    split: str
    requests: int
    sessions: int
    output_tokens: int


class Learned(_Frozen):
    """What a learner came back with: a candidate, or a reason for none."""

    learner: str
    cost_s: float
    declined: str | None = None
    expects: dict[str, float] = {}
    notes: dict[str, Any] = {}
    """JSON types. `curve` (a list of {step, loss, validation_loss, acceptance, acceptance_length}) is drawn."""


class RolloutEvent(_Frozen):
    """One step of the rollout; weights are shares of sessions from 0 to 1."""

    at_s: float
    event: str
    champion_weight: float
    candidate_weight: float
    detail: str = ""


class Lineage(_Frozen):
    """Fingerprints before and after, and what the candidate changes."""

    champion_before: str
    candidate: str | None
    champion_after: str
    diff: dict[str, tuple[Any, Any]] = {}
    """As `Stack.diff` gives it: dotted path -> (champion, candidate)."""


class ReportData(_Frozen):
    """Everything the report shows. Text in it is untrusted and escaped."""

    loop_id: str
    started_at: datetime
    ended_at: datetime
    outcome: Literal["promoted", "taken back", "refused", "no candidate", "failed"]
    reason: str
    stages: tuple[Stage, ...]
    traces: tuple[TraceCounts, ...]
    learned: tuple[Learned, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    rollout: tuple[RolloutEvent, ...] = ()
    lineage: Lineage
    places: dict[str, str] = {}
    """Where things are: name -> path or address, shown as text."""
    conditions: str = ""
    """Machine and engine the figures were measured on, in one line."""


_HEADLINES = {
    "promoted": "The candidate now serves all traffic.",
    "taken back": "The candidate was taken back; the champion serves on.",
    "refused": "The candidate was refused; the champion serves on.",
    "no candidate": "Nothing was proposed; the champion serves on.",
    "failed": "The loop failed; the champion serves on.",
}

# Name in words, unit shown, factor to that unit.
_METRICS = {
    "inter_token_s": ("Time per output token", "ms", 1000.0),
    "ttft_s": ("Time to first token", "ms", 1000.0),
    "e2e_s": ("Time per request", "s", 1.0),
    "decode_tokens_per_s": ("Decode speed", "tokens/s", 1.0),
    "throughput_tokens_per_s": ("Output speed, whole requests", "tokens/s", 1.0),
    "acceptance_length": ("Acceptance length", "tokens/step", 1.0),
}


def render(data: ReportData) -> str:
    """The page as HTML: no script, no resource but itself, every text escaped."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(seconds=seconds_words, number=_number, value=_value)
    template = environment.from_string(Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8"))
    verdict = data.verdicts[-1] if data.verdicts else None
    slowest = max((stage.seconds or 0 for stage in data.stages), default=0) or 1
    return template.render(
        style=style(),
        data=data,
        headline=_headline(data.outcome, verdict),
        tone={"promoted": "good", "no candidate": "plain"}.get(data.outcome, "bad"),
        tiles=_tiles(verdict) if verdict else [],
        latencies=_latencies(verdict) if verdict else [],
        acceptance=_acceptance(verdict, data.learned) if verdict else None,
        curves=[(learned.learner, chart) for learned in data.learned for chart in _curves(learned)],
        verdicts=[(each, _rows(each)) for each in data.verdicts],
        stages=[(stage, 100 * (stage.seconds or 0) / slowest) for stage in data.stages],
        weights=_weights(data.rollout),
    )


def style() -> Markup:
    """The style sheet of all reports, to be put into the page itself."""
    return Markup(Path(__file__).with_name("report.css").read_text(encoding="utf-8"))


def _headline(outcome: str, verdict: Verdict | None) -> str:
    decode = (
        [c for c in verdict.comparisons if (c.metric, c.slice) == ("decode_tokens_per_s", "all")]
        if verdict
        else []
    )
    if outcome == "promoted" and decode and _tone(decode[0]) == "good":
        return f"The candidate now serves all traffic, decoding {decode[0].ratio:.2f} times as fast."
    return _HEADLINES[outcome]


def _tiles(verdict: Verdict) -> list[dict[str, str]]:
    """The three big numbers: (title, number, what it says)."""
    tiles = []
    found = {c.metric: c for c in verdict.comparisons if c.slice == "all"}
    if decode := found.get("decode_tokens_per_s"):
        tiles.append(
            {
                "title": "Decode speed",
                "number": f"{decode.ratio:.2f}×",
                "interval": f"{decode.ratio_low:.2f} to {decode.ratio_high:.2f}",
                "note": f"{_number(decode.champion)} → {_number(decode.candidate)} tokens/s",
            }
        )
    if acceptance := found.get("acceptance_length"):
        tiles.append(
            {
                "title": "Acceptance length",
                "number": f"{acceptance.candidate:.2f}",
                "interval": "",
                "note": f"tokens per target step, bonus token counted; champion {acceptance.champion:.2f}",
            }
        )
    if latency := found.get("e2e_s"):
        tiles.append(
            {
                "title": "Time per request",
                "number": f"{latency.ratio:.2f}×",
                "interval": f"{latency.ratio_low:.2f} to {latency.ratio_high:.2f}",
                "note": f"{seconds_words(latency.champion)} → {seconds_words(latency.candidate)} on average",
            }
        )
    return tiles


def _latencies(verdict: Verdict) -> list[dict[str, Any]]:
    found = []
    for metric in ("inter_token_s", "ttft_s"):
        name, unit, factor = _METRICS[metric]
        series = [
            Series(
                stack,
                stack,
                [factor * row[metric] for row in _rows_of(verdict, stack) if row[metric] is not None],
            )
            for stack in ("champion", "candidate")
        ]
        if all(s.values for s in series):
            quantiles = [[float(np.quantile(s.values, q)) for s in series] for q in (0.5, 0.9)]
            found.append(
                {"title": name, "unit": unit, "chart": charts.ecdf(series, unit), "quantiles": quantiles}
            )
    return found


def _rows_of(verdict: Verdict, stack: str) -> list[dict[str, Any]]:
    return [row for row in verdict.samples if row["stack"] == stack and not row["error"]]


def _acceptance(verdict: Verdict, learned: Sequence[Learned]) -> dict[str, Any] | None:
    """Share of steps that accepted the draft at each position: measured, and predicted in training."""
    series = [
        Series("champion", "champion", _by_position(_rows_of(verdict, "champion"))),
        Series("measured", "candidate", _by_position(_rows_of(verdict, "candidate"))),
        Series("predicted", "predicted", _predicted(learned)),
    ]
    present = [s for s in series if s.values]
    if not any(s.style == "candidate" for s in present):
        return None
    positions = [str(i + 1) for i in range(max(len(s.values) for s in present))]
    return {
        "series": present,
        "chart": charts.bars(present, positions, "position in the draft", charts.NARROW),
    }


def _by_position(rows: Sequence[dict[str, Any]]) -> list[float]:
    drafted = [row for row in rows if row["steps"] and row["accepted_by_position"]]
    steps = sum(row["steps"] for row in drafted)
    longest = max((len(row["accepted_by_position"]) for row in drafted), default=0)
    padded = [[*row["accepted_by_position"], *[0] * longest][:longest] for row in drafted]
    return [sum(column) / steps for column in zip(*padded, strict=True)]


def _curve(learned: Learned) -> list[dict[str, Any]]:
    curve = learned.notes.get("curve")
    return [p for p in curve if isinstance(p, dict) and "step" in p] if isinstance(curve, list) else []


def _predicted(learned: Sequence[Learned]) -> list[float]:
    points = [p for each in learned for p in _curve(each) if p.get("acceptance")]
    best = max(points, key=lambda p: p.get("acceptance_length") or sum(p["acceptance"]), default=None)
    return [float(share) for share in best["acceptance"]] if best else []


def _curves(learned: Learned) -> list[dict[str, Any]]:
    """Charts of the learning curve: predicted acceptance length, and losses."""
    found = []
    for title, names in (
        ("Predicted acceptance length", {"acceptance_length": ("held-out", "candidate")}),
        ("Loss", {"loss": ("training", "champion"), "validation_loss": ("held-out", "candidate")}),
    ):
        curve = _curve(learned)
        shown = [n for n in names if curve and n in curve[-1]]
        points = [p for p in curve if all(_finite(p.get(n)) for n in shown)]
        series = [Series(names[n][0], names[n][1], [float(p[n]) for p in points]) for n in shown]
        if series and len(points) > 1:
            chart = charts.lines(series, [float(p["step"]) for p in points], "training step", charts.NARROW)
            found.append({"title": title, "series": series, "chart": chart})
    return found


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _rows(verdict: Verdict) -> list[dict[str, Any]]:
    """The table of comparisons, grouped by metric, each with its interval drawn on one common scale."""
    ends = [abs(math.log(v)) for c in verdict.comparisons for v in (c.ratio_low, c.ratio_high) if v > 0]
    reach = math.exp(min(max([*ends, math.log(1.25)]) * 1.05, math.log(10)))
    rows = []
    for comparison in sorted(verdict.comparisons, key=lambda c: list(_METRICS).index(c.metric)):
        name, unit, factor = _METRICS[comparison.metric]
        tone = _tone(comparison)
        rows.append(
            {
                "first": not rows or rows[-1]["name"] != name,
                "name": name,
                "unit": unit,
                "slice": comparison.slice,
                "requests": comparison.requests,
                "champion": _number(factor * comparison.champion),
                "candidate": _number(factor * comparison.candidate),
                "comparison": comparison,
                "tone": tone,
                "chart": charts.interval(
                    comparison.ratio_low, comparison.ratio, comparison.ratio_high, reach, tone
                ),
            }
        )
    return rows


def _tone(comparison: Comparison) -> str:
    if comparison.ratio_low <= 1 <= comparison.ratio_high:
        return "open"
    return "good" if (comparison.ratio_low > 1) == (comparison.better == "higher") else "bad"


def _weights(rollout: Sequence[RolloutEvent]) -> str:
    times, shares = [event.at_s for event in rollout], [event.candidate_weight for event in rollout]
    return charts.weights(times, shares, max(times, default=0) * 1.04)


def seconds_words(value: float | None) -> str:
    if value is None:
        return "–"
    if 0 < value < 1:
        return f"{1000 * value:.0f} ms"
    if value < 120:
        return f"{value:.3g} s"
    if value < 7200:
        return f"{value // 60:.0f} min {value % 60:02.0f} s"
    return f"{value // 3600:.0f} h {value % 3600 // 60:02.0f} min"


def _number(value: float) -> str:
    """Three significant digits, plain notation, thousands apart."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 6)}f}"


def _value(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return _number(value)
    text = str(value)
    is_digest = len(text) == 64 and set(text) <= set("0123456789abcdef")
    return text[:12] if is_digest else text
