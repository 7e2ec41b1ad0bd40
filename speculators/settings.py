"""The `speculators:` section of strop.yaml."""

from pydantic import Field

from strop.serving.settings import Section


class SpeculatorSettings(Section):
    draft_tokens: int = Field(default=3, ge=1, le=8)
    """Tokens drafted per step of the target, and steps of training-time test."""
    draft_vocab: int = Field(default=4096, ge=64, multiple_of=64)
    """Target tokens that the draft may propose; the most frequent output tokens of the traffic."""
    min_output_tokens: int = Field(default=4000, ge=1)
    """Output tokens of usable traffic below which no draft is trained."""
    max_output_tokens: int = Field(default=200_000, ge=1)
    """Output tokens to train on at most; the newest sessions are kept."""
    max_sequence_tokens: int = Field(default=4096, ge=64)
    """Turns that end past this many tokens of conversation are left out."""
    validation_share: float = Field(default=0.1, gt=0, lt=0.5)
    """Share of sessions that decides which checkpoint is kept; never trained on."""
    minutes: float = Field(default=8.0, gt=0)
    """Longest training, the target's hidden states not included; the schedule is cut to fit."""
    epochs: int = Field(default=8, ge=1)
    """Passes over the training sessions, if the minutes allow."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak of the cosine schedule, for the matrices; norms and head take a part of it."""
    batch_tokens: int = Field(default=1024, ge=1)
    """Output tokens per optimiser step, whole conversations rounded up."""
    prompt_weight: float = Field(default=0.5, ge=0, le=1)
    """Weight of prompt positions in the loss relative to the model's own tokens; 0 learns from answers alone."""
    step_weight: float = Field(default=0.8, gt=0, le=1)
    """Weight of each draft position in the loss relative to the one before."""
    patience: int = Field(default=3, ge=1)
    """Validations without a longer predicted acceptance length after which training stops."""
    checkpoint_s: float = Field(default=60.0, gt=0)
    """Seconds between resumable checkpoints."""
