"""What traffic costs, against sums made by hand."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.evals.cost import (
    HOUR_US,
    Attempt,
    Usage,
    answered_well,
    attempt,
    bill,
    break_even,
    by_hour,
    by_hour_of_day,
    payback,
    served_per_hour,
)
from strop.evals.settings import CostSettings
from strop.serving.traces import Choice, Trace

MakeTrace = Callable[..., Trace]
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
NOON_US = int(NOON.timestamp()) * 1_000_000
MINUTE_US = 60_000_000
PRICES = CostSettings(price_per_hour=6.0, machines=2, api_input=1.0, api_cached=0.25, api_output=4.0)


def at(minutes: float, lasting: float = 1.0, session: str = "s", task: str = "t", **more: object) -> Attempt:
    """An attempt `minutes` after noon that lasts so many minutes."""
    begin = NOON_US + round(minutes * MINUTE_US)
    end = begin + round(lasting * MINUTE_US)
    made = Attempt(begin, end, session, task, 1000, 0, 100, True)
    return replace(made, **more)  # type: ignore[arg-type]


def test_a_trace_becomes_an_attempt(make_trace: MakeTrace) -> None:
    trace = make_trace(started_at=NOON, e2e_s=1.5, prompt_token_ids=[1] * 9, cached_tokens=4)
    one = attempt(trace)
    assert (one.started_us, one.ended_us) == (NOON_US, NOON_US + 1_500_000)
    assert (one.session, one.input_tokens, one.cached_tokens) == ("default/s0", 9, 4)
    assert (one.output_tokens, one.succeeded) == (3, True)
    again = attempt(replace(trace, request_id="other", status=500, error="no", choices=[]))
    assert again.task == one.task and not again.succeeded and again.output_tokens == 0
    assert attempt(replace(trace, session="elsewhere")).task != one.task
    assert attempt(replace(trace, messages="[]")).task != one.task
    unknown = attempt(replace(trace, e2e_s=None, cached_tokens=None))
    assert unknown.ended_us == unknown.started_us and unknown.cached_tokens == 0
    assert attempt(trace, succeeded=lambda t: False).succeeded is False


def test_faulty_answers_are_no_success(make_trace: MakeTrace) -> None:
    assert answered_well(make_trace())
    assert not answered_well(make_trace(status=499, error="the client went away"))
    assert not answered_well(make_trace(choices=[Choice(0, [], "", "stop")]))
    assert not answered_well(make_trace(choices=[Choice(0, [7] * 60, "a" * 60, "length")]))
    wants_json = json.dumps({"response_format": {"type": "json_object"}})
    assert not answered_well(make_trace(format=wants_json))


def test_usage_by_hour_by_hand() -> None:
    attempts = [
        at(10, 20),
        at(20, 20, cached_tokens=600),  # under way together for ten minutes
        at(50, 20),  # ten minutes in each hour
        at(150, 1),
    ]
    hours = by_hour(attempts, NOON_US, NOON_US + 4 * HOUR_US)
    noon, one, two, three = (hours[NOON_US + n * HOUR_US] for n in range(4))
    assert noon == Usage(HOUR_US, 3, 3000, 600, 300, 40 * MINUTE_US, 50 * MINUTE_US)
    assert one == Usage(HOUR_US, busy_us=10 * MINUTE_US, under_way_us=10 * MINUTE_US)
    assert two == Usage(HOUR_US, 1, 1000, 0, 100, MINUTE_US, MINUTE_US)
    assert three == Usage(HOUR_US)
    assert (noon.busy_share, noon.at_once, three.busy_share, three.at_once) == (2 / 3, 1.25, 0, 0)
    assert noon.dedicated(PRICES) == three.dedicated(PRICES) == 12.0
    assert noon.api(PRICES) == pytest.approx((2400 * 1 + 600 * 0.25 + 300 * 4) / 1e6)
    assert noon.api(CostSettings(api_input=1, api_output=4)) == pytest.approx(4200 / 1e6)
    assert noon.api(CostSettings(price_per_hour=1)) is None
    assert served_per_hour(noon) == 3 * 60 / 40 and served_per_hour(three) is None


def test_failed_and_repeated_attempts_are_paid_for() -> None:
    """Four requests in an hour of 12: one task done at the second attempt, one never, one at once."""
    attempts = [
        at(0, task="a", succeeded=False),
        at(5, task="a"),
        at(10, task="b", succeeded=False),
        at(20, task="c", session="other"),
    ]
    found = bill(attempts, NOON_US, NOON_US + HOUR_US, PRICES)
    assert (found.usage.requests, found.sessions, found.tasks) == (4, 2, 3)
    assert (found.completed_tasks, found.completed_sessions) == (2, 1)
    assert (found.cost, found.per_request, found.per_session) == (12.0, 3.0, 6.0)
    assert (found.per_completed_task, found.per_completed_session) == (6.0, 12.0)
    assert found.api_cost == pytest.approx(4 * (1000 + 400) / 1e6)
    assert found.api_per_completed_task == pytest.approx(2 * (1000 + 400) / 1e6)
    none = bill([at(0, succeeded=False)], NOON_US, NOON_US + HOUR_US, PRICES)
    assert none.per_completed_task is None and none.api_per_completed_task is None
    tenth = bill(attempts, NOON_US, NOON_US + HOUR_US, PRICES, sample_rate=0.1)
    assert tenth.per_request == pytest.approx(0.3) and tenth.api_cost == pytest.approx(0.056)
    assert tenth.api_per_completed_task == pytest.approx(0.0028)


def test_hours_of_the_day_and_the_break_even_by_hand() -> None:
    """Two days: noon is busy on both, three o'clock on one of them."""
    large: dict[str, Any] = {"input_tokens": 100_000, "output_tokens": 10_000}
    many = [at(number / 10, 0.1, task=str(number), **large) for number in range(400)]
    next_day = [at(24 * 60 + number / 10, 0.1, **large) for number in range(200)]
    few = [at(185, **large)]
    start, end = NOON_US, NOON_US + 48 * HOUR_US
    hours = by_hour([*many, *next_day, *few], start, end)
    of_day = by_hour_of_day(hours, PRICES)
    noon, three = of_day[12], of_day[15]
    # A request costs 0.14 of the API; an hour of both machines 12.
    assert (noon.seen, noon.requests, noon.dedicated) == (2, 300, 12)
    assert noon.api == pytest.approx(42) and noon.dedicated_is_cheaper is True
    assert (three.requests, three.api) == (0.5, pytest.approx(0.07))
    assert three.dedicated_is_cheaper is False
    assert noon.break_even_requests == pytest.approx(12 / 0.14)
    assert (of_day[3].requests, of_day[3].api, of_day[3].break_even_requests) == (0, 0, None)
    halved = by_hour_of_day(hours, PRICES, sample_rate=0.5)[12]
    assert halved.requests == 600 and halved.api == pytest.approx(84)
    assert break_even(Usage(HOUR_US), PRICES) is None
    free = CostSettings(price_per_hour=1, api_input=0, api_output=0)
    assert break_even(hours[NOON_US], free) is None


