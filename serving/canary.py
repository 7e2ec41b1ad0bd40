"""Whether a candidate may be cut over to, told from what it and the champion do on live sessions.

Both serve side by side. What each did is gathered by session and metric (`Arm`), compared as
`sequential` describes, and decided (`decide`): taken back on evidence of harm, promoted when there
are enough requests and no tolerance is in doubt. docs/canary.md says what that guarantees.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from strop.serving.quality import flags
from strop.serving.sequential import (
    Blocks,
    Floats,
    Kind,
    interval,
    log_evidence,
    log_evidence_of_more,
    pair_up,
    sessions_to_show,
)
from strop.serving.settings import CanarySettings
from strop.serving.traces import Trace

ALPHA = 0.05
"""Chance, over the whole canary and all metrics, of taking back a candidate equal to the champion for
harm; and for each tolerance that must be shown, of promoting a candidate beyond it."""
ONE_SIDED_95 = NormalDist().inv_cdf(0.95)
"""Standard errors above an estimate that a true value passes in 5 % of cases, looked at once."""
SLOW_QUANTILE = 0.95
FAILING = 0.01
"""Share of requests with any one fault that a sound Stack is reckoned to have."""
REQUEST_SPREAD = 0.8
"""Standard deviation of a request's log time, which makes a ratio of p95s a share of slow requests."""
Session = tuple[str, str]


class TakenBack(Exception):
    """Why the candidate has to go."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One thing a candidate may be worse at. More is worse."""

    name: str
    kind: Kind
    words: str
    """What the candidate does if it is worse; for shares, of requests."""
    excuses_noise: bool = True
    """Whether an estimate beyond the tolerance may be put down to its error; not where a sound Stack has
    next to none."""
    of_words: bool = False
    """Whether it tells what was said, which two Stacks of the same numerics have been shown to say alike."""


METRICS = (
    Metric("error", "share", "failed", excuses_noise=False),
    Metric("empty", "share", "were answered with nothing", excuses_noise=False),
    Metric("invalid_json", "share", "that asked for JSON got invalid JSON", of_words=True),
    Metric("invalid_tool_call", "share", "that offered tools got an invalid tool call", of_words=True),
    Metric("loop", "share", "ended up in a repetition loop", of_words=True),
    Metric("slow", "share", "were slower than the p95 of both"),
    Metric("token_s", "ratio", "seconds per output token"),
    Metric("e2e_s", "ratio", "seconds per request"),
    Metric("steps_per_token", "ratio", "target steps per token (fewer drafted tokens are accepted)"),
)


def tolerance(metric: Metric, settings: CanarySettings) -> float:
    """What is still accepted: a difference of shares, or the log of a ratio."""
    match metric.name:
        case "error":
            return settings.max_error_rate_increase
        case "slow":
            return _slow_share(settings.max_latency_ratio)
        case "token_s" | "e2e_s":
            return math.log(settings.max_latency_ratio)
        case "steps_per_token":
            return -math.log(settings.min_acceptance_ratio)
        case _:
            return settings.max_fault_rate_increase


def _slow_share(ratio: float) -> float:
    """Requests that pass a p95, above the 5 % that should, where a lognormal's own p95 is `ratio` times it."""
    normal = NormalDist()
    passing = 1 - normal.cdf(normal.inv_cdf(SLOW_QUANTILE) - math.log(ratio) / REQUEST_SPREAD)
    return max(0.0, passing - (1 - SLOW_QUANTILE))


@dataclass(slots=True)
class Arm:
    """What one Stack did on live traffic, by metric and session, sessions in order of appearance.

    Holds a few numbers a request, for as long as the canary runs.
    """

    requests: int = 0
    errors: int = 0
    parts: dict[str, dict[Session, tuple[float, float]]] = field(
        default_factory=lambda: {metric.name: {} for metric in METRICS}
    )
    """Sums of a session's `amount` and `over`; its value is their quotient."""
    looks: dict[str, list[int]] = field(default_factory=lambda: {metric.name: [] for metric in METRICS})
    """At which call of `add` each of these sessions appeared."""
    e2e_s: dict[Session, list[float]] = field(default_factory=dict)
    """Of the requests that count as whole-request times."""
    _known: set[Session] = field(default_factory=set)
    _look: int = 0

    def add(self, traces: Iterable[Trace]) -> None:
        """Count the requests seen at one more look; both arms are looked at equally often.

        What a client did (499, or another 4xx) says nothing about the Stack.
        """
        self._look += 1
        for trace in sorted(traces, key=lambda t: t.started_at):
            if 400 <= trace.status < 500:
                continue
            session = (trace.tenant, trace.session)
            moved = session not in self._known and _continues(trace)
            self._known.add(session)
            self.requests += 1
            self.errors += trace.status >= 500
            for name, (amount, over) in observe(trace).items():
                if moved and name == "e2e_s":
                    continue
                if session not in self.parts[name]:
                    self.looks[name].append(self._look)
                before = self.parts[name].get(session, (0.0, 0.0))
                self.parts[name][session] = (before[0] + amount, before[1] + over)
                if name == "e2e_s":
                    self.e2e_s.setdefault(session, []).append(amount)

    def values(self, metric: Metric, slow_s: float) -> Floats:
        """One value a session: a share of its requests, or the log of a quotient."""
        if metric.name == "slow":
            return np.array([sum(s > slow_s for s in e2e_s) / len(e2e_s) for e2e_s in self.e2e_s.values()])
        sums = np.array(list(self.parts[metric.name].values())).reshape(-1, 2)
        quotients = sums[:, 0] / sums[:, 1]
        return quotients if metric.kind == "share" else np.log(quotients)


