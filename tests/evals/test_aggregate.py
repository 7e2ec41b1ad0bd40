import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from strop.evals.aggregate import Aggregate, Broken, Measurement, Statistic
from strop.evals.observation import Metric, Observation

KL = Metric("kl", "nats", "lower", "level", "distance from the reference's distributions")
AGREES = Metric("agrees", "", "higher", "level", "share of tokens that are the reference's first choice")
ERROR = Metric("error", "", "lower", "difference", "share of requests without a whole answer")
TTFT = Metric("ttft_s", "s", "lower", "ratio", "time to the first token")
METRICS = (KL, AGREES, ERROR, TTFT)


def observed(
    metric: Metric, number: int, candidate: list[float], reference: list[float] | None = None, **more: str
) -> Observation:
    return Observation(
        metric.name,
        f"r{number}",
        more.get("session", f"s{number}"),
        tuple(more.get("slices", "").split()),
        tuple(candidate),
        None if reference is None else tuple(reference),
    )


def measured(
    metric: Metric,
    values: Sequence[tuple[list[float], list[float] | None]],
    statistic: Statistic = "mean",
    session: Callable[[int], str] = lambda number: f"s{number}",
) -> Measurement:
    observations = [observed(metric, i, c, r, session=session(i)) for i, (c, r) in enumerate(values)]
    found = Aggregate.of(METRICS, observations).measure(metric.name, statistic=statistic)
    assert found is not None
    return found


def test_statistics_are_of_all_tokens_and_of_both_stacks() -> None:
    found = {
        s: measured(KL, [([0.0, 0.1], None), ([0.2, 0.9], None)], s).candidate
        for s in ("mean", "median", "max")
    }
    assert found == pytest.approx({"mean": 0.3, "median": 0.1, "max": 0.9})
    times = measured(TTFT, [([2.0], [1.0]), ([4.0], [3.0])])
    assert (times.reference, times.candidate, times.estimate) == (2.0, 3.0, 1.5)
    errors = measured(ERROR, [([1.0], [0.0]), ([0.0], [0.0])])
    assert (errors.reference, errors.candidate, errors.estimate) == (0.0, 0.5, 0.5)


def test_slices_hold_their_requests_and_what_holds_all_is_no_slice() -> None:
    aggregate = Aggregate.of(
        METRICS,
        [
            observed(ERROR, 0, [1.0], [0.0], slices="json english"),
            observed(ERROR, 1, [0.0], [0.0], slices="code english"),
            observed(ERROR, 2, [0.0], [0.0], slices="code english"),
        ],
    )
    assert aggregate.slices("error") == ["code", "json"]
    json, whole, nothing = (aggregate.measure("error", name) for name in ("json", "all", "tools"))
    assert json and whole and nothing is None
    assert (json.estimate, json.requests) == (1.0, 1)
    assert (whole.estimate, whole.requests, whole.samples) == (pytest.approx(1 / 3), 3, 3)


def test_what_shows_nothing_on_one_side_is_left_out_on_both() -> None:
    found = measured(TTFT, [([2.0], [1.0]), ([], [9.0]), ([9.0], [])])
    assert (found.reference, found.candidate, found.requests) == (1.0, 2.0, 1)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (observed(KL, 0, [math.nan]), "not a number"),
        (observed(KL, 0, [math.inf]), "not a number"),
        (observed(ERROR, 0, [1.0]), "needs the reference"),
        (observed(Metric("odd", "", "lower", "level", ""), 0, [1.0]), "does not declare"),
    ],
)
def test_what_cannot_be_summed_up_is_named(bad: Observation, reason: str) -> None:
    with pytest.raises(Broken, match=f"r0.*{reason}"):
        Aggregate.of(METRICS, [bad])


@given(st.integers(1, 80), st.integers(0, 80), st.sampled_from([0.8, 0.9, 0.95]))
def test_a_share_of_single_requests_has_the_exact_interval(n: int, failed: int, confidence: float) -> None:
    failed = min(failed, n)
    low, high = measured(AGREES, [([float(i < failed)], None) for i in range(n)]).interval(confidence)
    tail = (1 - confidence) / 2
    exact_low = stats.beta.ppf(tail, failed, n - failed + 1) if failed else 0.0
    exact_high = stats.beta.ppf(1 - tail, failed + 1, n - failed) if failed < n else 1.0
    assert (low, high) == (pytest.approx(exact_low, abs=0.02), pytest.approx(exact_high, abs=0.02))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("statistic", ["mean", "p99"])
def test_sessions_that_are_all_alike_still_leave_doubt(metric: Metric, statistic: Statistic) -> None:
    reference = None if metric.compare == "level" else [1.0]
    for value in (0.0, 1.0):
        found = measured(metric, [([value], reference)] * 40, statistic)
        low, high = found.interval(0.95)
        assert low < high and low <= found.estimate <= high


