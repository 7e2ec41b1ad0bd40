"""A process of its own for code that is not trusted: it gets inputs, and its outputs are looked at from outside.

The process is a small C++ program (`csrc/host.cpp`) in the sandbox of `strop.evals.behaviour.sandbox`: no
network, no files but the system's shared objects, no Python. It holds no expected output, so there is
none to be found. Inputs lie in memory that it can only read, outputs in memory whose former content the
verifier has overwritten, each between two pages that nothing may touch.

Outside of a call the process is stopped (SIGSTOP): nothing can be prepared before the clock runs, and
what is not there when it stops is missing. Clock, processor time and numbers of threads are taken from
outside.
"""

import fcntl
import mmap
import os
import select
import signal
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import torch
from torch import Tensor

from strop.evals.behaviour import sandbox
from strop.evals.behaviour.sandbox import Limits, Program, SandboxError
from strop.kernels.build import DTYPES
from strop.kernels.contract import Tensors

PAGE = 4096
START_S = 30.0
CALL_S = 60.0
MEMORY_BYTES = 4 << 30
SPARE_THREADS = 6
"""Threads beyond those allowed that can be started, so that they are seen and named."""
_ARRANGE, _CALL = 1, 2
_ANSWER = struct.Struct("4q")

Flush = Literal["start", "end"]
"""At which end of its pages a tensor touches the guard."""


class HostError(RuntimeError):
    """The process ended, did not answer, or answered what it was not asked: all of it the candidate's doing."""


@dataclass(frozen=True, slots=True)
class Called:
    """What a run of calls was seen to do."""

    wall_s: float
    """Until every thread was stopped again."""
    cpu_s: float
    idle_cpu_s: float
    """Processor time since the call before, while it should have been stopped."""
    threads: int
    children: int
    refused: int
    status: int
    """What the last call that was refused returned."""
    control_changed: bool
    """Whether rounding or the treatment of denormals was left changed (MXCSR)."""


@dataclass(frozen=True, slots=True)
class _Slot:
    region: int
    start: int
    size: int
    view: Tensor
    memory: Tensor
    """The whole of the pages, in bytes."""

    def numbers(self) -> list[int]:
        code, bits = DTYPES[self.view.dtype]
        data = self.view.data_ptr() - self.memory.data_ptr()
        shape, strides = self.view.shape, self.view.stride()
        return [self.region, self.start, self.size, data, code, bits, self.view.ndim, *shape, *strides]


@dataclass(frozen=True, slots=True)
class Placed:
    """One call's tensors in shared memory."""

    slots: tuple[_Slot, ...]
    inputs: Tensors
    outputs: Tensors

    def write(self, inputs: Sequence[Tensor], poison: int) -> None:
        """Overwrite all of the memory with the byte `poison`, then lay the inputs into it."""
        for slot in self.slots:
            slot.memory.fill_(poison)
        for place, value in zip(self.inputs, inputs, strict=True):
            place.copy_(value)

    def untouched_outside(self, poison: int) -> bool:
        """Whether the memory around the outputs is still as it was poisoned."""
        for slot in self.slots:
            if slot.region == 1:
                begin = slot.view.data_ptr() - slot.memory.data_ptr()
                end = begin + slot.view.numel() * slot.view.element_size()
                if not (slot.memory[:begin].eq(poison).all() and slot.memory[end:].eq(poison).all()):
                    return False
        return True

    def outputs_untouched(self, poison: int) -> bool:
        """Whether nothing was written at all."""
        return all(bool(slot.memory.eq(poison).all()) for slot in self.slots if slot.region == 1)


