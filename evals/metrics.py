"""What is measured on a pair of answers, and the comparison of both Stacks over all pairs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from strop.evals.replay import Pair
from strop.evals.settings import EvalSettings
from strop.evals.statistics import Totals, paired_ratio
from strop.evals.verdict import Comparison
from strop.serving.client import Outcome

Parts = tuple[float, float]
"""Amount and what it is divided by; summed over requests before dividing."""


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    unit: str
    better: Literal["higher", "lower"]
    parts: Callable[[Outcome], Parts | None]
    """None where an answer does not show the metric; such a request is left out for both Stacks."""


def decode_s(outcome: Outcome) -> float | None:
    """Seconds from the first output token to the last; None for answers that came in one piece."""
    seconds = sum(outcome.inter_token_s)
    return seconds if outcome.output_tokens > 1 and seconds > 0 else None


def inter_token_s(outcome: Outcome) -> float | None:
    """Mean seconds per output token after the first."""
    seconds = decode_s(outcome)
    return None if seconds is None else seconds / (outcome.output_tokens - 1)


def _ttft(outcome: Outcome) -> Parts | None:
    return None if outcome.ttft_s is None else (outcome.ttft_s, 1)


def _inter_token(outcome: Outcome) -> Parts | None:
    seconds = inter_token_s(outcome)
    return None if seconds is None else (seconds, 1)


def _decode_rate(outcome: Outcome) -> Parts | None:
    seconds = decode_s(outcome)
    return None if seconds is None else (outcome.output_tokens - 1, seconds)


def _throughput(outcome: Outcome) -> Parts | None:
    return (outcome.output_tokens, outcome.e2e_s) if outcome.output_tokens else None


def _acceptance(outcome: Outcome) -> Parts | None:
    if outcome.speculation is None:
        return 1, 1
    steps = outcome.speculation.steps
    return (steps + outcome.speculation.accepted, steps) if steps else None


METRICS = (
    Metric("inter_token_s", "s/token", "lower", _inter_token),
    Metric("ttft_s", "s", "lower", _ttft),
    Metric("e2e_s", "s", "lower", lambda outcome: (outcome.e2e_s, 1)),
    Metric("decode_tokens_per_s", "tokens/s", "higher", _decode_rate),
    Metric("throughput_tokens_per_s", "tokens/s", "higher", _throughput),
    Metric("acceptance_length", "tokens/step", "higher", _acceptance),
)


def compare(pairs: Sequence[Pair], settings: EvalSettings) -> tuple[Comparison, ...]:
    """Every metric over all answered pairs, then over each kind of traffic that has `min_requests`."""
    answered = [pair for pair in pairs if pair.answered]
    slices: dict[str, list[Pair]] = {"all": answered}
    for kind in ("chat", "json", "tools"):
        of_kind = [pair for pair in answered if pair.request.kind == kind]
        if settings.min_requests <= len(of_kind) < len(answered):
            slices[kind] = of_kind
    found = (_compare(metric, name, part, settings) for name, part in slices.items() for metric in METRICS)
    return tuple(comparison for comparison in found if comparison is not None)


def _compare(metric: Metric, name: str, pairs: Sequence[Pair], settings: EvalSettings) -> Comparison | None:
    if metric.parts is _acceptance and not any(
        p.champion.speculation or p.candidate.speculation for p in pairs
    ):
        return None
    both = [(pair, metric.parts(pair.champion), metric.parts(pair.candidate)) for pair in pairs]
    shown = [(pair.request.session, here, there) for pair, here, there in both if here and there]
    if len({session for session, _, _ in shown}) < 2:
        return None
    champion = Totals([here[0] for _, here, _ in shown], [here[1] for _, here, _ in shown])
    candidate = Totals([there[0] for _, _, there in shown], [there[1] for _, _, there in shown])
    ratio = paired_ratio(
        champion,
        candidate,
        [session for session, _, _ in shown],
        samples=settings.bootstrap_samples,
        seed=settings.seed,
    )
    return Comparison(
        metric=metric.name,
        unit=metric.unit,
        slice=name,
        requests=len(shown),
        champion=champion.value,
        candidate=candidate.value,
        ratio=ratio.ratio,
        ratio_low=ratio.low,
        ratio_high=ratio.high,
        better=metric.better,
    )


def same_lengths(pairs: Sequence[Pair]) -> bool:
    """Whether latencies of whole requests are comparable: nearly all answers equally long."""
    answered = [pair for pair in pairs if pair.answered]
    equal = sum(pair.champion.output_tokens == pair.candidate.output_tokens for pair in answered)
    return equal >= 0.95 * len(answered)


def samples(pairs: Sequence[Pair]) -> tuple[dict[str, Any], ...]:
    """One row a request and Stack, JSON types only."""
    return tuple(
        {
            "request_id": pair.request.request_id,
            "session": pair.request.session,
            "stack": name,
            "slice": pair.request.kind,
            "ttft_s": outcome.ttft_s,
            "e2e_s": outcome.e2e_s,
            "inter_token_s": inter_token_s(outcome),
            "prompt_tokens": outcome.prompt_tokens,
            "cached_tokens": outcome.cached_tokens,
            "output_tokens": outcome.output_tokens,
            "acceptance_length": outcome.speculation.acceptance_length if outcome.speculation else None,
            "steps": outcome.speculation.steps if outcome.speculation else None,
            "accepted_by_position": outcome.speculation.accepted_by_position if outcome.speculation else None,
            "error": outcome.error,
        }
        for pair in pairs
        for name, outcome in (("champion", pair.champion), ("candidate", pair.candidate))
    )
