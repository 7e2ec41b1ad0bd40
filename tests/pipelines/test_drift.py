import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.pipelines.drift import BUCKETS, Detector, Drift, Observation, Past, feature_of, may_start
from strop.serving.redaction import without_content
from strop.serving.traces import WITHHELD, Choice

DAY_S = 86_400


def run_length(rng: random.Random, alarm_at: float, most: int, values: list[float] | None = None) -> int:
    """Sessions until a false alarm of one detector of two scores, at most `most`."""

    def score() -> float:
        return rng.choice(values) if values else rng.expovariate(1)

    detector = Detector([sorted(score() for _ in range(20)) for _ in range(2)], both=True)
    for session in range(1, most):
        detector.see([score(), score()], [rng.random(), rng.random()], 100 * alarm_at)
        if detector.evidence >= 2 * alarm_at:
            return session
    return most


@pytest.mark.parametrize("values", [None, [0.0, 1.0], [3.0]])
def test_false_alarms_are_as_rare_as_promised(values: list[float] | None) -> None:
    """Whatever the scores are like, with ties or all equal, and from a reference of 20 sessions only."""
    rng = random.Random(0)
    lengths = np.array([run_length(rng, 40, 400, values) for _ in range(300)])
    for sessions in (4, 10, 20, 40):
        assert (lengths <= sessions).mean() <= sessions / 40
    # Half of it follows from that; cut off at 400, the mean can only be lower than it is.
    assert lengths.mean() >= 20


def observation(number: int, rng: random.Random, acceptance: float | None = 2.5, words: range = range(300)):
    prompt, output = (rng.choices(words, k=rng.randint(30, 60)) for _ in range(2))
    noise = rng.gauss(0, 0.3)
    return Observation(f"s{number}", prompt, output, None if acceptance is None else acceptance + noise)


def fed(drift: Drift, count: int, first: int = 0, **how) -> Drift:
    rng = random.Random(first)
    for number in range(first, first + count):
        drift.see(observation(number, rng, **how))
    return drift


def new() -> Drift:
    return Drift(
        reference_sessions=60, sessions_to_false_alarm=1e5, hold_sessions=10, min_acceptance_drop=0.05
    )


def test_nothing_happens_before_there_is_a_reference() -> None:
    drift = fed(new(), 59)
    assert not drift.has_reference and not drift.detectors
    assert fed(drift, 1, 59).has_reference


def test_steady_traffic_raises_nothing() -> None:
    drift = fed(new(), 1500)
    assert not drift.raised_at and drift.reference_acceptance == pytest.approx(2.5, abs=0.15)


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({"acceptance": 2.0}, {"acceptance"}),
        ({"words": range(150, 450)}, {"prompts", "outputs"}),
        ({"words": range(20)}, {"prompts", "outputs"}),
    ],
)
def test_a_shift_is_seen_for_what_it_is(change: dict, seen: set[str]) -> None:
    drift = fed(new(), 300)
    assert not drift.holding
    fed(drift, 80, 300, **change)
    assert set(drift.holding) == seen


def test_an_alarm_must_hold_and_is_cleared_when_all_is_as_before() -> None:
    drift = fed(new(), 300)
    number = 300
    while not drift.raised_at:
        fed(drift, 1, number, acceptance=1.5)
        number += 1
    assert not drift.holding
    while drift.raised_at:
        fed(drift, 1, number)
        number += 1
        assert number < 2000
    assert not drift.holding


def test_drafts_that_are_accepted_more_are_no_drift() -> None:
    assert not fed(fed(new(), 300), 300, 300, acceptance=3.5).raised_at


def test_a_fall_that_does_not_matter_starts_nothing() -> None:
    drift = new()
    drift.min_acceptance_drop = 0.3
    fed(fed(drift, 300), 80, 300, acceptance=2.0)
    assert set(drift.raised_at) == {"acceptance"} and 0.1 < drift.acceptance_drop < 0.3
    assert not drift.holding


def test_without_speculation_the_mixes_are_watched() -> None:
    drift = fed(fed(new(), 300, acceptance=None), 80, 300, acceptance=None, words=range(20))
    assert set(drift.detectors) == {"prompts", "outputs"} == set(drift.holding)


def test_what_is_seen_depends_on_the_sessions_alone() -> None:
    one, two = fed(new(), 200), fed(new(), 200)
    assert [d.evidence for d in one.detectors.values()] == [d.evidence for d in two.detectors.values()]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), max_size=100))
def test_a_feature_is_a_point_of_the_sphere_that_knows_no_order(tokens: list[int]) -> None:
    feature = feature_of(tokens)
    assert feature.shape == (BUCKETS,)
    assert np.square(feature).sum() == pytest.approx(1.0 if tokens else 0.0)
    assert (feature_of(tokens[::-1]) == feature).all()


def test_loops_are_paid_from_a_budget() -> None:
    now = 10 * DAY_S
    assert may_start(now, [], 3600, 1800) is None
    assert may_start(now, [], 1000, 1800) is not None
    hour_ago, week_ago = Past(now - 3600, 1200), Past(now - 7 * DAY_S, 1200)
    assert may_start(now, [hour_ago, week_ago], 3600, 1800) is None
    reason = may_start(now, [hour_ago] * 3, 3600, 1800)
    assert reason == "loops took 60 of 60 minutes allowed in 24 hours, and one takes about 20"
    assert may_start(now, [week_ago] * 3, 3600, 1800) is None


def test_tokens_that_were_withheld_are_not_looked_at(make_trace) -> None:
    masked = make_trace(prompt_token_ids=[1, WITHHELD, 3], choices=[Choice(0, [WITHHELD, 5], "", "stop")])
    seen = Observation.of(masked)
    assert (seen.prompt, seen.output) == ([1, 3], [5])
    bare = Observation.of(without_content(masked))
    assert feature_of(bare.prompt).sum() == 0
