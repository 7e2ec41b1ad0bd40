import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats.mstats import hdquantiles

from strop.evals.statistics import Ratio, paired_quantile_ratio

latencies = st.lists(st.floats(1e-3, 1e3), min_size=10, max_size=40)


@pytest.mark.parametrize(
    ("sessions", "turns", "quantile", "runs"),
    [
        (60, 1, 0.5, 500),
        (120, 1, 0.95, 500),
        pytest.param(50, 3, 0.5, 1000, marks=pytest.mark.slow),
        pytest.param(200, 1, 0.95, 1000, marks=pytest.mark.slow),
        pytest.param(150, 3, 0.95, 1000, marks=pytest.mark.slow),
    ],
)
def test_the_interval_covers_the_truth_as_often_as_it_says(
    sessions: int, turns: int, quantile: float, runs: int
) -> None:
    """Lognormal latencies, dependent within a session, 20 % faster with noise of each Stack's own."""
    rng = np.random.default_rng(sessions)
    labels = np.repeat(np.arange(sessions), turns)
    hits = 0
    for run in range(runs):
        base = np.exp(rng.normal(0, 0.4, sessions))[labels] * np.exp(rng.normal(0, 0.3, len(labels)))
        champion = base * np.exp(rng.normal(0, 0.2, len(labels)))
        candidate = 0.8 * base * np.exp(rng.normal(0, 0.2, len(labels)))
        found = paired_quantile_ratio(champion, candidate, labels, quantile, samples=200, seed=run)
        hits += found.low <= 0.8 <= found.high
    assert 0.93 <= hits / runs <= 0.97


@given(latencies, st.sampled_from([0.5, 0.3, 0.7]))
def test_the_quantile_is_harrell_and_davis_and_equal_data_have_ratio_one(
    values: list[float], quantile: float
) -> None:
    many = values * 2
    assert paired_quantile_ratio(many, many, range(len(many)), quantile, samples=200) == Ratio(1, 1, 1)
    fives = np.full(len(many), 5.0)
    found = paired_quantile_ratio(fives, many, range(len(many)), quantile, samples=200)
    assert 5 * found.ratio == pytest.approx(float(hdquantiles(many, [quantile])[0]), rel=1e-3)
    assert found.low <= found.ratio <= found.high


@given(latencies, st.floats(0.01, 100))
def test_scaling_the_candidate_scales_the_interval(values: list[float], scale: float) -> None:
    other = np.array(values) * np.linspace(0.5, 1.5, len(values))
    plain = paired_quantile_ratio(values, other, range(len(values)), 0.5, samples=200)
    scaled = paired_quantile_ratio(values, other * scale, range(len(values)), 0.5, samples=200)
    assert [scaled.ratio, scaled.low, scaled.high] == pytest.approx(
        [plain.ratio * scale, plain.low * scale, plain.high * scale], rel=1e-6
    )


def test_turns_of_a_session_are_not_taken_for_independent_evidence() -> None:
    rng = np.random.default_rng(0)
    candidate = np.repeat(np.exp(rng.normal(0, 0.3, 20)), 5)
    by_session = paired_quantile_ratio(np.ones(100), candidate, np.repeat(np.arange(20), 5), 0.5)
    by_request = paired_quantile_ratio(np.ones(100), candidate, np.arange(100), 0.5)
    assert np.log(by_session.high / by_session.low) > 1.3 * np.log(by_request.high / by_request.low)


@pytest.mark.parametrize(
    ("values", "sessions", "quantile", "reason"),
    [
        ([1.0] * 20, [7] * 20, 0.5, "2 sessions"),
        ([1.0] * 99, range(99), 0.95, "p95 needs at least 100 requests, got 99"),
        ([1.0] * 20, range(20), 0.99, "p99 needs at least 500"),
        ([0.0] * 20, range(20), 0.5, "positive"),
        ([float("nan")] * 20, range(20), 0.5, "finite"),
        ([1.0] * 20, range(20), 1.0, "between 0 and 1"),
    ],
)
def test_what_cannot_be_said_is_refused(
    values: list[float], sessions: list[int], quantile: float, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        paired_quantile_ratio(values, values, sessions, quantile)
