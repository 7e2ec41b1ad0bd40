"""The machine that serves: what of it changes numerics, and what vLLM needs to be told because of it."""

import platform
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Scalar = str | int | float | bool | None


class Hardware(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Literal["cpu", "cuda"]
    name: str
    isa: str
    """Instruction set of a CPU that changes numerics (avx2, avx512, ...) or compute capability of a GPU."""
    driver: str | None = None


def detect_hardware() -> Hardware:
    """The device this process would serve on."""
    import torch

    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return Hardware(
            device="cuda",
            name=torch.cuda.get_device_name(),
            isa=f"sm_{major}{minor}",
            driver=torch.version.cuda,
        )
    flags, name = _cpu_info()
    isa = next((i for i in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if i in flags), platform.machine())
    return Hardware(device="cpu", name=name, isa=isa)


def native_dtype(hardware: Hardware, model_config: dict[str, Any]) -> str:
    """The dtype that serves fastest without changing the weights' precision downwards.

    Without bfloat16 instructions a CPU falls back to linears at a sixth of the float32 rate,
    and a speculative step costs as many single steps as it has rows.
    """
    if hardware.device == "cpu" and hardware.isa not in ("amx_bf16", "avx512_bf16"):
        return "float32"
    return str(model_config.get("dtype") or model_config.get("torch_dtype") or "bfloat16")


def safe_args(hardware: Hardware, config: dict[str, Any], args: dict[str, Scalar]) -> dict[str, Scalar]:
    """On a CPU, a prompt is prefilled whole.

    vLLM 0.32 rewinds the generator of a seeded request whose prefill was cut into chunks, which
    generators on CPUs refuse: one client's `seed` would end the engine.
    """
    if hardware.device != "cpu" or args.get("enable-chunked-prefill"):
        return {}
    longest = args.get("max-model-len") or config.get("max_position_embeddings") or 4096
    return {"no-enable-chunked-prefill": True, "max-num-batched-tokens": max(4096, int(longest))}


def _cpu_info() -> tuple[set[str], str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set(), platform.processor() or platform.machine()
    fields = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    return set(fields.get("flags", "").split()), fields.get("model name", platform.machine())
