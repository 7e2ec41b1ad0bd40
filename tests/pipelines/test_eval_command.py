import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import yaml
from typer.testing import CliRunner

from strop.evals import suite
from strop.evals.observation import Bench, EvalError, Finding, Metric, Observation, Side
from strop.pipelines import evaluating
from strop.pipelines.cli import app
from strop.pipelines.registry import Registry
from strop.pipelines.settings import Settings
from strop.serving.settings import Section
from strop.serving.stack import Stack
from strop.serving.traces import PROBE_TENANT, Trace, TraceSet, TraceStore


class Fake(Section):
    name: Literal["fake"] = "fake"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("good", "", "higher", "difference", "share of good answers"),
    )
    bad: int = 0
    """Bad answers of 60."""

    async def observe(self, bench: Bench) -> AsyncIterator[Observation | Finding]:
        seen.append(bench)
        for number in range(60):
            yield Observation("good", f"r{number}", f"s{number}", (), (float(number >= self.bad),), (1.0,))


seen: list[Bench] = []


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stacks are not started: whatever is served, is served at an address where nothing is asked."""

    class Fleet:
        def __init__(self) -> None:
            self.served: list[str] = []

        def stacks(self) -> list[str]:
            return self.served

        def remove(self, stack: Stack) -> None:
            self.served.remove(stack.fingerprint)

    @contextmanager
    def fleet(settings: Settings, home: Path, first: Stack) -> Iterator[Fleet]:
        yield Fleet()

    @contextmanager
    def leased(fleet: Fleet, stack: Stack) -> Iterator[str]:
        fleet.served.append(stack.fingerprint)
        yield "http://127.0.0.1:9"

    def side_in(fleet: Fleet, arm: Any, stack: Stack) -> Side:
        assert stack.fingerprint in fleet.served
        return Side(arm, stack, f"http://127.0.0.1:9/{stack.fingerprint[:4]}")

    seen.clear()
    sys.modules.setdefault(Fake.__module__, sys.modules[__name__])
    monkeypatch.setattr(suite, "PARTS", {"fake": f"{Fake.__module__}:Fake"})
    monkeypatch.setattr(evaluating, "_fleet", fleet)
    monkeypatch.setattr(evaluating, "leased", leased)
    monkeypatch.setattr(evaluating, "side_in", side_in)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def my_suite(tmp_path: Path) -> Callable[..., str]:
    def make(bad: int = 0, at_least: float = -0.1) -> str:
        path = tmp_path / "my.yaml"
        gates = [{"metric": "good", "at_least": at_least}]
        path.write_text(yaml.safe_dump({"parts": {"fake": {"bad": bad}}, "gates": gates}))
        return str(path)

    return make


def strop(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["eval", *arguments])


@pytest.mark.parametrize(
    ("bad", "at_least", "code", "verdict"),
    [(0, -0.1, 0, "passed"), (30, -0.1, 1, "failed"), (2, -0.04, 2, "not enough data")],
)
def test_the_exit_code_is_the_verdict(
    tiny_model: Path, my_suite: Callable[..., str], tmp_path: Path,
    bad: int, at_least: float, code: int, verdict: str,
) -> None:  # fmt: skip
    model = str(tiny_model)
    report = tmp_path / "report"
    result = strop(model, model, "--suite", my_suite(bad, at_least), "--json", "--report", str(report))
    assert result.exit_code == code, result.output
    evaluation = json.loads(result.stdout)
    assert evaluation["verdict"] == verdict
    assert evaluation["reference"]["model"]["location"] == model
    assert json.loads((report / "evaluation.json").read_text())["id"] == evaluation["id"]
    assert verdict in (report / "report.md").read_text()


def test_a_person_is_told_the_verdict_and_where_the_report_is(
    tiny_model: Path, my_suite: Callable[..., str]
) -> None:
    result = strop("compare", str(tiny_model), str(tiny_model), "--suite", my_suite(30))
    assert result.exit_code == 1
    assert "Failed: one gate fails." in result.stdout and "report.html" in result.stdout


def test_what_is_known_is_not_asked_again_unless_told(tiny_model: Path, my_suite: Callable[..., str]) -> None:
    arguments = (str(tiny_model), str(tiny_model), "--suite", my_suite())
    assert [strop(*arguments).exit_code for _ in range(2)] == [0, 0] and len(seen) == 1
    my_suite(at_least=0.1)
    assert strop(*arguments).exit_code == 1 and len(seen) == 1, "other gates are decided from what is known"
    assert strop(*arguments, "--again").exit_code == 1 and len(seen) == 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("nowhere/stack.json", "x"), "There is no nowhere/stack.json"),
        (("champion", "previous"), "No registered Stack is called 'champion'"),
        (("http://127.0.0.1:9", "http://127.0.0.1:9"), "Nothing answers at http://127.0.0.1:9"),
        (("a", "b", "--suite", "slow"), "no suite slow"),
        (("a", "b", "--traces", "no condition"), "not a condition"),
    ],
)
def test_what_makes_an_evaluation_impossible_is_one_sentence_and_code_3(
    my_suite: Callable[..., str], arguments: tuple[str, ...], reason: str
) -> None:
    suite_option = () if "--suite" in arguments else ("--suite", my_suite())
    result = strop(*arguments, *suite_option)
    assert (result.exit_code, reason in result.stderr) == (3, True), result.output


def test_stacks_are_found_by_manifest_folder_and_registry(tiny_model: Path, home: Path) -> None:
    settings = Settings()
    plain = evaluating.find_stack(str(tiny_model), settings, home)
    assert plain.served_model == settings.serving.served_model
    plain.save(home / "stack.json")
    assert evaluating.find_stack(str(home / "stack.json"), settings, home) == plain
    registry = Registry(home, settings.experiment)
    number = registry.ensure(plain)
    registry.set_alias("champion", number)
    for name in ("champion", number, plain.fingerprint[:8]):
        assert evaluating.find_stack(name, settings, home).fingerprint == plain.fingerprint


def test_more_manifests_than_addresses_are_refused(tiny_model: Path, home: Path) -> None:
    names = (str(tiny_model), str(tiny_model))
    with pytest.raises(EvalError, match="more manifests than addresses"):
        evaluating.find(names, [home / "stack.json"], Settings(), home)


def test_traffic_is_chosen_by_folder_condition_or_the_newest(
    home: Path, make_trace: Callable[..., Trace]
) -> None:
    traces = [make_trace(number) for number in range(20)]
    TraceStore(home / "traces").append(
        [*traces, make_trace(30, tenant=PROBE_TENANT), make_trace(31, messages="")]
    )
    newest = evaluating.heldout(None, Settings(), home)
    assert [t.request_id for t in newest] == ["r16", "r17", "r18", "r19"]
    assert len(evaluating.heldout("status = 200", Settings(), home)) == 20
    folder = TraceSet.create(home / "chosen", traces[:3]).folder
    assert [t.request_id for t in evaluating.heldout(str(folder), Settings(), home)] == ["r0", "r1", "r2"]
    with pytest.raises(EvalError, match="No trace is in"):
        evaluating.heldout("status = 500", Settings(), home)


def test_without_any_traffic_there_is_none(home: Path) -> None:
    assert evaluating.heldout(None, Settings(), home) == []


def test_suites_are_listed_described_and_copied(
    my_suite: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = my_suite()
    described = strop("suites", path)
    assert described.exit_code == 0 and "Bad answers of 60." in described.stdout
    copied = strop("suites", path, "--yaml")
    assert yaml.safe_load(copied.stdout) == yaml.safe_load(Path(path).read_text())


def test_help_has_the_parts_of_the_command() -> None:
    result = strop("--help")
    assert result.exit_code == 0 and "compare" in result.stdout and "suites" in result.stdout
