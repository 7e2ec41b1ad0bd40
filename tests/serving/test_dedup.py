import json
import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.serving.dedup import earlier_like, identities, signatures, texts, usable
from strop.serving.traces import Choice, to_table

SHINGLE = 8


def jaccard(a: bytes, b: bytes) -> float:
    one, two = ({text[i : i + SHINGLE] for i in range(len(text) - SHINGLE + 1)} for text in (a, b))
    return len(one & two) / len(one | two)


def words(rng: random.Random, count: int) -> list[str]:
    return ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(3, 8))) for _ in range(count)]


def test_signatures_estimate_jaccard_similarity() -> None:
    rng = random.Random(0)
    errors = []
    for changed in (0, 3, 10, 30, 60):
        for _ in range(40):
            one = words(rng, 60)
            two = list(one)
            for place in rng.sample(range(60), changed):
                two[place] = words(rng, 1)[0]
            a, b = " ".join(one).encode(), " ".join(two).encode()
            found = signatures([a, b])
            errors.append((found[0] == found[1]).mean() - jaccard(a, b))
    # The standard error of 64 bins is at most 1 / 16, and the estimate has no bias.
    assert np.sqrt(np.mean(np.square(errors))) < 1 / 16
    assert abs(np.mean(errors)) < 0.02


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=8))
def test_a_signature_depends_on_its_own_text_alone(rows: list[bytes]) -> None:
    together = signatures(rows)
    assert together.shape == (len(rows), 64)
    for row, signature in zip(rows, together, strict=True):
        assert (signatures([row])[0] == signature).all()
        assert usable(signature[None])[0] == (len(row) >= 71)


def test_a_copy_points_to_the_first_and_a_chain_is_followed() -> None:
    rng = random.Random(1)
    text = words(rng, 80)
    chain = [" ".join(text)]
    for step in range(6):
        text[step * 10] = "changed"
        chain.append(" ".join(text))
    other = " ".join(words(rng, 80))
    rows = [row.encode() for row in (other, *chain, "short", "short", chain[0])]
    found = earlier_like(signatures(rows))
    assert (found[[0, 1, 8, 9]] == [-1, -1, -1, -1]).all()
    assert (found[2:8] >= 1).all() and (found[2:8] < np.arange(2, 8)).all()
    assert found[10] == 1


def test_nothing_is_like_anything_in_nothing() -> None:
    assert earlier_like(signatures([])).tolist() == []


def test_unrelated_texts_are_not_alike() -> None:
    rng = random.Random(2)
    rows = [" ".join(words(rng, 50)).encode() for _ in range(2000)]
    assert (earlier_like(signatures(rows)) == -1).all()


def test_equality_ignores_case_space_and_unicode_form(make_trace) -> None:
    def trace(question: str, answer: str, **more: object):
        messages = json.dumps([{"role": "user", "content": question}], ensure_ascii=False)
        return make_trace(0, messages=messages, choices=[Choice(0, [1], answer, "stop")], **more)

    table = to_table(
        [
            trace("What IS  it?", "A cafe\u0301."),
            trace("what is it?", " a  café. "),
            trace("what is it?", "a café!"),
            trace("what is it?", "a café.", format='{"tools":[]}'),
            make_trace(1, choices=[]),
        ]
    )
    found = identities(table)
    assert found[0] == found[1]
    assert len(set(found.tolist())) == 4
    assert texts(table)[0] == texts(table)[1] != texts(table)[2]


def test_only_the_last_message_is_compared_for_likeness(make_trace) -> None:
    system = {"role": "system", "content": "rules " * 500}
    parts = [{"type": "text", "text": "Sum up"}, {"type": "image_url", "image_url": {"url": "x"}}]
    table = to_table(
        [
            make_trace(1, messages=json.dumps([system, {"role": "user", "content": parts}])),
            make_trace(2, endpoint="completions", messages='"Once upon"'),
            make_trace(3, messages="not json"),
            make_trace(4, messages="[]", choices=[]),
        ]
    )
    assert [text.decode() for text in texts(table)] == [
        "sum up ok 😀", "once upon ok 😀", "not json ok 😀", ""
    ]  # fmt: skip
