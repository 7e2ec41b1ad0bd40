"""Hidden states of the target over recorded conversations, computed once and kept on disk."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from strop.serving.hardware import detect_hardware
from strop.serving.home import write_atomic
from strop.speculators.samples import Sample, common_prefix


def compute_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def compute_dtype() -> torch.dtype:
    """bfloat16 where the device multiplies it natively, float32 elsewhere."""
    hardware = detect_hardware()
    native = hardware.device == "cuda" or hardware.isa in ("amx_bf16", "avx512_bf16")
    return torch.bfloat16 if native else torch.float32


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """The residual streams EAGLE-3 reads: low, middle and high (Li et al., arXiv 2503.01840)."""
    return tuple(sorted({min(2, num_layers), num_layers // 2, max(1, num_layers - 3)}))


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """The frozen model whose answers are to be drafted."""

    model: Any
    config: dict[str, Any]
    aux_layers: tuple[int, ...]
    """Layer k stands for the residual stream after k layers."""

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, device: torch.device) -> "Target":
        config = json.loads((folder / "config.json").read_text())
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, local_files_only=True, attn_implementation="sdpa"
        )
        model.eval().requires_grad_(False).to(device)
        return cls(model, config, default_aux_layers(config["num_hidden_layers"]))

    @property
    def embeddings(self) -> Tensor:
        return self.model.get_input_embeddings().weight

    @property
    def head(self) -> Tensor:
        return self.model.get_output_embeddings().weight


def feature_path(folder: Path, sample: Sample) -> Path:
    return folder / f"{sample.digest}.safetensors"


def extract(
    target: Target,
    samples: Sequence[Sample],
    folder: Path,
    progress: Callable[[int, int], None] = lambda *_: None,
    keep_going: Callable[[], bool] = lambda: True,
) -> int:
    """Write `aux` [T, aux layers x hidden] and `final` [T, hidden] (after the final norm) of every
    sample, bfloat16, and return the positions that were computed.

    In lexicographic order each sample shares its longest known prefix with the one before, so
    one KV cache, cut back to the common prefix, computes every distinct prefix once. Finished
    samples are skipped. `progress` gets samples done and in all; stops early when `keep_going`
    says so.
    """
    distinct = {s.digest: s for s in samples}.values()
    ordered = sorted(distinct, key=lambda s: s.tokens_T.tolist())
    missing = [s for s in ordered if not feature_path(folder, s).is_file()]
    runner = _PrefixRunner(target)
    computed = 0
    for done, sample in enumerate(missing):
        if not keep_going():
            break
        aux_TA, final_TH, new = runner.run(sample.tokens_T)
        computed += new
        tensors = {
            "aux": aux_TA.bfloat16().cpu().contiguous(),
            "final": final_TH.bfloat16().cpu().contiguous(),
        }
        write_atomic(feature_path(folder, sample), save(tensors))
        progress(len(ordered) - len(missing) + done + 1, len(ordered))
    return computed


def load_features(folder: Path, sample: Sample) -> tuple[Tensor, Tensor]:
    """`aux` and `final` of a sample, bfloat16 on the CPU."""
    with safe_open(str(feature_path(folder, sample)), framework="pt") as file:
        return file.get_tensor("aux"), file.get_tensor("final")


class _PrefixRunner:
    """The target over one sequence after another, reusing what the last one has in common."""

    def __init__(self, target: Target):
        self.target = target
        self.tokens = np.zeros(0, dtype=np.int64)
        self.cache = DynamicCache(config=target.model.config)
        self.aux: Tensor | None = None
        self.final: Tensor | None = None

    @torch.inference_mode()
    def run(self, tokens_T: np.ndarray) -> tuple[Tensor, Tensor, int]:
        shared = min(common_prefix(self.tokens, tokens_T), len(tokens_T) - 1)
        if shared < len(self.tokens):
            self.cache.crop(shared - len(self.tokens))
        body = self.target.model.model
        captured: dict[int, Tensor] = {}
        hooks = [
            body.layers[k - 1].register_forward_hook(
                lambda _m, _i, out, k=k: captured.update({k: out[0] if isinstance(out, tuple) else out})
            )
            for k in self.target.aux_layers
        ]
        try:
            # Any token stands in for one that was not kept; none is predicted there.
            new_T = torch.from_numpy(tokens_T[shared:]).clamp(min=0).to(body.embed_tokens.weight.device)
            output = body(input_ids=new_T[None], past_key_values=self.cache, use_cache=True)
        finally:
            for hook in hooks:
                hook.remove()
        aux = torch.cat([captured[k][0] for k in self.target.aux_layers], dim=-1)
        final = output.last_hidden_state[0]
        if shared and self.aux is not None and self.final is not None:
            aux = torch.cat([self.aux[:shared], aux])
            final = torch.cat([self.final[:shared], final])
        self.tokens, self.aux, self.final = tokens_T, aux, final
        return aux, final, len(new_T)
