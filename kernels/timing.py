"""How long does a kernel take, beside the reference, on inputs that come from memory?

One round: new values in the buffers of many calls, caches emptied, then a burst of the reference, one of
the kernel and one of the reference (torch, in this process, on the same buffers with as many threads).
Each call of a burst has inputs and outputs of its own, so that nothing can be reused, and the outputs of
the very calls that were timed are checked afterwards. A burst of the kernel is timed by this process's
clock from outside, with the process stopped before and after. The two bursts of the reference tell how
much the machine's own unrest moves a ratio.

A kernel's burst bears the cost of waking its process, the reference's that of torch's dispatch: for
operators of a few microseconds the ratio says little, and only what the engine gains counts.
"""

import math
import os
import time
from dataclasses import dataclass
from statistics import median

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from strop.kernels.checks import POISON, Trial, Wrong
from strop.kernels.contract import Shape, Tensors, words
from strop.kernels.host import HostError, Placed
from strop.kernels.tolerance import fault

BURST_S = 0.02
ROUNDS = 9
TRIES = 50
MOST_CALLS = 512
MOST_BYTES = 192 << 20
COMPARED = 6
"""Calls of a burst, drawn anew each round, whose outputs are compared in full."""


class Timing(BaseModel):
    """Times of one served shape; a call's, in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    shape: str
    kernel_s: float
    reference_s: float
    speedup: float
    """Median over rounds of the reference's time over the kernel's."""
    low: float
    high: float
    """Ends of the interval of that median (sign test, 90 % or the most that the rounds allow)."""
    noise: float
    """The median factor between two bursts of the reference in one round: what is no gain."""
    calls: int
    """In a burst."""
    rounds: int

    @property
    def complete(self) -> bool:
        """Whether every figure is there: a time that is missing is no time of zero."""
        figures = (self.kernel_s, self.reference_s, self.speedup, self.low, self.high, self.noise)
        return self.rounds > 0 and all(math.isfinite(f) and f > 0 for f in figures)


@dataclass(frozen=True, slots=True)
class _Round:
    kernel_s: float
    reference_s: tuple[float, float]


def measure(trial: Trial, shape: Shape, rounds: int = ROUNDS, burst_s: float = BURST_S) -> Timing:
    """Time one shape. Raises Wrong for outputs that are not right, and HostError."""
    before = torch.get_num_threads()
    torch.set_num_threads(trial.threads)
    try:
        calls = _calls(trial, shape, burst_s)
        inputs = [trial.make(shape) for _ in range(calls)]
        placed = trial.place(inputs)
        scratch = torch.zeros(2 * _last_level_cache_bytes(), dtype=torch.uint8)
        found = [_round(trial, placed, inputs, scratch) for _ in range(rounds + 1)][1:]
    except Wrong as wrong:
        raise Wrong(f"{words(shape)}: {wrong}") from None
    finally:
        torch.set_num_threads(before)
    gains = [math.log(sum(r.reference_s) / 2 / r.kernel_s) for r in found]
    unrest = [abs(math.log(r.reference_s[0] / r.reference_s[1])) for r in found]
    low, high = median_interval(gains)
    return Timing(
        shape=words(shape),
        kernel_s=median(r.kernel_s for r in found) / calls,
        reference_s=median(sum(r.reference_s) / 2 for r in found) / calls,
        speedup=math.exp(median(gains)),
        low=math.exp(low),
        high=math.exp(high),
        noise=math.exp(median(unrest)),
        calls=calls,
        rounds=rounds,
    )


def median_interval(values: list[float], confidence: float = 0.9) -> tuple[float, float]:
    """The interval of the median by the sign test: two order statistics, whatever the distribution."""
    ordered, n = sorted(values), len(values)
    outside = [2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n for k in range((n + 1) // 2)]
    dropped = max((k for k, share in enumerate(outside) if share <= 1 - confidence), default=0)
    return ordered[dropped], ordered[n - 1 - dropped]


def _round(trial: Trial, placed: list[Placed], inputs: list[Tensors], scratch: Tensor) -> _Round:
    for n, (each, old) in enumerate(zip(placed, inputs, strict=True)):
        inputs[n] = tuple(_renewed(trial, tensor) for tensor in old)
        each.write(trial.contract.laid_out(inputs[n]), POISON)
    ours = inputs if trial.contract.layout else [each.inputs for each in placed]
    first = _reference_burst(trial, ours, scratch)
    _empty_caches(scratch)
    called = trial.call(0, len(placed))
    second = _reference_burst(trial, ours, scratch)
    if called.refused:
        raise Wrong("it refuses a shape that is served, while it is timed")
    compared = set(trial.choices.sample(range(len(placed)), min(COMPARED, len(placed))))
    for n, each in enumerate(placed):
        if any(_left_poisoned(output) for output in each.outputs):
            raise Wrong("an output of a timed call was not written when the time was taken")
        if n in compared and (
            wrong := fault(each.outputs, trial.contract.truth(inputs[n]), trial.rounded(inputs[n]))
        ):
            raise Wrong(f"a timed call: {wrong}")
    return _Round(called.wall_s, (first, second))


def _reference_burst(trial: Trial, all_inputs: list[Tensors], scratch: Tensor) -> float:
    _empty_caches(scratch)
    start = time.perf_counter()
    for inputs in all_inputs:
        trial.contract.reference(*inputs)
    return time.perf_counter() - start


def _renewed(trial: Trial, tensor: Tensor) -> Tensor:
    """Other values at every place, for less than drawing them would cost."""
    flat = tensor.reshape(-1)
    return flat.roll(trial.choices.randrange(len(flat))).view(tensor.shape)


def _left_poisoned(output: Tensor) -> bool:
    return bool((output.isnan() if output.is_floating_point() else output.eq(-1)).any())


def _calls(trial: Trial, shape: Shape, burst_s: float) -> int:
    """As many as fill a burst of the reference, within bounds."""
    inputs = trial.make(shape)
    needed = sum(t.numel() * t.element_size() for t in (*inputs, *trial.rounded(inputs)))
    times: list[float] = []
    while len(times) < TRIES and sum(times) < burst_s:
        start = time.perf_counter()
        trial.rounded(inputs)
        times.append(time.perf_counter() - start)
    wanted = math.ceil(burst_s / min(times))
    return max(2, min(wanted, MOST_CALLS, MOST_BYTES // needed))


def _empty_caches(scratch: Tensor) -> None:
    scratch.add_(1)


def _last_level_cache_bytes() -> int:
    known = os.sysconf("SC_LEVEL3_CACHE_SIZE") if "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names else 0
    return min(max(known, 32 << 20), 256 << 20)


def timed(trial: Trial, rounds: int, burst_s: float) -> tuple[Timing, ...]:
    """Times of all served shapes. Raises Wrong, also where a time is missing."""
    found: list[Timing] = []
    for shape in trial.contract.served:
        try:
            found.append(measure(trial, shape, rounds, burst_s))
        except HostError as error:
            raise Wrong(f"{words(shape)}: no time was measured: {error}") from None
    return tuple(found)


def overall_speedup(timings: tuple[Timing, ...]) -> float:
    """The geometric mean over the served shapes; NaN where there is nothing."""
    return math.exp(sum(math.log(t.speedup) for t in timings) / len(timings)) if timings else math.nan


def faster(timings: tuple[Timing, ...]) -> str:
    """Faster on the whole, shown so on one shape at least, and shown slower on none. Raises Wrong."""
    if not timings or not all(timing.complete for timing in timings):
        raise Wrong("a time is missing, and what was not measured counts as no gain")
    for timing in timings:
        if timing.high < 1:
            raise Wrong(f"{timing.shape}: {timing.speedup:.2f} times the reference's speed: slower")
    overall = overall_speedup(timings)
    shown = [t for t in timings if t.low > 1 and t.speedup > t.noise]
    if overall <= 1 or not shown:
        raise Wrong(f"{overall:.2f} times the reference's speed, within what the machine's unrest explains")
    return f"{overall:.2f} times the reference's speed, faster on {len(shown)} of {len(timings)} shapes"
