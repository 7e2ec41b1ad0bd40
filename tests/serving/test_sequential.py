import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from strop.serving.sequential import (
    Blocks,
    Kind,
    interval,
    log_evidence,
    log_evidence_of_more,
    pair_up,
    sessions_to_show,
)

shares = st.floats(0, 1)
logs = st.floats(-6, 6)
LOOKS = np.unique(np.geomspace(1, 400, 60).astype(int))


@st.composite
def blocks_of(draw: st.DrawFn, kind: Kind) -> Blocks:
    values = shares if kind == "share" else logs
    count, k = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    return Blocks(
        kind, draw(arrays(float, count, elements=values)), draw(arrays(float, (count, k), elements=values))
    )


@given(blocks_of("ratio"))
def test_which_session_was_the_candidates_says_nothing_between_equals(blocks: Blocks) -> None:
    """Averaged over every place the candidate's session may have had in one block, a factor is 1."""
    values_BJ = np.concatenate([blocks.candidate_B[:, None], blocks.champion_BK], axis=1)
    for row_J in values_BJ:
        swapped = [
            float(log_evidence_of_more(Blocks("ratio", row_J[[j]], np.delete(row_J, j)[None])))
            for j in range(len(row_J))
        ]
        assert np.exp(swapped).mean() == pytest.approx(1)


@given(arrays(float, 24, elements=shares))
def test_a_bet_on_a_share_neither_gains_nor_loses_if_its_mean_is_right(values: np.ndarray) -> None:
    candidate, champion = values[:12], values[12:]
    mean = float((candidate - champion).mean())
    if abs(mean) < 0.99:
        for side in ("above", "below"):
            single = [
                float(log_evidence(Blocks("share", candidate[[i]], champion[i, None, None]), mean, side))
                for i in range(12)
            ]
            assert np.exp(single).mean() == pytest.approx(1)


