import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from strop.serving.canary import METRICS, Arm, TakenBack, compare, decide, shortfall
from strop.serving.settings import CanarySettings
from strop.serving.traces import Choice, Speculation, Trace

SMALL = CanarySettings(share=0.5, min_requests=12)
STRICT = CanarySettings(share=0.5, min_requests=500)
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {}}}]
FORMAT = json.dumps({"response_format": {"type": "json_object"}})
TOOL_FORMAT = json.dumps({"tools": TOOLS})

Make = Callable[..., Trace]


def _arm(
    make: Make,
    sessions: int,
    seed: int,
    turns: int = 1,
    slower: float = 1.0,
    tail: float = 1.0,
    **changes: Any,
) -> Arm:
    """Sessions whose requests take lognormal times, every eighth `tail` times as long.

    `changes` to the traces may be functions of the request's number.
    """
    rng, arm, number = np.random.default_rng(seed), Arm(), 0
    for session in range(sessions):
        pace = math.exp(rng.normal(0, 0.2))
        for _ in range(turns):
            time_s = slower * pace * math.exp(rng.normal(0, 0.2)) * (tail if number % 8 == 0 else 1.0)
            own = {k: v(number) if callable(v) else v for k, v in changes.items()}
            times = {"ttft_s": 0.2 * time_s, "e2e_s": time_s}
            arm.add([make(number, **{"session": f"s{session}", **times, **own})])
            number += 1
    return arm


def test_too_little_evidence_is_no_decision(make_trace) -> None:
    assert decide(_arm(make_trace, 100, 0), _arm(make_trace, 11, 1), SMALL) is None
    assert decide(_arm(make_trace, 3, 0), _arm(make_trace, 50, 1), SMALL) is None
    assert decide(Arm(), Arm(), SMALL) is None


def test_a_small_canary_cuts_over_to_a_faster_candidate_as_soon_as_it_has_its_requests(make_trace) -> None:
    evidence = decide(_arm(make_trace, 12, 0), _arm(make_trace, 12, 1, slower=0.6), SMALL)
    assert evidence and "no harm" in evidence and "0 errors" in evidence
    assert "times the champion's seconds per output token" in evidence


def test_a_small_canary_waits_while_an_estimate_is_beyond_its_tolerance(make_trace) -> None:
    champion, candidate = _arm(make_trace, 12, 0), _arm(make_trace, 12, 1, slower=1.5)
    assert decide(champion, candidate, SMALL) is None
    assert "1.64 times the champion's seconds per request" in shortfall(champion, candidate, SMALL)
    allowed = SMALL.model_copy(update={"max_latency_ratio": 100.0})
    assert decide(champion, candidate, allowed)


def test_a_candidate_shown_to_say_the_same_need_not_show_it_again_but_may_not_do_harm(make_trace) -> None:
    def faulty(share: int) -> dict[str, Any]:
        return {"format": FORMAT, "choices": lambda n: _text("{" if n % 10 < share else "{}")}

    champion, candidate = _arm(make_trace, 30, 0, **faulty(0)), _arm(make_trace, 30, 1, **faulty(2))
    assert decide(champion, candidate, SMALL) is None
    assert "invalid JSON" in shortfall(champion, candidate, SMALL)
    assert decide(champion, candidate, SMALL, says_the_same=True)
    assert not shortfall(champion, candidate, SMALL, says_the_same=True)
    many, broken = _arm(make_trace, 60, 0, **faulty(0)), _arm(make_trace, 60, 1, **faulty(6))
    with pytest.raises(TakenBack, match="invalid JSON"):
        decide(many, broken, SMALL, says_the_same=True)


def test_a_small_canary_does_not_wait_for_noise_to_settle_but_for_errors(make_trace) -> None:
    def faulty(*numbers: int) -> dict[str, Any]:
        return {"format": FORMAT, "choices": lambda n: _text("{" if n in numbers else "{}")}

    champion, candidate = _arm(make_trace, 14, 0, **faulty(2, 7)), _arm(make_trace, 14, 1, **faulty(0, 5, 9))
    invalid = next(c for c in compare(champion, candidate, SMALL) if c.metric.name == "invalid_json")
    assert invalid.difference > invalid.tolerance and invalid.is_within
    failed = _arm(make_trace, 14, 1, status=lambda n: 500 if n == 0 else 200)
    assert decide(champion, failed, SMALL) is None
    assert "7.1% of its requests failed" in shortfall(champion, failed, SMALL)


def test_a_large_canary_has_to_show_that_it_is_no_worse(make_trace) -> None:
    wide = {"max_error_rate_increase": 0.1, "max_fault_rate_increase": 0.1, "max_latency_ratio": 1.6}
    settings = CanarySettings(share=0.5, min_requests=50, **wide)
    champion, candidate = _arm(make_trace, 300, 0), _arm(make_trace, 300, 1)
    assert all(c.must_be_shown for c in compare(champion, candidate, settings))
    assert decide(champion, candidate, settings)
    # The estimate is within the tolerance; the interval is not.
    failing = _arm(make_trace, 300, 1, status=lambda n: 500 if n % 12 == 0 else 200)
    errors = compare(champion, failing, settings)[0]
    assert 0.08 < errors.difference < errors.tolerance and not errors.is_within
    # With few sessions the estimate is all there is.
    assert not any(c.must_be_shown for c in compare(_arm(make_trace, 6, 0), _arm(make_trace, 6, 1), settings))


