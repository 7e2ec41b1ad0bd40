"""The `evals:` and `cost:` sections of strop.yaml."""

from pydantic import Field

from strop.serving.settings import Section


class EvalSettings(Section):
    max_requests: int = Field(default=48, ge=1)
    """Held-out requests replayed to each Stack, in whole sessions."""
    min_requests: int = Field(default=12, ge=2)
    """Requests that both Stacks must have answered before anything is concluded, overall and for a slice."""
    max_output_tokens: int = Field(default=256, ge=2)
    """Cap on the output tokens of a replayed request; bounds how long judging takes."""
    max_minutes: float = Field(default=15, gt=0)
    """After this long no further held-out request is replayed, if `min_requests` have been."""
    warmup_requests: int = Field(default=2, ge=0)
    """Requests sent to each Stack beforehand and not counted."""
    request_timeout_s: float = Field(default=300, gt=0)
    """Longest time one replayed request may take before it counts as failed."""
    bootstrap_samples: int = Field(default=2000, ge=200)
    """Resamplings of the sessions behind each 95 % interval."""
    max_time_ratio: float = Field(default=1.0, gt=0, le=1)
    """The whole interval of candidate over champion time must lie below this; lower asks for more gain."""
    suite: str | None = None
    """Suite that a candidate must also meet in a loop: `quick`, `full`, `lossless` or a suite's file. Null
    takes `lossless` for one that computes the champion's numbers and `quick` for one that does not."""
    seed: int = 0
    """Seed of the resampling, and of sampled requests that were recorded without one."""


class CostSettings(Section):
    """Prices, all in one currency."""

    price_per_hour: float | None = Field(default=None, ge=0)
    """Of one machine, busy or not."""
    machines: int = Field(default=1, ge=1)
    """Machines that serve."""
    api_input: float | None = Field(default=None, ge=0)
    """What an API asks for a million input tokens, to compare with."""
    api_cached: float | None = Field(default=None, ge=0)
    """The same for input tokens that it finds in its cache; null asks the full price."""
    api_output: float | None = Field(default=None, ge=0)
    """The same for output tokens."""
