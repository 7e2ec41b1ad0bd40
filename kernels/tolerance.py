"""Are these outputs as good as the dtype allows?

The truth is the contract's reference in float64. How far a kernel may be from it is what the same
reference in the served dtype is off, or what rounding the truth once costs, whichever is more: on the
whole (root mean square, each row by its own largest value, so that zeros pass nowhere), and in the worst
element of each row. A kernel that keeps its sums in less than float32, or drops a bit of an input, has
1.4 times that error and more.
"""

import torch
from torch import Tensor

from strop.kernels.contract import Tensors

WHOLE = {torch.bfloat16: 1.1, torch.float16: 1.1}
"""How many times the reference's error on the whole; another order of float32 sums is no fault."""
WHOLE_OTHERWISE = 4.0
WORST = 2.0
"""How many times the reference's worst error in the row, or half a unit in the last place of its largest value."""
WORST_OTHERWISE = 16.0


def fault(outputs: Tensors, truth: Tensors, rounded: Tensors) -> str | None:
    """What is wrong with outputs, in words; None if nothing is.

    `truth` is in float64, `rounded` what the reference gives in the served dtype; integers must be equal.
    """
    for number, (found, true, stock) in enumerate(zip(outputs, truth, rounded, strict=True)):
        wrong = _fault(found, true, stock) if found.is_floating_point() else _unequal(found, true)
        if wrong:
            return f"output {number}: {wrong}"
    return None


def _unequal(found: Tensor, true: Tensor) -> str | None:
    different = found.ne(true)
    if not different.any():
        return None
    where = different.nonzero()[0].tolist()
    return f"{int(different.sum())} of {found.numel()} differ, first at {where}: {found[tuple(where)].item()} instead of {true[tuple(where)].item()}"


def _fault(found: Tensor, true: Tensor, stock: Tensor) -> str | None:
    kind = torch.finfo(found.dtype)
    once = true.to(found.dtype).double()
    finite = once.isfinite()
    value = found.double()
    if not torch.equal(value.isfinite(), finite):
        where = (value.isfinite() != finite).nonzero()[0].tolist()
        hidden = "finite" if value.isfinite()[tuple(where)] else str(value[tuple(where)].item())
        return f"{hidden} at {where}, where the reference has {once[tuple(where)].item()}"
    error, base, ideal = (
        torch.where(finite & t.isfinite(), t - true, 0.0).abs() for t in (value, stock.double(), once)
    )
    half_unit, least = kind.eps / 2, kind.smallest_normal * kind.eps
    largest = torch.where(finite, true, 0.0).abs().amax(-1, keepdim=True)
    strict = found.dtype in WHOLE
    worst = WORST if strict else WORST_OTHERWISE
    bound = worst * torch.maximum(base.amax(-1, keepdim=True), half_unit * largest) + least
    if bool((over := error > bound).any()):
        where = over.nonzero()[0].tolist()
        at = tuple(where)
        return (
            f"{found[at].item():.6g} instead of {true[at].item():.6g} at {where}; "
            f"{int(over.sum())} of {found.numel()} elements are off by more than the dtype explains"
        )
    rows = largest.expand_as(error) > 0
    relative, allowed, unavoidable = (
        (t / largest.clamp(min=least))[rows].square().mean().sqrt().item() if rows.any() else 0.0
        for t in (error, base, ideal)
    )
    # Of few elements, the root mean square is known less well.
    factor = (WHOLE[found.dtype] if strict else WHOLE_OTHERWISE) * (1 + error.numel() ** -0.5)
    allowed = factor * max(allowed, unavoidable) + least
    if relative > allowed:
        return f"precision is lower than asked for: error {relative:.3g} of the largest values, {allowed:.3g} is allowed"
    return None


def exactly(outputs: Tensors, truth: Tensors) -> str | None:
    """What is wrong with outputs that every right kernel gives bit for bit."""
    for number, (found, true) in enumerate(zip(outputs, truth, strict=True)):
        if wrong := _unequal(found, true.to(found.dtype)):
            return f"output {number}: {wrong} (exact inputs: sums must be kept in float32 and rounded to nearest even)"
    return None
