import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar, Literal

import pytest
import yaml
from pydantic import Field

from strop.evals import suite
from strop.evals.endpoints import side_at
from strop.evals.evaluate import evaluate, identity
from strop.evals.evaluation import Evaluation, load_evaluation
from strop.evals.journal import Journal
from strop.evals.observation import Arm, Bench, EvalError, Finding, Metric, Observation, Side
from strop.serving.hardware import Hardware
from strop.serving.settings import Section
from strop.serving.stack import Artifact, Engine, Stack
from strop.serving.traces import Trace

GOOD = Metric("good", "", "higher", "difference", "share of good answers")
ERROR = Metric("error", "", "lower", "difference", "share of requests without a whole answer")


class Fake(Section):
    """A part that says of each request what its options say."""

    name: Literal["fake"] = "fake"
    metrics: ClassVar[tuple[Metric, ...]] = (GOOD, ERROR)
    requests: int = Field(default=100, ge=1)
    """Requests to ask."""
    bad: int = 0
    """Of those, how many the candidate answers badly."""
    words: Path | None = None
    """A file."""
    fails: str = ""
    """Raise an EvalError with this."""
    stops_at: int | None = None
    """Be killed at this request."""
    hangs_at: int | None = None
    """Never come back from this one."""

    async def observe(self, bench: Bench) -> AsyncIterator[Observation | Finding]:
        if self.fails:
            raise EvalError(self.fails)
        for number in range(self.requests):
            id_ = f"r{number}"
            if id_ in bench.done:
                continue
            asked.append(id_)
            value = float(number >= self.bad)
            yield Observation("error", id_, id_, ("code",) if number % 2 else (), (0.0,), (0.0,))
            if number == self.stops_at:
                raise KeyboardInterrupt
            if number == self.hangs_at:
                await asyncio.sleep(60)
            yield Observation("good", id_, id_, ("code",) if number % 2 else (), (value,), (1.0,))
            if not value:
                detail = "It is bad: \ud83d <b>\x00"
                yield Finding("bad", "candidate", "f" * 64, id_, detail, {"n": 1}, "no", "yes")
            bench.progress(number / self.requests, "asking")


class Other(Fake):
    name: Literal["other"] = "other"  # type: ignore[assignment]


class Contradicts(Fake):
    metrics: ClassVar[tuple[Metric, ...]] = (Metric("good", "s", "lower", "ratio", "another thing"),)


asked: list[str] = []


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked.clear()
    module = Fake.__module__
    known = {"fake": "Fake", "other": "Other", "contradicts": "Contradicts", "absent": "Absent"}
    sys.modules.setdefault(module, sys.modules[__name__])
    monkeypatch.setattr(suite, "PARTS", {name: f"{module}:{cls}" for name, cls in known.items()})


MakePlan = Callable[..., suite.Plan]
GATES = [
    {"metric": "good", "at_least": -0.1},
    {"metric": "error", "at_most": 0.05},
    {"metric": "good", "slice": "*", "at_least": -0.2},
]


@pytest.fixture
def plan(tmp_path: Path) -> MakePlan:
    def make(options: dict[str, object] | None = None, gates: object = GATES, **parts: object) -> suite.Plan:
        path = tmp_path / "my.yaml"
        path.write_text(yaml.safe_dump({"parts": parts or {"fake": options or {}}, "gates": gates}))
        return suite.load(path)

    return make


def side(arm: Arm, name: str = "model") -> Side:
    stack = Stack(
        served_model=name,
        model=Artifact(location="", files={}),
        engine=Engine(version="none 0", dtype="float32"),
        hardware=Hardware(device="cpu", name="none", isa="none"),
    )
    return Side(arm, stack, "http://127.0.0.1:9")


def run(plan: suite.Plan, folder: Path, **more: object) -> Evaluation:
    return evaluate(side("reference"), side("candidate", "other"), [], plan, folder, **more)  # type: ignore[arg-type]


