"""What an operator must do: the reference that a kernel is held against, and the inputs it is held to it on.

A contract is one entry in `CONTRACTS`. Its reference is torch, written so that it runs in any floating
dtype: in float64 it is the truth, in the served dtype it shows what rounding alone costs.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

Shape = Mapping[str, int]
"""Sizes by name, as the contract's `sizes` names them."""
Tensors = tuple[Tensor, ...]
Maker = Callable[[Shape, torch.dtype, torch.Generator], Tensors]
Reference = Callable[..., Tensors]


@dataclass(frozen=True, slots=True)
class Contract:
    """One operator as it is served."""

    name: str
    about: str
    """What the inputs and outputs are, in their order, for whoever writes a kernel."""
    reference: Reference
    """Inputs to outputs; arithmetic in the inputs' dtype, or in float32 where that is wider."""
    make: Maker
    """Inputs like those served, of random values."""
    served: tuple[Shape, ...]
    """The shapes that the engine calls it with. A kernel must take all of them, and is timed on all."""
    sizes: Mapping[str, tuple[int, int]]
    """The least and the most of each size that a random shape has; a kernel may refuse such a shape."""
    dtype: torch.dtype = torch.bfloat16
    exact: Maker | None = None
    """Inputs for which every order of float32 sums gives the same bits."""
    layout: Callable[..., Tensors] | None = None
    """How the inputs are laid out for the kernel, where that is not how the reference takes them."""
    in_place: tuple[tuple[int, int], ...] = ()
    """Pairs of an input and the output that takes its memory when served."""

    def truth(self, inputs: Tensors) -> Tensors:
        """The outputs in float64 (integers stay integers)."""
        return self.reference(*(t.double() if t.is_floating_point() else t for t in inputs))

    def laid_out(self, inputs: Tensors) -> Tensors:
        """The inputs as the kernel gets them."""
        return self.layout(*inputs) if self.layout else inputs

    def source(self) -> str:
        """The reference as text."""
        return inspect.getsource(self.reference)


def words(shape: Shape) -> str:
    """A shape as it is shown and compared: `rows=4 inputs=576`."""
    return " ".join(f"{name}={size}" for name, size in shape.items())


def shapes(**sizes: int | tuple[int, ...]) -> tuple[Shape, ...]:
    """Every combination of the sizes given."""
    choices = [size if isinstance(size, tuple) else (size,) for size in sizes.values()]
    return tuple(dict(zip(sizes, combination, strict=True)) for combination in product(*choices))


# -- references ----------------------------------------------------------------------------------


def _linear(x: Tensor, weight: Tensor) -> Tensors:
    return (linear(x, weight),)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rms_norm(x: Tensor, weight: Tensor, epsilon: Tensor) -> Tensors:
    wide = _wide(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return ((wide * scale * weight).to(x.dtype),)


def _fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: Tensor) -> Tensors:
    total = _wide(x) + _wide(residual)
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon)
    return (total * scale * weight).to(x.dtype), total.to(x.dtype)


def _silu_and_mul(x: Tensor) -> Tensors:
    gate, up = _wide(x).chunk(2, -1)
    return ((silu(gate) * up).to(x.dtype),)


def _rope(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensors:
    cos, sin = _wide(cos_sin)[positions].unsqueeze(1).chunk(2, -1)
    first, second = _wide(x).chunk(2, -1)
    return (torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype),)


def _greedy(logits: Tensor) -> Tensors:
    return (logits.argmax(-1),)


# -- inputs --------------------------------------------------------------------------------------


