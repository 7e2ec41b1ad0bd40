"""Known ways in which a faster kernel turns out false, each planted as a kernel that does it (`planted/`).

They are here so that any machine can be asked whether its verifier catches them all. The first lines of
each file say which of docs/kernels.md's items it is, which checks may reject it, and words of the answer.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from strop.kernels.build import Source
from strop.kernels.contract import CONTRACTS, Contract, shapes
from strop.kernels.verify import Verification, verify

FOLDER = Path(__file__).parent / "planted"
HONEST = "KERNEL { return right(in, n_in, out, n_out); }"
CONTRACT: Contract = replace(
    CONTRACTS["linear"],
    served=shapes(rows=(1, 4), inputs=96, outputs=64),
    sizes={"rows": (1, 5), "inputs": (1, 130), "outputs": (1, 40)},
)
"""What the planted kernels pretend to do: small, so that all of them take a minute."""


@dataclass(frozen=True, slots=True)
class Cheat:
    """A kernel that must be rejected."""

    item: int
    name: str
    caught_by: tuple[str, ...]
    """The checks of which one must say no."""
    because: str
    """Words that its answer must have."""
    source: Source

    def caught(self, found: Verification) -> bool:
        """Whether it was rejected for what it does."""
        why = found.failure
        return why is not None and why.name in self.caught_by and self.because in why.detail


def planted() -> list[Cheat]:
    """All of them, in their order."""
    return [_read(path) for path in sorted(FOLDER.glob("*.cpp"))]


def kernel(code: str) -> Source:
    """A kernel `kernel` from what comes after the planted kernels' common beginning."""
    text = code
    for header in ("kept.h", "prelude.h"):
        text = text.replace(f'#include "{header}"', (FOLDER / header).read_text().replace("#pragma once", ""))
    if text == code:
        text = (FOLDER / "prelude.h").read_text().replace("#pragma once", "") + code
    return Source("kernel", text)


def quickly(source: Source, folder: Path, threads: int = 1) -> Verification:
    """Verify with bursts just long enough to tell what is several times as slow."""
    return verify(source, CONTRACT, folder, threads=threads, rounds=5, burst_s=0.004)


def _read(path: Path) -> Cheat:
    text = path.read_text()
    first, caught, because = (line.partition(": ")[2] for line in text.splitlines()[:3])
    return Cheat(
        item=int(path.name[:2]),
        name=first.rstrip("."),
        caught_by=tuple(caught.split(", ")),
        because=because,
        source=kernel(text),
    )