def observe(trace: Trace) -> dict[str, tuple[float, float]]:
    """What a request adds to each metric it says something about: an amount, and over how much."""
    if trace.status >= 400:
        return {"error": (1.0, 1.0)}
    found = {"error": (0.0, 1.0)}
    faults = flags(trace)
    for name in ("empty", "invalid_json", "invalid_tool_call", "loop"):
        if (faulty := getattr(faults, name)) is not None:
            found[name] = (float(faulty), 1.0)
    tokens = len(trace.output_token_ids)
    if trace.e2e_s:
        found["e2e_s"] = (trace.e2e_s, 1.0)
        streamed = trace.stream and trace.ttft_s is not None
        decode_s = trace.e2e_s - trace.ttft_s if streamed and trace.ttft_s is not None else trace.e2e_s
        if tokens >= 2 and decode_s > 0:
            found["token_s"] = (decode_s, tokens - 1.0 if streamed else float(tokens))
    if trace.speculation and trace.speculation.steps:
        steps = trace.speculation.steps
        found["steps_per_token"] = (steps, steps + trace.speculation.accepted)
    return found


def _continues(trace: Trace) -> bool:
    # Its earlier turns are in the prefix cache of whoever served them, which was the champion.
    return '"role":"assistant"' in trace.messages


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric on both sides, as it stands."""

    metric: Metric
    champion: float
    """Mean over sessions: of shares, or of logs."""
    candidate: float
    blocks: Blocks
    tolerance: float
    must_be_shown: bool
    """Whether the whole interval has to be within the tolerance, or about the estimate only."""

    @property
    def difference(self) -> float:
        return self.candidate - self.champion

    @property
    def is_harm(self) -> bool:
        return bool(is_harm(self.blocks, self.difference, self.tolerance))

    @property
    def is_within(self) -> bool:
        return bool(is_within(self.metric, self.blocks, self.difference, self.tolerance, self.must_be_shown))

    @property
    def chance_if_equal(self) -> float:
        """Greatest chance that equal Stacks would ever have looked so unequal."""
        return math.exp(-max(0.0, float(log_evidence_of_more(self.blocks))))

    def __str__(self) -> str:
        low, high = interval(self.blocks, ALPHA / len(METRICS), ALPHA)
        if self.metric.kind == "share":
            return (
                f"{self.candidate:.1%} of its requests {self.metric.words}, {self.champion:.1%} of the champion's "
                f"(difference {low:+.1%} to {high:+.1%}, accepted {self.tolerance:+.1%})"
            )
        return (
            f"{math.exp(self.difference):.2f} times the champion's {self.metric.words} "
            f"({math.exp(low):.2f} to {math.exp(high):.2f}, accepted {math.exp(self.tolerance):.2f})"
        )


def is_harm(blocks: Blocks, difference: Floats | float, tolerance: float) -> NDArray[np.bool_]:
    """Worse for sure, and by an estimate beyond the tolerance `[...]`."""
    sure = log_evidence_of_more(blocks) >= math.log(len(METRICS) / ALPHA)
    return sure & (difference > max(tolerance, 0.0))


def is_within(
    metric: Metric, blocks: Blocks, difference: Floats | float, tolerance: float, must_be_shown: bool
) -> NDArray[np.bool_]:
    """Whether the tolerance is not in doubt `[...]`.

    The whole always-valid interval is within it. Where that need not be shown: the ordinary 95 % bound,
    if it is no wider than the tolerance; else the estimate; and where even its standard error is wider,
    the estimate less that (`excuses_noise`).
    """
    if must_be_shown:
        return np.asarray(log_evidence(blocks, tolerance, "below") >= math.log(1 / ALPHA))
    error = _standard_error(blocks)
    bound = ONE_SIDED_95 * error
    excused = np.where(error > tolerance, error, 0.0) if metric.excuses_noise else 0.0
    return np.asarray(difference + np.where(bound <= tolerance, bound, -excused) <= tolerance)


def _standard_error(blocks: Blocks) -> Floats:
    """Of the mean difference over blocks `[...]`; with fewer than two, none is granted."""
    difference_B = blocks.candidate_B - blocks.champion_BK.mean(axis=-1)
    if len(blocks) < 2:
        return np.zeros(difference_B.shape[:-1])
    return difference_B.std(axis=-1, ddof=1) / math.sqrt(len(blocks))


def compare(champion: Arm, candidate: Arm, settings: CanarySettings) -> list[Comparison]:
    """Every metric that both sides say something about."""
    times = [s for arm in (champion, candidate) for session in arm.e2e_s.values() for s in session]
    # The p95 of both together treats both alike; the champion's own would make it slow in 5 % by definition.
    slow_s = float(np.quantile(times, SLOW_QUANTILE)) if times else math.inf
    k = champions_a_block(settings)
    found = []
    for metric in METRICS:
        ours, theirs = candidate.values(metric, slow_s), champion.values(metric, slow_s)
        if not len(ours) or not len(theirs):
            continue
        accepted = tolerance(metric, settings)
        appeared = "e2e_s" if metric.name == "slow" else metric.name
        own_B, others_BK = pair_up(candidate.looks[appeared], champion.looks[appeared], k)
        blocks = Blocks(
            metric.kind, ours[np.array(own_B, int)], theirs[np.reshape(others_BK, (-1, k)).astype(int)]
        )
        found.append(
            Comparison(
                metric=metric,
                champion=float(theirs.mean()),
                candidate=float(ours.mean()),
                blocks=blocks,
                tolerance=accepted,
                must_be_shown=len(blocks) >= sessions_needed(metric, settings),
            )
        )
    return found


def sessions_needed(metric: Metric, settings: CanarySettings) -> float:
    """Candidate's sessions from which on a metric's tolerance must be shown: equal Stacks then could show it."""
    base = 1 - SLOW_QUANTILE if metric.name == "slow" else FAILING
    return sessions_to_show(
        metric.kind, tolerance(metric, settings), ALPHA, champions_a_block(settings), base
    )


def champions_a_block(settings: CanarySettings) -> int:
    """Sessions that the champion gets for each of the candidate's."""
    return max(1, round((1 - settings.share) / settings.share))


