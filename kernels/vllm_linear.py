"""Our linear layers in vLLM on CPUs: unquantised ones with the output head, W4A16, and int8 weights.

Unquantised weights are packed as bfloat16 where that holds them exactly, whatever the engine's dtype: a
bfloat16 checkpoint served in float32 keeps float32 activations and reads half the bytes. A layer that
cannot be packed stays with vLLM.

W8A8 checkpoints run as W8A16: their activations are not rounded to int8.
"""

from collections.abc import Callable
from functools import partial

import torch
from vllm.model_executor.kernels import linear as registry
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
    MPLinearKernel,
    MPLinearLayerConfig,
)
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    Int8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

from strop.kernels.linear import INT4_GROUPS, Packed, pack_bf16, pack_int4, pack_int8

ACTIVATIONS = (torch.float32, torch.bfloat16)

_stock_dispatch = utils.dispatch_cpu_unquantized_gemm


def install() -> None:
    """Put our kernels before vLLM's; harmless twice."""
    utils.dispatch_cpu_unquantized_gemm = dispatch
    for kernels, ours in (
        (registry._POSSIBLE_KERNELS[PlatformEnum.CPU], Int4Linear),
        (registry._POSSIBLE_INT8_KERNELS[PlatformEnum.CPU], Int8Linear),
    ):
        # vLLM's own way of registering appends, and its CPU kernels say that they can do everything.
        if ours not in kernels:
            kernels.insert(0, ours)  # type: ignore[arg-type]


def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
    """In place of vLLM's function of this name: choose what `layer.cpu_linear` is, and pack the weights."""
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    if weight.is_meta or weight.ndim != 2 or weight.dtype not in ACTIVATIONS:
        _stock_dispatch(layer, remove_weight)
        return
    if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
        # An embedding multiplies nothing, unless a model ties its head to it by using it as one.
        layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]
        return
    try:
        packed = pack_bf16(weight.data)
    except ValueError:
        _stock_dispatch(layer, remove_weight)
        return
    if remove_weight:
        layer.weight = torch.nn.Parameter(packed.weight, requires_grad=False)
        layer.cpu_linear = partial(_linear, packed.channels)  # type: ignore[assignment]
    else:
        layer.cpu_linear = _bound(packed)  # type: ignore[assignment]


def _linear(channels: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.strop_kernels.linear(x, weight, None, bias, channels)


def _bound(packed: Packed) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """For an output head, whose weight may be the embedding's too and stays as it is."""
    return lambda x, _weight, bias: _linear(packed.channels, x, packed.weight, bias)


class Int4Linear(MPLinearKernel):
    """Symmetric int4 weights in groups, as compressed-tensors' `pack-quantized` has them."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        if c.weight_type != scalar_types.uint4b8 or c.zero_points:
            return False, f"strop's int4 kernel takes symmetric int4 weights, not {c.weight_type}"
        if c.act_type not in ACTIVATIONS or c.group_size not in INT4_GROUPS:
            return False, f"strop's int4 kernel takes groups of {INT4_GROUPS} and {ACTIVATIONS}"
        if c.partition_weight_shape[0] % c.group_size:
            return False, f"{c.partition_weight_shape[0]} inputs are no multiple of {c.group_size}"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        words, scale, _ = self._get_weight_params(layer)
        # [N, K/8] int32, low nibble first, q + 8.
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        values = ((words.data[:, :, None] >> shifts) & 15).flatten(1).to(torch.int8) - 8
        packed = pack_int4(values, scale.data)
        self._transform_param(layer, self.w_q_name, lambda _: packed.weight)
        self._transform_param(layer, self.w_s_name, lambda _: packed.scale)
        layer.strop_channels = packed.channels  # type: ignore[assignment]

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight, scale, _ = self._get_weight_params(layer)
        return torch.ops.strop_kernels.linear(x, weight, scale, bias, layer.strop_channels)


class Int8Linear(Int8ScaledMMLinearKernel):
    """Int8 weights with a symmetric scale per output channel."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        if not c.is_channelwise or c.is_static_input_scheme:
            return False, "strop's int8 kernel takes a scale per channel and dynamic activations"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        weight, scale, _, _, _ = self._get_layer_params(layer)
        packed = pack_int8(weight.data, scale.data)
        weight_name, scale_name, *_ = self.layer_param_names
        assert packed.scale is not None
        setattr(layer, weight_name, torch.nn.Parameter(packed.weight, requires_grad=False))
        setattr(layer, scale_name, torch.nn.Parameter(packed.scale, requires_grad=False))
        layer.strop_channels = packed.channels  # type: ignore[assignment]

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight, scale, _, _, _ = self._get_layer_params(layer)
        return torch.ops.strop_kernels.linear(x, weight, scale, bias, layer.strop_channels)
