"""What a kernel is asked to do before its speed counts: one function a check.

Each looks for faults that others do not see (`docs/kernels.md` says which), and gives what it tried or
raises Wrong. The expected outputs stay in this process.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from strop.kernels.contract import Contract, Shape, Tensors, words
from strop.kernels.host import Called, Flush, Host, Placed
from strop.kernels.tolerance import exactly, fault

POISON = 0xFF
"""Not a number in every floating dtype, and no index."""
RANDOM_SHAPES = 12
CHANGES = 8
MOST_ELEMENTS = 1 << 22
"""Of the largest input, in checks that need no served shape."""
IDLE_S = 0.002
BUSY_S = 0.003


class Wrong(Exception):
    """What a kernel did that it must not do."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A kernel in its process, and the randomness that it does not know."""

    contract: Contract
    host: Host
    threads: int
    numbers: torch.Generator
    choices: random.Random

    def make(self, shape: Shape) -> Tensors:
        return self.contract.make(shape, self.contract.dtype, self.numbers)

    def place(
        self, all_inputs: Sequence[Tensors], flush: Flush = "end", in_place: bool = False
    ) -> list[Placed]:
        """Room for calls with inputs like these."""
        calls = [(self.contract.laid_out(inputs), self._like_outputs(inputs)) for inputs in all_inputs]
        return self.host.arrange(calls, flush, self.contract.in_place if in_place else ())

    def _like_outputs(self, inputs: Tensors) -> Tensors:
        return self.rounded(tuple(t.to("meta") for t in inputs))

    def rounded(self, inputs: Tensors) -> Tensors:
        """What the reference gives in the served dtype."""
        return self.contract.reference(*inputs)

    def call(self, first: int = 0, count: int = 1) -> Called:
        """Call, and see that nothing went on beside the call. Raises Wrong."""
        called = self.host.call(first, count)
        if called.children:
            raise Wrong("it started a process")
        if called.threads > self.threads:
            raise Wrong(f"it has {called.threads} threads where {self.threads} may run: work beside the call")
        if called.cpu_s > called.wall_s * self.threads + BUSY_S:
            raise Wrong(f"it took {called.cpu_s:.4f} s of processor time in {called.wall_s:.4f} s")
        if called.idle_cpu_s > IDLE_S:
            raise Wrong(f"it took {called.idle_cpu_s:.4f} s of processor time between calls")
        if called.control_changed:
            raise Wrong(
                "it leaves rounding or denormals changed for the rest of the process (no -ffast-math)"
            )
        return called

    def outputs(self, placed: Placed, inputs: Tensors, poison: int = POISON) -> Tensors | None:
        """Of one call of its own; None if the kernel refuses it. Raises Wrong."""
        return self._called(placed, self.contract.laid_out(inputs), poison)

    def _called(self, placed: Placed, inputs: Tensors, poison: int) -> Tensors | None:
        placed.write(inputs, poison)
        called = self.call()
        if not placed.untouched_outside(poison):
            raise Wrong("it wrote beside an output")
        if called.refused:
            if placed.untouched_outside(poison) and _as_given(placed, inputs, poison):
                return None
            raise Wrong(f"it returned {called.status} and had written to an output all the same")
        return tuple(output.clone() for output in placed.outputs)

    def judge(self, outputs: Tensors, inputs: Tensors) -> None:
        if wrong := fault(outputs, self.contract.truth(inputs), self.rounded(inputs)):
            raise Wrong(wrong)

    def attempt(self, inputs: Tensors, flush: Flush = "end", in_place: bool = False) -> bool:
        """Whether the kernel takes such inputs; if so it must be right."""
        (placed,) = self.place([inputs], flush, in_place)
        outputs = self.outputs(placed, inputs)
        if outputs is not None:
            self.judge(outputs, inputs)
        return outputs is not None

    def attempt_spread(self, inputs: Tensors, number: int, spread: Tensor) -> bool:
        """The same with input `number` of the kernel in another layout."""
        given = list(self.contract.laid_out(inputs))
        given[number] = spread
        (placed,) = self.host.arrange([(tuple(given), self._like_outputs(inputs))])
        outputs = self._called(placed, tuple(given), POISON)
        if outputs is not None:
            self.judge(outputs, inputs)
        return outputs is not None

    def small(self) -> Shape:
        """The served shape with the fewest elements of those with several rows, if there is one."""
        several = [shape for shape in self.contract.served if shape.get("rows", 2) > 1]
        return min(several or self.contract.served, key=_volume)


