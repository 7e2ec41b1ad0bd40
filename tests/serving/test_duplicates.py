import tracemalloc

import numpy as np
import pytest

from strop.serving.duplicates import near_duplicates
from strop.serving.redaction import without_content
from strop.serving.traces import TraceSet

RNG = np.random.default_rng(7)


def words(count: int) -> list[int]:
    return RNG.integers(0, 50_000, count).tolist()


def asked(make_trace, prompts: list[list[int]], **changes):
    return [make_trace(n, prompt_token_ids=p, **changes) for n, p in enumerate(prompts)]


def edited(prompt: list[int], share: float) -> list[int]:
    """The prompt with one run of tokens replaced."""
    count = round(share * len(prompt))
    start = len(prompt) // 3
    return [*prompt[:start], *words(count), *prompt[start + count :]]


def test_all_but_the_first_of_each_group(make_trace, tmp_path):
    one, two, three = words(200), words(200), words(3)
    traces = asked(make_trace, [one, two, edited(one, 0.02), three, one, edited(two, 0.5), three])
    assert near_duplicates(traces) == {"r2", "r4", "r6"}
    assert near_duplicates(TraceSet.create(tmp_path / "set", traces)) == {"r2", "r4", "r6"}


def test_turns_of_a_session_are_not_duplicates_but_those_of_another_are(make_trace):
    first = words(300)
    turns = [first, first + words(20), first + words(20)]
    traces = asked(make_trace, turns, session="one")
    assert near_duplicates(traces) == set()
    other = [make_trace(9, prompt_token_ids=turns[1], session="two")]
    assert near_duplicates([*traces, *other]) == {"r9"}
    same_name = [make_trace(9, prompt_token_ids=turns[1], session="one", tenant="another")]
    assert near_duplicates([*traces, *same_name]) == {"r9"}


@pytest.mark.parametrize("assistants", [1, 5])
def test_a_system_prompt_that_many_share_does_not_make_duplicates(make_trace, assistants):
    systems = [words(1000) for _ in range(assistants)]
    questions = [words(80) for _ in range(60)]
    prompts = [systems[n % assistants] + question for n, question in enumerate(questions)]
    prompts += [prompts[3], systems[7 % assistants] + edited(questions[7], 0.0125)]
    assert near_duplicates(asked(make_trace, prompts)) == {"r60", "r61"}


def test_a_prompt_that_nearly_everyone_sends_is_kept_once(make_trace):
    prompts = [words(100)] * 50 + [words(100) for _ in range(5)]
    assert near_duplicates(asked(make_trace, prompts)) == {f"r{n}" for n in range(1, 50)}


def test_the_similarity_is_that_of_the_sets_of_runs(make_trace):
    """Over 200 pairs of known Jaccard similarity, about those above the threshold are found."""
    for share, likely in ((0.02, True), (0.3, False)):
        pairs = [p for _ in range(200) for base in [words(150)] for p in (base, edited(base, share))]
        found = near_duplicates(asked(make_trace, pairs))
        assert found <= {f"r{n}" for n in range(1, 400, 2)}
        assert len(found) >= 195 if likely else len(found) <= 1


def test_what_was_not_kept_is_nobodys_duplicate(make_trace):
    traces = [without_content(t) for t in asked(make_trace, [words(50)] * 3)]
    assert near_duplicates(traces) == set()
    assert near_duplicates([]) == set()
    with pytest.raises(ValueError, match="not between 0 and 1"):
        near_duplicates([], similarity=1.5)


def test_memory_is_that_of_the_window(make_trace):
    traces = asked(make_trace, [words(20) for _ in range(1200)])
    peaks = []
    for count in (400, 1200):
        tracemalloc.start()
        assert near_duplicates(traces[:count], window=200) == set()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 1e6
    assert near_duplicates(
        [*traces, make_trace(9000, prompt_token_ids=traces[-1].prompt_token_ids)], window=200
    )
    assert not near_duplicates(
        [*traces, make_trace(9000, prompt_token_ids=traces[0].prompt_token_ids)], window=200
    )
