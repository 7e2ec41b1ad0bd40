"""Linear layers against float64, over shapes, strides, dtypes and values that are not nice."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from strop.kernels.build import AVX512, Kernel, build, load
from strop.kernels.linear import (
    Packed,
    linear_source,
    pack_bf16,
    pack_int4,
    pack_int8,
    quantise_int4,
    quantise_int8,
)

KINDS = ("bf16", "int8", "int4")


@pytest.fixture(scope="module")
def linear(objects: Path) -> Kernel:
    return load(build(linear_source(), objects), "linear")


def make(kind: str, channels: int, k: int, group: int = 32) -> tuple[Packed, torch.Tensor]:
    """Packed weights, and their exact values."""
    weight = torch.randn(channels, k)
    if kind == "bf16":
        return pack_bf16(weight.to(torch.bfloat16)), weight.to(torch.bfloat16).double()
    values, scale = quantise_int8(weight) if kind == "int8" else quantise_int4(weight, group)
    exact = values.double().unflatten(1, (scale[0].numel(), -1)) * scale.double().reshape(channels, -1, 1)
    return (pack_int8 if kind == "int8" else pack_int4)(values, scale), exact.flatten(1)


def bound(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What float32 sums may be off by: a few roundings of the sum of magnitudes, and int4's offsets of 8."""
    k = x.shape[1]
    return 2**-23 * (4 + k**0.5) * (x.double().abs() @ weight.abs().t() + 1e-30)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 60),
    channels=st.integers(1, 70),
    groups=st.integers(1, 12),
    group=st.sampled_from((32, 64, 128)),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_against_float64(
    linear: Kernel, kind: str, rows: int, channels: int, groups: int, group: int, bias: bool, seed: int
):
    torch.manual_seed(seed)
    k = groups * group
    packed, exact = make(kind, channels, k, group)
    x, b = torch.randn(rows, k), torch.randn(channels)
    y = torch.full((rows, channels), torch.nan)
    assert linear([x, *packed.tensors, *([b] if bias else [])], [y]) == 0
    error = (y.double() - x.double() @ exact.t() - (b.double() if bias else 0)).abs()
    assert (error <= 4 * bound(x, exact) + 2**-23 * b.abs().double()).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 7, 24, 25, 245, 481])
def test_every_path_with_bfloat16_in_and_out(linear: Kernel, kind: str, rows: int):
    torch.manual_seed(rows)
    packed, exact = make(kind, 333, 576, 64)
    x = torch.randn(rows, 576).to(torch.bfloat16)
    y = torch.full((rows, 333), torch.nan, dtype=torch.bfloat16)
    assert linear([x, *packed.tensors], [y]) == 0
    expected = x.double() @ exact.t()
    assert ((y.double() - expected).abs() <= 2**-8 * expected.abs() + bound(x, exact) * 4).all()


@pytest.mark.parametrize("kind", ["bf16", "int8"])
@pytest.mark.parametrize("rows", [2, 5, 17, 24, 25, 300])
def test_a_row_does_not_depend_on_the_others(linear: Kernel, kind: str, rows: int):
    torch.manual_seed(rows)
    packed, _ = make(kind, 130, 609)
    x = torch.randn(rows, 609)
    together, alone = torch.empty(rows, 130), torch.empty(1, 130)
    assert linear([x, *packed.tensors], [together]) == 0
    for row in (0, rows // 2, rows - 1):
        assert linear([x[row : row + 1], *packed.tensors], [alone]) == 0
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("kind", KINDS)
def test_exact_for_small_whole_numbers(linear: Kernel, kind: str):
    weight = torch.randint(-7, 8, (40, 96), dtype=torch.int8)
    packed = {
        "bf16": lambda: pack_bf16(weight.to(torch.bfloat16)),
        "int8": lambda: pack_int8(weight, torch.ones(40)),
        "int4": lambda: pack_int4(weight, torch.ones(40, 3)),
    }[kind]()
    for rows in (1, 4, 30):
        x = torch.randint(0, 2, (rows, 96)).float()
        y = torch.full((rows, 40), torch.nan)
        assert linear([x, *packed.tensors], [y]) == 0
        assert torch.equal(y, x @ weight.float().t())


def test_rows_may_lie_apart_and_nothing_else_is_written(linear: Kernel):
    packed, exact = make("bf16", 20, 64)
    x, y = torch.randn(9, 200)[:, 40:104], torch.full((9, 50), 7.0)
    assert linear([x, *packed.tensors], [y[:, 10:30]]) == 0
    assert ((y[:, 10:30].double() - x.double() @ exact.t()).abs() <= 4 * bound(x, exact)).all()
    assert (y[:, :10] == 7).all() and (y[:, 30:] == 7).all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_stays_in_its_row(linear: Kernel, kind: str):
    packed, _ = make(kind, 48, 64)
    x = torch.randn(6, 64)
    x[2, 5], x[4, 9] = torch.nan, torch.inf
    for dtype in (torch.float32, torch.bfloat16):
        y = torch.zeros(6, 48, dtype=dtype)
        assert linear([x.to(dtype), *packed.tensors], [y]) == 0
        assert y[2].isnan().all() and not y[4].isfinite().any()
        assert y[[0, 1, 3, 5]].isfinite().all()


@pytest.mark.parametrize(
    "broken",
    [
        lambda x, w, y: ([x.half(), w], [y]),
        lambda x, w, y: ([x[:, :63], w], [y]),
        lambda x, w, y: ([x.t().contiguous().t(), w], [y]),
        lambda x, w, y: ([x, w[:1]], [y]),
        lambda x, w, y: ([x, w.transpose(0, 1)], [y]),
        lambda x, w, y: ([x, w], [y[:2]]),
        lambda x, w, y: ([x, w], [y.to(torch.int32)]),
        lambda x, w, y: ([x, w, torch.zeros(19)], [y]),
        lambda x, w, y: ([x, w, torch.zeros(20), torch.zeros(20)], [y]),
        lambda x, w, y: ([x, w.to(torch.int8)], [y]),
        lambda x, w, y: ([x], [y]),
    ],
)
def test_refuses_what_it_does_not_take(linear: Kernel, broken):
    packed, _ = make("bf16", 20, 64)
    y = torch.full((3, 20), 7.0)
    inputs, outputs = broken(torch.randn(3, 64), packed.weight, y)
    assert linear(inputs, outputs) != 0
    assert (y == 7).all()


def test_packing_refuses_to_round():
    with pytest.raises(ValueError, match="round"):
        pack_bf16(torch.tensor([[1.0, 1.0 + 2**-20]]))
    with pytest.raises(ValueError, match="bfloat16"):
        pack_int4(torch.zeros(1, 32, dtype=torch.int8), torch.tensor([[1.0 + 2**-20]]))
    with pytest.raises(ValueError, match="48 / 1"):
        pack_int4(torch.zeros(1, 48, dtype=torch.int8), torch.ones(1, 1))


def test_quantised_values_are_near():
    weight = torch.randn(16, 128)
    values, scale = quantise_int8(weight)
    assert ((values.float() * scale[:, None] - weight).abs() <= 0.5001 * scale[:, None]).all()
    values, scale = quantise_int4(weight, 32)
    steps = scale.float().abs().repeat_interleave(32, 1)
    # Within half a step, or a whole one at the end of the range that has a level less.
    assert ((values.float() * scale.float().repeat_interleave(32, 1) - weight).abs() <= 1.05 * steps).all()


def test_avx512_compiles(objects: Path):
    assert build(linear_source(AVX512), objects).is_file()
