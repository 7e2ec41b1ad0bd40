"""How close the linear layers come to what memory and processor allow, and how they compare with torch.

    python benchmarks/kernel_linear.py [--quick] [--threads N] [--rounds N]

Every shape runs with 1 to 256 rows over bfloat16, int8 (a scale per channel) and int4 (groups of 64)
weights with float32 activations, beside `F.linear` in bfloat16 and float32. All take turns in one run,
in an order that flips every round; weights rotate through copies that together are more than the
last-level cache, so that they come from memory as in a model. The floors are measured in the same
turns: reading memory (GB/s) and torch's float32 matrix product (GFLOP/s).

A model's figure counts every shape as often as the model has it. Errors are the largest difference
from float64 over the largest value: of bfloat16 inputs and outputs beside `F.linear` in bfloat16, and
of int8 and int4 beside a float32 `F.linear` over exactly dequantised weights.

Keys of the last line: bandwidth_fraction (of the read bandwidth at one row: the worst of the models and
kinds of weight), rows4_over_rows1 (time, the worst), prefill_fraction (of the float32 matrix product at 256
rows, the worst), each also by kind of weight for the worst model (…_bf16, …_int8, …_int4);
error_over_reference (the worst ratio of errors), read_gb_s, sgemm_gflop_s, decode_over_bf16 and
prefill_over_fp32 (time of `F.linear` over ours with bfloat16 weights, of the first model).
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from strop.kernels.build import Source, bind, build
from strop.kernels.linear import (
    Packed,
    linear_source,
    pack_bf16,
    pack_int4,
    pack_int8,
    quantise_int4,
    quantise_int8,
)

GROUP = 64
CACHE_BYTES = 96 << 20
TURN_FLOP = 2e9
ROWS = (1, 2, 4, 8, 16, 64, 256)
KINDS = ("bf16", "int8", "int4")
MODELS = {
    "SmolLM2-135M": {(576, 960): 30, (576, 576): 30, (576, 3072): 30, (1536, 576): 30, (576, 49152): 1},
    "Llama-3.2-1B": {(2048, 3072): 16, (2048, 2048): 16, (2048, 16384): 16, (8192, 2048): 16, (2048, 128256): 1},
}  # fmt: skip
"""Shapes (inputs, outputs) with how often a forward pass has them."""

READ = """
#include "kernel.h"
#include "vector.h"
STROP_KERNEL read_memory(const DLTensor* const* in, int, DLTensor* const* out, int) {
  const float* from = data<float>(in[0]);
  const int64_t blocks = in[0]->shape[0] / 64;
  float total = 0;
#pragma omp parallel for reduction(+ : total) schedule(static)
  for (int64_t part = 0; part < 64; part++) {
    F16 a = zero(), b = zero(), c = zero(), d = zero();
    for (int64_t i = blocks * part / 64 * 64; i < blocks * (part + 1) / 64 * 64; i += 64) {
      a = a + load(from + i);
      b = b + load(from + i + 16);
      c = c + load(from + i + 32);
      d = d + load(from + i + 48);
    }
    float lanes[LANES];
    store(lanes, a + b + (c + d));
    for (float lane : lanes) total += lane;
  }
  data<float>(out[0])[0] = total;
  return 0;
}
"""


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm at one shape and number of rows."""

    seconds: float
    weight_bytes: int
    flop: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the small model, rows 1, 4 and 256, 4 rounds")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--rounds", type=int, default=9, help="turns that every arm has")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    models = dict(list(MODELS.items())[:1]) if arguments.quick else MODELS
    rows, rounds = ((1, 4, 256), 4) if arguments.quick else (ROWS, arguments.rounds)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="strop-") as folder:
        library = build(linear_source(), Path(folder))
        reader = build(Source("read_memory", READ), Path(folder))
        floors: dict[str, list[float]] = {"read": [], "sgemm": []}
        cells: dict[tuple[str, tuple[int, int], str, int], Cell] = {}
        errors: dict[str, float] = {}
        for name, shapes in models.items():
            for shape in shapes:
                found = _measure(shape, rows, library, reader, floors, rounds)
                cells |= {(name, shape, arm, count): cell for (arm, count), cell in found.items()}
                for kind, ratio in _errors(shape, library).items():
                    errors[kind] = max(errors.get(kind, 0.0), ratio)
    _report(models, rows, cells, floors, errors)


