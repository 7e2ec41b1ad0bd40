"""Each known cheat is rejected, by the check that is there for it; honest kernels are not."""

from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from strop.kernels.cheats import CONTRACT, HONEST, Cheat, kernel, planted, quickly
from strop.kernels.contract import Tensors
from strop.kernels.verify import CHECKS, verify

from .conftest import isolated

pytestmark = [isolated, pytest.mark.slow]


@pytest.mark.parametrize("cheat", planted(), ids=lambda cheat: f"{cheat.item}-{cheat.name}")
def test_a_cheat_is_rejected_for_what_it_does(cheat: Cheat, objects: Path) -> None:
    found = quickly(cheat.source, objects)
    assert not found.passed
    assert found.failure
    assert found.failure.name in cheat.caught_by, found.failure
    assert cheat.because in found.failure.detail
    assert cheat.caught(found)


@pytest.mark.parametrize(
    "turn", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_an_honest_kernel_is_right_each_time(turn: int, objects: Path) -> None:
    found = quickly(kernel(HONEST), objects)
    assert found.correct, found.failure
    assert tuple(check.name for check in found.checks) == CHECKS
    assert all(timing.complete for timing in found.timings)
    assert len(found.timings) == len(CONTRACT.served)


def test_an_object_that_is_exchanged_while_it_is_verified_is_seen(tmp_path: Path) -> None:
    """Item 18: what was timed is not what lies there."""

    def exchanges(x: Tensor, weight: Tensor) -> Tensors:
        for path in tmp_path.glob("kernel-*.so"):
            path.write_bytes(b"another object")
        return CONTRACT.reference(x, weight)

    contract = replace(CONTRACT, reference=exchanges)
    found = verify(kernel(HONEST), contract, tmp_path, rounds=1, burst_s=0.001)
    assert found.failure and found.failure.name == "object"
    assert not found.correct
