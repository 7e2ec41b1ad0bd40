"""Nothing is promoted of which anything is missing or wrong: one test a way to be fooled."""

import hashlib
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.kernels.promotion import (
    Decision,
    Engine,
    PromotionError,
    Promotions,
    Ran,
    Record,
    predicted_gain,
)
from strop.kernels.timing import Timing, median_interval
from strop.kernels.verify import CHECKS, Check, Verification

OBJECT = b"what was compiled"
DIGEST = hashlib.sha256(OBJECT).hexdigest()
SHAPE = {"rows": 1, "inputs": 96}
TIMING = Timing(
    shape="rows=1 inputs=96", kernel_s=1e-5, reference_s=2e-5, speedup=2.0, low=1.8, high=2.2, noise=1.01,
    calls=100, rounds=9,
)  # fmt: skip


def verification(**other: Any) -> Verification:
    content: dict[str, Any] = {
        "contract": "linear",
        "source": "0" * 64,
        "object": DIGEST,
        "checks": tuple(Check(name=name, passed=True, detail="") for name in CHECKS),
        "timings": (TIMING,),
        "threads": 1,
        "seed": 7,
        "isolated": True,
    }
    return Verification(**(content | other))


def record(verified: Verification) -> Record:
    return Record(
        name="kernel",
        code="int kernel;",
        flags=(),
        contract="linear",
        served=(SHAPE,),
        object=DIGEST,
        verification=verified,
        share=0.5,
        proposed_by="a test",
        proposed_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


def engine(**other: Any) -> Engine:
    content: dict[str, Any] = {
        "workers": 1,
        "activations": (Ran(worker="0", name="kernel", sha256=DIGEST, calls=900, refusals=0),),
        "on_s": (1.0, 1.01, 0.99, 1.0, 1.0, 1.02),
        "off_s": (1.5, 1.52, 1.47, 1.5, 1.49, 1.5),
        "same_s": ((1.0, 1.02), (1.01, 1.0)),
        "fidelity_passed": True,
        "fidelity": "quick: KL 1e-5",
    }
    return Engine(**(content | other))


def ran(**other: Any) -> tuple[Ran, ...]:
    content: dict[str, Any] = {"worker": "0", "name": "kernel", "sha256": DIGEST, "calls": 900, "refusals": 0}
    return (Ran(**(content | other)),)


def without(name: str) -> tuple[Check, ...]:
    return tuple(check for check in verification().checks if check.name != name)


def failed(name: str) -> tuple[Check, ...]:
    return tuple(c.model_copy(update={"passed": c.name != name}) for c in verification().checks)


@pytest.fixture
def promotions(tmp_path: Path) -> Promotions:
    return Promotions(tmp_path)


def test_what_nothing_speaks_against_is_approved_by_someone(promotions: Promotions) -> None:
    identity = promotions.propose(record(verification()), OBJECT)
    assert promotions.get(identity[:8]).state == "proposed"
    with pytest.raises(PromotionError, match="not measured in the engine"):
        promotions.approve(identity, by="ada")
    with pytest.raises(PromotionError, match="proposed: only approved"):
        promotions.artifact(identity)
    promotions.measured(identity, engine())
    promotions.approve(identity, by="ada", reason="looked at it")
    found = promotions.get(identity)
    assert isinstance(found.decision, Decision) and found.decision.by == "ada"
    assert found.state == "approved" and found.credited_gain == pytest.approx(1.5, abs=0.01)
    artifact = promotions.artifact(identity)
    artifact.verify()
    with pytest.raises(PromotionError, match="stays as it is"):
        promotions.measured(identity, engine(fidelity_passed=False))
    promotions.reject(identity, by="bob", reason="drifts")
    assert [p.state for p in promotions.all()] == ["rejected"]
    with pytest.raises(PromotionError, match="rejected"):
        promotions.artifact(identity)


@pytest.mark.parametrize(
    ("item", "measured", "words"),
    [
        (1, engine(activations=ran(calls=0)), "never ran"),
        (1, engine(activations=ran(sha256=None)), "loaded nothing"),
        (1, engine(activations=()), "0 of 1 workers"),
        (1, engine(workers=2), "1 of 2 workers"),
        (2, engine(activations=ran(refusals=3)), "fell back to the stock operator 3 times"),
        (18, engine(activations=ran(sha256="1" * 64)), "loaded 111111111111"),
        (19, engine(on_s=(), off_s=()), "time of the engine is missing"),
        (19, engine(on_s=(1.0,) * 5), "time of the engine is missing"),
        (19, engine(on_s=(0.0,) * 6), "time of the engine is missing"),
        (19, engine(on_s=(math.nan,) * 6), "time of the engine is missing"),
        (19, engine(same_s=()), "no A/A run"),
        (20, engine(fidelity_passed=None), "no evaluation end to end"),
        (20, engine(fidelity_passed=False, fidelity="KL 0.2"), "failed: KL 0.2"),
        (0, engine(off_s=(1.0, 1.03, 0.97, 1.0, 1.01, 1.0)), "bursts that are the same"),
        (0, engine(same_s=((1.0, 1.6),)), "bursts that are the same"),
    ],
)
def test_a_measurement_that_proves_nothing_promotes_nothing(
    item: int, measured: Engine, words: str, promotions: Promotions
) -> None:
    identity = promotions.propose(record(verification()), OBJECT)
    promotions.measured(identity, measured)
    with pytest.raises(PromotionError, match=words):
        promotions.approve(identity, by="ada")
    assert promotions.get(identity).state == "proposed"
    if item in (0, 19):
        assert promotions.get(identity).credited_gain is None


@pytest.mark.parametrize(
    ("item", "verified", "words"),
    [
        (17, verification(timings=(TIMING.model_copy(update={"shape": "rows=9 inputs=8"}),)), "is not served"),
        (17, verification(timings=()), "no time was taken"),
        (18, verification(object="2" * 64), "not the one that was verified"),
        (18, verification(contract="greedy"), "verified as greedy"),
        (19, verification(timings=(TIMING.model_copy(update={"kernel_s": 0.0}),)), "no time was taken"),
        (19, verification(timings=(TIMING.model_copy(update={"speedup": math.nan}),)), "no time was taken"),
        (21, verification(checks=failed("served shapes")), "'served shapes' failed"),
        (21, verification(checks=failed("exact inputs")), "'exact inputs' failed"),
        (21, verification(checks=without("after timing")), "'after timing' was not done"),
        (21, verification(checks=()), "'build' was not done"),
    ],
)  # fmt: skip
def test_a_verification_with_a_hole_promotes_nothing(
    item: int, verified: Verification, words: str, promotions: Promotions
) -> None:
    identity = promotions.propose(record(verified), OBJECT)
    promotions.measured(identity, engine())
    with pytest.raises(PromotionError, match=words):
        promotions.approve(identity, by="ada")


@pytest.mark.parametrize("name", CHECKS)
def test_no_check_may_be_missing_or_failed(name: str) -> None:
    assert verification().passed
    assert not verification(checks=without(name)).passed
    assert not verification(checks=failed(name)).passed


def test_the_object_that_is_shipped_is_the_one_that_was_timed(promotions: Promotions) -> None:
    with pytest.raises(PromotionError, match="nothing was kept"):
        promotions.propose(record(verification()), b"another object")
    identity = promotions.propose(record(verification()), OBJECT)
    promotions.measured(identity, engine())
    promotions.object_path(DIGEST).write_bytes(b"another object")
    with pytest.raises(PromotionError, match="not the one that was verified"):
        promotions.approve(identity, by="ada")
    promotions.object_path(DIGEST).write_bytes(OBJECT)
    promotions.approve(identity, by="ada")
    promotions.object_path(DIGEST).write_bytes(b"another object")
    with pytest.raises(PromotionError, match="no longer what was approved"):
        promotions.artifact(identity)


def test_a_record_that_was_edited_is_not_read(promotions: Promotions) -> None:
    identity = promotions.propose(record(verification()), OBJECT)
    path = promotions.folder / "records" / f"{identity}.json"
    path.write_text(path.read_text().replace('"speedup": 2.0', '"speedup": 9.0'))
    with pytest.raises(PromotionError, match="was changed"):
        promotions.get(identity)
    path.write_text("{}")
    with pytest.raises(PromotionError, match="cannot be read"):
        promotions.get(identity)
    with pytest.raises(PromotionError, match="0 kernels begin"):
        promotions.get("ffff")


@given(st.floats(0, 1), st.floats(1, 100))
def test_a_prediction_is_never_more_than_all_that_the_operator_takes(share: float, speedup: float) -> None:
    gain = predicted_gain(share, speedup)
    assert gain * (1 + 1e-9) >= 1 and gain <= speedup * (1 + 1e-9)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=40))
def test_an_interval_holds_the_median_of_what_was_measured(values: list[float]) -> None:
    low, high = median_interval(values)
    ordered = sorted(values)
    assert low <= ordered[len(values) // 2] and ordered[(len(values) - 1) // 2] <= high
