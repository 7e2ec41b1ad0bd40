"""`strop cost` over traces written as capture writes them."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strop.pipelines.cli import app
from strop.pipelines.commands.cost import CostError
from strop.pipelines.registry import LoopJournal, Registry
from strop.serving.traces import Trace, TraceStore

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
PRICES = ("--price-per-hour", "36", "--api-input", "1000", "--api-output", "10000")


@pytest.fixture
def served(strop_home: Path, make_trace: Callable[..., Trace]) -> Path:
    """Two hours: a request that fails, its repetition, one of another session at the end; and a probe."""
    asked = {"session": "s", "e2e_s": 600.0, "prompt_token_ids": [1] * 10}
    TraceStore(strop_home / "traces").append(
        [
            make_trace(0, **asked, started_at=NOON, status=500, error="no", choices=[]),
            make_trace(1, **asked, started_at=NOON + timedelta(minutes=30)),
            make_trace(2, started_at=NOON + timedelta(minutes=119), e2e_s=60.0),
            make_trace(3, started_at=NOON + timedelta(hours=9), tenant="strop"),
            make_trace(4, started_at=NOON, stack="imported-openai", e2e_s=1.0),
        ]
    )
    return strop_home


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["cost", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_it_reckons_with_what_was_recorded(served: Path) -> None:
    found = json.loads(run(*PRICES, "--machines", "2", "--json"))
    assert (found["hours"], found["requests_per_day"]) == (2.0, 36.0)
    bill = found["bill"]
    assert (bill["cost"], bill["per_request"], bill["per_completed_task"]) == (144.0, 48.0, 72.0)
    assert (bill["sessions"], bill["completed_tasks"]) == (2, 2)
    assert bill["api_cost"] == pytest.approx((23 * 1000 + 6 * 10000) / 1e6)
    noon, one = found["by_hour_of_day"][12:14]
    assert (noon["requests"], one["requests"]) == (2.0, 1.0)
    assert noon["busy_share"] == pytest.approx(1200 / 3600)
    assert noon["dedicated_is_cheaper"] is False and found["promotions"] == []
    imported = json.loads(run(*PRICES, "--imported", "--json"))
    assert imported["bill"]["usage"]["requests"] == 1


def test_it_reads_prices_from_the_configuration_and_shows_a_table(served: Path, tmp_path: Path) -> None:
    config = tmp_path / "strop.yaml"
    config.write_text("cost: {price_per_hour: 36, api_input: 1000, api_output: 10000}\n")
    shown = run("--config", str(config))
    assert "2 hours of 1 machine(s) cost 72." in shown and "API" in shown and "tasks completed" in shown
    assert "give --price" not in shown
    config.write_text("cost: {price: 36}\n")
    with pytest.raises(Exception, match=r"cost\.price is not a known key"):
        run("--config", str(config))


def test_it_says_what_is_missing(served: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(CostError, match="--price-per-hour"):
        run()
    monkeypatch.setenv("STROP_HOME", str(tmp_path / "nothing"))
    with pytest.raises(CostError, match="no recorded traffic"):
        run(*PRICES)


def test_a_promotion_is_weighed_against_what_it_saves(
    served: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "traces").symlink_to(served / "traces")
    monkeypatch.setenv("STROP_HOME", str(home))
    registry = Registry(home, "strop")
    journal: LoopJournal = registry.begin("loop-1", {})
    comparison = {"metric": "e2e_s", "slice": "all", "champion": 3.0, "candidate": 2.5}
    for stage, output in (("learn", {}), ("judge", {"verdict": {"comparisons": [comparison]}})):
        journal.finish(journal.start(stage), output, {})
    journal.end("promoted")
    refused = registry.begin("loop-2", {})
    refused.end("refused")
    found = json.loads(run(*PRICES, "--json"))
    (one,) = found["promotions"]
    took = sum((s["ended_ms"] - s["started_ms"]) / 1000 for s in journal.stages())
    assert (one["loop"], one["saved_s_per_request"]) == ("loop-1", 0.5)
    assert one["seconds"] == pytest.approx(took) and one["cost"] == pytest.approx(took / 100)
    assert one["days"] == pytest.approx(took / (0.5 * 36))
    assert "loop-1 took" in run(*PRICES)
