"""How a Stack becomes a running vLLM server: its command line and its environment."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from strop.serving.disaggregation import Link
from strop.serving.hardware import Scalar
from strop.serving.stack import Stack

CAPTURE = "strop.serving.capture.Capture"
PREFILL = "strop.serving.prefill.Prefill"


def engine_command(
    stack: Stack, host: str, port: int, capture: bool = True, link: Link | None = None
) -> list[str]:
    """Command line of `python -m vllm.entrypoints.openai.api_server` for one replica of `stack`.

    The `vllm` command is not used: the CPU build installs it under another distribution name,
    and it then refuses to run.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    arguments: dict[str, Any] = {
        "host": host,
        "port": port,
        "model": stack.model.location,
        "served-model-name": stack.served_model,
        "dtype": stack.engine.dtype,
        "tensor-parallel-size": stack.topology.tensor_parallel,
        "pipeline-parallel-size": stack.topology.pipeline_parallel,
        "enable-prompt-tokens-details": True,
        "enable-per-request-metrics": True,
        # Its `/v1/chat/completions/render` is where vllm-router gets the tokens by which it finds the
        # replica that has them cached; refused, it takes any replica without a word.
        "enable-scale-out": True,
        "shutdown-timeout": 20,
        "generation-config": "vllm",
        **stack.engine.args,
    }
    if stack.speculator:
        speculation: dict[str, object] = {
            "method": stack.speculator.method,
            "num_speculative_tokens": stack.speculator.draft_tokens,
        }
        if stack.speculator.weights:
            speculation["model"] = stack.speculator.weights.location
        arguments["speculative-config"] = json.dumps(speculation)
        arguments["per-request-spec-decode-metrics"] = "summary"
    # vLLM puts each one around those before: capture sees a request's whole time.
    arguments["middleware"] = []
    if link:
        arguments["kv-transfer-config"] = json.dumps(link.kv_transfer_config())
        arguments["middleware"] += [PREFILL] if link.role == "decode" else []
    if capture:
        arguments["middleware"] += [CAPTURE]
    for name, value in _flat(arguments):
        if value is True:
            command.append(f"--{name}")
        elif value is not None and value is not False:
            command += [f"--{name}", str(value)]
    return command


def _flat(arguments: dict[str, Any]) -> Iterator[tuple[str, Scalar]]:
    for name, value in arguments.items():
        yield from ((name, one) for one in value) if isinstance(value, list) else [(name, value)]


def engine_environment(
    stack: Stack,
    kv_cache_gib: int,
    cores: list[int],
    capture: dict[str, object] | None,
    link: Link | None = None,
) -> dict[str, str]:
    """Environment of one replica, to be added to the parent's.

    `cores` are the CPU cores its compute threads are bound to (ignored on GPUs); `capture` is
    the configuration of the capture middleware.
    """
    # Ours alone: a plugin that happens to be installed must not change what a Stack computes. The list is
    # part of the key of vLLM's compiled graphs, so that those with our kernels in them are kept apart.
    env = {"VLLM_PLUGINS": "strop"}
    if stack.kernels:
        env["VLLM_PLUGINS"] = "strop,strop_kernels"
        env["STROP_KERNELS"] = str(Path(stack.kernels[0].location) / "kernels.json")
    if capture is not None:
        env["STROP_CAPTURE"] = json.dumps(capture)
    how = stack.topology.disaggregation
    if link and how and link.role == "decode":
        known = {
            "url": link.prefill_url,
            "min_request_bytes": how.min_request_bytes,
            "transfer": how.transfer,
        }
        env["STROP_PREFILL"] = json.dumps(known)
    if stack.hardware.device == "cpu":
        env |= {
            "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            # Two Stacks share the cores during a rollout: threads that wait must not spin.
            "KMP_BLOCKTIME": "1",
        }
        preload = [str(path) for path in (tcmalloc(), _intel_openmp()) if path]
        if preload:
            env["LD_PRELOAD"] = ":".join(preload)
    return env


def cores_of_replica(index: int, replicas: int) -> list[int]:
    """The share of this process's cores that replica `index` of `replicas` computes on."""
    cores = sorted(os.sched_getaffinity(0))
    if replicas >= len(cores):
        return [cores[index % len(cores)]]
    return cores[index * len(cores) // replicas : (index + 1) * len(cores) // replicas]


def tcmalloc() -> Path | None:
    folders = (Path("/usr/lib"), Path("/usr/lib64"), *Path("/usr/lib").glob("*-linux-gnu"))
    names = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
    return next((f / n for f in folders for n in names if (f / n).is_file()), None)


def _intel_openmp() -> Path | None:
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    return library if library.is_file() else None