@given(blocks_of("share"), st.floats(-0.99, 0.99), st.floats(-0.99, 0.99))
def test_evidence_falls_the_more_is_claimed(blocks: Blocks, a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert log_evidence(blocks, low, "above") >= log_evidence(blocks, high, "above") - 1e-9
    assert log_evidence(blocks, low, "below") <= log_evidence(blocks, high, "below") + 1e-9


@given(blocks_of("ratio"), st.floats(-3, 3))
def test_a_ratio_moves_with_the_candidate_and_turns_over_with_the_sides(blocks: Blocks, shift: float) -> None:
    moved = Blocks("ratio", blocks.candidate_B + shift, blocks.champion_BK)
    assert log_evidence(moved, shift, "above") == pytest.approx(log_evidence(blocks, 0.0, "above"), abs=1e-6)
    mirrored = Blocks("ratio", -blocks.candidate_B, -blocks.champion_BK)
    assert log_evidence(mirrored, 0.0, "below") == pytest.approx(log_evidence(blocks, 0.0, "above"), abs=1e-6)


@pytest.mark.parametrize("kind", ["share", "ratio"])
def test_the_interval_is_where_the_evidence_ends(kind: Kind) -> None:
    rng = np.random.default_rng(3)
    champion = rng.random((300, 2)) if kind == "share" else rng.normal(0, 0.3, (300, 2))
    candidate = rng.random(300) * 0.9 if kind == "share" else rng.normal(0.1, 0.3, 300)
    blocks = Blocks(kind, candidate, champion)
    low, high = interval(blocks, 0.05, 0.01)
    assert low < float(candidate.mean() - champion.mean()) < high
    assert log_evidence(blocks, low, "above") == pytest.approx(math.log(20), abs=1e-6)
    assert log_evidence(blocks, high, "below") == pytest.approx(math.log(100), abs=1e-6)


def test_too_few_sessions_bound_nothing() -> None:
    assert interval(Blocks.of("share", np.zeros(3), np.zeros(2), 3), 0.05, 0.05) == (-1, 1)
    assert interval(Blocks.of("ratio", np.zeros(2), np.zeros(6), 3), 0.05, 0.05) == (-math.inf, math.inf)


def test_sessions_in_step_fill_blocks_in_order() -> None:
    blocks = Blocks.of("share", np.arange(4) / 10, np.arange(7) / 10, 3)
    assert blocks.candidate_B.tolist() == [0.0, 0.1]
    assert blocks.champion_BK.tolist() == [[0.0, 0.1, 0.2], [0.3, 0.4, 0.5]]


arrivals = st.lists(st.integers(0, 30), max_size=40).map(sorted)


@given(arrivals, arrivals, st.integers(1, 3), st.integers(0, 30))
def test_blocks_are_disjoint_and_once_made_stay(ours: list[int], theirs: list[int], k: int, now: int) -> None:
    own, others = pair_up(ours, theirs, k)
    assert len(own) == len(others) == len(set(own)) == min(len(ours), len(theirs) // k)
    assert all(len(block) == k for block in others)
    assert len({i for block in others for i in block}) == k * len(others)
    earlier = pair_up([look for look in ours if look <= now], [look for look in theirs if look <= now], k)
    assert own[: len(earlier[0])] == earlier[0] and others[: len(earlier[1])] == earlier[1]


def test_a_block_is_of_one_time_where_one_side_has_more_than_its_share() -> None:
    ours, theirs = list(range(0, 300, 5)), list(range(0, 300, 2))
    for own, others in zip(*pair_up(ours, theirs, 1), strict=True):
        assert abs(ours[own] - theirs[others[0]]) <= 2


def _share(rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    """Sessions of a few requests that fail rarely, some sessions much more often than others."""
    return rng.binomial(4, rng.beta(0.2, 3.8, size)) / 4


def _heavy(rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    return rng.standard_t(2, size) * 0.4


@pytest.mark.parametrize(
    ("kind", "draw", "truth"), [("share", _share, 0.0), ("share", _share, 0.1), ("ratio", _heavy, 0.3)]
)
@pytest.mark.parametrize("k", [1, 3])
def test_intervals_cover_the_truth_at_all_times_at_once(kind: Kind, draw, truth: float, k: int) -> None:
    """A false exclusion at any look counts; Ville's inequality allows 10 % a side."""
    rng = np.random.default_rng(k)
    runs, count, alpha = 500, 400, 0.1
    candidate, champion = draw(rng, (runs, count)), draw(rng, (runs, count * k)).reshape(runs, count, k)
    if kind == "share":
        # One failed session more, with the chance that moves the mean by `truth`.
        candidate = np.where(rng.random((runs, count)) < truth / 0.95, 1.0, candidate)
    else:
        candidate = candidate + truth
    for side in ("above", "below"):
        wrong = np.zeros(runs, bool)
        for looks in LOOKS:
            so_far = Blocks(kind, candidate[:, :looks], champion[:, :looks])
            wrong |= log_evidence(so_far, truth, side) >= math.log(1 / alpha)
        # 500 runs at 10 %: a share above 14 % has a chance of 0.2 %.
        assert wrong.mean() <= 0.14


@pytest.mark.parametrize("draw", [_share, _heavy])
@pytest.mark.parametrize("k", [1, 3])
def test_equal_stacks_are_told_apart_no_more_often_than_allowed(draw, k: int) -> None:
    rng = np.random.default_rng(10 + k)
    runs, count, alpha = 500, 400, 0.1
    candidate, champion = draw(rng, (runs, count)), draw(rng, (runs, count * k)).reshape(runs, count, k)
    wrong = np.zeros(runs, bool)
    for looks in LOOKS:
        so_far = Blocks("share", candidate[:, :looks], champion[:, :looks])
        wrong |= log_evidence_of_more(so_far) >= math.log(1 / alpha)
    assert wrong.mean() <= 0.14


@pytest.mark.parametrize("tolerance", [0.01, 0.05])
def test_the_size_of_a_canary_is_reckoned_right_for_shares(tolerance: float) -> None:
    needed = math.ceil(sessions_to_show("share", tolerance, 0.05, 1, 0.0))
    for count, shown in ((needed, True), (int(needed * 0.6), False)):
        clean = Blocks.of("share", np.zeros(count), np.zeros(count), 1)
        assert (log_evidence(clean, tolerance, "below") >= math.log(20)) == shown
    assert sessions_to_show("share", 0.0, 0.05, 1, 0.0) == math.inf


def test_the_size_of_a_canary_is_reckoned_about_right_for_ratios() -> None:
    needed = sessions_to_show("ratio", math.log(1.15), 0.05, 1, 0.0)
    rng = np.random.default_rng(0)
    shown = []
    for count in (0.5 * needed, 2 * needed):
        candidate, champion = rng.normal(0, 0.5, (2, 200, round(count)))
        blocks = Blocks("ratio", candidate, champion[..., None])
        shown.append((log_evidence(blocks, math.log(1.15), "below") >= math.log(20)).mean())
    assert shown[0] < 0.4 and shown[1] > 0.8


def test_the_size_of_a_canary_is_reckoned_about_right_for_shares_that_are_never_zero() -> None:
    needed = sessions_to_show("share", 0.05, 0.05, 3, 0.05)
    rng = np.random.default_rng(1)
    shown = []
    for count in (round(0.4 * needed), round(2.5 * needed)):
        draws = (rng.random((4, 200, count)) < 0.05).astype(float)
        blocks = Blocks("share", draws[0], np.moveaxis(draws[1:], 0, -1))
        shown.append((log_evidence(blocks, 0.05, "below") >= math.log(20)).mean())
    assert shown[0] < 0.4 and shown[1] > 0.8
