"""The `serving:` section of strop.yaml."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of every section: immutable, documented field by field, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class CaptureSettings(Section):
    enabled: bool = True
    """Whether served requests are recorded as traces."""
    queue_records: int = Field(default=4096, ge=1)
    """Records that may wait for the writer; more are dropped and counted, never waited for."""
    flush_s: float = Field(default=0.5, gt=0)
    """Longest time a finished record stays in memory before it is in the journal on disk."""
    roll_s: float = Field(default=5.0, gt=0)
    """How often the journal is turned into Parquet, which is when readers see the records."""


class CanarySettings(Section):
    share: float = Field(default=0.25, gt=0, lt=1)
    """Share of sessions that the candidate serves during the canary."""
    min_requests: int = Field(default=1000, ge=1)
    """Requests that each of the two must have served before a cut-over. More of them find smaller harm:
    docs/canary.md has how much. Below a few hundred only gross harm is found."""
    deadline_s: float = Field(default=3600, gt=0)
    """Without enough evidence by then, the candidate is taken back."""
    max_error_rate_increase: float = Field(default=0.01, ge=0, lt=1)
    """Errors above the champion's rate, as a fraction of requests, that are still accepted."""
    max_fault_rate_increase: float = Field(default=0.02, ge=0, lt=1)
    """The same for faulty answers: empty ones, invalid JSON, invalid tool calls, loops; each by itself."""
    max_latency_ratio: float = Field(default=1.15, gt=0)
    """Candidate's seconds per output token, per request, and per request at the p95, over the champion's
    that are still accepted."""
    min_acceptance_ratio: float = Field(default=0.9, gt=0)
    """Candidate's acceptance length over the champion's that is still accepted, where both speculate."""


class ServingSettings(Section):
    host: str = "127.0.0.1"
    """Address the gateway binds. Anything but loopback exposes the fleet: put authentication in front."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port of the OpenAI-compatible endpoint."""
    served_model: str = "strop"
    """Model name that clients send."""
    replicas: int = Field(default=1, ge=1)
    """vLLM processes per Stack."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """`auto`: the model's own on GPUs and on CPUs with bfloat16 instructions, float32 on other CPUs."""
    engine_args: dict[str, str | int | float | bool | None] = {
        "max-model-len": 4096,
        "max-num-seqs": 16,
        "enforce-eager": True,
        "enable-auto-tool-choice": True,
        "tool-call-parser": "hermes",
    }
    """vLLM arguments by long name without dashes; `true` is a bare flag, `false` and `null` are left out."""
    kv_cache_gib: int = Field(default=1, ge=1)
    """Size of the KV pool of a CPU replica, GiB (GPUs: set gpu-memory-utilization in engine_args)."""
    cpus_per_replica: float = Field(default=0.1, ge=0)
    """Logical CPUs a replica reserves from Ray; raise it to spread replicas over machines."""
    gpus_per_replica: float = Field(default=0.0, ge=0)
    """GPUs a replica reserves from Ray."""
    start_timeout_s: float = Field(default=600, gt=0)
    """Longest time a replica may take until it answers."""
    drain_timeout_s: float = Field(default=120, gt=0)
    """Longest time a leaving replica may take to finish its requests."""
    ray_address: str | None = None
    """Address of a Ray cluster; none starts Ray on this machine for as long as the fleet runs."""
    capture: CaptureSettings = CaptureSettings()
    """How served requests are recorded."""
    canary: CanarySettings = CanarySettings()
    """How a candidate proves itself on live sessions."""