# -- suites ------------------------------------------------------------------------------------


def test_a_suite_gives_its_parts_their_options(plan: MakePlan, tmp_path: Path) -> None:
    found = plan(fake={"requests": 7, "seconds": 30, "words": "words.txt"}, other=None)
    first, second = found.parts
    assert (
        isinstance(first.part, Fake)
        and first.part.requests == 7
        and first.part.words == tmp_path / "words.txt"
    )
    assert first.seconds == 30 and second.seconds == suite.DEFAULT_SECONDS
    assert [gate.slice for gate in found.gates] == ["all", "all", "*"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("parts: {fake: {reqests: 3}}", "parts.fake.reqests is not a known key"),
        ("parts: {fake: {requests: many}}", "parts.fake.requests: .*got 'many'"),
        ("parts: {fake: {seconds: -1}}", "parts.fake.seconds"),
        ("parts: {fake: {seconds: true}}", "parts.fake.seconds"),
        ("parts: {fidelty: {}}", "'fidelty' is not a part"),
        ("parts: {absent: {}}", "cannot be loaded"),
        ("parts: {fake: {}, contradicts: {}}", "different things by the metric 'good'"),
        ("parts: {}", "parts"),
        ("parts: [fake]", "parts"),
        ("partz: {fake: {}}", "partz is not a known key"),
        ("parts: {fake: {}}\ngates: [{metric: goood, at_most: 1}]", "no part of this suite measures 'goood'.*error, good"),
        ("parts: {fake: {}}\ngates: [{metric: good}]", "gates.0: .*either at_most or at_least"),
        ("parts: {fake: {}}\ngates: [{metric: good, at_most: 1, bound: 2}]", "gates.0.bound is not a known key"),
        ("parts: {fake: [}", "line 1 is not valid YAML"),
        ("- 1", "must hold the keys"),
        ("", "must hold the keys"),
    ],
)  # fmt: skip
def test_a_suite_with_a_mistake_is_refused_by_name(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(content)
    with pytest.raises(suite.SuiteError, match=f"(?s){reason}"):
        suite.load(path)


def test_a_suite_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(suite.SuiteError, match=r"no suite nowhere.yaml.*quick, full, lossless"):
        suite.load("nowhere.yaml")


def test_without_gates_of_its_own_a_suite_has_those_that_fit_its_parts(
    plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = plan(gates=None)
    assert found.gates and {gate.metric for gate in found.gates} == {"error"}


def test_a_suite_is_described_with_options_metrics_and_gates(plan: MakePlan, tmp_path: Path) -> None:
    plan({"requests": 5})
    text = suite.describe(tmp_path / "my.yaml")
    assert "requests: 5" in text and "Requests to ask." in text
    assert "good: the candidate's share of good answers, difference from the reference" in text
    assert "good, mean of each slice, at least -0.2" in text


@pytest.mark.parametrize("name", suite.SHIPPED)
def test_shipped_suites_fit_the_parts_there_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for module in ("fidelity", "behaviour", "failures", "regressions", "speed"):
        pytest.importorskip(f"strop.evals.{module}", reason="a part of the suite is not there")
    assert suite.load(name).gates


# -- running -----------------------------------------------------------------------------------


def test_a_good_candidate_passes_and_a_bad_one_fails(plan: MakePlan, tmp_path: Path) -> None:
    good = run(plan(), tmp_path / "good")
    assert good.verdict == "passed" and good.passed and bool(good)
    bad = run(plan({"bad": 40}), tmp_path / "bad")
    assert bad.verdict == "failed" and not bad
    assert {gate.metric for gate in bad.gates if gate.answer == "failed"} == {"good"}
    assert "share of good answers" in bad.summary and "-0.4" in bad.summary
    assert len(bad.findings) == 40 and bad.findings[0].answer == "no"
    few = run(plan({"requests": 20}), tmp_path / "few")
    assert few.verdict == "not enough data" and "not shown to hold" in few.summary


def test_the_evaluation_is_kept_and_read_back(plan: MakePlan, tmp_path: Path) -> None:
    made = run(plan({"bad": 1}), tmp_path / "it")
    assert load_evaluation(tmp_path / "it") == made
    assert load_evaluation(tmp_path / "nowhere") is None


def test_an_interrupted_part_goes_on_and_asks_the_half_done_request_again(
    plan: MakePlan, tmp_path: Path
) -> None:
    whole = run(plan({"requests": 60, "bad": 3}), tmp_path / "whole")
    asked.clear()
    with pytest.raises(KeyboardInterrupt):
        run(plan({"requests": 60, "bad": 3, "stops_at": 30}), tmp_path / "cut")
    assert asked[-1] == "r30"
    asked.clear()
    resumed = run(plan({"requests": 60, "bad": 3}), tmp_path / "cut")
    assert asked == [f"r{number}" for number in range(30, 60)]
    assert resumed.figures == whole.figures and resumed.findings == whole.findings


def test_what_a_killed_process_wrote_by_half_is_cut_off(plan: MakePlan, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(plan({"requests": 60, "stops_at": 30}), tmp_path / "cut")
    with (tmp_path / "cut" / "journal.jsonl").open("a") as file:
        file.write('{"part": "fake", "observ')
    assert run(plan({"requests": 60}), tmp_path / "cut").verdict == "passed"


def test_a_finished_part_is_never_asked_again(plan: MakePlan, tmp_path: Path) -> None:
    run(plan(), tmp_path / "it")
    asked.clear()
    again = run(plan(), tmp_path / "it")
    assert asked == [] and again.verdict == "passed"


def test_a_journal_that_is_not_ours_is_refused(plan: MakePlan, tmp_path: Path) -> None:
    run(plan(), tmp_path / "it")
    journal = tmp_path / "it" / "journal.jsonl"
    journal.write_text(journal.read_text().replace('"r7"', "7,", 1))
    with pytest.raises(EvalError, match=r"line \d+ cannot be read.*begin anew"):
        run(plan(), tmp_path / "it")


def test_a_part_is_ended_when_its_time_is_over(plan: MakePlan, tmp_path: Path) -> None:
    ended = run(plan({"hangs_at": 50, "seconds": 0.5}), tmp_path / "it")
    assert ended.parts[0].ended and ended.parts[0].seconds < 5
    assert {figure.requests for figure in ended.figures if figure.slice == "all"} == {50, 51}


def test_a_part_that_can_say_nothing_leaves_its_gates_open_and_is_tried_again(
    plan: MakePlan, tmp_path: Path
) -> None:
    gates = [{"metric": "good", "at_least": -0.1}]
    one = run(plan(gates=gates, fake={}, other={"fails": "no prompts"}), tmp_path / "it")
    assert one.verdict == "not enough data" and "no prompts" in one.summary
    assert run(plan(gates=gates, fake={}, other={"requests": 5}), tmp_path / "it").verdict == "passed"


def test_progress_goes_from_part_to_part(plan: MakePlan, tmp_path: Path) -> None:
    seen: list[tuple[float, str]] = []
    run(plan(fake={}, other={}), tmp_path / "it", progress=lambda done, text: seen.append((done, text)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {text.partition(":")[0] for _, text in seen} == {"fake", "other", "summing up"}


def test_only_one_evaluation_is_at_work_in_a_folder(plan: MakePlan, tmp_path: Path) -> None:
    from strop.serving.home import locked

    with locked(tmp_path / "it" / "lock"), pytest.raises(EvalError, match="Another evaluation"):
        run(plan(), tmp_path / "it")


def test_the_identity_is_of_stacks_parts_and_traffic_but_not_of_gates(
    plan: MakePlan, make_trace: Callable[..., Trace]
) -> None:
    one, other = side("reference").stack, side("candidate", "other").stack
    base = identity(one, other, plan(), [])
    assert base == identity(one, other, plan(gates=[]), [])
    changed = [
        identity(other, one, plan(), []),
        identity(one, other, plan({"requests": 99}), []),
        identity(one, other, plan(), [make_trace(1)]),
    ]
    assert len({base, *changed}) == 4


def test_journal_lines_hold_whatever_answers_hold(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    text = 'half \ud83d, nul \x00, line\u2028sep, "quote"\r\n'
    finding = Finding("odd", "candidate", "f", text, text, {"content": [text]}, text, text)
    journal.begin(1.0)
    journal.saw("fake", finding)
    assert journal.parts()["fake"].findings == [finding]


# -- endpoints and pytest ----------------------------------------------------------------------


@pytest.fixture
def endpoint() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": "tiny", "root": "/nowhere"}]}).encode()
            self.send_response(200 if self.path == "/v1/models" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_an_address_is_described_by_what_it_says(endpoint: str, tmp_path: Path) -> None:
    found = side_at("candidate", f"{endpoint}/v1/")
    assert (found.url, found.model, found.stack.image) == (endpoint, "tiny", endpoint)
    manifest = tmp_path / "stack.json"
    side("candidate", "tiny").stack.save(manifest)
    assert side_at("candidate", endpoint, manifest).stack.engine.version == "none 0"
    side("candidate", "other").stack.save(manifest)
    with pytest.raises(EvalError, match="does not serve other"):
        side_at("candidate", endpoint, manifest)


def test_an_address_where_nothing_answers_is_named(endpoint: str) -> None:
    with pytest.raises(EvalError, match="Nothing answers at http://127.0.0.1:9"):
        side_at("candidate", "http://127.0.0.1:9", timeout_s=2)
    with pytest.raises(EvalError, match="answers 404"):
        side_at("candidate", f"{endpoint}/elsewhere")


PLUGIN_TEST = """
import sys
import pytest
from strop.evals import suite

@pytest.fixture(autouse=True)
def parts(monkeypatch):
    sys.path.insert(0, {folder!r})
    monkeypatch.setattr(suite, "PARTS", {{"fake": "test_suite:Fake"}})

@pytest.mark.strop_gates(suite={suite!r})
def test_marked(strop_eval):
    assert strop_eval({url!r}, baseline={url!r}).passed

def test_named(strop_eval):
    assert not strop_eval(suite={bad!r})

def test_left_open(strop_eval, pytestconfig):
    pytestconfig.option.strop_candidate = None
    strop_eval()

def test_costs_nothing():
    assert "torch" not in sys.modules
"""


def test_the_pytest_plugin(endpoint: str, tmp_path: Path, strop_home: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(yaml.safe_dump({"parts": {"fake": {}}, "gates": GATES}))
    bad.write_text(yaml.safe_dump({"parts": {"fake": {"bad": 50}}, "gates": GATES}))
    folder = str(Path(__file__).parent)
    test = tmp_path / "test_endpoint.py"
    test.write_text(PLUGIN_TEST.format(folder=folder, suite=str(good), bad=str(bad), url=endpoint))
    command = [
        sys.executable, "-m", "pytest", "-q", "-rs", "-p", "strop.evals.pytest_plugin", "--rootdir", str(tmp_path),
        "--strict-markers", "-c", "/dev/null", f"--strop-candidate={endpoint}", f"--strop-reference={endpoint}",
        str(test),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert "3 passed, 1 skipped" in result.stdout, result.stdout + result.stderr
    assert "give --strop-candidate and --strop-reference" in result.stdout


def test_loading_the_plugin_loads_nothing_else() -> None:
    code = "import sys, strop.evals.pytest_plugin as p; print([m for m in ('torch', 'httpx', 'numpy', 'pydantic') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr
