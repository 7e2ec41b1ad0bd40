"""The Verdict: what the judge found when two Stacks answered the same held-out requests."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Comparison(_Frozen):
    """One metric of both Stacks over the same requests, with a paired 95 % bootstrap interval of the ratio."""

    metric: str
    unit: str
    slice: str
    """Kind of traffic: `all`, `chat`, `json`, `tools`."""
    requests: int
    champion: float
    candidate: float
    ratio: float
    """Candidate over champion."""
    ratio_low: float
    ratio_high: float
    better: Literal["higher", "lower"]


class OutputDifference(_Frozen):
    """A greedy request whose token ids differ, and the evidence on whether that is a numeric tie."""

    request_id: str
    position: int
    """Index of the first differing output token."""
    champion_token: int
    candidate_token: int
    logprob_gap: float | None
    """Champion's log-probability of its own token minus that of the candidate's, nats; None if it did not say."""
    tie: bool
    """Whether the gap is within the numeric noise of the dtype, so that either token is a right answer."""


class Losslessness(_Frozen):
    """Whether the candidate says what the champion says (greedy requests only)."""

    requests: int
    identical: int
    ties: int
    different: int
    tie_bound: float
    """Largest gap in nats that counts as numeric noise in this dtype."""
    differences: tuple[OutputDifference, ...] = ()


class SampledLikelihood(_Frozen):
    """How likely sampled answers are under the champion's logits: candidate's minus champion's, nats per token."""

    requests: int
    difference: float
    low: float
    high: float
    """A 99 % interval over requests."""


class Gate(_Frozen):
    """One condition the candidate had to meet."""

    name: str
    passed: bool
    detail: str
    """In plain words, with the numbers."""


class Verdict(_Frozen):
    """Judgement of `candidate` against `champion` (fingerprints)."""

    champion: str
    candidate: str
    passed: bool
    summary: str
    """One sentence a person can act on."""
    comparisons: tuple[Comparison, ...]
    losslessness: Losslessness | None
    sampled: SampledLikelihood | None = None
    gates: tuple[Gate, ...]
    samples: tuple[dict[str, Any], ...] = ()
    """One row a request and Stack: request_id, session, stack ('champion'|'candidate'), slice, ttft_s, e2e_s,
    inter_token_s (mean), prompt_tokens, cached_tokens, output_tokens, acceptance_length, steps,
    accepted_by_position, error."""

    def metric(self, name: str, slice_: str = "all") -> Comparison:
        """The comparison of that name. Raises KeyError."""
        for comparison in self.comparisons:
            if (comparison.metric, comparison.slice) == (name, slice_):
                return comparison
        raise KeyError(f"no metric {name!r} for slice {slice_!r}")
