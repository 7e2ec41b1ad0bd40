"""Samples: what a draft learns from is exactly what the engine said."""

import dataclasses
from datetime import UTC, datetime

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strop.serving.redaction import without_content
from strop.serving.traces import WITHHELD, Choice, Trace
from strop.speculators.samples import draft_vocabulary, samples_from_traces, split_validation

TOKENS = st.lists(st.integers(0, 40), min_size=1, max_size=6)
TURNS = st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=4)


def a_trace(prompt: list[int], output: list[int], session: str = "s", status: int = 200) -> Trace:
    return Trace(
        request_id="r",
        started_at=datetime.now(UTC),
        tenant="t",
        session=session,
        stack="",
        endpoint="chat",
        stream=False,
        model="m",
        sampling="{}",
        format=None,
        messages="[]",
        prompt_token_ids=prompt,
        choices=[Choice(0, output, "", "stop")],
        status=status,
    )


def conversation(turns: list[tuple[list[int], list[int]]]) -> tuple[list[Trace], list[int], list[bool]]:
    """Traces of a conversation, its whole token ids, and which of them are outputs."""
    traces: list[Trace] = []
    tokens: list[int] = []
    marks: list[bool] = []
    for question, answer in turns:
        tokens, marks = tokens + question, marks + [False] * len(question)
        traces.append(a_trace(tokens, answer))
        tokens, marks = tokens + answer, marks + [True] * len(answer)
    return traces, tokens, marks


@given(turns=TURNS, data=st.data())
def test_a_conversation_becomes_one_sample_with_every_answer_marked(turns, data):
    traces, tokens, marks = conversation(turns)
    samples = samples_from_traces(data.draw(st.permutations(traces)), 1000)
    assert len(samples) == 1
    assert samples[0].tokens_T.tolist() == tokens
    assert samples[0].output_T.tolist() == marks


@given(turns=TURNS, other=TOKENS)
def test_an_answer_that_the_next_prompt_does_not_repeat_keeps_a_sample_of_its_own(turns, other):
    traces, tokens, marks = conversation(turns)
    edited = a_trace([50, *tokens], other)
    samples = samples_from_traces([*traces, edited], 1000)
    assert sum(s.output_tokens for s in samples) == sum(marks) + len(other)
    assert len(samples) == 2


def test_failed_empty_and_overlong_answers_are_dropped():
    good = a_trace([1, 2], [3, 4])
    bad = [a_trace([1], [2], status=500), a_trace([1], []), a_trace([], [1]), a_trace([5] * 9, [6] * 9)]
    bad.append(dataclasses.replace(good, error="timeout", prompt_token_ids=[9, 9]))
    samples = samples_from_traces([good, *bad], 10)
    assert [s.tokens_T.tolist() for s in samples] == [[1, 2, 3, 4]]


@given(turns=TURNS, data=st.data())
def test_tokens_that_were_not_kept_are_no_outputs_and_not_in_the_vocabulary(turns, data):
    traces, tokens, marks = conversation(turns)
    gone = data.draw(st.sets(st.sampled_from(range(len(tokens)))))
    for number, trace in enumerate(traces):
        known = [*trace.prompt_token_ids, *trace.choices[0].token_ids]
        kept = [WITHHELD if i in gone else token for i, token in enumerate(known)]
        start = len(trace.prompt_token_ids)
        choice = dataclasses.replace(trace.choices[0], token_ids=kept[start:])
        traces[number] = dataclasses.replace(trace, prompt_token_ids=kept[:start], choices=[choice])
    samples = samples_from_traces(traces, 1000)
    if set(traces[-1].choices[0].token_ids) != {WITHHELD}:
        assert samples[0].tokens_T.tolist() == [WITHHELD if i in gone else t for i, t in enumerate(tokens)]
        assert samples[0].output_T.tolist() == [m and i not in gone for i, m in enumerate(marks)]
    assert WITHHELD not in draft_vocabulary(samples, 100, 60).target_ids_V


def test_records_without_content_are_nothing_to_learn_from():
    assert samples_from_traces([without_content(a_trace([1, 2], [3, 4]))], 10) == []


def test_conversations_of_different_sessions_stay_apart():
    samples = samples_from_traces([a_trace([1], [2], "a"), a_trace([1, 2, 3], [4], "b")], 100)
    assert {s.session for s in samples} == {"t/a", "t/b"}


def test_the_digest_tells_marks_apart():
    one = samples_from_traces([a_trace([1, 2], [3])], 100)[0]
    two = samples_from_traces([a_trace([1], [2, 3])], 100)[0]
    assert one.tokens_T.tolist() == two.tokens_T.tolist() and one.digest != two.digest


@given(sessions=st.integers(2, 40), share=st.floats(0.01, 0.49))
def test_validation_shares_no_session_and_does_not_move_when_traffic_grows(sessions, share):
    samples = [s for i in range(sessions) for s in samples_from_traces([a_trace([1], [2], str(i))] * 2, 9)]
    training, validation = split_validation(samples, share)
    assert training and validation and len(training) + len(validation) == len(samples)
    assert not {s.session for s in training} & {s.session for s in validation}
    ranks = sorted(range(sessions), key=lambda i: f"t/{i}" not in {s.session for s in validation})
    assert {f"t/{i}" for i in ranks[: len(validation)]} == {s.session for s in validation}


@given(
    outputs=st.lists(st.integers(0, 199), min_size=1, max_size=60),
    prompt=st.lists(st.integers(0, 199), min_size=1, max_size=60),
    size=st.integers(1, 250),
)
def test_d2t_and_t2d_describe_the_same_tokens(outputs, prompt, size):
    samples = samples_from_traces([a_trace(prompt, outputs)], 1000)
    vocabulary = draft_vocabulary(samples, 200, size, always=[7])
    d2t, t2d, back = vocabulary.d2t, vocabulary.t2d, vocabulary.draft_ids()
    assert len(d2t) == min(size, 200) == t2d.sum()
    targets = np.arange(len(d2t)) + d2t
    assert np.array_equal(targets, np.flatnonzero(t2d))
    assert np.array_equal(back[targets], np.arange(len(d2t)))
    assert t2d[7]
    assert ((back == -1) == ~t2d).all()
    counts = {i: outputs.count(i) for i in set(outputs)}
    left_out = max((counts[i] for i in counts if not t2d[i]), default=0)
    assert all(counts.get(int(i), 0) >= left_out for i in targets if i != 7) or left_out == 0
    assert vocabulary.coverage(samples) == np.mean([bool(t2d[i]) for i in outputs])