def _measure(
    shape: tuple[int, int],
    rows: tuple[int, ...],
    library: Path,
    reader: Path,
    floors: dict[str, list[float]],
    rounds: int,
) -> dict[tuple[str, int], Cell]:
    inputs, outputs = shape
    weight = torch.randn(outputs, inputs).mul_(inputs**-0.5).to(torch.bfloat16)
    packed = {kind: _copies(_pack(weight, kind)) for kind in KINDS}
    stock = {"F.linear bf16": weight, "F.linear fp32": weight.float()}
    plain = {name: [w.clone() for _ in range(_count(w.nbytes))] for name, w in stock.items()}
    memory, total = torch.ones(CACHE_BYTES // 2), torch.zeros(1)
    read = bind(reader, "read_memory", [memory], [total])
    a, b = torch.randn(960, 1536), torch.randn(1536, 1536)
    cells = {}
    for count in rows:
        x, y = torch.randn(count, inputs), torch.empty(count, outputs)
        flop = 2.0 * count * inputs * outputs
        arms = {"read": _Arm([read], memory.nbytes, 1), "sgemm": _Arm([partial(torch.mm, a, b)], 0, 4)}
        for kind, copies in packed.items():
            calls = [bind(library, "linear", [x, *copy.tensors], [y]) for copy in copies]
            arms[kind] = _Arm(calls, copies[0].bytes, _calls_per_turn(len(calls), flop))
        for name, weights in plain.items():
            given = x.to(weights[0].dtype)
            calls = [partial(torch.nn.functional.linear, given, each) for each in weights]
            arms[name] = _Arm(calls, weights[0].nbytes, _calls_per_turn(len(calls), flop))
        for name, seconds in _alternate(arms, rounds).items():
            if name == "read":
                floors["read"].append(memory.nbytes / seconds)
            elif name == "sgemm":
                floors["sgemm"].append(2.0 * 960 * 1536 * 1536 / seconds)
            else:
                cells[name, count] = Cell(seconds, arms[name].weight_bytes, flop)
    return cells


class _Arm:
    """Calls that take turns: the copies of one shape's weights."""

    def __init__(self, calls: Sequence[Callable[[], object]], weight_bytes: int, per_turn: int) -> None:
        self.calls = itertools.cycle(calls)
        self.weight_bytes = weight_bytes
        self.per_turn = per_turn

    def seconds(self) -> float:
        """Of one call, over the calls of a turn."""
        began = time.perf_counter()
        for call in itertools.islice(self.calls, self.per_turn):
            call()
        return (time.perf_counter() - began) / self.per_turn


def _calls_per_turn(copies: int, flop: float) -> int:
    """All copies, but no more than a fraction of a second of the slowest arithmetic."""
    return min(copies, max(1, int(TURN_FLOP / flop)))


def _alternate(arms: dict[str, _Arm], rounds: int) -> dict[str, float]:
    """Median seconds of one call of each arm."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name in list(arms) if number % 2 else list(arms)[::-1]:
            seconds = arms[name].seconds()
            # The first round warms up threads, pages and oneDNN's own kernels.
            if number:
                times[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def _pack(weight: torch.Tensor, kind: str) -> Packed:
    if kind == "bf16":
        return pack_bf16(weight)
    return pack_int8(*quantise_int8(weight)) if kind == "int8" else pack_int4(*quantise_int4(weight, GROUP))


def _copies(packed: Packed) -> list[Packed]:
    more = [
        Packed(packed.weight.clone(), None if packed.scale is None else packed.scale.clone(), packed.channels)
        for _ in range(_count(packed.bytes) - 1)
    ]
    return [packed, *more]


def _count(size: int) -> int:
    return max(1, -(-CACHE_BYTES // size))


def _errors(shape: tuple[int, int], library: Path) -> dict[str, float]:
    """Our largest error against float64 over that of the reference arithmetic, by kind of weight."""
    inputs, outputs = shape[0], min(shape[1], 4096)
    weight = torch.randn(outputs, inputs).mul_(inputs**-0.5).to(torch.bfloat16)
    ratios = {}
    for kind in KINDS:
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        values = _dequantised(weight, kind)
        x = torch.randn(16, inputs).to(dtype)
        exact = x.double() @ values.double().t()
        y = torch.empty(16, outputs, dtype=dtype)
        if bind(library, "linear", [x, *_pack(weight, kind).tensors], [y])():
            raise SystemExit(f"The kernel refuses {kind} weights of {inputs} -> {outputs}.")
        theirs = torch.nn.functional.linear(x, values.to(dtype))
        ratios[kind] = float((y.double() - exact).abs().max() / (theirs.double() - exact).abs().max())
    return ratios


def _dequantised(weight: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "bf16":
        return weight
    values, scale = quantise_int8(weight) if kind == "int8" else quantise_int4(weight, GROUP)
    grouped = values.double().unflatten(1, (scale[0].numel(), -1))
    return (grouped * scale.double().reshape(len(weight), -1, 1)).flatten(1)


def _report(
    models: dict[str, dict[tuple[int, int], int]],
    rows: tuple[int, ...],
    cells: dict[tuple[str, tuple[int, int], str, int], Cell],
    floors: dict[str, list[float]],
    errors: dict[str, float],
) -> None:
    console = Console()
    read, sgemm = (statistics.median(floors[name]) for name in ("read", "sgemm"))
    console.print(
        f"read {read / 1e9:.1f} GB/s, float32 matrix product {sgemm / 1e9:.0f} GFLOP/s, "
        f"{torch.get_num_threads()} threads; "
        + ", ".join(f"error of {kind} {ratio:.2f} of the reference's" for kind, ratio in errors.items())
    )
    arms = (*KINDS, "F.linear bf16", "F.linear fp32")
    totals: dict[tuple[str, str, int], Cell] = {}
    for name, shapes in models.items():
        for arm in arms:
            for count in rows:
                parts = [(cells[name, shape, arm, count], times) for shape, times in shapes.items()]
                totals[name, arm, count] = Cell(
                    sum(cell.seconds * times for cell, times in parts),
                    sum(cell.weight_bytes * times for cell, times in parts),
                    sum(cell.flop * times for cell, times in parts),
                )
        for shape in (*shapes, None):
            label = f"{shape[0]} -> {shape[1]}" if shape else "all layers and the head"
            table = Table("weights", *(f"{count} rows" for count in rows), title=f"{name}, {label}")
            for arm in arms:
                row = [cells[name, shape, arm, c] if shape else totals[name, arm, c] for c in rows]
                table.add_row(arm, *(_text(cell, read, sgemm) for cell in row))
            console.print(table)
    worst = {
        kind: (
            min(totals[n, kind, 1].weight_bytes / totals[n, kind, 1].seconds / read for n in models),
            max(totals[n, kind, 4].seconds / totals[n, kind, 1].seconds for n in models),
            min(totals[n, kind, 256].flop / totals[n, kind, 256].seconds / sgemm for n in models),
        )
        for kind in KINDS
    }
    names = ("bandwidth_fraction", "rows4_over_rows1", "prefill_fraction")
    last = {
        name: round((max if index == 1 else min)(found[index] for found in worst.values()), 3)
        for index, name in enumerate(names)
    }
    for kind, found in worst.items():
        last |= {f"{name}_{kind}": round(value, 3) for name, value in zip(names, found, strict=True)}
    first = next(iter(models))
    ours, bf16, fp32 = ("bf16", "F.linear bf16", "F.linear fp32")
    last |= {
        "error_over_reference": round(max(errors.values()), 3),
        "read_gb_s": round(read / 1e9, 2),
        "sgemm_gflop_s": round(sgemm / 1e9, 1),
        "decode_over_bf16": round(totals[first, bf16, 1].seconds / totals[first, ours, 1].seconds, 2),
        "prefill_over_fp32": round(totals[first, fp32, 256].seconds / totals[first, ours, 256].seconds, 2),
    }
    print(json.dumps(last))


def _text(cell: Cell, read: float, sgemm: float) -> str:
    """Milliseconds, and the larger of the shares of the two floors."""
    share = max(cell.weight_bytes / cell.seconds / read, cell.flop / cell.seconds / sgemm)
    return f"{1e3 * cell.seconds:.3f} ms {share:.0%}"


if __name__ == "__main__":
    main()
