"""The `serving:` section of strop.yaml."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from strop.serving.stack import Disaggregation


class Section(BaseModel):
    """Base of every section: immutable, documented field by field, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class CaptureSettings(Section):
    enabled: bool = True
    """Whether served requests are recorded as traces."""
    content: bool = True
    """Whether what was said is recorded; false keeps times, counts, parameters and statistics, and nothing to learn from."""
    redact: bool = False
    """Whether e-mail addresses, telephone, social security and card numbers and IP addresses are masked before writing."""
    opted_out_tenants: tuple[str, ...] = ()
    """Tenants that are served unrecorded, as is any request with the header `X-Strop-Capture: off`."""
    sample_rate: float = Field(default=1.0, ge=0, le=1)
    """Share of sessions that are recorded; failures, low acceptance and rare formats are recorded in any case."""
    queue_records: int = Field(default=4096, ge=1)
    """Records that may wait for the writer; more are dropped and counted, never waited for."""
    flush_s: float = Field(default=0.5, gt=0)
    """Longest time a finished record stays in memory before it is in the journal on disk."""
    roll_s: float = Field(default=5.0, gt=0)
    """How often the journal is turned into Parquet, which is when readers see the records."""


class RetentionSettings(Section):
    max_age_days: float | None = Field(default=None, gt=0)
    """Longest time that what was said is kept: traces, and what loops froze or computed of them. None keeps all."""
    max_gib: float | None = Field(default=50, gt=0)
    """Size of the traces beyond which the oldest go, GiB; looked after every minute while a fleet runs."""


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


class GatewaySettings(Section):
    keys_file: str | None = None
    """File (mode 600) with a line for each bearer key: tenant, space, key. STROP_GATEWAY_KEYS goes before it."""
    allow_unauthenticated: bool = False
    """Bind another address than loopback without keys. Clients then choose their own tenant."""
    tls_certificate: str | None = None
    """PEM file with the certificate, its chain and its private key; none serves plain HTTP."""
    max_body_mib: int = Field(default=8, ge=1, le=32)
    """Largest request body; larger ones answer 413."""
    requests_per_tenant: int = Field(default=256, ge=1)
    """Requests of one tenant that may be under way at once; more answer 429."""
    queue: int = Field(default=256, ge=1)
    """Requests that may wait at the gateway while the replicas have all they take; more answer 429."""
    queue_timeout_s: int = Field(default=60, ge=1)
    """Longest time a request may wait there; then it answers 429."""


class ServingSettings(Section):
    host: str = "127.0.0.1"
    """Address the gateway binds. Anything but loopback wants keys (gateway.keys_file)."""
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
    disaggregation: Disaggregation | None = None
    """Replicas of their own for long prompts, so that they do not hold up the tokens of short ones. None: all do both."""
    gateway: GatewaySettings = GatewaySettings()
    """Who may send requests, and how many."""
    capture: CaptureSettings = CaptureSettings()
    """How served requests are recorded."""
    retention: RetentionSettings = RetentionSettings()
    """How long traces are kept."""
    canary: CanarySettings = CanarySettings()
    """How a candidate proves itself on live sessions."""
