import json

from hypothesis import given
from hypothesis import strategies as st

from strop.serving.interest import Interest, in_sample
from strop.serving.traces import Speculation


@given(st.text(), st.text(), st.floats(0, 1), st.floats(0, 1))
def test_a_session_is_in_every_larger_sample_too(tenant, session, one, other):
    small, large = sorted((one, other))
    assert in_sample(tenant, session, large) or not in_sample(tenant, session, small)
    assert in_sample(tenant, session, 1.0) and not in_sample(tenant, session, 0.0)


def test_the_sample_has_the_share_it_should_have():
    kept = sum(in_sample("default", f"s{n}", 0.2) for n in range(20_000))
    assert 3800 < kept < 4200  # 3.5 standard deviations


def test_failures_are_of_interest(make_trace):
    interest = Interest()
    assert interest.of(make_trace(status=200)) is None
    assert interest.of(make_trace(status=500, error="boom")) == "failure"
    assert interest.of(make_trace(status=499, error="the client went away")) == "failure"


def test_acceptance_is_low_against_what_is_usual_here(make_trace):
    interest = Interest()

    def of(accepted: int, steps: int = 10) -> str | None:
        return interest.of(make_trace(speculation=Speculation(steps, 3 * steps, accepted, [accepted, 0, 0])))

    assert of(0) is None, "nothing is usual yet"
    assert [of(20) for _ in range(40)] == [None] * 40
    assert of(9) == "low acceptance"
    assert of(15) is None
    assert of(0, steps=3) is None, "too short to tell"
    # When all of the traffic accepts little, that is usual.
    assert of(5) == "low acceptance"
    assert [of(5) for _ in range(1000)][-1] is None


def test_tools_and_formats_are_of_interest_while_they_are_rare(make_trace):
    interest = Interest()

    def asking(*names: str) -> str | None:
        tools = [{"type": "function", "function": {"name": name, "description": "d" * 10}} for name in names]
        return interest.of(make_trace(format=json.dumps({"tools": tools})))

    assert [asking("search") for _ in range(20)] == ["rare format"] * 20
    assert asking("search") is None
    assert asking("search", "buy") == "rare format"
    assert [asking("search") for _ in range(3000)] == [None] * 3000
    assert [asking("buy") for _ in range(31)][-2:] == ["rare format", None], "1 % of 3,000"
    assert interest.of(make_trace(format='{"response_format":{"type":"json_object"}}')) == "rare format"


@given(st.dictionaries(st.sampled_from(["tools", "response_format", "tool_choice"]), st.from_type(type(None)) | st.integers() | st.text() | st.lists(st.integers()) | st.dictionaries(st.just("function"), st.integers())))  # fmt: skip
def test_whatever_a_client_sends_as_format_has_a_name(make_trace, wanted):
    assert Interest().of(make_trace(format=json.dumps(wanted))) in ("rare format", None)


def test_memory_stays_bounded(make_trace):
    interest = Interest()
    for n in range(5000):
        interest.of(make_trace(format=json.dumps({"tools": [{"function": {"name": f"t{n}"}}]})))
    assert len(interest._formats) <= 1024
