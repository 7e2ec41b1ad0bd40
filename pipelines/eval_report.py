"""The report of one evaluation: HTML that needs nothing but itself, Markdown for pull requests, JSON."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from strop.evals.evaluation import Evaluation, Figure, GateResult, Shown
from strop.evals.gates import Answer
from strop.evals.settings import CostSettings
from strop.evals.speed_summary import Level, LoadCurve
from strop.evals.summary import bound_words, ends_words, estimate_words, gate_words, number
from strop.pipelines import charts
from strop.pipelines.charts import Series
from strop.pipelines.report import seconds_words, style
from strop.serving.home import write_atomic

CHANGED, CHANGED_OF_A_KIND = 8, 3
"""Answers shown side by side, those that differ most first."""
LISTED = 60
"""Findings in the table."""
SAID = 1500
"""Characters of an answer that are shown."""
ID = 60
_TONES: dict[Answer, str] = {"passed": "good", "failed": "bad", "not enough data": "open"}
_HEADLINES: dict[Answer, str] = {
    "passed": "The candidate meets every gate.",
    "failed": "The candidate does not meet its gates.",
    "not enough data": "There is not enough data to say.",
}
_WORDS = re.compile(r"\s+|[^\W_]+|.", re.DOTALL)


def write(evaluation: Evaluation, folder: Path, prices: CostSettings | None = None) -> None:
    """Write `report.html`, `report.md`, `evaluation.json`, and `findings.jsonl` for `strop eval replay`."""
    write_atomic(folder / "report.html", html(evaluation, prices))
    write_atomic(folder / "report.md", markdown(evaluation))
    write_atomic(folder / "evaluation.json", evaluation.model_dump_json(indent=1))
    lines = "".join(finding.model_dump_json() + "\n" for finding in evaluation.findings)
    write_atomic(folder / "findings.jsonl", lines)


def html(evaluation: Evaluation, prices: CostSettings | None = None) -> str:
    """The page: no script, no resource but itself, every text escaped.

    With a price of a machine, throughput under load is shown as cost too.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(seconds=seconds_words, number=number)
    source = Path(__file__).with_name("eval_report.html.j2").read_text(encoding="utf-8")
    required = [gate for gate in evaluation.gates if gate.required]
    watched = [gate for gate in evaluation.gates if not gate.required and gate.figure]
    watched.sort(key=lambda gate: gate.answer != "failed")
    alike, more = _stacks(evaluation)
    changed = _changed(evaluation.findings)
    listed = sorted(evaluation.findings, key=lambda f: (f.arm != "candidate", f.kind))
    errors = sorted({f"{1 - gate.confidence:.0%}" for gate in evaluation.gates}) or ["5%"]
    return environment.from_string(source).render(
        style=style(),
        evaluation=evaluation,
        started=datetime.fromtimestamp(evaluation.started_at, UTC),
        headline=_HEADLINES[evaluation.verdict],
        tone=_TONES[evaluation.verdict],
        stacks=alike,
        more_differences=more,
        gates=[_gate(gate) for gate in required],
        gate_error=" or ".join(errors),
        watched=[_gate(gate) for gate in watched],
        watched_failed=sum(gate.answer == "failed" for gate in watched),
        changed=changed,
        findings=[_finding(finding) for finding in listed[:LISTED]],
        findings_left_out=max(0, len(listed) - LISTED),
        finding_counts=_counts(evaluation.findings),
        curves=list(_curves(evaluation)),
        load=list(_load(evaluation.load)),
        knees=", ".join(_knee(curve) for curve in evaluation.load),
        per_hour=None
        if prices is None or prices.price_per_hour is None
        else prices.price_per_hour * prices.machines,
        groups=list(_groups(evaluation.figures)),
        confidence=f"{evaluation.figures[0].confidence:.0%}" if evaluation.figures else "95%",
    )


def markdown(evaluation: Evaluation) -> str:
    """A comment for a pull request: the verdict, the gates, what was found; the rest is in the page."""
    mark = {"passed": "✅", "failed": "❌", "not enough data": "❔"}
    required = [gate for gate in evaluation.gates if gate.required or gate.answer == "failed"]
    fingerprints = [stack["fingerprint"][:12] for stack in (evaluation.reference, evaluation.candidate)]
    lines = [
        f"### {mark[evaluation.verdict]} strop eval: {evaluation.verdict}",
        "",
        _plain(evaluation.summary),
        "",
        f"Reference `{fingerprints[0]}`, candidate `{fingerprints[1]}`, suite {_plain(evaluation.suite)}, "
        f"{evaluation.traces} held-out requests, {seconds_words(evaluation.seconds)}.",
    ]
    if required:
        lines += ["", "| | gate | slice | reference | candidate | compared (interval) | bound | sessions |"]
        lines.append("|---|---|---|--:|--:|--:|--:|--:|")
        for gate in required:
            row = _gate(gate)
            cells = (
                mark[gate.answer], row["name"], row["slice"], row["reference"], row["candidate"],
                f"{row['estimate']} ({row['interval']})", row["bound"], row["samples"],
            )  # fmt: skip
            lines.append("| " + " | ".join(_plain(str(cell)) for cell in cells) + " |")
    if evaluation.differences:
        lines += ["", "<details><summary>What differs between the two Stacks</summary>", ""]
        for name, (here, there) in list(evaluation.differences.items())[:LISTED]:
            lines.append(f"- {_plain(name)}: {_plain(_short(here))} → {_plain(_short(there))}")
        lines += ["", "</details>"]
    ours = [finding for finding in evaluation.findings if finding.arm == "candidate"]
    if ours:
        lines += ["", f"<details><summary>{_plain(_counts(ours))}</summary>", ""]
        lines += [
            f"- {_plain(f.kind)}, request {_plain(f.request_id[:ID])}: {_plain(f.detail[:300])}"
            for f in ours[:20]
        ]
        lines += ["", "</details>"]
    return "\n".join(lines) + "\n"


def word_diff(here: str, there: str) -> tuple[Markup, Markup]:
    """Both texts escaped, with the words that the other has not marked as `del` and `ins`."""
    ours, theirs = _WORDS.findall(here[:SAID]), _WORDS.findall(there[:SAID])
    left, right = Markup(""), Markup("")
    for kind, a, b, c, d in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        here_part, there_part = _visible("".join(ours[a:b])), _visible("".join(theirs[c:d]))
        if kind == "equal":
            left, right = left + escape(here_part), right + escape(there_part)
            continue
        left += Markup("<del>{}</del>").format(here_part) if here_part else ""
        right += Markup("<ins>{}</ins>").format(there_part) if there_part else ""
    return (
        left + ("…" if len(here) > SAID else ""),
        right + ("…" if len(there) > SAID else ""),
    )


def _stacks(evaluation: Evaluation) -> tuple[list[tuple[str, str, str, bool]], list[tuple[str, str, str]]]:
    """What both are in a few rows, and the leaves that differ besides."""
    stacks = (evaluation.reference, evaluation.candidate)

    def row(name: str, *values: Any) -> tuple[str, str, str, bool]:
        here, there = (_short(value) for value in values)
        return name, here, there, values[0] != values[1]

    rows = [
        ("fingerprint", stacks[0]["fingerprint"], stacks[1]["fingerprint"], bool(evaluation.differences)),
        row("served as", *(s["served_model"] for s in stacks)),
        row("model", *(s["model"]["location"] or s.get("image") for s in stacks)),
        row("quantization", *(s["quantization"] for s in stacks)),
        row("engine", *(f"{s['engine']['version']}, {s['engine']['dtype']}" for s in stacks)),
        row("speculator", *((s["speculator"] or {}).get("method") for s in stacks)),
        row("hardware", *(s["hardware"]["name"] for s in stacks)),
        row("replicas", *(s["topology"]["replicas"] for s in stacks)),
    ]
    more = [(name, _short(a), _short(b)) for name, (a, b) in evaluation.differences.items()]
    return rows, more


def _gate(gate: GateResult) -> dict[str, Any]:
    figure = gate.figure
    return {
        "name": gate.metric if gate.statistic == "mean" else f"{gate.metric}, {gate.statistic}",
        "words": gate_words(gate),
        "slice": gate.slice,
        "reference": "–" if figure is None or figure.reference is None else number(figure.reference),
        "candidate": "–" if figure is None else number(figure.candidate),
        "estimate": "–" if figure is None else estimate_words(figure),
        "interval": "–" if figure is None else ends_words(figure),
        "bound": f"{'≥' if gate.side == 'at least' else '≤'} {bound_words(gate)}",
        "samples": f"{figure.samples if figure else 0}"
        + (f" of {gate.min_samples}" if figure is None or figure.samples < gate.min_samples else ""),
        "answer": gate.answer,
        "answer_in_slice": "harm" if gate.answer == "failed" else "",
        "tone": _TONES[gate.answer],
        "chart": charts.bounded_interval(
            figure.low, figure.estimate, figure.high, gate.bound, gate.side == "at most", _TONES[gate.answer]
        )
        if figure and figure.estimate is not None
        else "",
    }


def _finding(finding: Shown) -> dict[str, str]:
    return {
        "kind": finding.kind.replace("_", " "),
        "arm": finding.arm,
        "request_id": _visible(finding.request_id[:ID]),
        "detail": _visible(finding.detail[:600]),
        "command": f"strop eval replay {shlex.quote(f'findings.jsonl:{_visible(finding.request_id)}')} --url URL",
    }


def _changed(findings: Sequence[Shown]) -> list[dict[str, Any]]:
    """Pairs of answers that differ, the most different first, each request once."""
    pairs: dict[str, tuple[float, Shown]] = {}
    for finding in findings:
        if finding.answer and finding.other and finding.answer != finding.other:
            alike = SequenceMatcher(
                None,
                _WORDS.findall(finding.answer[:SAID]),
                _WORDS.findall(finding.other[:SAID]),
                autojunk=False,
            ).quick_ratio()
            if finding.request_id not in pairs or alike < pairs[finding.request_id][0]:
                pairs[finding.request_id] = (alike, finding)
    shown: list[dict[str, Any]] = []
    kinds = Counter[str]()
    for _, finding in sorted(pairs.values(), key=lambda pair: pair[0]):
        kinds[finding.kind] += 1
        if len(shown) == CHANGED or kinds[finding.kind] > CHANGED_OF_A_KIND:
            continue
        sides = (finding.other, finding.answer)
        here, there = word_diff(*(sides if finding.arm == "candidate" else sides[::-1]))
        shown.append({**_finding(finding), "here": here, "there": there})
    return shown


