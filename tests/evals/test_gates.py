import numpy as np
import pytest
from pydantic import ValidationError
from scipy import stats

from strop.evals.aggregate import Aggregate
from strop.evals.gates import Gate, decide, verdict
from strop.evals.observation import Metric, Observation

ERROR = Metric("error", "", "lower", "difference", "share of requests without a whole answer")
AGREES = Metric("agrees", "", "higher", "level", "share of tokens that are the reference's first choice")


def errors(shares: dict[str, tuple[int, int]], start: int = 0) -> list[Observation]:
    """For each slice: of so many single-request sessions, so many fail on the candidate alone."""
    found = []
    for name, (sessions, failed) in shares.items():
        for number in range(sessions):
            id_ = f"{name}-{start + number}"
            found.append(Observation("error", id_, id_, (name,), (float(number < failed),), (0.0,)))
    return found


def agreements(shares: dict[str, tuple[int, int]]) -> Aggregate:
    """The same as a level: a share whose bounds are those of the binomial distribution."""
    return Aggregate.of(
        [AGREES],
        [
            Observation("agrees", o.request_id, o.session, o.slices, (1 - o.candidate[0],))
            for o in errors(shares)
        ],
    )


def aggregate(shares: dict[str, tuple[int, int]]) -> Aggregate:
    return Aggregate.of([ERROR, AGREES], errors(shares))


@pytest.mark.parametrize(
    ("sessions", "failed", "answer"),
    [(100, 0, "passed"), (40, 0, "not enough data"), (100, 3, "not enough data"), (100, 30, "failed")],
)
def test_the_interval_and_not_the_estimate_decides(sessions: int, failed: int, answer: str) -> None:
    decisions = decide([Gate(metric="error", at_most=0.05)], aggregate({"chat": (sessions, failed)}))
    assert [d.answer for d in decisions] == [answer]
    assert verdict(decisions) == answer


def test_with_too_few_sessions_nothing_is_concluded() -> None:
    few = aggregate({"chat": (9, 9)})
    assert verdict(decide([Gate(metric="error", at_most=0.05, min_samples=10)], few)) == "not enough data"
    assert verdict(decide([Gate(metric="error", at_most=0.05, min_samples=9)], few)) == "failed"


def test_a_metric_that_nothing_shows_is_not_enough_data() -> None:
    decisions = decide([Gate(metric="agrees", at_least=0.9)], aggregate({"chat": (50, 0)}))
    assert [(d.answer, d.measurement) for d in decisions] == [("not enough data", None)]
    assert verdict(decisions) == "not enough data"


def test_no_gates_pass_nothing() -> None:
    assert verdict(decide([], aggregate({"chat": (500, 0)}))) == "not enough data"


def test_at_least_is_the_other_side() -> None:
    agreeing = [Observation("agrees", f"r{i}", f"s{i}", (), (1.0,) * 19 + (float(i % 2),)) for i in range(60)]
    found = Aggregate.of([AGREES], agreeing)
    for bound, answer in ((0.9, "passed"), (0.97, "not enough data"), (0.999, "failed")):
        assert [d.answer for d in decide([Gate(metric="agrees", at_least=bound)], found)] == [answer]


def test_harm_in_a_slice_fails_where_the_average_hides_it() -> None:
    shares = {"chat": (300, 0), "code": (60, 0), "json": (30, 15)}
    gates = [Gate(metric="error", at_most=0.1), Gate(metric="error", slice="*", at_most=0.1)]
    decisions = decide(gates, aggregate(shares))
    assert {(d.slice, d.answer) for d in decisions} == {
        ("all", "passed"), ("chat", "passed"), ("code", "passed"), ("json", "failed"),
    }  # fmt: skip
    assert verdict(decisions) == "failed"


