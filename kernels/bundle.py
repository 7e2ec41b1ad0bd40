"""A folder of kernels with its manifest `kernels.json`: how kernels are shipped, and loaded in a process.

The folder holds every kernel once for each instruction set, and the object with torch's operators over
them. Objects are checked against the manifest's SHA-256 before they are loaded: what runs is what was
verified. `activation` says what this process runs and how often.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import library

from strop.kernels.build import AVX2, AVX512, CSRC, BuildError, Source, build, native_flags
from strop.kernels.linear import linear_source
from strop.serving.home import write_atomic
from strop.serving.stack import file_sha256

MANIFEST = "kernels.json"
Isa = Literal["avx2", "avx512"]
_ISA_FLAGS: dict[Isa, tuple[str, ...]] = {"avx2": AVX2, "avx512": AVX512}


class Object(BaseModel):
    """One shared object of the folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """The function that it exports, which names the operator it serves too."""
    isa: Isa
    file: str
    sha256: str
    source: str
    """Digest of the source it was built from (`Source.digest`)."""


class Manifest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    operators: str
    """File with torch's operators."""
    operators_sha256: str
    kernels: tuple[Object, ...]


@dataclass(frozen=True, slots=True)
class Activation:
    """What a process runs for one operator."""

    name: str
    sha256: str | None
    """Of the object that is attached; None if none is."""
    calls: int
    """Calls that the kernel took."""
    refusals: int
    """Calls that it refused, and that were computed without it."""


class LibraryError(RuntimeError):
    """Kernels that cannot be loaded; the message says what to do."""


def operators_source() -> Source:
    code = (CSRC / "torch_ops.cpp").read_text()
    return Source("torch_ops", code, (*AVX2, "-Wl,--no-as-needed", "-ltorch_cpu"))


def write_library(folder: Path, kernels: tuple[Source, ...] | None = None) -> Path:
    """Build the kernels (ours, if none are given) into `folder`; returns the path of the manifest.

    A kernel without instruction set in its flags is built for AVX2 and for AVX-512. Raises BuildError.
    """
    objects = []
    for source in kernels or (linear_source(),):
        for isa, flags in _ISA_FLAGS.items():
            made = Source(source.name, source.code, (*flags, *source.flags))
            path = build(made, folder)
            objects.append(
                Object(
                    name=source.name, isa=isa, file=path.name, sha256=file_sha256(path), source=made.digest
                )
            )
    operators = build(operators_source(), folder)
    manifest = Manifest(
        operators=operators.name, operators_sha256=file_sha256(operators), kernels=tuple(objects)
    )
    for lock in folder.glob("*.lock"):
        lock.unlink()
    write_atomic(folder / MANIFEST, manifest.model_dump_json(indent=2) + "\n")
    return folder / MANIFEST


_loaded: dict[str, str] = {}
"""SHA-256 of what is attached, by operator."""
_operators: ctypes.CDLL | None = None


def load_library(manifest: Path) -> None:
    """Load the kernels for this machine and attach them to their operators; again for the same is nothing.

    Raises LibraryError if the manifest is broken, an object is not what it says, or the machine has none
    of its instruction sets.
    """
    global _operators
    try:
        content = Manifest.model_validate_json(manifest.read_text())
    except (OSError, ValidationError) as error:
        raise LibraryError(
            f"{manifest} is not a manifest of kernels ({error}). Write the library again."
        ) from None
    try:
        isa = "avx512" if native_flags() == AVX512 else "avx2"
    except BuildError as error:
        raise LibraryError(str(error)) from None
    if _operators is None:
        path = _checked(manifest.parent / content.operators, content.operators_sha256)
        torch.ops.load_library(str(path))
        _operators = ctypes.CDLL(str(path))
        _operators.strop_attach_linear.restype = ctypes.c_char_p
        for name in ("strop_calls_linear", "strop_refusals_linear"):
            getattr(_operators, name).restype = ctypes.c_int64
        library.register_fake("strop_kernels::linear", _linear_shape)
    for kernel in content.kernels:
        if kernel.isa != isa or kernel.name != "linear" or _loaded.get(kernel.name) == kernel.sha256:
            continue
        path = _checked(manifest.parent / kernel.file, kernel.sha256)
        error = _operators.strop_attach_linear(str(path).encode(), kernel.name.encode())
        if error:
            raise LibraryError(f"{path} cannot be attached: {error.decode(errors='replace')}")
        _loaded[kernel.name] = kernel.sha256
    if not _loaded:
        raise LibraryError(f"{manifest} holds no kernel for {isa}. Write the library again.")


def activation() -> tuple[Activation, ...]:
    """What this process runs, with its counters since it started."""
    if _operators is None:
        return ()
    calls, refusals = _operators.strop_calls_linear(), _operators.strop_refusals_linear()
    return (Activation("linear", _loaded.get("linear"), calls, refusals),)


def _checked(path: Path, sha256: str) -> Path:
    try:
        found = file_sha256(path)
    except OSError as error:
        raise LibraryError(f"{path} cannot be read ({error}). Write the library again.") from None
    if found != sha256:
        raise LibraryError(
            f"{path} is not the object that was verified: its sha256 is {found[:12]}…, not {sha256[:12]}…."
        )
    return path


def _linear_shape(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    channels: int,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], channels))
