"""Compile one C++ translation unit into a shared object, and call a function of it on torch tensors.

The binary interface is C: `int NAME(const DLTensor* const* inputs, int n_inputs, DLTensor* const*
outputs, int n_outputs)`, with DLTensor from the DLPack header that torch ships. It returns 0, or
something else for shapes, dtypes or strides that it does not take. So a kernel needs none of torch's
headers, which alone take a minute to compile, and the same object serves a test, a benchmark and vLLM.
"""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from strop.serving.home import locked, sync_folder

CSRC = Path(__file__).parent / "csrc"
TIME_LIMIT_S = 300.0
AVX2 = ("-march=x86-64-v3",)
AVX512 = ("-march=x86-64-v4", "-mprefer-vector-width=512")

_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-Wall", "-Wextra")
_SANITIZE = ("-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g")

Kernel = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], int]
Compiler = Callable[[list[str], Path, str], None]
"""Runs a command, which ends in the code's path, -o and the object's, with a scratch folder, for a named kernel."""


class BuildError(RuntimeError):
    """A kernel that cannot be compiled or loaded here; the message holds the compiler's words."""


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel as text."""

    name: str
    """The exported function."""
    code: str
    """C++; `#include "kernel.h"` gives DLTensor and vectors of floats."""
    flags: tuple[str, ...] = ()
    """Added to the compiler's own; without an -march, what the machine that builds can do is taken."""

    @property
    def digest(self) -> str:
        """SHA-256 (64 hex digits) over all that decides what the object does. Raises BuildError without g++."""
        parts = [self.name, self.code, *_FLAGS, *self.all_flags, _compiler_version()]
        parts += [text for path in _headers() for text in (path.name, path.read_text())]
        return hashlib.sha256("\0".join(f"{len(part)}:{part}" for part in parts).encode()).hexdigest()

    @property
    def all_flags(self) -> tuple[str, ...]:
        """`flags`, with the instruction set spelled out."""
        named = any(flag.startswith("-march=") for flag in self.flags)
        return self.flags if named else (*native_flags(), *self.flags)