def test_a_promotion_pays_back_by_hand() -> None:
    """Half an hour of one machine, against 0.1 s of both at 4,500 requests a day: a quarter of an hour."""
    paid = payback(1800, 0.1, 4500, PRICES)
    assert (paid.cost, paid.saved_per_day, paid.days) == (3.0, pytest.approx(1.5), pytest.approx(2.0))
    assert payback(1800, 0.0, 4500, PRICES).days is None
    assert payback(1800, -1.0, 4500, PRICES).days is None
    assert payback(1800, 0.1, 0, PRICES).days is None


attempts_of_two_days = st.lists(
    st.builds(
        lambda begin, lasting, session, tokens, ok: Attempt(
            NOON_US + begin, NOON_US + begin + lasting, session, session, tokens, tokens // 3, tokens, ok
        ),
        st.integers(0, 48 * HOUR_US),
        st.integers(0, 3 * HOUR_US),
        st.sampled_from("abc"),
        st.integers(0, 10_000),
        st.booleans(),
    ),
    max_size=12,
)


@given(attempts_of_two_days, st.lists(st.integers(0, 50 * HOUR_US), min_size=2, max_size=4).map(sorted))
def test_windows_that_share_nothing_add_up(attempts: list[Attempt], cuts: list[int]) -> None:
    edges = [NOON_US + cut for cut in cuts]
    whole = sum(by_hour(attempts, edges[0], edges[-1]).values(), Usage())
    parts = [sum(by_hour(attempts, a, b).values(), Usage()) for a, b in pairwise(edges)]
    assert sum(parts, Usage()) == whole
    assert sum(part.dedicated(PRICES) for part in parts) == pytest.approx(whole.dedicated(PRICES))
    assert sum(part.api(PRICES) or 0.0 for part in parts) == pytest.approx(whole.api(PRICES))
    assert 0 <= whole.busy_us <= min(whole.length_us, whole.under_way_us)


@given(attempts_of_two_days, st.floats(1e-3, 1e3))
def test_no_hour_is_nan_and_amounts_follow_the_currency(attempts: list[Attempt], rate: float) -> None:
    end_us = NOON_US + 50 * HOUR_US
    names = ("price_per_hour", "api_input", "api_cached", "api_output")
    dearer = PRICES.model_copy(update={name: getattr(PRICES, name) * rate for name in names})
    hours = by_hour(attempts, NOON_US, end_us)
    cheap, dear = by_hour_of_day(hours, PRICES), by_hour_of_day(hours, dearer)
    for here, there in zip(cheap, dear, strict=True):
        json.dumps(asdict(here), allow_nan=False)
        assert there.dedicated == pytest.approx(here.dedicated * rate)
        assert (there.api, there.break_even_requests) == (
            here.api and pytest.approx(here.api * rate),
            here.break_even_requests and pytest.approx(here.break_even_requests),
        )
    one, other = (bill(attempts, NOON_US, end_us, prices) for prices in (PRICES, dearer))
    json.dumps(asdict(one), allow_nan=False)
    assert other.cost == pytest.approx(one.cost * rate)
    assert (other.tasks, other.completed_tasks) == (one.tasks, one.completed_tasks)


def test_an_hour_that_is_not_whole_counts_as_its_part() -> None:
    start = NOON_US + 45 * MINUTE_US
    hours = by_hour([at(50), at(61)], start, start + 30 * MINUTE_US)
    assert [usage.length_us for usage in hours.values()] == [15 * MINUTE_US, 15 * MINUTE_US]
    noon = by_hour_of_day(hours, PRICES)[12]
    assert (noon.seen, noon.requests) == (0.25, 4.0)
    assert sum(usage.dedicated(PRICES) for usage in hours.values()) == 6.0
    assert NOON + timedelta(hours=1) == datetime.fromtimestamp(max(hours) / 1e6, UTC)
