"""Whether traffic has drifted from what the champion was learned on: pure, no clock, no files.

One session after another is compared with a reference by conformal p-values: the rank of its score
among all scores before it, ties broken at random. While sessions are exchangeable these are
independent and uniform, whatever their distribution (Vovk, Gammerman and Shafer, Algorithmic Learning
in a Random World, 2005, section 8.2), with no error from estimating anything on the reference. A
bet f(p) with mean one then makes the Shiryaev-Roberts statistic R = f(p) (R + 1), for which R minus
the number of sessions is a martingale, so that R reaches A within n sessions with probability at most
n / A (Vovk, Petej, Nouretdinov, Ahlberg, Carlsson and Gammerman, Retrain or not retrain: conformal
test martingales for change-point detection, COPA 2021; the same argument makes the e-detectors of
Shin, Ramdas and Rinaldo, 2023). An average over bets on the same p is such a statistic too. Over
several scores, whose p-values depend on each other, the bounds add up: an alarm needs A times their
number.

What exchangeable means here: the mix of sessions and what they are like may not depend on when they
come; how many come may. A deployment whose nights differ in kind from its days needs a reference and
a hold that span a day.
"""

import hashlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from strop.serving.traces import WITHHELD, Trace

Watched = Literal["acceptance", "prompts", "outputs"]
WATCHED: tuple[Watched, ...] = ("acceptance", "prompts", "outputs")

BETS = np.array([0.5, 1.0, 1.5, 1.9])
"""f(p) = 1 + bet (p - 1/2): the simple jumper's bets, Vovk et al. 2021, in several sizes."""
BUCKETS = 256
TOKENS = 512
"""Tokens that are looked at: the last of a prompt, where the requests differ, the first of an output."""
DIRECTIONS = 4
SCORES = 1 + 2 * (DIRECTIONS + 2)
"""Of a session: its acceptance, and of each mix its places, its distance and its length."""
MAX_SCORES = 100_000
"""Scores that are kept; after as many sessions the oldest reference there is is long enough."""
RECENT = 50
"""Sessions that the shown recent acceptance length is the mean of."""


@dataclass(slots=True)
class Detector:
    """Shiryaev-Roberts statistics of several scores; `both` sides of a score are bet on, or the low one."""

    scores: list[list[float]]
    """Per score, the sorted values of all sessions so far."""
    both: bool
    statistic: np.ndarray = field(init=False)
    """float64 [scores, bets]."""

    def __post_init__(self) -> None:
        self.statistic = np.zeros((len(self.scores), len(BETS) * (2 if self.both else 1)))

    @property
    def evidence(self) -> float:
        """The largest over scores of the average over bets."""
        return float(self.statistic.mean(axis=1).max())

    def see(self, values: Sequence[float], ties: Sequence[float], most: float) -> None:
        """Take in one session's scores; `ties` are uniform numbers. Statistics stop growing at `most`."""
        bets = np.concatenate([-BETS, BETS]) if self.both else -BETS
        for row, (before, value, tie) in enumerate(zip(self.scores, values, ties, strict=True)):
            less, equal = bisect_left(before, value), bisect_right(before, value)
            p = (less + tie * (equal - less + 1)) / (len(before) + 1)
            self.statistic[row] = np.minimum(most, (1 + bets * (p - 0.5)) * (self.statistic[row] + 1))
            if len(before) < MAX_SCORES:
                insort(before, value)


@dataclass(frozen=True, slots=True, eq=False)
class Mix:
    """Scores of a list of tokens: its place along the reference's main directions, its distance, its length."""

    mean: np.ndarray
    """float64 [BUCKETS]."""
    directions: np.ndarray
    """float64 [DIRECTIONS, BUCKETS]."""

    @classmethod
    def of(cls, features: np.ndarray) -> "Mix":
        """Directions of the largest variance of `features` [sessions, BUCKETS]."""
        mean = features.mean(axis=0)
        _, _, directions = np.linalg.svd(features - mean, full_matrices=False)
        return cls(mean, directions[:DIRECTIONS])

    def scores(self, tokens: Sequence[int], feature: np.ndarray) -> list[float]:
        off = feature - self.mean
        return [*(self.directions @ off).tolist(), float(off @ off), float(len(tokens))]


