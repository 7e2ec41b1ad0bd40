"""Traces to training sequences: exact token ids, with the assistant's tokens marked."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from strop.serving.traces import WITHHELD, Trace


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One conversation as the engine saw it."""

    session: str
    tokens_T: np.ndarray
    """int64 token ids: prompt and outputs of all turns; `WITHHELD` where the id was not kept."""
    output_T: np.ndarray
    """bool: whether the target produced the token, and it is known."""
    shared: int = 0
    """Tokens at the start that another sample has too, and is trained on."""

    @property
    def digest(self) -> str:
        """Identity of the tokens and marks, 32 hex digits."""
        return hashlib.sha256(self.tokens_T.tobytes() + self.output_T.tobytes()).hexdigest()[:32]

    @property
    def output_tokens(self) -> int:
        return int(self.output_T.sum())


@dataclass(frozen=True, slots=True, eq=False)
class DraftVocabulary:
    """The target tokens that a draft may propose, in ascending order."""

    target_ids_V: np.ndarray
    """int64, strictly ascending."""
    vocab_size: int

    @property
    def d2t(self) -> np.ndarray:
        """int64 [draft vocab]: target id minus draft id, as vLLM reads it."""
        return self.target_ids_V - np.arange(len(self.target_ids_V))

    @property
    def t2d(self) -> np.ndarray:
        """bool [target vocab]: whether the token is in the draft vocabulary."""
        member = np.zeros(self.vocab_size, dtype=bool)
        member[self.target_ids_V] = True
        return member

    def draft_ids(self) -> np.ndarray:
        """int64 [target vocab]: draft id of every token, -1 outside the draft vocabulary."""
        ids = np.full(self.vocab_size, -1, dtype=np.int64)
        ids[self.target_ids_V] = np.arange(len(self.target_ids_V))
        return ids

    def coverage(self, samples: Iterable[Sample]) -> float:
        """Share of output tokens that a draft can propose; 1 where there are none."""
        member = self.t2d
        hits = [member[s.tokens_T[s.output_T]] for s in samples]
        return float(np.concatenate(hits).mean()) if any(len(h) for h in hits) else 1.0


def samples_from_traces(traces: Iterable[Trace], max_tokens: int) -> list[Sample]:
    """One sample a conversation, in the order of sessions.

    An answer whose prompt and output are the start of a longer conversation of its session is
    marked there, so that every position is computed once. Failed and empty answers are dropped,
    those whose tokens were not kept, and the turns that end past `max_tokens` tokens.
    """
    by_session: dict[tuple[str, str], list[tuple[list[int], list[int]]]] = {}
    for trace in traces:
        answers = [(trace.prompt_token_ids, c.token_ids) for c in trace.choices if c.token_ids]
        usable = [
            a
            for a in answers
            if a[0] and any(i != WITHHELD for i in a[1]) and len(a[0]) + len(a[1]) <= max_tokens
        ]
        if trace.error is None and trace.status < 400 and usable:
            by_session.setdefault((trace.tenant, trace.session), []).extend(usable)
    samples = []
    for (tenant, session), answers in by_session.items():
        kept: list[tuple[np.ndarray, np.ndarray]] = []
        for prompt, output in sorted(answers, key=lambda a: -len(a[0]) - len(a[1])):
            tokens = np.array([*prompt, *output], dtype=np.int64)
            whole = next((k for k in kept if np.array_equal(k[0][: len(tokens)], tokens)), None)
            if whole is None:
                whole = (tokens, np.zeros(len(tokens), dtype=bool))
                kept.append(whole)
            whole[1][len(prompt) : len(tokens)] = tokens[len(prompt) :] != WITHHELD
        samples += [Sample(f"{tenant}/{session}", tokens, marks) for tokens, marks in kept]
    return samples


def mark_shared(samples: Sequence[Sample]) -> list[Sample]:
    """The same samples with `shared` set, so that every distinct prefix belongs to one of them."""
    marked: dict[int, Sample] = {}
    previous = np.zeros(0, dtype=np.int64)
    for i in sorted(range(len(samples)), key=lambda i: samples[i].tokens_T.tolist()):
        tokens = samples[i].tokens_T
        marked[i] = replace(samples[i], shared=common_prefix(previous, tokens))
        previous = tokens
    return [marked[i] for i in range(len(samples))]


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading tokens that are equal."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def split_validation(samples: Sequence[Sample], share: float) -> tuple[list[Sample], list[Sample]]:
    """Train and validation samples that share no session; a session's side never changes.

    At least one session is on each side when there are two or more.
    """
    ranked = sorted({s.session for s in samples}, key=lambda s: hashlib.sha256(s.encode()).digest())
    count = min(max(1, round(len(ranked) * share)), len(ranked) - 1)
    chosen = set(ranked[:count]) if len(ranked) > 1 else set()
    return [s for s in samples if s.session not in chosen], [s for s in samples if s.session in chosen]


def draft_vocabulary(
    samples: Iterable[Sample], vocab_size: int, size: int, always: Iterable[int] = ()
) -> DraftVocabulary:
    """The `always` tokens, then the most frequent output tokens, then prompt tokens, then the lowest ids."""
    outputs: Counter[int] = Counter()
    prompts: Counter[int] = Counter()
    for sample in samples:
        outputs.update(sample.tokens_T[sample.output_T].tolist())
        prompts.update(sample.tokens_T[~sample.output_T & (sample.tokens_T != WITHHELD)].tolist())
    size = min(size, vocab_size)
    ranked = [
        *(i for i in always if 0 <= i < vocab_size),
        *sorted(outputs, key=lambda i: (-outputs[i], i)),
        *sorted(prompts, key=lambda i: (-prompts[i], i)),
        *range(vocab_size),
    ]
    chosen = list(dict.fromkeys(ranked))[:size]
    return DraftVocabulary(np.array(sorted(chosen), dtype=np.int64), vocab_size)
