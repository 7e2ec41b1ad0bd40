"""Distances of two models: exact values, and bounds from the likeliest tokens alone."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import log_softmax, rel_entr
from scipy.stats import entropy

from strop.evals.distances import (
    NO_TOKEN,
    OVERLAP_TOKENS,
    RESOLUTION,
    TopLogprobs,
    full_distances,
    top_distances,
)

ROUNDING = 5e-5
"""What `RESOLUTION` of probability may cost at the ratios that come up here."""


def told(reference, candidate, tokens, k: int) -> tuple[TopLogprobs, TopLogprobs]:
    return TopLogprobs.of_logits(reference, tokens, k), TopLogprobs.of_logits(candidate, tokens, k)


def both_logits(seed: int, positions: int, vocab: int, sharpness: float, noise: float):
    rng = np.random.default_rng(seed)
    reference = rng.normal(size=(positions, vocab)) * sharpness
    candidate = reference + rng.normal(size=(positions, vocab)) * noise
    return reference, candidate, rng.integers(0, vocab, size=positions)


CASES = {
    "seed": st.integers(0, 2**32 - 1),
    "vocab": st.integers(2, 80),
    "sharpness": st.floats(0, 8),
    "noise": st.floats(0, 8),
}


@given(**CASES)
@settings(max_examples=150, deadline=None)
def test_whole_vocabularies_give_what_scipy_gives(seed, vocab, sharpness, noise) -> None:
    reference, candidate, tokens = both_logits(seed, 5, vocab, sharpness, noise)
    found = full_distances(reference, candidate, tokens)
    p, q = np.exp(log_softmax(reference, axis=1)), np.exp(log_softmax(candidate, axis=1))
    np.testing.assert_allclose(found.kl, rel_entr(p, q).sum(axis=1), atol=1e-9)
    np.testing.assert_allclose(found.reverse_kl, rel_entr(q, p).sum(axis=1), atol=1e-9)
    np.testing.assert_allclose(
        found.surprise, np.log(p[range(5), tokens] / q[range(5), tokens]), rtol=1e-9, atol=1e-9
    )
    assert (found.kl >= 0).all() and (found.reverse_kl >= 0).all()
    assert (found.top1 == (p.argmax(axis=1) == q.argmax(axis=1))).all()


@given(k=st.integers(1, 24), **CASES)
@settings(max_examples=400, deadline=None)
def test_bounds_hold_the_exact_value(k, seed, vocab, sharpness, noise) -> None:
    reference, candidate, tokens = both_logits(seed, 5, vocab, sharpness, noise)
    exact = full_distances(reference, candidate, tokens)
    tops = told(reference, candidate, tokens, k)
    floor = float(log_softmax(candidate, axis=1).min())
    found = top_distances(*tops, candidate_floor=floor)
    assert (found.kl <= exact.kl + ROUNDING).all()
    assert (found.reverse_kl <= exact.reverse_kl + ROUNDING).all()
    assert (found.kl_upper >= exact.kl - ROUNDING).all()
    assert (found.kl >= 0).all()
    np.testing.assert_array_equal(found.top1, exact.top1)
    if k >= OVERLAP_TOKENS:
        np.testing.assert_allclose(found.overlap, exact.overlap)
    np.testing.assert_allclose(found.surprise, exact.surprise, atol=1e-12)


@given(k=st.integers(1, 24), **CASES)
@settings(max_examples=200, deadline=None)
def test_the_lower_bound_is_no_worse_than_one_lumped_remainder(k, seed, vocab, sharpness, noise) -> None:
    reference, candidate, tokens = both_logits(seed, 5, vocab, sharpness, noise)
    tops = told(reference, candidate, tokens, k)
    p, q = np.exp(log_softmax(reference, axis=1)), np.exp(log_softmax(candidate, axis=1))
    for row in range(5):
        both = set(tops[0].ids[row]) & set(tops[1].ids[row]) - {NO_TOKEN}
        rest = [token for token in range(vocab) if token not in both]
        lumped = rel_entr(p[row, list(both)], q[row, list(both)]).sum() + rel_entr(
            p[row, rest].sum(), q[row, rest].sum() + RESOLUTION
        )
        assert top_distances(*tops).kl[row] >= lumped - ROUNDING


@given(**CASES)
@settings(max_examples=100, deadline=None)
def test_all_tokens_told_is_exact_and_needs_no_floor(seed, vocab, sharpness, noise) -> None:
    reference, candidate, tokens = both_logits(seed, 5, vocab, sharpness, noise)
    exact = full_distances(reference, candidate, tokens)
    tops = told(reference, candidate, tokens, vocab)
    found = top_distances(*tops)
    np.testing.assert_allclose(found.kl, exact.kl, atol=ROUNDING)
    np.testing.assert_allclose(found.kl_upper, exact.kl, atol=ROUNDING)
    np.testing.assert_allclose(found.unseen, 0, atol=1e-9)


@given(arrays(np.float32, (3, 12), elements=st.floats(-9999, 0, width=32)), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_log_probabilities_as_odd_as_servers_may_send_give_numbers(logits, k) -> None:
    top = TopLogprobs.of_logits(logits, [0, 5, 11], k)
    other = TopLogprobs.of_logits(logits[::-1], [0, 5, 11], k)
    found = top_distances(top, other, candidate_floor=-20_000)
    for values in (found.kl, found.reverse_kl, found.kl_upper, found.surprise, found.unseen):
        assert np.isfinite(values).all()


def test_a_token_the_candidate_does_not_tell_weighs_what_it_must() -> None:
    # The reference is sure of token 0, which the candidate holds at most as likely as its second.
    reference = np.log([[0.9, 0.05, 0.03, 0.01, 0.01]])
    candidate = np.log([[0.001, 0.6, 0.39, 0.005, 0.004]])
    tops = told(reference, candidate, [1], 2)
    exact = full_distances(reference, candidate, [1]).kl[0]
    # Of token 2 is known that the reference gives it less than 0.05, of token 0 that the candidate gives it 0.01 in all.
    assert exact * 0.6 < top_distances(*tops).kl[0] < exact


def test_no_upper_bound_where_the_reference_has_a_remainder() -> None:
    logits = np.zeros((1, 50))
    top = TopLogprobs.of_logits(logits, [3], 5)
    found = top_distances(top, top)
    assert found.kl_upper[0] == np.inf
    assert found.unseen[0] == pytest.approx(45 / 50)
    assert top_distances(top, top, candidate_floor=np.log(1 / 50)).kl_upper[0] == pytest.approx(0, abs=1e-9)


def test_tokens_without_probability() -> None:
    reference, candidate = [[0.0, -np.inf, 0.0]], [[0.0, 0.0, -np.inf]]
    found = full_distances(reference, reference, [0])
    assert found.kl[0] == 0
    assert full_distances(reference, candidate, [0]).kl[0] == np.inf


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="same vocabulary"):
        full_distances(np.zeros((2, 5)), np.zeros((2, 6)), [0, 0])
    one, other = (TopLogprobs.of_logits(np.zeros((1, 5)), [token], 2) for token in (0, 1))
    with pytest.raises(ValueError, match="different tokens"):
        top_distances(one, other)


def test_exact_to_a_millionth_on_a_model(tiny_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    # Random weights make every token as likely as any other, which no served model does.
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 40)
    ids = torch.randint(3, 512, (1, 96), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        reference = model(ids).logits[0].double()
        model.model.layers[1].mlp.down_proj.weight *= 3
        candidate = model(ids).logits[0].double()
    p, q = reference.softmax(-1), candidate.softmax(-1)
    expected = torch.nn.functional.kl_div(q.log(), p.log(), log_target=True, reduction="none").sum(-1)
    tokens = ids[0].roll(-1).numpy()
    found = full_distances(reference.numpy(), candidate.numpy(), tokens)
    np.testing.assert_allclose(found.kl, expected.numpy(), atol=1e-6, rtol=0)
    np.testing.assert_allclose(found.kl, entropy(p.numpy(), q.numpy(), axis=1), atol=1e-6, rtol=0)
    assert expected.mean() > 1e-2
    for k in (1, 20, 512):
        tops = told(reference.numpy(), candidate.numpy(), tokens, k)
        bound = top_distances(*tops)
        assert (bound.kl <= found.kl + 1e-6).all()
    np.testing.assert_allclose(bound.kl, found.kl, atol=3e-6, rtol=0)
