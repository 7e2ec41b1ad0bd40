"""How far one model's next-token distributions are from another's, position by position.

From whole vocabularies the distances are exact. From the k likeliest tokens that a server tells, a
distance is known only to lie between two bounds. All sums are in float64; distances are in nats.

Arrays are named by their axes: T positions, V tokens of the vocabulary, K told tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_softmax

Floats = NDArray[np.float64]

NO_TOKEN = -1
"""Fills rows of token ids up to the width of the array."""

RESOLUTION = 1e-6
"""Probability below which a remainder is rounding: told log-probabilities are float32."""

OVERLAP_TOKENS = 20
"""Likeliest tokens whose overlap is counted, of as many as were told."""

_UNLIKELIEST = -30.0
"""The likeliest of e^30 tokens can be no less likely than that."""
_WIDEST_LOG_RATIO = 40.0
_BISECTIONS = 50


Row = tuple[list[tuple[int, float]], tuple[int, float]]
"""Told tokens and their log-probabilities, likeliest first, and the one that came if it is not among them."""


def row_of(told: list[tuple[int, float]], token: int, k: int) -> Row:
    """The row of one position, from all that was told of it, likeliest first. Raises ValueError without the token."""
    top = told[:k] if k >= 0 else told
    if any(known == token for known, _ in top):
        return top, (NO_TOKEN, -np.inf)
    for known in told:
        if known[0] == token:
            return top, known
    raise ValueError(f"nothing is told of token {token}")


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The likeliest next tokens at T positions, as a server tells them, and the token that came."""

    ids: NDArray[np.int32]
    """[T, K + 1], likeliest first; the last column holds the token that came if it is not among them."""
    logprobs: Floats
    """[T, K + 1], nats; -inf where `ids` is NO_TOKEN."""
    tokens: NDArray[np.int32]
    """[T], the tokens that came."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def of_tokens(self) -> Floats:
        """[T], log-probability of each token that came."""
        return self.logprobs[np.arange(len(self)), (self.ids == self.tokens[:, None]).argmax(axis=1)]

    @classmethod
    def of_rows(cls, rows: Sequence[Row], tokens: Sequence[int]) -> "TopLogprobs":
        """What a server told, one row a position. Raises ValueError for numbers that are no log-probabilities."""
        width = max((len(top) for top, _ in rows), default=1)
        padding = [(NO_TOKEN, -np.inf)] * width
        table = np.array([[*(top + padding)[:width], came] for top, came in rows], float)
        table = table.reshape(len(rows), width + 1, 2)
        ids, logprobs = table[..., 0], table[..., 1]
        if (ids < NO_TOKEN).any() or (ids > np.iinfo(np.int32).max).any():
            raise ValueError("some of the token ids are none")
        # Not above a bound is another thing than below it where there is NaN.
        if not (logprobs < 1e-3).all() or not (logprobs[:, 0] > _UNLIKELIEST).all():
            raise ValueError("some of the log-probabilities are none")
        return cls(ids.astype(np.int32), logprobs, np.array(tokens, np.int32))

    @classmethod
    def of_logits(cls, logits_TV: ArrayLike, tokens_T: ArrayLike, k: int) -> "TopLogprobs":
        """What a server with these logits would tell, in float64."""
        logprobs_TV = log_softmax(np.asarray(logits_TV, np.float64), axis=-1)
        tokens = np.asarray(tokens_T, np.int32)
        k = min(k, logprobs_TV.shape[1])
        ids_TK = np.argsort(-logprobs_TV, axis=1, kind="stable")[:, :k].astype(np.int32)
        told_T = (ids_TK == tokens[:, None]).any(axis=1)
        ids = np.concatenate([ids_TK, np.where(told_T, NO_TOKEN, tokens)[:, None]], axis=1)
        logprobs = np.take_along_axis(logprobs_TV, np.maximum(ids, 0), axis=1)
        return cls(ids, np.where(ids == NO_TOKEN, -np.inf, logprobs), tokens)


@dataclass(frozen=True, slots=True)
class Distances:
    """Distances of a candidate from a reference at T positions; every array is [T]."""

    kl: Floats
    """KL(reference || candidate); the lower bound where it is not exact."""
    kl_upper: Floats
    """Upper bound of the same; inf where there is none."""
    reverse_kl: Floats
    """KL(candidate || reference); the lower bound where it is not exact."""
    top1: Floats
    """1 where both find the same token likeliest, else 0."""
    overlap: Floats
    """Share of the reference's likeliest tokens (`OVERLAP_TOKENS`) that are among the candidate's."""
    surprise: Floats
    """Log-probability of the token that came: the reference's minus the candidate's. Its mean is the log
    ratio of the candidate's perplexity to the reference's."""
    unseen: Floats
    """Reference's probability of the tokens that not both told: what is known only by bounds."""


