"""Training-time test: the draft runs its own drafting steps in parallel over recorded text.

Anchor t is a position where the engine would start to draft: tokens t+1 and t+2 are outputs.
Step j at anchor t sees the recorded token t+1+j and predicts token t+2+j.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from strop.serving.traces import WITHHELD
from strop.speculators.eagle3 import Eagle3Draft
from strop.speculators.samples import Sample


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Several samples end to end. T: positions, N: anchors, J: draft steps."""

    tokens_T: Tensor
    positions_T: Tensor
    aux_TA: Tensor
    final_TH: Tensor
    lengths: list[int]
    """Tokens of each sample."""
    anchor_counts: list[int]
    anchors_N: Tensor
    labels_NJ: Tensor
    """Draft id of token t+2+j; -1 outside the draft vocabulary."""
    valid_NJ: Tensor
    """Whether tokens t+2 to t+2+j may be predicted: all outputs of one turn, or with a `prompt_weight` any tokens."""
    weight_N: Tensor
    """Weight of an anchor in the loss."""

    @property
    def anchors(self) -> int:
        return len(self.anchors_N)

    def to(self, device: torch.device) -> "Batch":
        tensors = {
            n: getattr(self, n).to(device) for n in self.__slots__ if isinstance(getattr(self, n), Tensor)
        }
        return replace(self, **tensors)


def anchors_of(sample: Sample, prompts: bool = False) -> np.ndarray:
    """Positions where the engine drafts with a known continuation; with `prompts` also the positions
    of prompts, each distinct prefix in one sample."""
    inside_T = sample.output_T[1:-1] & sample.output_T[2:]
    if prompts:
        inside_T[sample.shared :] = sample.tokens_T[2:][sample.shared :] != WITHHELD
    return np.flatnonzero(inside_T)


def make_batch(
    samples: Sequence[Sample],
    features: Sequence[tuple[Tensor, Tensor]],
    draft_ids: np.ndarray,
    steps: int,
    prompt_weight: float = 0,
) -> Batch:
    """Join samples and their (aux, final) features. With a `prompt_weight`
    there are also anchors in prompts, to learn from and never to measure."""
    anchors, labels, valid, weights = [], [], [], []
    offset = 0
    for sample in samples:
        length, t = len(sample.tokens_T), anchors_of(sample, prompt_weight > 0)
        predicted_NJ = t[:, None] + 2 + np.arange(steps)
        inside_NJ = np.minimum(predicted_NJ, length - 1)
        allowed_NJ = predicted_NJ < length
        allowed_NJ &= sample.tokens_T[inside_NJ] != WITHHELD
        if not prompt_weight:
            allowed_NJ &= sample.output_T[inside_NJ]
        anchors.append(t + offset)
        labels.append(draft_ids[sample.tokens_T[inside_NJ]])
        valid.append(np.logical_and.accumulate(allowed_NJ, axis=1))
        weights.append(np.where(sample.output_T[t + 1] & sample.output_T[t + 2], 1.0, prompt_weight))
        offset += length
    lengths = [len(s.tokens_T) for s in samples]
    return Batch(
        tokens_T=torch.from_numpy(np.concatenate([s.tokens_T for s in samples])).clamp(min=0),
        positions_T=torch.cat([torch.arange(n) for n in lengths]),
        aux_TA=torch.cat([aux for aux, _ in features]),
        final_TH=torch.cat([final for _, final in features]),
        lengths=lengths,
        anchor_counts=[len(a) for a in anchors],
        anchors_N=torch.from_numpy(np.concatenate(anchors)),
        labels_NJ=torch.from_numpy(np.concatenate(labels)),
        valid_NJ=torch.from_numpy(np.concatenate(valid)),
        weight_N=torch.from_numpy(np.concatenate(weights)).float(),
    )


def run_steps(draft: Eagle3Draft, batch: Batch) -> list[Tensor]:
    """Draft logits [N, V] of every step, each step on the hidden state of the one before."""
    next_T = torch.roll(batch.tokens_T, -1)
    anchors, last = batch.anchors_N, len(batch.tokens_T) - 1
    fused_TH = draft.fuse(batch.aux_TA.to(draft.fc.weight.dtype))
    inputs_TI = draft.layer_inputs(next_T, fused_TH)
    key_hTd, value_hTd = draft.keys_values(inputs_TI, batch.positions_T)
    inputs_NI, hidden_NH = inputs_TI[anchors], fused_TH[anchors]
    own: list[tuple[Tensor, Tensor]] = []
    logits = []
    for step in range(batch.labels_NJ.shape[1]):
        positions_N = batch.positions_T[anchors] + step
        if step:
            inputs_NI = draft.layer_inputs(batch.tokens_T[(anchors + 1 + step).clamp(max=last)], hidden_NH)
            own.append(draft.keys_values(inputs_NI, positions_N))
        query_hNd = draft.queries(inputs_NI, positions_N)
        attended_NA = attend(query_hNd, key_hTd, value_hTd, own, batch)
        step_logits, hidden_NH = draft.finish(attended_NA, hidden_NH)
        logits.append(step_logits)
    return logits


