import json

from hypothesis import given
from hypothesis import strategies as st

from strop.serving.redaction import without_content
from strop.serving.traces import WITHHELD, Choice, Speculation, to_jsonable

SAID = "a-word-nobody-else-says"


def test_without_content_nothing_said_is_left_and_everything_measured_is(make_trace):
    tools = [{"type": "function", "function": {"name": SAID, "description": SAID}}]
    schema = {"type": "json_schema", "json_schema": {"name": SAID}}
    whole = make_trace(
        messages=json.dumps([{"role": "user", "content": SAID}]),
        sampling=json.dumps({"temperature": 0.5, "max_tokens": 9, "stop": [SAID], "suffix": SAID, SAID: 1}),
        format=json.dumps({"tools": tools, "response_format": schema, "tool_choice": SAID}),
        prompt_token_ids=[7, 8, 9],
        choices=[
            Choice(0, [4, 5], SAID, "stop", json.dumps([{"function": SAID}])),
            Choice(1, [6], SAID, "length"),
        ],
        status=400,
        error=f"bad input {SAID}",
        model=SAID,
        speculation=Speculation(1, 2, 1, [1, 0]),
        cached_tokens=2,
    )
    bare = without_content(whole)
    assert SAID not in json.dumps(to_jsonable(bare))
    assert not bare.has_content and whole.has_content
    assert bare.prompt_token_ids == [WITHHELD] * 3
    assert [(c.index, c.token_ids, c.finish_reason) for c in bare.choices] == [
        (0, [WITHHELD] * 2, "stop"),
        (1, [WITHHELD], "length"),
    ]
    assert json.loads(bare.sampling) == {"temperature": 0.5, "max_tokens": 9}
    assert json.loads(bare.format or "") == {"tools": 1, "response_format": {"type": "json_schema"}}
    assert bare.error == "HTTP status 400"
    same = ("request_id", "tenant", "session", "stack", "started_at", "ttft_s", "e2e_s", "inter_token_s",
            "cached_tokens", "speculation", "status", "stream", "endpoint")  # fmt: skip
    assert all(getattr(bare, name) == getattr(whole, name) for name in same)


values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.just(SAID),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(
    st.dictionaries(st.sampled_from(["temperature", "stop", "documents", SAID]), values),
    st.dictionaries(
        st.sampled_from(["tools", "response_format", "structured_outputs", "tool_choice"]), values
    ),
)
def test_without_content_whatever_was_sent(make_trace, sampling, wanted):
    bare = without_content(make_trace(sampling=json.dumps(sampling), format=json.dumps(wanted)))
    assert SAID not in json.dumps(to_jsonable(bare))
