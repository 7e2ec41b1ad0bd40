import json
import random
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from strop.pipelines.cli import main
from strop.pipelines.registry import Registry
from strop.pipelines.settings import DriftSettings, Settings
from strop.pipelines.watch import Watch
from strop.serving.traces import PROBE_TENANT, Choice, Speculation, TraceStore

SETTINGS = Settings(
    drift=DriftSettings(reference_sessions=40, sessions_to_false_alarm=1e4, hold_sessions=5),
)
FUTURE = datetime.now(UTC) + timedelta(hours=1)


@pytest.fixture
def serve(home: Path, make_trace):
    """Records `count` sessions whose drafts are accepted with the given chance."""
    rng = random.Random(0)
    made = iter(range(1_000_000))

    def record(count: int, chance: float = 0.6, **changes) -> None:
        traces = []
        for _ in range(count):
            number = next(made)
            accepted = sum(rng.random() < chance for _ in range(60))
            more = {
                "started_at": FUTURE + timedelta(seconds=number),
                "prompt_token_ids": rng.choices(range(200), k=40),
                "choices": [Choice(0, rng.choices(range(200), k=40), "", "stop")],
                "speculation": Speculation(20, 60, accepted, []),
                **changes,
            }
            traces.append(make_trace(number, **more))
        TraceStore(home / "traces").append(traces)

    return record


@pytest.fixture
def watch(home: Path) -> Watch:
    return Watch(home, SETTINGS, Registry(home, "strop"))


def test_a_reference_first_then_silence(watch: Watch, serve) -> None:
    assert watch.look().decision == "nothing was served yet"
    serve(30)
    assert watch.look().decision == "30 of 40 sessions for a reference"
    serve(30, tenant=PROBE_TENANT)
    serve(5, status=500, error="no")
    serve(5, session="s0")
    assert watch.look().sessions == 30
    serve(200)
    look = watch.look()
    assert (look.sessions, look.decision, look.champion) == (230, "no drift", "ab" * 32)
    assert json.loads(json.dumps(look.evidence)).keys() == {"acceptance", "prompts", "outputs"}


def test_drift_starts_a_loop_and_a_loop_that_ended_is_a_new_beginning(watch: Watch, serve) -> None:
    serve(200)
    assert not watch.look().start
    serve(60, chance=0.2)
    look = watch.look()
    assert look.start and look.holding == ["acceptance"]
    assert look.acceptance_recent and look.acceptance_reference
    assert look.acceptance_recent < look.acceptance_reference
    # Another watch, started now, comes to the same.
    assert Watch(watch.home, SETTINGS, watch.registry).look().start
    watch.failed()
    assert "the last loop failed" in watch.look().decision
    watch.not_before = 0.0
    journal = watch.registry.begin("loop-1", {"strop.champion": "ab" * 32})
    journal.end("no candidate")
    serve(40, chance=0.2, started_at=FUTURE + timedelta(days=1))
    look = watch.look()
    assert not look.start and look.sessions > 0


def test_the_budget_is_kept(home: Path, serve) -> None:
    frugal = SETTINGS.model_copy(
        update={"drift": SETTINGS.drift.model_copy(update={"budget_minutes_per_day": 1})}
    )
    serve(200)
    serve(60, chance=0.2)
    look = Watch(home, frugal, Registry(home, "strop")).look()
    assert not look.start and "of 1 minutes allowed" in look.decision


@pytest.mark.slow
def test_the_command_runs_the_loop(
    home: Path, serve, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    serve(200)
    serve(60, chance=0.2)
    config = home / "strop.yaml"
    config.write_text(yaml.safe_dump({"model": "nowhere", "drift": SETTINGS.drift.model_dump()}))
    monkeypatch.chdir(home)
    monkeypatch.setenv("STROP_HOME", str(home))
    monkeypatch.setattr(sys, "argv", ["strop", "loop", "watch", "--once", "--json", "--config", str(config)])
    assert main() == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["start"] is True
    assert "exit code 2" in err
    assert "nowhere is not a folder" in (home / "logs" / "watched-loops.log").read_text()
