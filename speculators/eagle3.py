"""The EAGLE-3 draft model, in the exact form vLLM's Llama EAGLE-3 loads and runs.

One decoder layer reads, at index t, the embedding of token t+1 and a hidden state of index t:
first the fused hidden states of the target, in later steps its own output (Li et al.,
arXiv 2503.01840). It predicts token t+2, at rotary position t.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from strop.serving.home import write_atomic
from strop.speculators.features import Target
from strop.speculators.samples import DraftVocabulary

ARCHITECTURE = "LlamaForCausalLMEagle3"
_TARGET_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters", "rope_theta", "rope_scaling",
    "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


class DraftError(ValueError):
    """A draft folder that cannot be read; the message says what to do."""


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Shape of a draft: the target's own dimensions, one layer, a smaller vocabulary."""

    llama: dict[str, Any]
    """The Llama fields of config.json that the draft shares with the target."""
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    fc_norm: bool = True
    """Whether each of the target's streams is normed before they are fused."""

    @classmethod
    def for_target(
        cls, target_config: dict[str, Any], draft_vocab_size: int, aux_layers: tuple[int, ...]
    ) -> "DraftConfig":
        llama = {k: target_config[k] for k in _TARGET_KEYS if target_config.get(k) is not None}
        llama.setdefault("num_key_value_heads", llama["num_attention_heads"])
        llama.setdefault("head_dim", llama["hidden_size"] // llama["num_attention_heads"])
        return cls(llama, draft_vocab_size, aux_layers)

    def to_json(self, dtype: str) -> str:
        """config.json as vLLM reads it; flags that tools default differently are always written."""
        content = {
            **self.llama,
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.llama["hidden_size"],
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(self.aux_layers),
                "use_aux_hidden_state": True,
            },
            "num_aux_hidden_states": len(self.aux_layers),
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": self.fc_norm,
            "norm_output": False,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "dtype": dtype,
        }
        return json.dumps(content, indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "DraftConfig":
        content = json.loads(text)
        return cls(
            llama={k: content[k] for k in _TARGET_KEYS if content.get(k) is not None},
            draft_vocab_size=content["draft_vocab_size"],
            aux_layers=tuple(content["eagle_config"]["eagle_aux_hidden_state_layer_ids"]),
            fc_norm=content["fc_norm"],
        )

    @property
    def hf(self) -> LlamaConfig:
        return LlamaConfig(**self.llama, num_hidden_layers=1)


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.heads = int(config.num_attention_heads)
        self.kv_heads = int(config.num_key_value_heads or config.num_attention_heads)
        self.head_dim = int(config.head_dim or config.hidden_size // config.num_attention_heads)
        inputs = 2 * config.hidden_size
        self.q_proj = nn.Linear(inputs, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)


class _MidLayer(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3Draft(nn.Module):
    """Parameter names are those of the checkpoint; the embedding is the target's and is not saved."""

    def __init__(self, config: DraftConfig, embeddings_VH: Tensor, vocabulary: DraftVocabulary):
        super().__init__()
        self.config, self.vocabulary = config, vocabulary
        hf = config.hf
        hidden = hf.hidden_size
        self.midlayer = _MidLayer(hf)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(hidden, hf.rms_norm_eps) for _ in config.aux_layers)
        self.fc = nn.Linear(len(config.aux_layers) * hidden, hidden, bias=False)
        self.norm = LlamaRMSNorm(hidden, hf.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(hf)
        self.embeddings_VH: Tensor
        self.register_buffer("embeddings_VH", embeddings_VH.detach(), persistent=False)

    def normed_streams(self, aux_TA: Tensor) -> Tensor:
        """What the fusion reads of the target's streams, [T, aux layers x hidden]."""
        if not self.config.fc_norm:
            return aux_TA
        chunks = aux_TA.chunk(len(self.config.aux_layers), dim=-1)
        return torch.cat([norm(c) for norm, c in zip(self.fc_norm, chunks, strict=True)], dim=-1)

    def fuse(self, aux_TA: Tensor) -> Tensor:
        """[T, aux layers x hidden] of the target -> [T, hidden]."""
        return self.fc(self.normed_streams(aux_TA))

    def embedded(self, tokens_T: Tensor) -> Tensor:
        """Normed embeddings, [T, hidden]."""
        return self.midlayer.input_layernorm(F.embedding(tokens_T, self.embeddings_VH))

    def layer_inputs(self, tokens_T: Tensor, hidden_TH: Tensor) -> Tensor:
        """Normed embedding of the next token beside the normed hidden state, [T, 2 x hidden]."""
        embedded = self.embedded(tokens_T).to(hidden_TH.dtype)
        return torch.cat([embedded, self.midlayer.hidden_norm(hidden_TH)], dim=-1)

    def keys_values(self, inputs_TI: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, each [kv heads, T, head dim]."""
        attention = self.midlayer.self_attn
        key = _heads(attention.k_proj(inputs_TI), attention.kv_heads)
        return self._rotate(key, positions_T), _heads(attention.v_proj(inputs_TI), attention.kv_heads)

    def queries(self, inputs_NI: Tensor, positions_N: Tensor) -> Tensor:
        """Rotated queries, [heads, N, head dim]."""
        attention = self.midlayer.self_attn
        return self._rotate(_heads(attention.q_proj(inputs_NI), attention.heads), positions_N)

    def finish(self, attended_NA: Tensor, residual_NH: Tensor) -> tuple[Tensor, Tensor]:
        """Attention output and residual -> (draft logits [N, V], hidden state for the next step [N, H])."""
        hidden = residual_NH + self.midlayer.self_attn.o_proj(attended_NA)
        hidden = hidden + self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden))
        return self.lm_head(self.norm(hidden)), hidden

    def _rotate(self, x_hTd: Tensor, positions_T: Tensor) -> Tensor:
        cos, sin = self.rotary(x_hTd, positions_T[None])
        return apply_rotary_pos_emb(x_hTd[None], x_hTd[None], cos, sin)[0][0]

    def initialise(self, target: Target) -> None:
        """Queries, keys, gates, norm and head of the target; the rest is small noise (see `closed_form_start`)."""
        state = target.model.state_dict()
        last = f"model.layers.{target.config['num_hidden_layers'] - 1}."
        hidden = self.config.llama["hidden_size"]
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(std=0.02)
            for name in ("q_proj", "k_proj"):
                weight = getattr(self.midlayer.self_attn, name).weight
                weight[:, hidden:].copy_(state[f"{last}self_attn.{name}.weight"])
            self.midlayer.mlp.gate_proj.weight.copy_(state[f"{last}mlp.gate_proj.weight"])
            self.midlayer.mlp.up_proj.weight.copy_(state[f"{last}mlp.up_proj.weight"])
            self.norm.weight.copy_(state["model.norm.weight"])
            rows = torch.from_numpy(self.vocabulary.target_ids_V).to(target.head.device)
            self.lm_head.weight.copy_(target.head[rows])

    def warm_start(self, other: "Eagle3Draft") -> None:
        """Take over an earlier draft of the same shape; rows of new tokens keep their initial values."""
        if other.config.llama != self.config.llama or other.config.aux_layers != self.config.aux_layers:
            raise DraftError("the earlier draft has another shape than the target")
        rows = torch.from_numpy(other.vocabulary.draft_ids()[self.vocabulary.target_ids_V])
        known, theirs = rows >= 0, dict(other.named_parameters())
        with torch.no_grad():
            for name, mine in self.named_parameters():
                if name == "lm_head.weight":
                    mine[known] = theirs[name][rows[known]].to(mine)
                elif name in theirs:
                    mine.copy_(theirs[name])

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write config.json and model.safetensors that vLLM loads with method `eagle3`."""
        tensors = {n: p.detach().to("cpu", dtype).contiguous() for n, p in self.named_parameters()}
        tensors["d2t"] = torch.from_numpy(self.vocabulary.d2t)
        tensors["t2d"] = torch.from_numpy(self.vocabulary.t2d)
        write_atomic(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
        write_atomic(folder / "config.json", self.config.to_json(str(dtype).removeprefix("torch.")))


def load_draft(folder: Path, embeddings_VH: Tensor) -> Eagle3Draft:
    """Read what `Eagle3Draft.save` wrote, as float32. Raises DraftError."""
    try:
        config = DraftConfig.from_json((folder / "config.json").read_text())
        tensors = load_file(str(folder / "model.safetensors"))
        d2t, t2d = tensors.pop("d2t").numpy(), tensors.pop("t2d").numpy()
        target_ids = d2t + torch.arange(len(d2t)).numpy()
        draft = Eagle3Draft(config, embeddings_VH, DraftVocabulary(target_ids, len(t2d)))
        draft.load_state_dict(tensors)
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise DraftError(f"{folder} is not an EAGLE-3 draft of this form: {error}") from None
    return draft


def _heads(x_TA: Tensor, heads: int) -> Tensor:
    return x_TA.unflatten(-1, (heads, -1)).transpose(0, 1)