def _text(text: str) -> list[Choice]:
    return [Choice(0, [4, 5, 2], text, "stop")]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"status": lambda n: 500 if n % 4 == 0 else 200}, r"2\d\.\d% of its requests failed, 0\.0% of the champ"),
        ({"choices": lambda n: _text("" if n % 4 == 0 else "a")}, "were answered with nothing"),
        ({"choices": lambda n: _text("{" if n % 3 == 0 else "{}"), "format": FORMAT}, "got invalid JSON"),
        ({"choices": lambda n: _text("<tool_call>"), "format": TOOL_FORMAT}, "got an invalid tool call"),
        ({"choices": [Choice(0, [7] * 99, "again", "length")]}, "repetition loop"),
        ({"slower": 1.5}, r"1\.\d+ times the champion's seconds per output token \(1\.\d+ to 1\.\d+, accepted 1\.15\), by chance at most \d"),
        ({"tail": 3.0}, r"1\d\.\d% of its requests were slower than the p95 of both"),
    ],
)  # fmt: skip
def test_harm_is_taken_back_with_its_metric_values_and_interval(
    make_trace, changes: dict, reason: str
) -> None:
    sound = {"choices": _text("{}"), "format": changes.get("format")}
    sessions = 300 if "tail" in changes else 80
    champion = _arm(make_trace, sessions, 0, **sound)
    with pytest.raises(TakenBack, match=reason):
        decide(champion, _arm(make_trace, sessions, 1, **{**sound, **changes}), STRICT)


def test_a_candidate_that_only_fails_is_taken_back_within_a_dozen_sessions(make_trace) -> None:
    failing = {"status": 500, "choices": [], "error": "engine died"}
    with pytest.raises(TakenBack, match=r"100\.0% of its requests failed"):
        decide(_arm(make_trace, 12, 0), _arm(make_trace, 12, 1, **failing), SMALL)
    assert decide(_arm(make_trace, 12, 0, **failing), _arm(make_trace, 12, 1), SMALL)


def test_failures_within_one_session_are_one_piece_of_evidence(make_trace) -> None:
    candidate = _arm(make_trace, 2, 1, turns=12, status=lambda n: 500 if n < 12 else 200)
    assert decide(_arm(make_trace, 20, 0), candidate, SMALL) is None


def test_what_is_sure_but_within_the_tolerance_is_no_harm(make_trace) -> None:
    tolerant = STRICT.model_copy(update={"max_latency_ratio": 1.8})
    champion, candidate = _arm(make_trace, 900, 0), _arm(make_trace, 900, 1, slower=1.2)
    with pytest.raises(TakenBack, match="seconds per output token"):
        decide(champion, candidate, STRICT)
    assert decide(champion, candidate, tolerant)


def test_acceptance_is_compared_only_where_both_speculate(make_trace) -> None:
    def speculation(mean: float) -> dict:
        rng = np.random.default_rng(0)
        return {"speculation": lambda _: Speculation(20, 60, int(rng.normal(mean, 4)), [])}

    good, bad, plain = speculation(25), speculation(15), {}
    with pytest.raises(TakenBack, match="fewer drafted tokens are accepted"):
        decide(_arm(make_trace, 60, 0, **good), _arm(make_trace, 60, 1, **bad), STRICT)
    for sides in ((good, plain), (plain, bad)):
        arms = _arm(make_trace, 60, 0, **sides[0]), _arm(make_trace, 60, 1, **sides[1])
        assert "steps_per_token" not in [c.metric.name for c in compare(*arms, STRICT)]


def test_what_a_client_did_does_not_count_against_a_stack(make_trace) -> None:
    arm = Arm()
    arm.add(
        [
            make_trace(0),
            make_trace(1, status=499, choices=[]),
            make_trace(2, status=400, choices=[]),
            make_trace(3, status=500, choices=[], error="engine died"),
            make_trace(4, choices=[Choice(0, [2], "", "stop")]),
        ]
    )
    assert (arm.requests, arm.errors) == (3, 1)
    values = {m.name: arm.values(m, math.inf).tolist() for m in METRICS}
    assert values["error"] == [0, 1, 0] and values["empty"] == [0, 1]
    assert values["token_s"] == [pytest.approx(math.log((0.5 - 0.25) / 2))]


def test_the_first_request_of_a_session_that_moved_is_not_timed_as_a_whole(make_trace) -> None:
    later = '[{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"user","content":"c"}]'
    arm = Arm()
    for number in range(3):
        arm.add([make_trace(number, session="moved", messages=later, e2e_s=0.5 + number)])
    arm.add([make_trace(3, session="new")])
    arm.add([make_trace(4, session="new", messages=later, e2e_s=4.0)])
    assert arm.e2e_s == {("default", "moved"): [1.5, 2.5], ("default", "new"): [0.5, 4.0]}
    assert arm.parts["token_s"]["default", "moved"][0] == pytest.approx(0.25 + 1.25 + 2.25)


def test_sessions_keep_their_place_as_they_grow(make_trace) -> None:
    arm = Arm()
    for name in ("b", "a", "b", "c", "a"):
        arm.add([make_trace(session=name, tenant="t", status=500 if name == "a" else 200)])
    assert list(arm.parts["error"]) == [("t", "b"), ("t", "a"), ("t", "c")]
    assert arm.parts["error"]["t", "a"] == (2, 2)