def _curves(evaluation: Evaluation) -> Iterator[dict[str, Any]]:
    figures = {(f.metric, f.statistic): f for f in evaluation.figures if f.slice == "all"}
    for curve in evaluation.curves:
        mean = figures.get((curve.metric, "mean"))
        if mean is None:
            continue
        scale, unit = 1.0, mean.unit
        if unit in ("s", "s/token") and max(curve.reference) < 1:
            scale, unit = 1000.0, f"m{unit}"
        series = [
            Series("reference", "champion", [scale * v for v in curve.reference]),
            Series("candidate", "candidate", [scale * v for v in curve.candidate]),
        ]
        middle = [number(s.values[len(s.values) // 2]) for s in series]
        late = [number(s.values[int(0.95 * (len(s.values) - 1))]) for s in series]
        yield {
            "title": f"{curve.metric}: {mean.words}",
            "chart": charts.ecdf(series, unit or curve.metric),
            "caption": f"Median {middle[0]} → {middle[1]} {unit}, 95th percentile {late[0]} → {late[1]} {unit}.",
        }


def _load(curves: Sequence[LoadCurve]) -> Iterator[tuple[int, list[Level]]]:
    """Each level of concurrency with what the Stacks did there, in the curves' order."""
    for levels in zip(*(curve.levels for curve in curves), strict=True):
        yield levels[0].concurrency, list(levels)


def _knee(curve: LoadCurve) -> str:
    ends = "" if curve.knee_low == curve.knee_high else f" ({curve.knee_low} to {curve.knee_high})"
    return f"{curve.arm} at {curve.knee}{ends}"


def _groups(figures: Sequence[Figure]) -> Iterator[dict[str, Any]]:
    """The figures of each metric, their intervals drawn on one scale a metric."""
    by_metric: dict[str, list[Figure]] = {}
    for figure in figures:
        by_metric.setdefault(figure.metric, []).append(figure)
    for name, found in by_metric.items():
        means = [figure for figure in found if figure.statistic == "mean"]
        ends = [v for f in means for v in (f.low, f.estimate, f.high) if v is not None]
        neutral = {"level": None, "difference": 0.0, "ratio": 1.0}[found[0].compare]
        ends += [] if neutral is None else [neutral]
        low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
        rows = []
        for figure in found:
            is_mean = figure.statistic == "mean" and figure.estimate is not None
            rows.append(
                {
                    "slice": figure.slice if figure.statistic == "mean" else "",
                    "follows": False,
                    "statistic": figure.statistic,
                    "reference": "–" if figure.reference is None else number(figure.reference),
                    "candidate": number(figure.candidate),
                    "estimate": estimate_words(figure),
                    "interval": ends_words(figure),
                    "tone": _tone(figure, neutral),
                    "chart": charts.scaled_interval(
                        figure.low, figure.estimate, figure.high, (low, high), neutral, _tone(figure, neutral)
                    )
                    if is_mean and figure.estimate is not None
                    else "",
                    "samples": figure.samples,
                    "requests": figure.requests,
                }
            )
        first = found[0]
        yield {
            "name": name,
            "words": first.words,
            "unit": first.unit,
            "better": first.better,
            "compare": first.compare,
            "rows": rows,
        }


def _tone(figure: Figure, neutral: float | None) -> str:
    """`good` or `bad` where the whole interval is on one side of no difference."""
    if neutral is None or figure.low is None or figure.high is None or figure.low <= neutral <= figure.high:
        return ""
    return "good" if (figure.low > neutral) == (figure.better == "higher") else "bad"


def _counts(findings: Sequence[Shown]) -> str:
    counts = Counter((f.kind.replace("_", " "), f.arm) for f in findings)
    return "; ".join(f"{kind} {n} ({arm})" for (kind, arm), n in counts.most_common(12)) + "."


def _short(value: Any) -> str:
    if value is None:
        return "–"
    text = _visible(str(value))
    if len(text) == 64 and set(text) <= set("0123456789abcdef"):
        return text[:12]
    return text if len(text) <= 90 else f"…{text[-88:]}"


def _visible(text: str) -> str:
    """Without control characters, which no page shows and some terminals obey."""
    return "".join(c if c in "\n\t" or c.isprintable() else "�" for c in text)


def _plain(text: str) -> str:
    """As Markdown that means nothing but the text: no table, link, image, mention or tag of its own."""
    flat = " ".join(_visible(text).split())
    return re.sub(r"([\\`*_{}\[\]<>#|!@~])", r"\\\1", flat)