def full_distances(reference_TV: ArrayLike, candidate_TV: ArrayLike, tokens_T: ArrayLike) -> Distances:
    """Exact distances from the logits or log-probabilities of the whole vocabulary.

    A token that the reference gives no probability adds nothing, as 0 log 0 = 0; one that only the
    candidate gives none makes the distance inf. Raises ValueError for arrays that do not fit each other.
    """
    p_TV, q_TV = (
        log_softmax(np.asarray(logits, np.float64), axis=-1) for logits in (reference_TV, candidate_TV)
    )
    rows_T = np.asarray(tokens_T, np.int64)
    if p_TV.shape != q_TV.shape or p_TV.shape[:1] != rows_T.shape:
        raise ValueError(
            f"Logits of shape {p_TV.shape} and {q_TV.shape} for {rows_T.shape} tokens cannot be compared: both "
            "models must have scored the same tokens with the same vocabulary."
        )
    kl = _kl(p_TV, q_TV)
    came = np.arange(len(rows_T)), rows_T
    p_top_TK, q_top_TK = (np.argsort(-a, axis=1, kind="stable").astype(np.int32) for a in (p_TV, q_TV))
    return Distances(
        kl=kl,
        kl_upper=kl,
        reverse_kl=_kl(q_TV, p_TV),
        top1=(p_top_TK[:, 0] == q_top_TK[:, 0]).astype(float),
        overlap=_overlap(p_top_TK, q_top_TK),
        surprise=p_TV[came] - q_TV[came],
        unseen=np.zeros(len(rows_T)),
    )


def top_distances(
    reference: TopLogprobs, candidate: TopLogprobs, candidate_floor: float | None = None
) -> Distances:
    """Bounds from the tokens that two servers tell of the same positions.

    A token that a server does not tell is no likelier than its k-th. There is no upper bound in general:
    the candidate may give almost no probability to a token that it does not tell. There is one where the
    reference's told tokens are all it holds, and where no log-probability of the candidate lies below
    `candidate_floor`. Raises ValueError if the two did not score the same tokens.
    """
    if not np.array_equal(reference.tokens, candidate.tokens):
        raise ValueError("The two sides scored different tokens, so that their distances mean nothing.")
    forward, backward = _Told.of(reference, candidate), _Told.of(candidate, reference)
    return Distances(
        kl=forward.lower(),
        kl_upper=forward.upper(candidate_floor),
        reverse_kl=backward.lower(),
        top1=(reference.ids[:, 0] == candidate.ids[:, 0]).astype(float),
        overlap=_overlap(reference.ids[:, :-1], candidate.ids[:, :-1]),
        surprise=reference.of_tokens - candidate.of_tokens,
        unseen=forward.unseen_T,
    )


def _kl(p_TV: Floats, q_TV: Floats) -> Floats:
    """From log-probabilities. The exact value is never negative; rounding may be, by an ulp or so."""
    with np.errstate(invalid="ignore"):
        terms_TV = np.exp(p_TV) * (p_TV - q_TV)
    return np.maximum(np.where(np.isneginf(p_TV), 0.0, terms_TV).sum(axis=1), 0.0)


def _overlap(ids_TK: NDArray[np.int32], others_TK: NDArray[np.int32]) -> Floats:
    ids_TK, others_TK = ids_TK[:, :OVERLAP_TOKENS], others_TK[:, :OVERLAP_TOKENS]
    return _find(ids_TK, others_TK)[0].sum(axis=1) / (ids_TK != NO_TOKEN).sum(axis=1)


def _find(
    ids_TK: NDArray[np.int32], others_TK: NDArray[np.int32]
) -> tuple[NDArray[np.bool_], NDArray[np.intp]]:
    """Which tokens stand in the same row of the others, and in which of their columns (0 where in none)."""
    row_T1 = np.arange(len(ids_TK), dtype=np.int64)[:, None] << 32
    order_TK = np.argsort(others_TK, axis=1)
    keys = (np.take_along_axis(others_TK, order_TK, axis=1) + row_T1).ravel()
    wanted_TK = ids_TK + row_T1
    place_TK = np.minimum(np.searchsorted(keys, wanted_TK), len(keys) - 1)
    found_TK = (keys[place_TK] == wanted_TK) & (ids_TK != NO_TOKEN)
    return found_TK, np.where(found_TK, order_TK.ravel()[place_TK], 0)


