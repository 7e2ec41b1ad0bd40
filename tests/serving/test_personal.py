"""Redaction with a real tokenizer: nothing personal is left, everything else is where it was."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from strop.serving.journal import TraceWriter
from strop.serving.personal import Redactor
from strop.serving.traces import WITHHELD, Choice, Trace, TraceStore, to_jsonable

PERSONAL = {
    "ada.lovelace@example.org": "EMAIL",
    "+44 20 7946 0958": "PHONE",
    "(555) 123-4567": "PHONE",
    "078-05-1120": "SSN",
    "4111 1111 1111 1111": "CREDIT_CARD",
    "192.168.17.254": "IP_ADDRESS",
}


@pytest.fixture(scope="module")
def redactor(tiny_model) -> Redactor:
    return Redactor(tiny_model)


@pytest.fixture(scope="module")
def tokenizer(tiny_model) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


def spoken(make_trace, tokenizer: Tokenizer, asked: str, answered: str, **changes) -> Trace:
    prompt = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(answered).ids
    return make_trace(
        messages=json.dumps([{"role": "user", "content": asked}]),
        prompt_token_ids=tokenizer.encode(prompt).ids,
        choices=[Choice(0, ids, answered, "stop")],
        **changes,
    )


def texts_of(trace: Trace, tokenizer: Tokenizer) -> list[str]:
    """Everything that a record says, its tokens read as text in runs between those that are withheld."""
    texts = [json.dumps(to_jsonable(trace), ensure_ascii=False)]
    for ids in (trace.prompt_token_ids, *(c.token_ids for c in trace.choices)):
        run: list[int] = []
        for token in [*ids, WITHHELD]:
            if token == WITHHELD:
                texts.append(tokenizer.decode(run, skip_special_tokens=False))
                run = []
            else:
                run.append(token)
    return texts


@pytest.mark.parametrize("value", PERSONAL)
def test_each_kind_is_masked_in_text_and_in_tokens(redactor, tokenizer, make_trace, value):
    whole = spoken(make_trace, tokenizer, f"naïve 😀 write to {value}, please", f"I did: {value}.")
    redacted = redactor(whole)
    assert not any(value in text for text in texts_of(redacted, tokenizer))
    assert f"write to [{PERSONAL[value]}], please" in redacted.messages
    assert redacted.choices[0].text == f"I did: [{PERSONAL[value]}]."
    for before, after in (
        (whole.prompt_token_ids, redacted.prompt_token_ids),
        (whole.choices[0].token_ids, redacted.choices[0].token_ids),
    ):
        assert len(before) == len(after)
        kept = [a for a in after if a != WITHHELD]
        assert 0 < len(kept) < len(after)
        assert all(a in (b, WITHHELD) for b, a in zip(before, after, strict=True))
        # One run of tokens, no longer than the value and a token at each end.
        gone = [i for i, a in enumerate(after) if a == WITHHELD]
        assert gone == list(range(gone[0], gone[-1] + 1))
        hidden = tokenizer.decode(before[gone[0] : gone[-1] + 1])
        assert value in hidden and len(hidden) < len(value) + 8


def test_a_record_without_personal_data_is_the_same_object(redactor, tokenizer, make_trace):
    code = "def f(x):\n    return x ** 2 + 12345 - 3.14  # v1.2.3, 2026-03-01"
    trace = spoken(make_trace, tokenizer, code, code)
    assert redactor(trace) is trace


words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=15).map(lambda s: f" {s} ")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(words, st.sampled_from(sorted(PERSONAL))), min_size=1, max_size=4), words, st.data()
)
def test_whatever_stands_around_it(redactor, tokenizer, make_trace, pieces, rest, data):
    text = "".join(before + value for before, value in pieces) + rest
    whole = spoken(make_trace, tokenizer, text, "ok")
    redacted = redactor(whole)
    for _, value in pieces:
        assert not any(value in t for t in texts_of(redacted, tokenizer))
    assert len(redacted.prompt_token_ids) == len(whole.prompt_token_ids)
    assert all(
        a in (b, WITHHELD) for a, b in zip(redacted.prompt_token_ids, whole.prompt_token_ids, strict=True)
    )
    assert redacted.prompt_token_ids[0] == whole.prompt_token_ids[0], "the template around it stays"


def test_what_only_one_place_shows_is_masked_everywhere(redactor, tokenizer, make_trace):
    """A tool call's arguments are JSON in JSON, what was thought is in no text, a prompt may be token ids."""
    value = "ada.lovelace@example.org"
    call = json.dumps([{"id": "c", "function": {"name": "mail", "arguments": json.dumps({"to": value})}}])
    ids = tokenizer.encode(f"<think>{value}</think>").ids
    trace = make_trace(
        messages=json.dumps(tokenizer.encode(f"tell {value}").ids),
        prompt_token_ids=tokenizer.encode(f"tell {value}").ids,
        choices=[Choice(0, ids, "", "tool_calls", call)],
        format=json.dumps({"tools": [{"function": {"name": "mail", "description": f"as {value}"}}]}),
        sampling=json.dumps({"stop": [value]}),
        error=f"odd: {value}",
    )
    redacted = redactor(trace)
    assert not any(value in text for text in texts_of(redacted, tokenizer))
    assert WITHHELD in redacted.prompt_token_ids and WITHHELD in redacted.choices[0].token_ids
    assert json.loads(redacted.choices[0].tool_calls or "")[0]["function"]["arguments"] == '{"to": "[EMAIL]"}'


def test_a_text_far_too_long_keeps_no_content(redactor, make_trace):
    assert not redactor(make_trace(messages=json.dumps("x" * (1 << 21)))).has_content


@pytest.mark.parametrize("text", ["!" * 20_000, "a@" * 9000, "1 " * 9000, "a." * 9000 + "@", "(555) " * 3000])
def test_no_text_makes_a_pattern_slow(redactor, text):
    """What a client sends cannot hold the interpreter: searching four times as much takes about four times as long."""

    def seconds(length: int) -> float:
        times = []
        for _ in range(3):
            started = time.thread_time()
            redactor._values([text[:length]])
            times.append(time.thread_time() - started)
        return min(times)

    assert seconds(16_000) < 8 * seconds(4_000) + 0.02


def test_the_writer_redacts_before_anything_is_on_disk(redactor, tokenizer, make_trace, tmp_path):
    value = "ada.lovelace@example.org"
    writer = TraceWriter(tmp_path, roll_s=3600, prepare=redactor)
    writer.put(spoken(make_trace, tokenizer, value, "ok"))
    while writer.counts.written < 1:
        time.sleep(0.01)
    (journal,) = (tmp_path / "journal").glob("*.jsonl")
    assert b"[EMAIL]" in journal.read_bytes() and value.encode() not in journal.read_bytes()
    writer.close()


def test_what_cannot_be_redacted_is_written_without_content(make_trace, tmp_path):
    def broken(_: Trace) -> Trace:
        raise RuntimeError("broken")

    writer = TraceWriter(tmp_path, prepare=broken)
    writer.put(make_trace(1))
    writer.close()
    (trace,) = TraceStore(tmp_path).scan()
    assert not trace.has_content and trace.request_id == "r1"


def test_without_a_tokenizer_it_says_so_at_the_start(tmp_path):
    with pytest.raises(ValueError, match="Redaction needs .*tokenizer.json"):
        Redactor(tmp_path)
