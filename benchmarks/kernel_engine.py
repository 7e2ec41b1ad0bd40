"""The same model in vLLM with and without our kernels.

    python benchmarks/kernel_engine.py [--quick] [--model FOLDER] [--rounds N]

Four servers at once, of one model, compiled: stock in bfloat16, stock in float32, ours (float32
activations over bfloat16 weights), and ours over an int4 checkpoint (W4A16, groups of 64) of the same
weights that is written here. They take turns, in an order that flips every round; a figure is the
median over rounds, a ratio the median of each round's ratio. Batches of 1, 4 and 16 streams decode
prompts of random tokens; prefill is a prompt of 1,500 tokens with one token of answer.

Fidelity is measured against float32 arithmetic of transformers on the same weights: the divergence of
the whole next-token distribution at every position of a text. Of int4, on its dequantised weights.

Before anything is timed every server of ours must say that its worker loaded the kernels' objects, and
afterwards that they took the calls and refused none.

Keys of the last line: decode_speedup_b1 (over stock bfloat16), decode_speedup_b4, decode_speedup_b16
(over the faster stock dtype), prefill_over_fp32, prefill_over_bf16 (tokens per second, ours over
stock), kl_mean (nats a token), int4_works, int4_kl, int4_decode_b1 (over our bfloat16), calls,
refusals, step_ms_b1 (ours), and of each server decode tokens per second.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from strop.evals.distances import full_distances
from strop.evals.reference_logits import WHOLE_VOCABULARY, score
from strop.evals.replay import Server
from strop.kernels.bundle import write_library
from strop.kernels.linear import quantise_int4
from strop.pipelines.demo_model import fetch
from strop.serving.engine import cores_of_replica, engine_command, engine_environment
from strop.serving.hardware import Scalar
from strop.serving.home import home
from strop.serving.process import Child, free_port
from strop.serving.stack import Artifact, Stack, file_sha256

GROUP = 64
BATCHES = (1, 4, 16)
ENGINE: dict[str, Scalar] = {
    "max-model-len": 2048,
    "max-num-batched-tokens": 4096,
    "max-num-seqs": 16,
    "max-logprobs": WHOLE_VOCABULARY,
    "no-enable-prefix-caching": True,
    "worker-extension-cls": "strop.kernels.vllm_plugin.WorkerExtension",
}
PROMPT_TOKENS = 32
PREFILL_TOKENS = 1500
TEXT = (
    "A strop is a strip of leather on which a razor is drawn back and forth, so that its edge stays "
    "keen while it is in use. Nothing is ground away; what was bent is made straight again."
)


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    server: Server
    child: Child


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2 rounds of 16 steps")
    parser.add_argument("--model", type=Path, help="model folder (default: the demo's)")
    parser.add_argument("--rounds", type=int, default=5, help="turns that every server has")
    arguments = parser.parse_args()
    rounds, steps = (2, 16) if arguments.quick else (arguments.rounds, 48)
    model = (arguments.model or fetch(home() / "models")).absolute()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="strop-")))
        library = write_library(folder / "kernels")
        int4 = write_int4(model, folder / "int4")
        stacks = {
            "bf16": (model, "bfloat16", False),
            "fp32": (model, "float32", False),
            "ours": (model, "float32", True),
            "ours int4": (int4, "float32", True),
        }
        arms = [
            _start(name, weights, dtype, kernels, library, folder, stack)
            for name, (weights, dtype, kernels) in stacks.items()
        ]
        for arm in arms[2:]:
            if not all(one["sha256"] for one in _activation(arm)):
                raise SystemExit(f"The worker of {arm.name} loaded no kernel: see its log above.")
        found = asyncio.run(_measure(arms, rounds, steps))
        kl = asyncio.run(_divergence(arms[2], model, _reference(model)))
        kl_int4 = asyncio.run(_divergence(arms[3], model, _reference(model, int4=True)))
        counted = [_activation(arm)[0] for arm in arms[2:]]
    _report(found, kl, kl_int4, counted)


def write_int4(model: Path, target: Path) -> Path:
    """Write a compressed-tensors checkpoint with the linear layers of all blocks in int4."""
    target.mkdir()
    tensors = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if not _is_block_linear(name):
            tensors[name] = tensor
            continue
        values, scale = quantise_int4(tensor, GROUP)
        digits = (values.to(torch.int32) + 8).unflatten(1, (-1, 8))
        words = (digits.to(torch.int64) << torch.arange(0, 32, 4)).sum(2).to(torch.int32)
        stem = name.removesuffix("weight")
        tensors |= {f"{stem}weight_packed": words, f"{stem}weight_scale": scale}
        tensors[f"{stem}weight_shape"] = torch.tensor(tensor.shape)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "blocks": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
                "format": "pack-quantized",
            }
        },
    }
    (target / "config.json").write_text(json.dumps(config))
    for path in model.iterdir():
        if path.name not in ("model.safetensors", "config.json"):
            (target / path.name).write_bytes(path.read_bytes())
    return target


def _is_block_linear(name: str) -> bool:
    return ".layers." in name and name.endswith("proj.weight")


def _start(
    name: str, model: Path, dtype: str, kernels: bool, library: Path, folder: Path, stack: ExitStack
) -> Arm:
    manifest = Stack.build(model, name.replace(" ", "-"), dtype, ENGINE)
    if kernels:
        files = {path.name: file_sha256(path) for path in sorted(library.parent.iterdir())}
        artifact = Artifact(location=str(library.parent), files=files)
        manifest = manifest.model_copy(update={"kernels": (artifact,)})
    port = free_port()
    environment = engine_environment(manifest, 1, cores_of_replica(0, 1), None)
    child = Child.start(
        name.replace(" ", "-"),
        engine_command(manifest, "127.0.0.1", port, capture=False),
        folder / f"{name.replace(' ', '-')}.log",
        environment | {"VLLM_SERVER_DEV_MODE": "1"},
    )
    stack.callback(child.stop)
    # One after the other: side by side all would be slower, and compile the same twice.
    child.wait_until_answers(f"http://127.0.0.1:{port}/health", 1200)
    return Arm(name, Server(f"http://127.0.0.1:{port}", manifest.served_model), child)


def _activation(arm: Arm) -> list[dict]:
    answer = httpx.post(f"{arm.server.url}/collective_rpc", json={"method": "strop_kernels"}, timeout=60)
    return answer.raise_for_status().json()["results"][0]


async def _measure(arms: list[Arm], rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """By server: seconds a step of each batch, and tokens per second of prefill."""
    found: dict[str, dict[str, list[float]]] = {arm.name: {} for arm in arms}
    async with httpx.AsyncClient(timeout=600) as client:
        for number in range(rounds + 1):
            for arm in arms if number % 2 else arms[::-1]:
                taken = {}
                for batch in BATCHES:
                    taken[f"b{batch}"] = await _decode(client, arm.server, batch, steps if number else 4)
                began = time.perf_counter()
                await _stream(client, arm.server, PREFILL_TOKENS, 1)
                taken["prefill"] = PREFILL_TOKENS / (time.perf_counter() - began)
                # The first round warms up.
                for key, value in taken.items() if number else ():
                    found[arm.name].setdefault(key, []).append(value)
                print(f"round {number}, {arm.name}: {taken}", file=sys.stderr)
    return found


async def _decode(client: httpx.AsyncClient, server: Server, batch: int, steps: int) -> float:
    """Median seconds between the tokens of a stream, while all streams of the batch are under way."""
    streams = await asyncio.gather(*(_stream(client, server, PROMPT_TOKENS, steps + 4) for _ in range(batch)))
    begin, end = max(times[0] for times in streams), min(times[-1] for times in streams)
    gaps = [b - a for times in streams for a, b in pairwise(times) if a >= begin and b <= end]
    return statistics.median(gaps)


async def _stream(client: httpx.AsyncClient, server: Server, prompt: int, tokens: int) -> list[float]:
    """When each token came."""
    body = {
        "model": server.model,
        "prompt": [random.randrange(1000, 40000) for _ in range(prompt)],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    times = []
    async with client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return times


def _reference(model: Path, int4: bool = False) -> np.ndarray:
    """Log-probabilities [tokens, vocabulary] after each token of the text, in float32."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if int4:
        with torch.no_grad():
            for name, weight in network.named_parameters():
                if _is_block_linear(name):
                    values, scale = quantise_int4(weight, GROUP)
                    weight.copy_(values.float() * scale.float().repeat_interleave(GROUP, 1))
    with torch.inference_mode():
        logits = network(torch.tensor([_tokens(model)])).logits[0, :-1]
    return logits.log_softmax(-1).double().numpy()