Checked = Callable[[Trial], str]


def _as_given(placed: Placed, inputs: Tensors, poison: int) -> bool:
    shared = {slot.view.data_ptr() for slot in placed.slots if slot.region == 1}
    if any(place.data_ptr() in shared for place in placed.inputs):
        return all(torch.equal(p, t) for p, t in zip(placed.inputs, inputs, strict=True))
    return placed.outputs_untouched(poison)


def _volume(shape: Shape) -> int:
    volume = 1
    for size in shape.values():
        volume *= size
    return volume


def served(trial: Trial) -> str:
    """Every served shape, at both ends of guarded memory: right, and not refused."""
    for shape in trial.contract.served:
        inputs = trial.make(shape)
        flushes: tuple[Flush, ...] = ("end", "start")
        for flush in flushes:
            _at(shape, partial(_must_take, trial, inputs, flush))
    return f"{len(trial.contract.served)} shapes between guard pages"


def _must_take(trial: Trial, inputs: Tensors, flush: Flush) -> None:
    if not trial.attempt(inputs, flush):
        raise Wrong("it refuses a shape that is served")


def _at(shape: Shape, do: Callable[[], object]) -> None:
    try:
        do()
    except Wrong as wrong:
        raise Wrong(f"{words(shape)}: {wrong}") from None


def random_shapes(trial: Trial) -> str:
    """Odd sizes and those next to the served ones: right or refused."""
    sizes = trial.contract.sizes
    shapes: list[Shape] = [
        {name: trial.choices.randint(least, most) for name, (least, most) in sizes.items()}
        for _ in range(RANDOM_SHAPES)
    ]
    near = trial.small()
    shapes += [{**near, name: size + by} for name, size in near.items() for by in (-1, 1) if size + by > 0]
    taken = 0
    for shape in shapes:
        inputs = trial.make(shape)
        if max(t.numel() for t in inputs) > MOST_ELEMENTS:
            continue
        flush: Flush = trial.choices.choice(("end", "start"))

        def one(inputs: Tensors = inputs, flush: Flush = flush) -> None:
            nonlocal taken
            taken += trial.attempt(inputs, flush)

        _at(shape, one)
    return f"{taken} of {len(shapes)} shapes taken, the others refused"


def exact(trial: Trial) -> str:
    """Inputs that show every bit that was lost."""
    if trial.contract.exact is None:
        return "the operator has no exact inputs"
    for shape in trial.contract.served:
        inputs = trial.contract.exact(shape, trial.contract.dtype, trial.numbers)
        (placed,) = trial.place([inputs])
        outputs = trial.outputs(placed, inputs)
        refused = "it refuses a served shape" if outputs is None else None
        if wrong := refused or exactly(outputs or (), trial.contract.truth(inputs)):
            raise Wrong(f"{words(shape)}: {wrong}")
    return "bit for bit"


def scales(trial: Trial) -> str:
    """Zeros, ones, small and large numbers, denormals: nothing hides behind an absolute tolerance."""
    first, *others = trial.make(trial.small())
    kind = torch.finfo(first.dtype)
    denormal = first.double() * (kind.smallest_normal / 2 / first.double().abs().max())
    made = {
        "zeros": torch.zeros_like(first),
        "ones": torch.ones_like(first),
        "small numbers": first * 2.0**-9,
        "large numbers": first * 2.0**9,
        "denormals": denormal.to(first.dtype),
    }
    for name, values in made.items():
        try:
            trial.attempt((values, *others))
        except Wrong as wrong:
            raise Wrong(f"{name}: {wrong}") from None
    return ", ".join(made)


def nonfinite(trial: Trial) -> str:
    """NaN and infinities stay where the reference has them, and nowhere else."""
    shape = trial.small()
    for value in (torch.nan, torch.inf, -torch.inf):
        first, *others = trial.make(shape)
        flat = first.view(first.shape[0], -1)
        flat[trial.choices.randrange(len(flat)), trial.choices.randrange(flat.shape[1])] = value
        inputs = (first, *others)
        (placed,) = trial.place([inputs])
        outputs = trial.outputs(placed, inputs)
        if outputs is None:
            raise Wrong(f"{words(shape)}: it refuses a served shape because of its values")
        if value != value and not any(t.is_floating_point() for t in outputs):
            # The largest of numbers of which one is none is undefined, but must be one of them.
            if any(bool(((t < 0) | (t >= first.shape[-1])).any()) for t in outputs):
                raise Wrong(f"{value}: an index out of range")
            continue
        try:
            trial.judge(outputs, inputs)
        except Wrong as wrong:
            raise Wrong(f"{value} in the first input: {wrong}") from None
    return "NaN, inf, -inf"