@dataclass(frozen=True, slots=True)
class _Told:
    """What is known of distributions p and q: some tokens of both, some of p alone, some of q alone."""

    both_TK: Floats
    """p log(p / q) of the tokens that both tell; 0 elsewhere."""
    p_only_log_TK: Floats
    """log p of the tokens that p alone tells; -inf elsewhere."""
    q_only_log_TK: Floats
    p_most_log_T1: Floats
    """Log of the most that p can give to a token it does not tell."""
    q_most_log_T1: Floats
    p_rest_T: Floats
    """What p gives to all tokens it does not tell."""
    q_rest_T: Floats

    @classmethod
    def of(cls, p: TopLogprobs, q: TopLogprobs) -> "_Told":
        told_TK, column_TK = _find(p.ids, q.ids)
        q_log_TK = np.take_along_axis(q.logprobs, column_TK, axis=1)
        p_TK, q_TK = np.exp(p.logprobs), np.exp(q.logprobs)
        with np.errstate(invalid="ignore"):
            terms_TK = p_TK * (p.logprobs - q_log_TK)
        return cls(
            both_TK=np.where(told_TK & (p_TK > 0), terms_TK, 0.0),
            p_only_log_TK=np.where(told_TK, -np.inf, p.logprobs),
            q_only_log_TK=np.where(_find(q.ids, p.ids)[0], -np.inf, q.logprobs),
            p_most_log_T1=_least_told(p),
            q_most_log_T1=_least_told(q),
            p_rest_T=np.maximum(1.0 - p_TK.sum(axis=1), 0.0),
            q_rest_T=np.maximum(1.0 - q_TK.sum(axis=1), 0.0),
        )

    @property
    def unseen_T(self) -> Floats:
        return self.p_rest_T + np.exp(self.p_only_log_TK).sum(axis=1)

    def lower(self) -> Floats:
        """[T], the greatest lower bound of KL(p || q) that can be had from one ratio of what is not told.

        For any r > 0, p log(p/q) >= p log r + p - r q. Summed over the tokens that not both tell this needs
        their total probability alone: the log-sum inequality (Cover and Thomas, Elements of Information
        Theory, 2nd edition, theorem 2.7.1) with the best r. A token that one side tells can be bounded more
        closely, since the other side gives it no more than its least told one: that is Lagrange's dual of
        minimising KL under these limits, a lower bound for every r, and bisection on its slope finds the best.
        """
        p_only_TK = np.exp(self.p_only_log_TK)
        q_rest_T = self.q_rest_T + RESOLUTION

        def p_taken(log_r_T1: Floats) -> Floats:
            """What the q-only tokens have of p: r times q, or as much as they can."""
            return np.exp(np.minimum(self.p_most_log_T1, log_r_T1 + self.q_only_log_TK))

        def slope(log_r_T1: Floats) -> Floats:
            q_taken_TK = np.minimum(np.exp(log_r_T1 + self.q_most_log_T1), p_only_TK)
            left_T = self.p_rest_T - p_taken(log_r_T1).sum(axis=1)
            return left_T + q_taken_TK.sum(axis=1) - np.exp(log_r_T1[:, 0]) * q_rest_T

        low_T1 = np.full((len(q_rest_T), 1), -_WIDEST_LOG_RATIO)
        high_T1 = -low_T1
        for _ in range(_BISECTIONS):
            middle_T1 = (low_T1 + high_T1) / 2
            rises_T1 = slope(middle_T1)[:, None] > 0
            low_T1, high_T1 = np.where(rises_T1, middle_T1, low_T1), np.where(rises_T1, high_T1, middle_T1)
        p_taken_TK = p_taken(low_T1)
        p_log_TK, q_log_TK = (
            np.where(np.isneginf(a), 0.0, a) for a in (self.p_only_log_TK, self.q_only_log_TK)
        )
        rest_T = (
            (p_only_TK * np.maximum(p_log_TK - self.q_most_log_T1, low_T1)).sum(axis=1)
            + (p_taken_TK * np.minimum(self.p_most_log_T1 - q_log_TK, low_T1)).sum(axis=1)
            + (self.p_rest_T - p_taken_TK.sum(axis=1)) * low_T1[:, 0]
            + slope(low_T1)
        )
        q_unseen_T = self.q_rest_T + np.exp(self.q_only_log_TK).sum(axis=1)
        nothing_T = np.maximum(self.unseen_T, q_unseen_T) <= RESOLUTION
        return np.maximum(self.both_TK.sum(axis=1) + np.where(nothing_T, 0.0, rest_T), 0.0)

    def upper(self, floor: float | None) -> Floats:
        """[T]; inf where p has a remainder and nothing is known of q there."""
        known_T = self.both_TK.sum(axis=1)
        if floor is None:
            return np.where(self.unseen_T <= RESOLUTION, known_T, np.inf)
        p_log_TK = np.where(np.isneginf(self.p_only_log_TK), 0.0, self.p_only_log_TK)
        p_only_T = (np.exp(self.p_only_log_TK) * p_log_TK).sum(axis=1)
        # The remainder has its least entropy in tokens as likely as one that is not told can be.
        most_log_T = np.minimum(
            self.p_most_log_T1[:, 0], np.log(np.maximum(self.p_rest_T, np.finfo(float).tiny))
        )
        return known_T + p_only_T + self.p_rest_T * most_log_T - self.unseen_T * floor


def _least_told(top: TopLogprobs) -> Floats:
    """[T, 1], log-probability of the least likely of the k likeliest tokens."""
    logprobs_TK = np.where(np.isneginf(top.logprobs), np.inf, top.logprobs)[:, :-1]
    return np.minimum(logprobs_TK.min(axis=1, keepdims=True), 0.0)