def feature_of(tokens: Sequence[int]) -> np.ndarray:
    """float64 [BUCKETS]: square roots of the shares of hashed tokens, so that distances are Hellinger's."""
    hashed = (np.asarray(tokens, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(56)
    counts = np.bincount(hashed.astype(np.int64), minlength=BUCKETS)
    return np.sqrt(counts / max(1, counts.sum()))


@dataclass(frozen=True, slots=True)
class Observation:
    """What is looked at of one session: its first request."""

    session: str
    prompt: list[int]
    output: list[int]
    acceptance: float | None
    """Acceptance length, the bonus token counted; None without speculation."""

    @classmethod
    def of(cls, trace: Trace) -> "Observation":
        speculation = trace.speculation
        return cls(
            f"{trace.tenant}\0{trace.session}",
            _known(trace.prompt_token_ids[-TOKENS:]),
            _known(trace.output_token_ids[:TOKENS]),
            speculation.acceptance_length if speculation and speculation.steps else None,
        )


@dataclass(slots=True)
class Drift:
    """The three detectors over the sessions of one champion, and whether an alarm holds.

    An alarm is raised where the evidence reaches `sessions_to_false_alarm` times the number of scores,
    so that one within n sessions for nothing has at most the probability n / `sessions_to_false_alarm`,
    whatever raises it; it is cleared where the evidence falls below the square root of that, and holds after
    `hold_sessions` more sessions without clearing.
    """

    reference_sessions: int
    sessions_to_false_alarm: float
    hold_sessions: int
    min_acceptance_drop: float
    """A fall of acceptance length of less than this share of the reference's is no reason for a loop."""
    sessions: int = 0
    detectors: dict[Watched, Detector] = field(default_factory=dict)
    raised_at: dict[Watched, int] = field(default_factory=dict)
    """Number of sessions seen when an alarm was raised that has not been cleared."""
    reference_acceptance: float | None = None
    recent_acceptance: list[float] = field(default_factory=list)
    _mixes: dict[Watched, Mix] = field(default_factory=dict)
    _waiting: list[Observation] = field(default_factory=list)

    @property
    def threshold(self) -> float:
        return SCORES * self.sessions_to_false_alarm

    @property
    def has_reference(self) -> bool:
        return self.sessions >= self.reference_sessions

    @property
    def holding(self) -> list[Watched]:
        """Alarms that have held long enough and matter."""
        held: list[Watched] = [
            w for w, at in self.raised_at.items() if self.sessions - at >= self.hold_sessions
        ]
        return [w for w in held if w != "acceptance" or self.acceptance_drop >= self.min_acceptance_drop]

    @property
    def acceptance_drop(self) -> float:
        """Share by which recent drafts are accepted less than those of the reference."""
        recent = self.recent_mean
        return 1 - recent / self.reference_acceptance if recent and self.reference_acceptance else 0.0

    @property
    def recent_mean(self) -> float | None:
        return float(np.mean(self.recent_acceptance)) if self.recent_acceptance else None

    def see(self, observation: Observation) -> None:
        """Take in one session more; the first `reference_sessions` make the reference."""
        self.sessions += 1
        if self.sessions <= self.reference_sessions:
            self._waiting.append(observation)
            if self.sessions == self.reference_sessions:
                self._refer(self._waiting)
                self._waiting = []
            return
        ties = iter(np.random.default_rng(_seed(observation.session)).random(SCORES))
        for watched, values in self._scores(observation).items():
            if (detector := self.detectors.get(watched)) is None:
                continue
            detector.see(values, [next(ties) for _ in values], 100 * self.threshold)
            if detector.evidence >= self.threshold:
                self.raised_at.setdefault(watched, self.sessions)
            elif detector.evidence < self.threshold**0.5:
                self.raised_at.pop(watched, None)
        if observation.acceptance is not None:
            self.recent_acceptance = [*self.recent_acceptance[1 - RECENT :], observation.acceptance]

    def _refer(self, observations: list[Observation]) -> None:
        """The first half finds directions; the second, which had no part in that, ranks what comes."""
        half = len(observations) // 2
        fit, rank = observations[:half], observations[half:]
        self._mixes = {
            "prompts": Mix.of(np.stack([feature_of(o.prompt) for o in fit])),
            "outputs": Mix.of(np.stack([feature_of(o.output) for o in fit])),
        }
        known = [o.acceptance for o in observations if o.acceptance is not None]
        self.reference_acceptance = float(np.mean(known)) if known else None
        for watched in WATCHED:
            rows = [scores[watched] for scores in map(self._scores, rank) if watched in scores]
            if rows:
                columns = [sorted(column) for column in zip(*rows, strict=True)]
                self.detectors[watched] = Detector(columns, both=watched != "acceptance")

    def _scores(self, observation: Observation) -> dict[Watched, list[float]]:
        found: dict[Watched, list[float]] = {
            "prompts": self._mixes["prompts"].scores(observation.prompt, feature_of(observation.prompt)),
            "outputs": self._mixes["outputs"].scores(observation.output, feature_of(observation.output)),
        }
        if observation.acceptance is not None and self.reference_acceptance is not None:
            found["acceptance"] = [observation.acceptance]
        return found


@dataclass(frozen=True, slots=True)
class Past:
    """A loop that ran: when it began, and how long it took, on one clock."""

    began_s: float
    took_s: float


def may_start(now_s: float, past: Sequence[Past], budget_s_per_day: float, expected_s: float) -> str | None:
    """None if a loop may start now; else the reason why not. Loops of the last 24 hours count in full."""
    spent = sum(loop.took_s for loop in past if loop.began_s + loop.took_s > now_s - 86_400)
    expected = float(np.median([loop.took_s for loop in past])) if past else expected_s
    if spent + expected <= budget_s_per_day:
        return None
    return (
        f"loops took {spent / 60:.0f} of {budget_s_per_day / 60:.0f} minutes allowed in 24 hours, "
        f"and one takes about {expected / 60:.0f}"
    )


def _known(tokens: Sequence[int]) -> list[int]:
    """Without those that were not recorded."""
    return [token for token in tokens if token != WITHHELD]


def _seed(session: str) -> int:
    return int.from_bytes(hashlib.blake2b(session.encode(), digest_size=8).digest(), "little")