def strides(trial: Trial) -> str:
    """Inputs that do not lie densely: right or refused."""
    inputs = trial.make(trial.small())
    refused = tried = 0
    for number, tensor in enumerate(trial.contract.laid_out(inputs)):
        for name, spread in _spread(tensor).items():
            tried += 1
            try:
                refused += not trial.attempt_spread(inputs, number, spread)
            except Wrong as wrong:
                raise Wrong(f"input {number} {name}: {wrong}") from None
    return f"{tried} layouts, {refused} of them refused"


def _spread(tensor: Tensor) -> dict[str, Tensor]:
    """The same values in other layouts."""
    if tensor.numel() == 1:
        return {}
    *rows, columns = tensor.shape
    wide, apart = tensor.new_empty(*rows, columns + 3), tensor.new_empty(*rows, 2 * columns)
    made = {"with gaps between rows": wide[..., :columns], "with gaps between columns": apart[..., ::2]}
    if tensor.ndim > 1:
        made["transposed"] = tensor.new_empty(*tensor.shape[::-1]).permute(*range(tensor.ndim)[::-1])
    return {name: spread.copy_(tensor) for name, spread in made.items()}


def in_place(trial: Trial) -> str:
    """Outputs in the memory of inputs, as the engine calls it."""
    if not trial.contract.in_place:
        return "the operator is served with memory of its own"
    for shape in trial.contract.served:
        inputs = trial.make(shape)
        _at(shape, partial(trial.attempt, inputs, in_place=True))
    return f"{len(trial.contract.in_place)} pairs"


def changed(trial: Trial) -> str:
    """One element changes, in the same memory: what was computed from the others does not do."""
    inputs = list(trial.make(trial.small()))
    (placed,) = trial.place([tuple(inputs)])
    floats = [n for n, t in enumerate(inputs) if t.is_floating_point() and t.numel() > 1]
    for turn in range(CHANGES):
        outputs = trial.outputs(placed, tuple(inputs), poison=POISON)
        _answered(trial, outputs, tuple(inputs), "the same memory")
        number = floats[turn % len(floats)]
        values = inputs[number].clone()
        flat = values.view(-1)
        flat[trial.choices.randrange(len(flat))] = 8 * values.abs().max()
        inputs[number] = values
        outputs = trial.outputs(placed, tuple(inputs), poison=trial.choices.randrange(1, 255))
        _answered(trial, outputs, tuple(inputs), f"one element of input {number} changed")
    return f"{CHANGES} single elements"


def repeated(trial: Trial) -> str:
    """The same inputs again and again, and others between, each with memory of its own: all are computed."""
    one, other = trial.make(trial.small()), trial.make(trial.small())
    order = [one, one, one, other, one, other, other, one]
    placed = trial.place(order)
    for _ in range(2):
        for each, inputs in zip(placed, order, strict=True):
            each.write(trial.contract.laid_out(inputs), POISON)
        trial.call(0, len(order))
        for turn, (each, inputs) in enumerate(zip(placed, order, strict=True)):
            _answered(trial, each.outputs, inputs, f"call {turn} of a batch in which inputs come again")
    return f"{2 * len(order)} calls"


def fresh(trial: Trial) -> str:
    """Every served shape once more, with inputs never seen: for after the kernel was timed."""
    for shape in trial.contract.served:
        inputs = trial.make(shape)
        _at(shape, partial(_must_take, trial, inputs, "end"))
    return f"{len(trial.contract.served)} shapes"


def _answered(trial: Trial, outputs: Tensors | None, inputs: Tensors, when: str) -> None:
    try:
        if outputs is None:
            raise Wrong("it refuses what it took before")
        trial.judge(outputs, inputs)
    except Wrong as wrong:
        raise Wrong(f"{when}: {wrong}") from None


BEFORE_TIMING: dict[str, Checked] = {
    "served shapes": served,
    "random shapes": random_shapes,
    "exact inputs": exact,
    "scales": scales,
    "nonfinite": nonfinite,
    "strides": strides,
    "in place": in_place,
    "changed inputs": changed,
    "repeated inputs": repeated,
}
