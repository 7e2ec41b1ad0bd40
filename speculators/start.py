"""A start for the draft in closed form: least-squares fits in place of the first epochs.

The draft's hidden state is made to mean the target's final state, halfway between the one at its
own position and the next. The fusion learns to read it off the target's streams; one head of
each group attends to its own position and brings in the token that was just chosen; the output
projection and the MLP then learn the step to the next final state, first from the fused states,
then also from the states that the draft itself arrives at. Every fit is a ridge regression on
what the draft really computes up to there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.speculators.eagle3 import Eagle3Draft
from strop.speculators.steps import Batch, run_steps

_RIDGE = 0.02
_NEXT_SHARE = 0.5
_STEP_WEIGHT = 0.9
_SELF_PAIRS = 8
_SELF_SHARPNESS = 24.0


@torch.no_grad()
def closed_form_start(draft: Eagle3Draft, batches: Sequence[Batch]) -> None:
    """Fit an initialised `draft` to the target's final states over `batches`."""
    layer = draft.midlayer
    for norm in (layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm):
        norm.weight.fill_(1.0)
    states = [batch.final_TH.float() / draft.norm.weight for batch in batches]
    now_NH = torch.cat([s[b.anchors_N] for s, b in zip(states, batches, strict=True)])
    next_NH = torch.cat([s[b.anchors_N + 1] for s, b in zip(states, batches, strict=True)])
    streams = torch.cat([draft.normed_streams(b.aux_TA[b.anchors_N].float()) for b in batches])
    draft.fc.weight.copy_(ridge(streams, torch.lerp(now_NH, next_NH, _NEXT_SHARE)).T)
    del streams

    chosen_NH = torch.cat([draft.embedded(b.tokens_T[b.anchors_N + 1]) for b in batches])
    _attend_to_self(draft, chosen_NH)
    _carry_the_chosen_token(draft, chosen_NH, now_NH, next_NH)
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    for steps in dict.fromkeys((1, batches[0].labels_NJ.shape[1])):
        _fit_the_layer(draft, batches, states, steps)


def ridge(inputs_NI: Tensor, outputs_NO: Tensor) -> Tensor:
    """Least squares [I, O] with a penalty relative to the inputs' mean square."""
    gram = inputs_NI.T @ inputs_NI
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean().clamp(min=1e-12))
    return torch.linalg.solve(gram, inputs_NI.T @ outputs_NO)


def _attend_to_self(draft: Eagle3Draft, chosen_NH: Tensor) -> None:
    """The first head of each group finds its own position by the fastest rotary pairs, through a
    direction in which all embeddings agree; the other heads keep the slower pairs as they are."""
    attention, hidden = draft.midlayer.self_attn, chosen_NH.shape[1]
    half, groups = attention.head_dim // 2, attention.heads // attention.kv_heads
    pairs = min(_SELF_PAIRS, half // 2)
    constant_H = ridge(chosen_NH, chosen_NH.new_ones(len(chosen_NH), 1))[:, 0]
    size = math.sqrt(_SELF_SHARPNESS * math.sqrt(attention.head_dim) / pairs)
    queries = attention.q_proj.weight.view(attention.heads, attention.head_dim, -1)
    keys = attention.k_proj.weight.view(attention.kv_heads, attention.head_dim, -1)
    for rows in (queries, keys):
        rows[:, :pairs] = 0
        rows[:, half : half + pairs] = 0
    queries[::groups] = 0
    for rows in (queries[::groups], keys):
        rows[:, :pairs, :hidden] = constant_H * size


def _carry_the_chosen_token(draft: Eagle3Draft, chosen_NH: Tensor, now_NH: Tensor, next_NH: Tensor) -> None:
    """Values: the directions of the embedding that say most about the next state beyond the present one."""
    weight = draft.midlayer.self_attn.v_proj.weight
    hidden = chosen_NH.shape[1]
    effect_HH = ridge(torch.cat([now_NH, chosen_NH], dim=-1), next_NH)[hidden:]
    explained_NH = chosen_NH @ effect_HH
    strongest_HV = torch.linalg.eigh(explained_NH.T @ explained_NH).eigenvectors[:, -weight.shape[0] :]
    values_HV = effect_HH @ strongest_HV
    spread_V = (chosen_NH @ values_HV).std(0).clamp(min=1e-4)
    weight.zero_()
    weight[: values_HV.shape[1], :hidden] = (values_HV / spread_V).T


@dataclass(slots=True)
class _Seen:
    attended: list[Tensor]
    middle: list[Tensor]


def _fit_the_layer(
    draft: Eagle3Draft, batches: Sequence[Batch], states: Sequence[Tensor], steps: int
) -> None:
    """Output projection and MLP from what the draft computes in its first `steps` steps."""
    attention, mlp = draft.midlayer.self_attn, draft.midlayer.mlp
    seen = _Seen([], [])
    hooks = [
        attention.o_proj.register_forward_pre_hook(lambda _, args: seen.attended.append(args[0])),
        draft.midlayer.post_attention_layernorm.register_forward_pre_hook(
            lambda _, args: seen.middle.append(args[0])
        ),
    ]
    head = draft.lm_head
    setattr(draft, "lm_head", nn.Identity())  # noqa: B010
    rows: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    try:
        for batch, state_TH in zip(batches, states, strict=True):
            seen.attended.clear()
            seen.middle.clear()
            short = replace(batch, labels_NJ=batch.labels_NJ[:, :steps])
            run_steps(draft, short)
            for step, (attended, middle) in enumerate(zip(seen.attended, seen.middle, strict=True)):
                valid = batch.valid_NJ[:, step]
                residual = middle[valid] - F.linear(attended[valid], attention.o_proj.weight)
                wanted = state_TH[batch.anchors_N[valid] + 1 + step]
                rows.append(
                    (attended[valid], residual, wanted, wanted.new_full((len(wanted), 1), _STEP_WEIGHT**step))
                )
    finally:
        draft.lm_head = head
        for hook in hooks:
            hook.remove()
    attended, residual, wanted, weight = (torch.cat(column) for column in zip(*rows, strict=True))
    attention.o_proj.weight.copy_(ridge(attended * weight, (wanted - residual) * weight).T)
    middle = residual + attention.o_proj(attended)
    normed = draft.midlayer.post_attention_layernorm(middle)
    gated = mlp.act_fn(mlp.gate_proj(normed)) * mlp.up_proj(normed)
    # Units of one size, so that one learning rate suits the weights on both sides of them.
    size_F = gated.pow(2).mean(0).sqrt().clamp(min=1e-6)
    mlp.up_proj.weight.div_(size_F[:, None])
    gated = gated / size_F
    mlp.down_proj.weight.copy_(ridge(gated * weight, (wanted - middle) * weight).T)
