import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.evals.statistics import Ratio, Totals, paired_ratio

latencies = st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=40)


@given(latencies)
def test_ratio_of_identical_data_is_exactly_one(values: list[float]) -> None:
    sessions = range(len(values))
    ones = Totals(values)
    assert paired_ratio(ones, ones, sessions, samples=200) == Ratio(1, 1, 1)


@given(latencies, st.floats(0.01, 100), st.integers(0, 5))
def test_scaling_the_candidate_scales_the_interval(values: list[float], scale: float, seed: int) -> None:
    champion = Totals(values)
    other = np.array(values) * np.linspace(0.5, 1.5, len(values))
    plain = paired_ratio(champion, Totals(other), range(len(values)), samples=200, seed=seed)
    scaled = paired_ratio(champion, Totals(other * scale), range(len(values)), samples=200, seed=seed)
    assert [scaled.ratio, scaled.low, scaled.high] == pytest.approx(
        [plain.ratio * scale, plain.low * scale, plain.high * scale], rel=1e-6
    )


@given(latencies)
def test_interval_holds_the_ratio_and_swapping_sides_inverts_it(values: list[float]) -> None:
    champion, candidate = Totals(values), Totals(list(reversed(values)))
    there = paired_ratio(champion, candidate, range(len(values)), samples=200)
    back = paired_ratio(candidate, champion, range(len(values)), samples=200)
    assert there.low <= there.ratio * (1 + 1e-9) and there.ratio <= there.high * (1 + 1e-9)
    assert back.ratio == pytest.approx(1 / there.ratio)
    assert back.high == pytest.approx(1 / there.low, rel=1e-6)


def test_ratio_is_of_sums_not_a_mean_of_ratios() -> None:
    champion, candidate = Totals([1, 9], [1, 3]), Totals([2, 2], [1, 1])
    assert champion.value == 2.5
    assert paired_ratio(champion, candidate, [0, 1]).ratio == pytest.approx(2 / 2.5)


@pytest.mark.parametrize(("sessions", "turns"), [(30, 1), (48, 1), (16, 3)])
def test_interval_covers_the_truth_as_often_as_it_says(sessions: int, turns: int) -> None:
    """Lognormal latencies, dependent within a session, 20 % faster with noise of the pair's own."""
    rng = np.random.default_rng(sessions)
    labels = np.repeat(np.arange(sessions), turns)
    hits, runs = 0, 1000
    for run in range(runs):
        base = np.exp(rng.normal(0, 0.4, sessions))[labels] * np.exp(rng.normal(0, 0.3, len(labels)))
        champion = base * np.exp(rng.normal(0, 0.05, len(labels)))
        candidate = 0.8 * base * np.exp(rng.normal(0, 0.05, len(labels)))
        found = paired_ratio(Totals(champion), Totals(candidate), labels, samples=400, seed=run)
        hits += found.low <= 0.8 <= found.high
    assert 0.92 <= hits / runs <= 0.98


def test_turns_of_a_session_are_not_taken_for_independent_evidence() -> None:
    rng = np.random.default_rng(0)
    champion = np.ones(40)
    candidate = np.repeat(np.exp(rng.normal(0, 0.3, 8)), 5)
    by_session = paired_ratio(Totals(champion), Totals(candidate), np.repeat(np.arange(8), 5))
    by_request = paired_ratio(Totals(champion), Totals(candidate), np.arange(40))
    assert np.log(by_session.high / by_session.low) > 2 * np.log(by_request.high / by_request.low)


@pytest.mark.parametrize(
    ("champion", "sessions", "reason"),
    [
        ([1.0, 2.0], [7, 7], "2 sessions"),
        ([0.0, 0.0], [1, 2], "positive"),
        ([1.0, float("nan")], [1, 2], "finite"),
    ],
)
def test_what_cannot_be_measured_is_refused(champion: list[float], sessions: list[int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        paired_ratio(Totals(champion), Totals([1.0, 1.0]), sessions)