class Host:
    """The process, as `hosted` gives it."""

    def __init__(
        self, program: Program, commands: int, answers: int, memory: tuple[int, int], log: IO[bytes]
    ) -> None:
        self._program, self._commands, self._answers = program, commands, answers
        self._memory, self._log = memory, log
        self._serial = 0
        self._receive(START_S)
        self._pid = program.pid()
        self._stop()
        self._cpu_s = self._cpu()

    def arrange(
        self,
        calls: Sequence[tuple[Tensors, Tensors]],
        flush: Flush = "end",
        in_place: Sequence[tuple[int, int]] = (),
    ) -> list[Placed]:
        """Make room for calls of the given (inputs, outputs), of which only shape, strides and dtype count.

        Of the pairs in `in_place`, the input lies where the output does. What was arranged before is gone.
        """
        ends = [0, 0]
        plans: list[list[tuple[int, int, int, Tensor]]] = []
        for inputs, outputs in calls:
            shared = {i: outputs[j] for i, j in in_place}
            plan = [(0, *_claim(ends, 0, t), t) for n, t in enumerate(inputs) if n not in shared]
            plan += [(1, *_claim(ends, 1, t), t) for t in outputs]
            plans.append(plan)
        regions = [self._grow(region, end) for region, end in enumerate(ends)]
        placed: list[Placed] = []
        numbers = [len(calls)]
        for (inputs, _), plan in zip(calls, plans, strict=True):
            slots = [_slot(regions[region], region, start, size, t, flush) for region, start, size, t in plan]
            own = len(inputs) - len(in_place)
            first, outs = iter(slots[:own]), slots[own:]
            places = dict(in_place)
            ins = [outs[places[n]] if n in places else next(first) for n in range(len(inputs))]
            placed.append(Placed(tuple(slots), tuple(s.view for s in ins), tuple(slot.view for slot in outs)))
            numbers += [len(ins), len(outs)]
            for slot in (*ins, *outs):
                numbers += slot.numbers()
        self._ask(_ARRANGE, len(numbers), 0, struct.pack(f"{len(numbers)}q", *numbers))
        return placed

    def call(self, first: int = 0, count: int = 1, limit_s: float = CALL_S) -> Called:
        """Call the kernel once on each of `count` arranged calls. Raises HostError."""
        return self._ask(_CALL, first, count, limit_s=limit_s)

    def words(self) -> str:
        """The last of what it wrote to stderr."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()

    def _ask(self, kind: int, first: int, count: int, more: bytes = b"", limit_s: float = CALL_S) -> Called:
        self._serial += 1
        idle_s = self._cpu() - self._cpu_s
        before_s = self._cpu()
        command = struct.pack("4q", self._serial, kind, first, count)
        start = time.perf_counter()
        try:
            os.write(self._commands, command)
            os.kill(self._pid, signal.SIGCONT)
            if more:
                _write_all(self._commands, more)
        except OSError:
            raise self._gone() from None
        serial, refused, status, control = self._receive(limit_s)
        self._stop()
        wall_s = time.perf_counter() - start
        self._cpu_s = self._cpu()
        if serial != self._serial or select.select([self._answers], [], [], 0)[0]:
            raise HostError("it wrote answers of its own into the channel of the host's")
        threads, children = self._counted()
        return Called(
            wall_s, self._cpu_s - before_s, idle_s, threads, children, refused, status, bool(control)
        )

    def _receive(self, limit_s: float) -> tuple[int, int, int, int]:
        data = b""
        deadline = time.monotonic() + limit_s
        while len(data) < _ANSWER.size:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise HostError(f"it did not return within {limit_s:g} s")
            piece = os.read(self._answers, _ANSWER.size - len(data))
            if not piece:
                raise self._gone()
            data += piece
        return _ANSWER.unpack(data)

    def _gone(self) -> HostError:
        how = self._program.ended(2.0) or "gone"
        if how.startswith("not isolated"):
            raise SandboxError(f"The sandbox could not be made ({how}).")
        words = self.words()
        summary = next((line for line in words.splitlines() if line.startswith("SUMMARY")), words[-500:])
        return HostError(f"its process ended ({_meaning(how)}) {summary}".strip())

    def _stop(self) -> None:
        """Stop the process and wait until none of its threads runs."""
        with suppress(OSError):
            os.kill(self._pid, signal.SIGSTOP)
            while any(_state(task) not in "TtZX" for task in self._tasks()):
                pass
            return
        raise self._gone()

    def _tasks(self) -> list[Path]:
        return list(Path(f"/proc/{self._pid}/task").iterdir())

    def _counted(self) -> tuple[int, int]:
        tasks = self._tasks()
        return len(tasks), sum(len((task / "children").read_text().split()) for task in tasks)

    def _cpu(self) -> float:
        # The clock of another process: clock_getcpuclockid(3).
        try:
            return time.clock_gettime((~self._pid << 3) | 2)
        except OSError:
            raise self._gone() from None

    def _grow(self, region: int, size: int) -> Tensor:
        fd = self._memory[region]
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
        return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)


@contextmanager
def hosted(
    data: bytes,
    name: str,
    program: Path,
    threads: int = 1,
    sanitized: bool = False,
    trusted: bool = False,
) -> Iterator[Host]:
    """Run the function `name` of the shared object `data` in a process of its own.

    `program` is `csrc/host.cpp` compiled, with the sanitizers if the object is; `trusted` code runs also
    where there is no isolation. Raises SandboxError, and HostError if the object cannot be loaded.
    """
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "halt_on_error=1",
    }
    limits = Limits(
        seconds=3600,
        cpu_seconds=3600,
        # The address sanitizer reserves terabytes of addresses.
        memory_bytes=-1 if sanitized else MEMORY_BYTES,
        disk_bytes=64 << 20,
        processes=threads + SPARE_THREADS,
    )
    with ExitStack() as kept:
        log = kept.enter_context(tempfile.TemporaryFile())
        file = kept.enter_context(tempfile.TemporaryFile())
        file.write(data)
        file.seek(0)
        inputs, outputs = (_descriptor(kept, _memory(which)) for which in ("inputs", "outputs"))
        readable = _descriptor(kept, os.open(f"/proc/self/fd/{inputs}", os.O_RDONLY))
        their_commands, commands = os.pipe()
        answers, their_answers = os.pipe()
        _descriptor(kept, commands)
        _descriptor(kept, answers)
        handed = [their_commands, their_answers, file.fileno(), readable, outputs]
        arguments = [str(program), *map(str, handed), name]
        try:
            running = kept.enter_context(
                sandbox.started(
                    arguments,
                    limits,
                    visible=[str(program)],
                    handed=handed,
                    stderr=log.fileno(),
                    environment=environment,
                    allow_without_isolation=trusted,
                )
            )
        finally:
            os.close(their_commands)
            os.close(their_answers)
        yield Host(running, commands, answers, (inputs, outputs), log)


def _memory(name: str) -> int:
    fd = os.memfd_create(f"strop-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    # A candidate that could shrink it would end the verifier.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


def _descriptor(kept: ExitStack, fd: int) -> int:
    kept.callback(os.close, fd)
    return fd


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + steps) * tensor.element_size()


def _claim(ends: list[int], region: int, tensor: Tensor) -> tuple[int, int]:
    start, size = ends[region], -(-_extent(tensor) // PAGE) * PAGE
    ends[region] += size
    return start, size


def _slot(memory: Tensor, region: int, start: int, size: int, tensor: Tensor, flush: Flush) -> _Slot:
    pages = memory[start : start + size]
    extent = _extent(tensor)
    data = pages[size - extent :] if flush == "end" else pages[:extent]
    view = data.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    return _Slot(region, start, size, view, pages)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _meaning(how: str) -> str:
    number = how.removeprefix("signal ")
    if not (how.startswith("signal ") and number.isdigit()):
        return how
    known: dict[int, str] = {
        signal.SIGSEGV: "it touched memory that is not its own",
        signal.SIGABRT: "it gave up",
    }
    return f"{how}: {known.get(int(number)) or signal.strsignal(int(number))}"


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
