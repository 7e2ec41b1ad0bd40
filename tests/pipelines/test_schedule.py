from datetime import UTC, datetime, timedelta

import pytest

from strop.pipelines.schedule import ScheduleError, next_start, parse_interval, submit

NOW = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)


def test_intervals() -> None:
    assert parse_interval("30m") == timedelta(minutes=30)
    assert next_start(NOW, "6h", None) == NOW + timedelta(hours=6)


@pytest.mark.parametrize("text", ["", "6", "0h", "-1h", "1.5h", "6 weeks"])
def test_bad_intervals_say_what_to_write(text: str) -> None:
    with pytest.raises(ScheduleError, match="e.g. 6h"):
        parse_interval(text)


def test_cron() -> None:
    assert next_start(NOW, None, "0 3 * * *") == datetime(2026, 3, 2, 3, 0, tzinfo=UTC)


@pytest.mark.parametrize("text", ["", "nonsense", "61 * * * *", "* * * *"])
def test_bad_cron_says_what_to_write(text: str) -> None:
    with pytest.raises(ScheduleError, match="five fields"):
        next_start(NOW, None, text)


def test_submitting_to_nobody_is_one_clear_sentence() -> None:
    with pytest.raises(ScheduleError, match="No Ray dashboard answers"):
        submit("http://127.0.0.1:9", None)
