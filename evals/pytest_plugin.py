"""`strop_eval` for pytest: this endpoint still meets these gates.

    def test_my_endpoint(strop_eval):
        assert strop_eval("http://127.0.0.1:8000", baseline="http://127.0.0.1:8001", suite="quick").passed

What a call leaves open comes from the marker `strop_gates`, then from the command line. Every call
asks both servers anew. Loaded by every pytest of the environment, so nothing is imported before a
test asks for it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from strop.evals.evaluation import Evaluation
    from strop.serving.traces import Trace

_OPTIONS = {
    "candidate": "Address of the server to test.",
    "reference": "Address of the server it is held against.",
    "suite": "quick, full, or a suite's YAML file.",
    "traces": "Folder of Parquet files with held-out traffic.",
}


class StropEval(Protocol):
    def __call__(
        self,
        candidate: str | None = None,
        *,
        baseline: str | None = None,
        suite: str | Path | None = None,
        traces: Iterable[Trace] | Path | str | None = None,
    ) -> Evaluation: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("strop")
    for name, words in _OPTIONS.items():
        group.addoption(f"--strop-{name}", default=None, help=words)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "strop_gates(candidate, reference, suite, traces): what strop_eval takes where its call leaves it open",
    )


@pytest.fixture
def strop_eval(request: pytest.FixtureRequest) -> StropEval:
    """Evaluates a running server against another: `strop_eval(url, baseline=url, suite="quick").passed`.

    Skips the test where neither the call, the marker nor the command line says what to evaluate.
    """
    marker = request.node.get_closest_marker("strop_gates")
    marked = marker.kwargs if marker else {}

    def option(name: str, given: object) -> object:
        return given or marked.get(name) or request.config.getoption(f"strop_{name}")

    def run(
        candidate: str | None = None,
        *,
        baseline: str | None = None,
        suite: str | Path | None = None,
        traces: Iterable[Trace] | Path | str | None = None,
    ) -> Evaluation:
        from strop.evals.endpoints import side_at
        from strop.evals.evaluate import evaluate
        from strop.evals.suite import load
        from strop.serving.home import home
        from strop.serving.traces import TraceSet

        tested, held_against = option("candidate", candidate), option("reference", baseline)
        if not tested or not held_against:
            pytest.skip("give --strop-candidate and --strop-reference, the addresses of two servers")
        traffic = option("traces", traces) or ()
        if isinstance(traffic, str | Path):
            traffic = TraceSet(Path(traffic))
        return evaluate(
            side_at("reference", str(held_against)),
            side_at("candidate", str(tested)),
            sorted(traffic, key=lambda trace: trace.started_at),  # type: ignore[arg-type]
            load(str(option("suite", suite) or "quick")),
            home() / "evals" / f"pytest-{uuid.uuid4().hex[:12]}",
        )

    return run