def decide(
    champion: Arm, candidate: Arm, settings: CanarySettings, says_the_same: bool = False
) -> str | None:
    """None while there is too little evidence, else why the candidate may be cut over to.

    A candidate that `says_the_same`, which was shown before, need not show it again: of what was said
    only harm counts. Raises TakenBack when the candidate is worse than the settings allow.
    """
    comparisons = compare(champion, candidate, settings)
    if harms := [f"{c}, by chance at most {c.chance_if_equal:.2g}" for c in comparisons if c.is_harm]:
        raise TakenBack(f"it is worse on live traffic: {'; '.join(harms)}")
    if min(champion.requests, candidate.requests) < settings.min_requests:
        return None
    if in_doubt(comparisons, says_the_same):
        return None
    times = [str(c) for c in comparisons if c.metric.kind == "ratio"]
    return "; ".join(
        [
            f"{candidate.requests} live requests against {champion.requests}, no harm: {candidate.errors} errors",
            *times,
        ]
    )


def in_doubt(comparisons: Iterable[Comparison], says_the_same: bool) -> list[Comparison]:
    """Those whose tolerance is not kept yet."""
    return [c for c in comparisons if not c.is_within and not (says_the_same and c.metric.of_words)]


def counted(champion: Arm, candidate: Arm, settings: CanarySettings) -> str:
    """How far the canary has come, for those who watch."""
    return (
        f"{candidate.requests} live requests to the candidate, {champion.requests} to the champion; "
        f"at least {settings.min_requests} each are needed"
    )


def shortfall(champion: Arm, candidate: Arm, settings: CanarySettings, says_the_same: bool = False) -> str:
    """What is missing for a promotion."""
    if min(champion.requests, candidate.requests) < settings.min_requests:
        remedy = "raise deadline_s or share of serving.canary, or lower its min_requests"
        return f"{counted(champion, candidate, settings)} ({remedy})"
    return "; ".join(map(str, in_doubt(compare(champion, candidate, settings), says_the_same)))
