"""Linear layers on CPUs over packed bfloat16, int8 and int4 weights: `csrc/linear.cpp`, and its packing.

Weights are packed once, when they are loaded. K is the number of inputs, N of output channels; N is
filled up with zeros to whole panels of 16.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from strop.kernels.build import CSRC, Source

PANEL = 16
INT4_GROUPS = (32, 64, 128)
_SPLIT = [lane for j in range(PANEL // 2) for lane in (j, j + PANEL // 2)]


@dataclass(frozen=True, slots=True)
class Packed:
    """Weights as the kernel takes them."""

    weight: torch.Tensor
    """bf16 or int8 [panels, K, 16], or int32 [panels, K/8, 16] with eight int4 values in each."""
    scale: torch.Tensor | None
    """int8: float32 [panels * 16]; int4: bfloat16 [panels, K/group, 16]; None for bf16."""
    channels: int
    """N."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.weight,) if self.scale is None else (self.weight, self.scale)

    @property
    def bytes(self) -> int:
        """What one pass over the weights reads."""
        return sum(tensor.nbytes for tensor in self.tensors)


def linear_source(flags: tuple[str, ...] = ()) -> Source:
    return Source("linear", Path(CSRC, "linear.cpp").read_text(), flags)


def pack_bf16(weight_NK: torch.Tensor) -> Packed:
    """Pack weights that bfloat16 holds exactly. Raises ValueError where rounding would change them."""
    exact = weight_NK.to(torch.bfloat16)
    if exact.dtype != weight_NK.dtype and not torch.equal(exact.to(weight_NK.dtype), weight_NK):
        raise ValueError(
            f"These {weight_NK.dtype} weights are not bfloat16 values: packing would round them. "
            "Quantise them, or round them to bfloat16 first if that is what should be served."
        )
    return Packed(_panels(exact)[:, :, _SPLIT].contiguous(), None, len(weight_NK))


def pack_int8(weight_NK: torch.Tensor, scale_N: torch.Tensor) -> Packed:
    """Pack int8 weights with one symmetric scale per output channel: w = weight * scale."""
    if weight_NK.dtype != torch.int8 or scale_N.numel() != len(weight_NK):
        raise ValueError(
            f"int8 weights [N, K] and a scale for each channel are packed, not {weight_NK.dtype} with {scale_N.numel()}."
        )
    panels = _panels(weight_NK)
    scale = torch.zeros(len(panels) * PANEL)
    scale[: scale_N.numel()] = scale_N.reshape(-1).float()
    return Packed(panels, scale, len(weight_NK))


def pack_int4(weight_NK: torch.Tensor, scale_NG: torch.Tensor) -> Packed:
    """Pack int4 weights (int8 tensor of -8..7) with a symmetric bfloat16 scale per group of K / G inputs.

    Raises ValueError for groups other than 32, 64 or 128 and for scales that bfloat16 does not hold.
    """
    (channels, k), groups = weight_NK.shape, scale_NG.shape[-1]
    if groups == 0 or k % groups or k // groups not in INT4_GROUPS:
        raise ValueError(f"int4 groups have {INT4_GROUPS} inputs, not {k} / {groups}.")
    scale = scale_NG.to(torch.bfloat16)
    if not torch.equal(scale.to(scale_NG.dtype), scale_NG):
        raise ValueError("The scales of int4 weights must be bfloat16 values: round them before quantising.")
    digits = _panels(weight_NK).to(torch.int32).unflatten(1, (k // 8, 8))
    # All but the digit that carries the sign are stored as q + 8: see the kernel.
    digits[:, :, :7] += 8
    shifted = digits.bitwise_and_(15) << torch.arange(0, 32, 4, dtype=torch.int32)[:, None]
    packed = shifted.sum(2, dtype=torch.int64).to(torch.int32)
    return Packed(packed.contiguous(), _panels(scale), channels)


def quantise_int8(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [N, K], float32 scale [N]) by the largest weight of each channel, rounded to nearest."""
    weight = weight_NK.float()
    scale = weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def quantise_int4(weight_NK: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [N, K] of -8..7, bfloat16 scale [N, K/group]) by the largest weight of each group.

    The weight of largest magnitude becomes -8, as in llama.cpp's Q4_0, so that all 16 levels are used.
    """
    grouped = weight_NK.float().unflatten(1, (-1, group))
    largest = grouped.gather(2, grouped.abs().argmax(2, keepdim=True)).squeeze(2)
    scale = (largest / -8).to(torch.bfloat16)
    divisor = torch.where(scale == 0, 1.0, scale.float())[:, :, None]
    return (grouped / divisor).round().clamp(-8, 7).to(torch.int8).flatten(1), scale


def _panels(tensor_NK: torch.Tensor) -> torch.Tensor:
    """[N, K] as [panels, K, 16], with zeros for channels that are not there."""
    channels, k = tensor_NK.shape
    panels = -(-channels // PANEL)
    filled = tensor_NK.new_zeros(panels * PANEL, k)
    filled[:channels] = tensor_NK
    return filled.unflatten(0, (panels, PANEL)).transpose(1, 2).contiguous()
