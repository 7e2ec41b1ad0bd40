"""Whether an engine computes what its checkpoint says: its served distributions against the same weights offline.

An engine can load a checkpoint wrong and answer all the same: a layer left out, scales not applied, a
quantised layer taken as it is. Two served Stacks that share the mistake agree; transformers does not.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil

from strop.evals.distances import TopLogprobs, top_distances
from strop.evals.observation import Bench, Finding, Observation
from strop.evals.reference_logits import Cache, Scored, ScoreError, ask, most_logprobs, score, score_body
from strop.evals.replay import Server
from strop.serving.stack import Stack

PARITY_BOUND = {"float32": 1e-3, "float16": 5e-3, "bfloat16": 2e-2}
"""Mean divergence per token, nats, up to which an engine of that dtype may differ from float32 by rounding."""
QUANTISED_BOUND = 0.1
"""The same where activations may be quantised as well, which the offline model does not do."""

TEXTS = (
    "The library opens at nine in the morning, and anyone who wants to read there may bring a cup of tea. "
    "Books are lent for three weeks; whoever needs one for longer asks at the desk.",
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n    if len(ordered) % 2:\n"
    "        return ordered[middle]\n    return (ordered[middle - 1] + ordered[middle]) / 2\n",
    '{"name": "median", "arguments": {"values": [3, 1, 2]}, "returns": "number", "tests": ["odd", "even", "empty"]}',
    "Die Bibliothek öffnet um neun Uhr. 図書館は九時に開きます。 Библиотека открывается в девять.",
)
"""Prose, code, JSON and other languages: a few hundred tokens in all."""

_BYTES_PER_WEIGHT = 4


class NoParityError(RuntimeError):
    """The weights cannot be computed offline here; the message says why."""


async def parity(bench: Bench, top_logprobs: int, timeout_s: float) -> AsyncIterator[Observation | Finding]:
    """`parity_kl` and `parity_top1` of the candidate, one observation a text of `TEXTS`.

    Where the weights cannot be computed offline a finding says so; where the engine is farther from them
    than its dtype's bound, another names the text that is farthest.
    """
    side = bench.candidate
    server = Server(side.url, side.model)
    k = most_logprobs([side.stack], top_logprobs)
    waiting = [n for n in range(len(TEXTS)) if f"parity/{n}" not in bench.done]
    prompts: list[list[int]] = []
    distances = []
    try:
        for n in waiting:
            prompts.append(await _prompt(bench, server, TEXTS[n], timeout_s))
        offline = await asyncio.to_thread(offline_logprobs, side.stack, prompts, k, bench.cache / "offline")
        for ids, computed in zip(prompts, offline, strict=True):
            served = await score(bench.client, server, ids, 1, k, timeout_s)
            distances.append(top_distances(computed, served.top))
    except (NoParityError, ScoreError) as reason:
        body = score_body(prompts[0], k) if prompts else {"prompt": TEXTS[0], "max_tokens": 1}
        detail = f"The engine could not be compared with its weights computed offline: {reason}"
        yield Finding("no_parity", "candidate", side.stack.fingerprint, "parity", detail, body)
        return
    for n, distance in zip(waiting, distances, strict=True):
        for metric, values in (("parity_kl", distance.kl), ("parity_top1", distance.top1)):
            yield Observation(metric, f"parity/{n}", f"parity/{n}", (), tuple(map(float, values)))
    if not distances:
        return
    bound = parity_bound(side.stack)
    mean = float(np.concatenate([d.kl for d in distances]).mean())
    if mean > bound:
        worst = max(range(len(distances)), key=lambda i: distances[i].kl.mean())
        detail = (
            f"The engine is {mean:.4f} nats a token from its own weights computed offline in float32; rounding in "
            f"{side.stack.engine.dtype} explains up to {bound:g}. It may have loaded the checkpoint wrong: see its log "
            "for layers that were skipped or not quantised."
        )
        body = score_body(prompts[worst], k)
        yield Finding("parity", "candidate", side.stack.fingerprint, f"parity/{waiting[worst]}", detail, body)


def parity_bound(stack: Stack) -> float:
    """Mean divergence per token, nats, that arithmetic alone may explain."""
    if stack.quantization:
        return QUANTISED_BOUND
    return PARITY_BOUND.get(stack.engine.dtype, PARITY_BOUND["bfloat16"])


async def _prompt(bench: Bench, server: Server, text: str, timeout_s: float) -> list[int]:
    """Token ids that the server makes of a text."""
    body = {"prompt": text, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    ids = (await ask(bench.client, server, body, timeout_s)).get("prompt_token_ids")
    if not isinstance(ids, list) or len(ids) < 2 or not all(isinstance(i, int) for i in ids):
        raise ScoreError("the server tells no prompt token ids (`return_token_ids`)")
    return ids


def offline_logprobs(stack: Stack, prompts: Sequence[list[int]], k: int, folder: Path) -> list[TopLogprobs]:
    """What the Stack's weights say of all but the first token of each prompt, in float32 by transformers.

    Kept in `folder`, so that the model is loaded once. Raises NoParityError.
    """
    if not prompts:
        return []
    cache = Cache(folder / _version(), stack)
    kept = [cache.load(ids, 1, k) for ids in prompts]
    if all(kept):
        return [scored.top for scored in kept if scored]
    tops = _compute(stack, prompts, k)
    for ids, top in zip(prompts, tops, strict=True):
        cache.save(ids, 1, k, Scored(top))
    return tops


def _version() -> str:
    """Offline results depend on what computed them, too."""
    versions = f"{metadata.version('transformers')} {metadata.version('torch')}"
    return hashlib.sha256(versions.encode()).hexdigest()[:16]


def _compute(stack: Stack, prompts: Sequence[list[int]], k: int) -> list[TopLogprobs]:
    folder = Path(stack.model.location)
    if not (folder / "config.json").is_file():
        raise NoParityError(f"{folder} is not on this machine. Evaluate where the weights lie.")
    if stack.adapters:
        raise NoParityError("the Stack has adapters, which are not computed offline")
    weights = sum(
        (folder / n).stat().st_size
        for n in stack.model.files
        if n.endswith(".safetensors") and (folder / n).is_file()
    )
    needed, free = weights // 2 * _BYTES_PER_WEIGHT, psutil.virtual_memory().available
    if needed > free:
        raise NoParityError(
            f"its weights need about {needed >> 30} GiB in float32, and {free >> 30} GiB of memory are free"
        )
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model, loaded = cast(
            tuple[Any, dict[str, Any]],
            AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
            ),
        )
        # Formats that it does not know, and weights that are not there, it passes over with a warning.
        if getattr(model.config, "quantization_config", None) and not getattr(model, "is_quantized", False):
            raise NoParityError(f"transformers does not know the quantisation of {folder.name}")
        if loaded["missing_keys"]:
            raise NoParityError(
                f"transformers finds no weights for {min(loaded['missing_keys'])} in {folder.name}"
            )
        model.eval()
        with torch.inference_mode():
            logits = [model(torch.tensor([ids])).logits[0, :-1].double().numpy() for ids in prompts]
    except NoParityError:
        raise
    except Exception as error:  # whatever a checkpoint's own format makes the library raise
        reason = str(error).strip().splitlines() or [""]
        raise NoParityError(
            f"transformers cannot compute {folder.name} ({type(error).__name__}: {reason[0][:200]})"
        ) from error
    width = k if k > 0 else logits[0].shape[1]
    return [TopLogprobs.of_logits(rows, ids[1:], width) for rows, ids in zip(logits, prompts, strict=True)]
