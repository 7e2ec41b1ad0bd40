"""An evaluation in words: numbers with their intervals, and the verdict as one paragraph."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from strop.evals.evaluation import Figure, GateResult, Ran
from strop.evals.gates import Answer
from strop.evals.observation import Finding

NAMED = 3


def summarise(
    answer: Answer,
    gates: Sequence[GateResult],
    parts: Sequence[Ran],
    findings: Sequence[Finding],
    differences: Mapping[str, object],
) -> str:
    """What was decided and why, worst first; what to do where nothing could be decided."""
    required = [gate for gate in gates if gate.required]
    failed = [gate for gate in gates if gate.answer == "failed"]
    open_ = [gate for gate in required if gate.answer == "not enough data"]
    watched = [gate for gate in gates if not gate.required and gate.figure]
    said: list[str] = []
    if answer == "passed":
        said.append(f"Passed: {_all_of(len(required))} shown to hold.")
    elif answer == "failed":
        several = f"{len(failed)} of {len(gates)} gates fail" if len(failed) > 1 else "one gate fails"
        said.append(f"Failed: {several}. {_named(failed)}")
    elif required:
        said.append(
            f"Not enough data: nothing is shown to be wrong, but {len(open_)} of {len(required)} gates are not shown "
            f"to hold either. {_named(open_)}" if open_ else "Not enough data: all gates hold, but a part has a problem."
        )  # fmt: skip
    else:
        said.append("Not enough data: the suite has no gate that must hold.")
    if watched and answer != "failed":
        said.append(f"No harm was found in {len(watched)} further looks, at single slices and rare faults.")
    said += [f"{part.name} could not say all: {part.problem}" for part in parts if part.problem]
    if answer == "not enough data" and open_:
        said.append("More traffic, or a suite that asks for more requests, narrows the intervals.")
    if counts := Counter(f.kind for f in findings if f.arm == "candidate"):
        kinds = ", ".join(f"{kind.replace('_', ' ')} {n}" for kind, n in counts.most_common(4))
        said.append(f"Answers of the candidate worth reading: {kinds}.")
    if not differences:
        said.append("The two Stacks are the same.")
    return " ".join(said)


def figure_words(figure: Figure) -> str:
    """`0.021 (0.011 to 0.034)`: the estimate as it is compared, with its interval."""
    return f"{estimate_words(figure)} ({ends_words(figure)})"


def estimate_words(figure: Figure) -> str:
    return "–" if figure.estimate is None else _shown(figure, figure.estimate)


def ends_words(figure: Figure) -> str:
    low, high = ("open" if end is None else _shown(figure, end) for end in (figure.low, figure.high))
    return f"{low} to {high}"


def gate_words(gate: GateResult) -> str:
    """The gate's measurement, bound and answer as one sentence."""
    bound = bound_words(gate)
    where = "" if gate.slice == "all" else f" of {gate.slice}"
    figure = gate.figure
    if figure is None:
        return f"No request{where} showed {gate.metric}, which must be {gate.side} {bound}."
    of = "" if gate.statistic == "mean" else f"{gate.statistic} of the "
    compared = {"level": "", "difference": ", over the reference's", "ratio": ", in times of the reference's"}
    return (
        f"The candidate's {of}{figure.words}{where and f', {where.strip()}'}{compared[figure.compare]}: "
        f"{figure_words(figure)} over {figure.samples} sessions; {gate.side} {bound} is asked for."
    )


def bound_words(gate: GateResult) -> str:
    compare = gate.figure.compare if gate.figure else "level"
    sign = "+" if compare == "difference" and gate.bound > 0 else ""
    return f"{sign}{gate.bound:g}{'×' if compare == 'ratio' else ''}"


def number(value: float) -> str:
    """Three significant digits, plain notation, thousands apart."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.1e}" if digits > 6 else f"{value:,.{digits}f}"


def _shown(figure: Figure, value: float) -> str:
    return {"ratio": _ratio, "difference": _signed, "level": number}[figure.compare](value)


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{number(value)}"


def _ratio(value: float) -> str:
    return f"{number(value)}×"


def _all_of(count: int) -> str:
    return "the only gate is" if count == 1 else f"all {count} gates are"


def _named(gates: Sequence[GateResult]) -> str:
    """The clearest of them in words, one a metric, and how many more there are."""
    first: dict[str, GateResult] = {}
    for gate in sorted(gates, key=lambda g: not g.required):
        first.setdefault(gate.metric, gate)
    shown = list(first.values())[:NAMED]
    rest = len(gates) - len(shown)
    more = f" {rest} more {'are' if rest > 1 else 'is'} listed below." if rest else ""
    return " ".join(gate_words(gate) for gate in shown) + more