def test_nothing_of_n_bounds_a_difference_as_it_bounds_a_share() -> None:
    low, high = measured(ERROR, [([0.0], [0.0])] * 40).interval(0.95)
    assert high == pytest.approx(1 - 0.025 ** (1 / 40), abs=0.006)
    assert low == pytest.approx(-high, abs=0.01)


def test_for_paired_failures_it_is_the_sign_test() -> None:
    """With k failures on the candidate alone and none on the other side, the chance of that is 1 / 2^k."""
    for failed, found in ((4, False), (5, True)):
        values = [([float(i < failed)], [0.0]) for i in range(100)]
        assert (measured(ERROR, values).interval(0.9)[0] > 0) == found


def test_the_p99_is_open_until_the_sessions_can_bound_it() -> None:
    rng = np.random.default_rng(0)
    few = measured(KL, [([v], None) for v in rng.exponential(size=100)], "p99").interval(0.9)
    many = measured(KL, [([v], None) for v in rng.exponential(size=800)], "p99").interval(0.9)
    assert few[1] == math.inf and few[0] > 0
    assert many[0] < -math.log(0.01) < many[1] < math.inf


def test_the_largest_seen_is_a_lower_bound_and_no_upper_one() -> None:
    assert measured(KL, [([0.5, 2.0], None), ([0.1], None)], "max").interval(0.95) == (2.0, math.inf)


def test_turns_of_a_session_are_not_taken_for_independent_evidence() -> None:
    values = [([float(i < 25)], [0.0]) for i in range(100)]
    wide = measured(ERROR, values, session=lambda i: f"s{i // 10}").interval(0.9)
    narrow = measured(ERROR, values).interval(0.9)
    assert wide[1] - wide[0] > 2 * (narrow[1] - narrow[0])


def test_one_session_says_nothing_of_others() -> None:
    low, high = measured(KL, [([0.1, 0.2], None)]).interval(0.95)
    assert 0 <= low < 0.01 and high == math.inf
    low, high = measured(TTFT, [([1.0], [1.0])]).interval(0.95)
    assert low == 0.0 and high == math.inf


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1, max_size=30),
    st.sampled_from(METRICS),
    st.sampled_from(["mean", "median", "p95", "p99", "max"]),
    st.floats(0.5, 0.999),
)
def test_intervals_hold_the_estimate_and_grow_with_confidence(
    values: list[tuple[float, float]], metric: Metric, statistic: Statistic, confidence: float
) -> None:
    paired = metric.compare != "level"
    found = measured(metric, [([c], [r] if paired else None) for c, r in values], statistic)
    low, high = found.interval(confidence)
    wide_low, wide_high = found.interval(1 - (1 - confidence) / 10)
    assert not math.isnan(low) and not math.isnan(high)
    assert wide_low <= low <= high <= wide_high
    if statistic != "mean":
        assert low <= found.estimate <= high


def simulate(kind: str, n: int, seed: int) -> tuple[Measurement, float]:
    """A sample of `n` sessions of one to five requests that resemble each other, and the truth."""
    rng = np.random.default_rng(seed)
    turns = rng.integers(1, 6, n)
    session = np.repeat(np.arange(n), turns)
    shared = rng.normal(0, 0.5, n)[session]
    own = rng.normal(0, 0.5, (2, len(session)))
    if kind == "share":
        # The chance of a session's requests differs from session to session, 0.04 and 0.08 on average.
        tilt = rng.beta(0.5, 2, n)[session]
        draws = rng.random((2, len(session)))
        rows = [([float(d < 0.4 * t)], [float(e < 0.2 * t)]) for t, d, e in zip(tilt, *draws, strict=True)]
        return measured(ERROR, rows, session=lambda i: str(session[i])), 0.04
    if kind == "level":
        rows = [([v], None) for v in 0.02 * np.exp(shared + own[0] - 0.25)]
        return measured(KL, rows, session=lambda i: str(session[i])), 0.02
    pairs = 1.1 * np.exp(shared + 0.3 * own[0]), np.exp(shared + 0.3 * own[1])
    rows = [([c], [r]) for c, r in zip(*pairs, strict=True)]
    statistic: Statistic = "median" if kind == "median ratio" else "mean"
    return measured(TTFT, rows, statistic, session=lambda i: str(session[i])), 1.1


@pytest.mark.parametrize("kind", ["share", "level", "ratio", "median ratio"])
@pytest.mark.parametrize("n", [12, 40])
def test_intervals_cover_the_truth_as_often_as_they_say(kind: str, n: int) -> None:
    runs, missed = 160, 0
    for seed in range(runs):
        found, truth = simulate(kind, n, seed)
        low, high = found.interval(0.9)
        missed += not low <= truth <= high
    # Conservative is fine; 0.02 of bias is allowed, and three standard deviations of the simulation.
    assert missed / runs <= 0.12 + 3 * math.sqrt(0.1 * 0.9 / runs)
