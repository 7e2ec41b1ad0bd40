"""Kernels whose parameters are found by measuring: a template with macros, searched one parameter at a time."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from strop.kernels.build import Source
from strop.kernels.contract import Contract, words
from strop.kernels.timing import BURST_S, ROUNDS, overall_speedup
from strop.kernels.verify import Verification, verify
from strop.serving.home import write_atomic

SEARCH_ROUNDS = 5
"""While searching; what is found is measured in full."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One choice of parameters and what it led to."""

    values: Mapping[str, int]
    verification: Verification

    @property
    def speedup(self) -> float:
        """Times the reference's speed; 0 for a choice that is not right."""
        return overall_speedup(self.verification.timings) if self.verification.correct else 0.0


@dataclass(frozen=True, slots=True)
class Tuned:
    source: Source
    values: Mapping[str, int]
    verification: Verification
    """Of the choice that was best, measured in full."""
    trials: tuple[Trial, ...]


def tune(
    template: Source,
    parameters: Mapping[str, Sequence[int]],
    contract: Contract,
    folder: Path,
    seconds: float = 600,
    threads: int = 1,
    trusted: bool = False,
    rounds: int = ROUNDS,
    burst_s: float = BURST_S,
) -> Tuned:
    """Choose the macros of `template`: coordinate descent from the first value of each, by measured time.

    Every choice is verified like any kernel. A choice that was tried before, here or before an
    interruption, is not tried again. Ends when no single change helps, or after `seconds`.
    """
    deadline = time.monotonic() + seconds
    trials: dict[tuple[int, ...], Trial] = {}

    def tried(values: Mapping[str, int]) -> Trial:
        key = tuple(values[name] for name in parameters)
        if key not in trials:
            source = _chosen(template, values)
            path = folder / f"trial-{_identity(source, contract, threads)}.json"
            found = _recorded(path)
            if found is None:
                found = verify(
                    source, contract, folder, threads, trusted, min(rounds, SEARCH_ROUNDS), burst_s
                )
                write_atomic(path, found.model_dump_json())
            trials[key] = Trial(dict(values), found)
        return trials[key]

    best = tried({name: choices[0] for name, choices in parameters.items()})
    improved = True
    while improved and time.monotonic() < deadline:
        improved = False
        for name, choices in parameters.items():
            for choice in choices:
                if choice == best.values[name] or time.monotonic() >= deadline:
                    continue
                other = tried({**best.values, name: choice})
                if other.speedup > best.speedup:
                    best, improved = other, True
    source = _chosen(template, best.values)
    found = verify(source, contract, folder, threads, trusted, rounds, burst_s)
    return Tuned(source, best.values, found, tuple(trials.values()))


def _chosen(template: Source, values: Mapping[str, int]) -> Source:
    macros = tuple(f"-D{name}={value}" for name, value in values.items())
    return Source(template.name, template.code, (*template.flags, *macros))


def _identity(source: Source, contract: Contract, threads: int) -> str:
    what = [source.digest, contract.name, str(threads), *map(words, contract.served)]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]


def _recorded(path: Path) -> Verification | None:
    try:
        return Verification.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
