"""Is this kernel right, is it what it seems, and is it faster? The verifier that every kernel passes through."""

import hashlib
import random
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from strop.evals.behaviour.sandbox import isolation_missing
from strop.kernels.build import BuildError, Source, build
from strop.kernels.checks import BEFORE_TIMING, Trial, Wrong, fresh, random_shapes
from strop.kernels.contract import Contract
from strop.kernels.host import HostError, hosted
from strop.kernels.isolated_build import compile_isolated, host_program
from strop.kernels.timing import BURST_S, ROUNDS, Timing, faster, timed

BUILD, SANITIZER, TIMING, AFTER, OBJECT, FASTER = (
    "build", "sanitizer", "timing", "after timing", "object", "faster",
)  # fmt: skip
CHECKS = (BUILD, *BEFORE_TIMING, SANITIZER, TIMING, AFTER, OBJECT, FASTER)
"""Every check there is, in their order; one that was not done has not passed."""


class Check(BaseModel):
    """One answer of the verifier."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    name: str
    passed: bool
    detail: str


class Verification(BaseModel):
    """What the verifier found of one kernel; it stops at the first check that fails."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    contract: str
    source: str
    """Digest of the source."""
    object: str | None
    """SHA-256 of the very bytes that were checked and timed; None if there were none."""
    checks: tuple[Check, ...]
    timings: tuple[Timing, ...]
    threads: int
    seed: int
    """Of the inputs; drawn by the verifier and told afterwards."""
    isolated: bool

    @property
    def passed(self) -> bool:
        """Whether every check was done and passed."""
        return self.correct and self._answers().get(FASTER, False)

    @property
    def correct(self) -> bool:
        """Whether it is right, fast or not."""
        answers = self._answers()
        return all(answers.get(name, False) for name in CHECKS if name != FASTER)

    @property
    def failure(self) -> Check | None:
        """The check that failed."""
        return next((check for check in self.checks if not check.passed), None)

    def _answers(self) -> dict[str, bool]:
        return {check.name: check.passed for check in self.checks}


def verify(
    source: Source,
    contract: Contract,
    folder: Path,
    threads: int = 1,
    trusted: bool = False,
    rounds: int = ROUNDS,
    burst_s: float = BURST_S,
) -> Verification:
    """Build `source` in `folder` and hold it against `contract`; takes from seconds to a minute or two.

    Compiler and kernel run isolated from network and files. `trusted` code is verified also where there
    is no isolation. Raises SandboxError where untrusted code cannot be run, and BuildError if the
    verifier's own program does not compile; what is wrong with the kernel is in the answer.
    """
    seed = secrets.randbits(48)
    checks: list[Check] = []
    timings: tuple[Timing, ...] = ()
    digest: str | None = None

    def check(name: str, do: Callable[[], str]) -> bool:
        try:
            checks.append(Check(name=name, passed=True, detail=do()))
        except (Wrong, HostError, BuildError) as error:
            checks.append(Check(name=name, passed=False, detail=str(error)))
        return checks[-1].passed

    def verified() -> Verification:
        return Verification(
            contract=contract.name,
            source=source.digest,
            object=digest,
            checks=tuple(checks),
            timings=timings,
            threads=threads,
            seed=seed,
            isolated=isolation_missing() is None,
        )

    compiler = None if trusted else compile_isolated
    path = folder

    def built() -> str:
        nonlocal path
        path = build(source, folder, compiler=compiler)
        return path.name

    if not check(BUILD, built):
        return verified()
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    numbers, choices = torch.Generator().manual_seed(seed), random.Random(seed)

    def clean() -> str:
        sanitized = build(source, folder, sanitize=True, compiler=compiler).read_bytes()
        program = host_program(folder, sanitize=True)
        with hosted(sanitized, source.name, program, threads, True, trusted) as host:
            trial = Trial(contract, host, threads, numbers, choices)
            trial.attempt(trial.make(trial.small()))
            random_shapes(trial)
        return "addresses and undefined behaviour"

    with ExitStack() as kept:
        try:
            host = kept.enter_context(
                hosted(data, source.name, host_program(folder), threads, False, trusted)
            )
        except HostError as error:
            checks.append(Check(name=next(iter(BEFORE_TIMING)), passed=False, detail=f"not loaded: {error}"))
            return verified()
        trial = Trial(contract, host, threads, numbers, choices)

        def measured() -> str:
            nonlocal timings
            timings = timed(trial, rounds, burst_s)
            return f"{len(timings)} shapes, {rounds} rounds"

        steps: dict[str, Callable[[], str]] = {
            **{name: (lambda do=do: do(trial)) for name, do in BEFORE_TIMING.items()},
            SANITIZER: clean,
            TIMING: measured,
            AFTER: lambda: fresh(trial),
        }
        if not all(check(name, do) for name, do in steps.items()):
            return verified()

    def unchanged() -> str:
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise Wrong(f"{path} is no longer what was verified")
        return f"sha256 {digest}"

    if check(OBJECT, unchanged):
        check(FASTER, lambda: faster(timings))
    return verified()