def native_flags() -> tuple[str, ...]:
    """The compiler flags for this machine's instruction set. Raises BuildError below AVX2 with FMA."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        return AVX512
    if capability == "AVX2":
        return AVX2
    raise BuildError(
        f"The kernels need a processor with AVX2 and FMA or AVX-512; torch finds {capability} here "
        "(ATEN_CPU_CAPABILITY, if set, hides what there is). Serve without kernels on this machine."
    )


def build(source: Source, folder: Path, sanitize: bool = False, compiler: Compiler | None = None) -> Path:
    """Compile `source` to `folder/NAME-DIGEST.so`, once, and return that path.

    The compiler is a process of its own with a time limit. Processes that want the same object wait for
    one of them; the lock dies with its holder, so that a killed build blocks nobody. `sanitize` builds
    with the address and undefined-behaviour sanitizers; `compiler` runs the command in place of
    `run_compiler`. Raises BuildError with the compiler's words.
    """
    suffix = "-asan.so" if sanitize else ".so"
    target = folder.absolute() / f"{source.name}-{source.digest[:32]}{suffix}"
    if target.is_file():
        return target
    with locked(target.with_suffix(".lock")):
        if not target.is_file():
            _compile(source, target, _SANITIZE if sanitize else (), compiler or run_compiler)
    return target


def _compile(source: Source, target: Path, extra: tuple[str, ...], compiler: Compiler) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        code, made = Path(scratch, f"{source.name}.cpp"), Path(scratch, "made.so")
        code.write_text(source.code)
        places = [f"-I{CSRC}", f"-I{torch_folder() / 'include'}", f"-L{torch_folder() / 'lib'}"]
        flags = [*_FLAGS, *source.all_flags, *extra, *places]
        compiler([_compiler(), *flags, str(code), "-o", str(made)], Path(scratch), source.name)
        with made.open("rb") as file:
            os.fsync(file.fileno())
        made.replace(target)
    sync_folder(target.parent)


def run_compiler(command: list[str], scratch: Path, name: str) -> None:
    """Run the compiler in a process group that ends with it. Raises BuildError."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        env={"PATH": os.environ.get("PATH", os.defpath), "TMPDIR": str(scratch), "LC_ALL": "C"},
    )
    try:
        words, _ = process.communicate(timeout=TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{name} was not compiled within {TIME_LIMIT_S:g} s: make it smaller.") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise BuildError(f"{name} does not compile:\n{words[-8000:]}")


def load(path: Path, name: str) -> Kernel:
    """The function `name` of a shared object, as a call on (inputs, outputs) that returns its status.

    Tensors are handed over as they are: strides and all, nothing is copied. Raises BuildError if the
    object cannot be loaded or has no such function, and the call raises TypeError for a tensor that is
    not on the CPU or whose dtype DLPack has no name for.
    """
    function = _function(path, name)

    def call(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
        return function(_pointers(inputs), len(inputs), _pointers(outputs), len(outputs))

    return call


def bind(
    path: Path, name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> Callable[[], int]:
    """The same call with its tensors described once: what is left in Python is a microsecond, for timing."""
    function, given, made = _function(path, name), _pointers(inputs), _pointers(outputs)
    n_given, n_made = len(inputs), len(outputs)
    kept = (*inputs, *outputs)

    def call(_keep_alive: tuple[torch.Tensor, ...] = kept) -> int:
        return function(given, n_given, made, n_made)

    return call


def _function(path: Path, name: str) -> "ctypes._NamedFuncPointer":
    try:
        function = getattr(ctypes.CDLL(str(path)), name)
    except (OSError, AttributeError) as error:
        raise BuildError(f"{path} cannot be loaded: {error}. Build it again on this machine.") from None
    pointers = ctypes.POINTER(ctypes.POINTER(DLTensor))
    function.argtypes = [pointers, ctypes.c_int, pointers, ctypes.c_int]
    function.restype = ctypes.c_int
    return function


class DLTensor(ctypes.Structure):
    """`DLTensor` of dlpack.h, with `DLDevice` and `DLDataType` written out."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_INT, _UINT, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6
DTYPES = {
    torch.int8: (_INT, 8),
    torch.int16: (_INT, 16),
    torch.int32: (_INT, 32),
    torch.int64: (_INT, 64),
    torch.uint8: (_UINT, 8),
    torch.float16: (_FLOAT, 16),
    torch.float32: (_FLOAT, 32),
    torch.float64: (_FLOAT, 64),
    torch.bfloat16: (_BFLOAT, 16),
    torch.bool: (_BOOL, 8),
}


def _pointers(tensors: Sequence[torch.Tensor]) -> "ctypes.Array[ctypes._Pointer[DLTensor]]":
    return (ctypes.POINTER(DLTensor) * len(tensors))(*(ctypes.pointer(_described(t)) for t in tensors))


def _described(tensor: torch.Tensor) -> DLTensor:
    if tensor.device.type != "cpu" or tensor.dtype not in DTYPES:
        raise TypeError(f"A kernel for CPUs does not take {tensor.dtype} on {tensor.device}.")
    numbers = ctypes.c_int64 * tensor.ndim
    code, bits = DTYPES[tensor.dtype]
    shape, strides = numbers(*tensor.shape), numbers(*tensor.stride())
    return DLTensor(tensor.data_ptr(), 1, 0, tensor.ndim, code, bits, 1, shape, strides, 0)


def _compiler() -> str:
    if found := shutil.which("g++"):
        return found
    raise BuildError("There is no g++ to compile kernels with: install it (Debian: `apt install g++`).")


@cache
def _compiler_version() -> str:
    asked = subprocess.run([_compiler(), "--version"], capture_output=True, text=True, timeout=30)
    return asked.stdout.splitlines()[0]


def torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


@cache
def _headers() -> tuple[Path, ...]:
    """Every header that a kernel of ours may include."""
    return (*sorted(CSRC.glob("*.h")), torch_folder() / "include" / "ATen" / "dlpack.h")