def attend(
    query_hNd: Tensor, key_hTd: Tensor, value_hTd: Tensor, own: list[tuple[Tensor, Tensor]], batch: Batch
) -> Tensor:
    """Attention of each anchor over the target-fed keys up to itself and its own keys of later steps."""
    groups = query_hNd.shape[0] // key_hTd.shape[0]
    scale = query_hNd.shape[-1] ** -0.5
    queries = (query_hNd * scale).unflatten(0, (-1, groups)).split(batch.anchor_counts, dim=2)
    keys, values = key_hTd.split(batch.lengths, dim=1), value_hTd.split(batch.lengths, dim=1)
    places = batch.positions_T[batch.anchors_N].split(batch.anchor_counts)
    outputs = []
    start = 0
    for query, key, value, place in zip(queries, keys, values, places, strict=True):
        count, length = query.shape[2], key.shape[1]
        hidden_from = torch.arange(length, device=place.device)[None] > place[:, None]
        scores = [torch.einsum("kgnd,ktd->kgnt", query, key).float().masked_fill(hidden_from, float("-inf"))]
        mine = [(k[:, start : start + count], v[:, start : start + count]) for k, v in own]
        scores += [(query * k[:, None]).sum(-1, keepdim=True).float() for k, _ in mine]
        weights = F.softmax(torch.cat(scores, dim=-1), dim=-1).to(value.dtype)
        mixed = torch.einsum("kgnt,ktd->kgnd", weights[..., :length], value)
        for i, (_, v) in enumerate(mine):
            mixed = mixed + weights[..., length + i, None] * v[:, None]
        outputs.append(mixed.flatten(0, 1).transpose(0, 1).flatten(1))
        start += count
    return torch.cat(outputs)


def distillation_loss(logits: list[Tensor], batch: Batch, head_rows_VH: Tensor, step_weight: float) -> Tensor:
    """Forward KL from the target to the draft over the draft vocabulary, the weighted mean over usable
    positions, step j by `step_weight`^j. `head_rows_VH` are the target's output rows of that vocabulary.
    """
    places, where = torch.unique(
        batch.anchors_N[:, None] + 1 + torch.arange(len(logits), device=head_rows_VH.device),
        return_inverse=True,
    )
    final_MH = batch.final_TH[places.clamp(max=len(batch.final_TH) - 1)].to(head_rows_VH.dtype)
    target_MV = F.log_softmax(F.linear(final_MH, head_rows_VH).float(), dim=-1)
    usable_NJ = batch.valid_NJ & (batch.labels_NJ >= 0)
    total = target_MV.new_zeros(())
    for step, step_logits in enumerate(logits):
        usable_N = usable_NJ[:, step]
        weight = batch.weight_N[usable_N]
        want = target_MV[where[usable_N, step]]
        have = F.log_softmax(step_logits[usable_N].float(), dim=-1)
        divergence = F.kl_div(have, want, reduction="none", log_target=True).sum(-1)
        total = total + step_weight**step * (divergence * weight).sum() / weight.sum().clamp(min=1e-6)
    return total / sum(step_weight**j for j in range(len(logits)))


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What the engine would have counted: steps of the target and accepted drafts by position."""

    steps: int
    accepted: tuple[int, ...]

    @property
    def by_position(self) -> list[float]:
        """Accepted drafts of each position per drafting step."""
        return [a / max(1, self.steps) for a in self.accepted]

    @property
    def length(self) -> float:
        """Tokens per target step, the bonus token included."""
        return 1 + sum(self.by_position)

    def __add__(self, other: "Acceptance") -> "Acceptance":
        return Acceptance(
            self.steps + other.steps, tuple(a + b for a, b in zip(self.accepted, other.accepted, strict=True))
        )


def measure(logits: list[Tensor], batch: Batch) -> Acceptance:
    """Replay greedy drafting over the recorded text, skipping from each anchor past what it accepts.

    A drafted token is accepted where it equals the recorded one, which for sampled traffic is an
    unbiased estimate of rejection sampling with greedy drafts.
    """
    hit_NJ = torch.stack([step.argmax(-1) for step in logits], dim=1) == batch.labels_NJ
    chain_NJ = (hit_NJ & batch.valid_NJ).cumprod(dim=1)
    runs = chain_NJ.sum(dim=1).tolist()
    anchors = batch.anchors_N.tolist()
    steps, accepted = 0, [0] * chain_NJ.shape[1]
    until = -1
    for anchor, run in zip(anchors, runs, strict=True):
        if anchor < until:
            continue
        until = anchor + run + 1
        steps += 1
        for j in range(run):
            accepted[j] += 1
    return Acceptance(steps, tuple(accepted))