def _randn(*size: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(size, generator=generator).to(dtype)


def _linear_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    rows, inputs, outputs = shape["rows"], shape["inputs"], shape["outputs"]
    x = torch.randn(rows, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
    return x.to(dtype), weight.to(dtype)


def _linear_exact(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """Integers of as many bits as keep every partial sum below 2^24, whose halves nearly cancel out.

    A sum kept in less than float32, or inputs that lost a bit, miss the small difference that is left.
    """
    rows, inputs, outputs = shape["rows"], shape["inputs"], shape["outputs"]
    most = max(1, min(127, int((2**24 / max(inputs, 1)) ** 0.5) - 1))
    half = inputs // 2
    x = torch.randint(-most, most + 1, (rows, inputs), generator=generator)
    weight = torch.randint(-most, most + 1, (outputs, inputs), generator=generator)
    weight[:, half : 2 * half] = -weight[:, :half]
    x[:, half : 2 * half] = x[:, :half]
    # One column in sixteen differs by one.
    columns = torch.arange(0, half, 16)
    x[:, half + columns] = (x[:, columns] + 1).clamp(max=most)
    return x.to(dtype), weight.to(dtype)


def _norm_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    x = _randn(shape["rows"], shape["hidden"], dtype=dtype, generator=generator)
    weight = 1 + 0.3 * torch.randn(shape["hidden"], generator=generator)
    return x, weight.to(dtype), torch.tensor([1e-5])


def _add_norm_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    x, weight, epsilon = _norm_inputs(shape, dtype, generator)
    residual = 4 * torch.randn(x.shape, generator=generator)
    return x, residual.to(dtype), weight, epsilon


def _silu_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    return (_randn(shape["rows"], 2 * shape["hidden"], dtype=dtype, generator=generator) * 2,)


def _rope_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    rows, half, most = shape["rows"], shape["half"], 512
    x = _randn(rows, shape["heads"], 2 * half, dtype=dtype, generator=generator)
    positions = torch.randint(0, most, (rows,), generator=generator)
    angles = torch.arange(most)[:, None] * 1e5 ** (-torch.arange(half) / half)
    return x, positions, torch.cat((angles.cos(), angles.sin()), -1).to(dtype)


def _logits(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    return (_randn(shape["rows"], shape["vocabulary"], dtype=dtype, generator=generator) * 3,)


# -- the contracts -------------------------------------------------------------------------------

_HIDDEN, _INTERMEDIATE = 576, 1536
_ROWS = (1, 4, 256)

CONTRACTS: dict[str, Contract] = {
    contract.name: contract
    for contract in (
        Contract(
            name="linear",
            about="x [rows, inputs], weight [outputs, inputs] -> x times weight transposed [rows, outputs]; "
            "sums in float32, the result rounded to nearest even",
            reference=_linear,
            make=_linear_inputs,
            exact=_linear_exact,
            served=shapes(rows=_ROWS, inputs=_HIDDEN, outputs=2 * _INTERMEDIATE)
            + shapes(rows=_ROWS, inputs=_INTERMEDIATE, outputs=_HIDDEN),
            sizes={"rows": (1, 9), "inputs": (1, 700), "outputs": (1, 130)},
        ),
        Contract(
            name="rms_norm",
            about="x [rows, hidden], weight [hidden], epsilon float32 [1] -> [rows, hidden]",
            reference=_rms_norm,
            make=_norm_inputs,
            served=shapes(rows=_ROWS, hidden=_HIDDEN),
            sizes={"rows": (1, 9), "hidden": (1, 1100)},
        ),
        Contract(
            name="fused_add_rms_norm",
            about="x [rows, hidden], residual [rows, hidden], weight [hidden], epsilon float32 [1] -> "
            "norm of the sum [rows, hidden], the sum [rows, hidden]; served in the memory of x and residual",
            reference=_fused_add_rms_norm,
            make=_add_norm_inputs,
            served=shapes(rows=_ROWS, hidden=_HIDDEN),
            sizes={"rows": (1, 9), "hidden": (1, 1100)},
            in_place=((0, 0), (1, 1)),
        ),
        Contract(
            name="silu_and_mul",
            about="x [rows, 2 * hidden] -> silu(first half) * second half [rows, hidden]",
            reference=_silu_and_mul,
            make=_silu_inputs,
            served=shapes(rows=_ROWS, hidden=_INTERMEDIATE),
            sizes={"rows": (1, 9), "hidden": (1, 1100)},
        ),
        Contract(
            name="rope",
            about="x [rows, heads, 2 * half], positions int64 [rows], cos_sin [positions, 2 * half] (cosines, "
            "then sines) -> x rotated [rows, heads, 2 * half]; element i goes with i + half",
            reference=_rope,
            make=_rope_inputs,
            served=shapes(rows=_ROWS, heads=12, half=32),
            sizes={"rows": (1, 9), "heads": (1, 13), "half": (1, 70)},
            in_place=((0, 0),),
        ),
        Contract(
            name="greedy",
            about="logits [rows, vocabulary] -> index of the first largest int64 [rows]",
            reference=_greedy,
            make=_logits,
            served=shapes(rows=(1, 4), vocabulary=49152),
            sizes={"rows": (1, 9), "vocabulary": (1, 3000)},
            dtype=torch.float32,
        ),
    )
}
