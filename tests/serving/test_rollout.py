import pytest

from strop.serving.rollout import Arm, TakenBack, decide
from strop.serving.settings import CanarySettings
from strop.serving.traces import Choice

SETTINGS = CanarySettings(min_requests=10, max_error_rate_increase=0.05, max_latency_ratio=1.15)


def test_too_little_evidence_is_no_decision() -> None:
    assert decide(Arm(100, 0, 0, 0.02), Arm(9, 0, 0, 0.02), SETTINGS) is None
    assert decide(Arm(3, 0, 0, 0.02), Arm(50, 0, 0, 0.02), SETTINGS) is None


def test_a_faster_candidate_is_cut_over_to() -> None:
    evidence = decide(Arm(40, 0, 0, 0.02), Arm(10, 0, 0, 0.015), SETTINGS)
    assert evidence and "0.75 times" in evidence


def test_failures_and_slowness_are_taken_back() -> None:
    with pytest.raises(TakenBack, match="failed or were empty"):
        decide(Arm(40, 0, 0, 0.02), Arm(10, 1, 0, 0.015), SETTINGS)
    with pytest.raises(TakenBack, match="failed or were empty"):
        decide(Arm(40, 0, 0, 0.02), Arm(10, 0, 2, 0.015), SETTINGS)
    with pytest.raises(TakenBack, match="1.50 times"):
        decide(Arm(40, 0, 0, 0.02), Arm(10, 0, 0, 0.03), SETTINGS)


def test_many_early_errors_need_not_wait_for_evidence() -> None:
    with pytest.raises(TakenBack, match="live requests failed"):
        decide(Arm(40, 0, 0, 0.02), Arm(5, 4, 0, None), SETTINGS)


def test_what_a_client_did_does_not_count_against_a_stack(make_trace) -> None:
    traces = [
        make_trace(0),
        make_trace(1, status=499, choices=[]),
        make_trace(2, status=400, choices=[]),
        make_trace(3, status=500, choices=[], error="engine died"),
        make_trace(4, choices=[Choice(0, [2], "", "stop")]),
    ]
    arm = Arm.of(traces)
    assert (arm.requests, arm.errors, arm.empty) == (3, 1, 1)
    assert arm.latency_s == pytest.approx((0.5 - 0.25) / 2)