def _tokens(model: Path) -> list[int]:
    return AutoTokenizer.from_pretrained(model)(TEXT)["input_ids"]


async def _divergence(arm: Arm, model: Path, reference: np.ndarray) -> float:
    """Mean KL of the server from the reference, in nats a token."""
    tokens = _tokens(model)
    async with httpx.AsyncClient() as client:
        scored = await score(client, arm.server, tokens, 1, WHOLE_VOCABULARY, 600)
    candidate = np.full_like(reference, -np.inf)
    # The last column is for a token that is not told, and all are.
    ids, logprobs = scored.top.ids[:, :-1].astype(np.int64), scored.top.logprobs[:, :-1]
    np.put_along_axis(candidate, ids, logprobs, axis=1)
    return float(full_distances(reference, candidate, tokens[1:]).kl.mean())


def _report(found: dict[str, dict[str, list[float]]], kl: float, kl_int4: float, counted: list[dict]) -> None:
    keys = [*(f"b{batch}" for batch in BATCHES), "prefill"]
    table = Table("server", *(f"{key}, tok/s" for key in keys))
    speeds = {
        name: {
            key: [value if key == "prefill" else int(key[1:]) / value for value in values]
            for key, values in rows.items()
        }
        for name, rows in found.items()
    }
    for name, rows in speeds.items():
        table.add_row(name, *(f"{statistics.median(rows[key]):.1f}" for key in keys))
    Console().print(table)

    def ratio(key: str, over: str, ours: str = "ours") -> float:
        pairs = zip(speeds[ours][key], speeds[over][key], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)

    last: dict[str, object] = {
        "decode_speedup_b1": ratio("b1", "bf16"),
        "decode_speedup_b4": min(ratio("b4", "bf16"), ratio("b4", "fp32")),
        "decode_speedup_b16": min(ratio("b16", "bf16"), ratio("b16", "fp32")),
        "prefill_over_fp32": ratio("prefill", "fp32"),
        "prefill_over_bf16": ratio("prefill", "bf16"),
        "kl_mean": float(f"{kl:.3g}"),
        "int4_works": kl_int4 < 1e-3,
        "int4_kl": float(f"{kl_int4:.3g}"),
        "int4_decode_b1": ratio("b1", "ours", "ours int4"),
        "calls": sum(one["calls"] for one in counted),
        "refusals": sum(one["refusals"] for one in counted),
        "step_ms_b1": round(1e3 * statistics.median(found["ours"]["b1"]), 2),
    }
    for name, rows in speeds.items():
        last |= {f"{name.replace(' ', '_')}_{key}": round(statistics.median(rows[key]), 1) for key in keys}
    print(json.dumps(last))


if __name__ == "__main__":
    main()