def test_a_slice_that_shows_nothing_does_not_keep_from_passing() -> None:
    gates = [Gate(metric="error", at_most=0.1), Gate(metric="error", slice="*", at_most=0.1)]
    decisions = decide(gates, aggregate({"chat": (100, 0), "json": (14, 0), "tools": (3, 0)}))
    assert [d.answer for d in decisions] == ["passed", "passed", "not enough data", "not enough data"]
    assert verdict(decisions) == "passed"


def test_what_is_not_required_can_fail_and_need_not_pass() -> None:
    gates = [Gate(metric="error", at_most=0.1), Gate(metric="error", at_most=0, required=False)]
    fine, some = aggregate({"chat": (200, 0)}), aggregate({"chat": (200, 7)})
    assert [d.answer for d in decide(gates, fine)] == ["passed", "not enough data"]
    assert verdict(decide(gates, fine)) == "passed"
    assert verdict(decide(gates, some)) == "failed"


def test_what_would_fail_by_itself_need_not_among_many() -> None:
    sessions, failed = 30, 6
    alone = agreements({"slice0": (sessions, failed), "rest": (sessions, 0)})
    gate = Gate(metric="agrees", slice="slice0", at_least=0.92)
    p = stats.binom.sf(failed - 1, sessions, 0.08)
    assert 0.05 / 30 < p < 0.05
    assert decide([gate], alone)[0].answer == "failed"
    many = agreements({f"slice{i}": (sessions, failed if i == 0 else 0) for i in range(30)})
    decisions = decide([Gate(metric="agrees", slice="*", at_least=0.92)], many)
    assert "failed" not in {d.answer for d in decisions}


def test_what_is_clear_leaves_more_to_what_is_less_clear() -> None:
    """Holm's steps: once the clear failures are out, the next is held against fewer."""
    sessions, failed = 60, 11
    p = stats.binom.sf(failed - 1, sessions, 0.08)
    assert 0.05 / 10 < p < 0.05 / 2
    gate = Gate(metric="agrees", slice="*", at_least=0.92)
    clear = {f"clear{i}": (sessions, sessions) for i in range(9)}
    with_clear = decide([gate], agreements({"doubt": (sessions, failed), **clear}))
    assert {d.slice: d.answer for d in with_clear}["doubt"] == "failed"
    without = {f"fine{i}": (sessions, 0) for i in range(9)}
    with_fine = decide([gate], agreements({"doubt": (sessions, failed), **without}))
    assert {d.slice: d.answer for d in with_fine}["doubt"] == "not enough data"


@pytest.mark.parametrize("n", [60, 200])
def test_a_candidate_at_the_bound_seldom_passes(n: int) -> None:
    rng = np.random.default_rng(n)
    gate = Gate(metric="error", at_most=0.1)
    passed = 0
    for _ in range(300):
        found = aggregate({"chat": (n, int(rng.binomial(n, 0.1)))})
        passed += decide([gate], found)[0].answer == "passed"
    assert passed / 300 <= 0.08  # nominal 0.05, 2.4 standard deviations of the simulation


def test_good_candidates_seldom_fail_however_many_slices_there_are() -> None:
    rng = np.random.default_rng(1)
    gate = Gate(metric="error", slice="*", at_most=0.05)
    failed = 0
    for _ in range(100):
        found = aggregate({f"slice{i}": (40, int(rng.binomial(40, 0.05))) for i in range(20)})
        failed += verdict(decide([gate], found)) == "failed"
    assert failed <= 12


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({}, "either at_most or at_least"),
        ({"at_most": 1, "at_least": 0}, "either at_most or at_least"),
        ({"at_most": 1, "statistic": "max"}, "use p99"),
        ({"at_most": 1, "statistic": "mode"}, "statistic"),
        ({"at_most": 1, "confidence": 1}, "confidence"),
        ({"at_most": "nan"}, "at_most"),
        ({"at_most": 1, "slcie": "json"}, "slcie"),
    ],
)
def test_gates_that_make_no_sense_are_refused(keys: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        Gate.model_validate({"metric": "error", **keys})
