"""The board that long work is watched on: each stage with its state, elapsed and expected time."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from strop.serving.home import write_atomic

LINE_EVERY_S = 15.0


@dataclass(slots=True)
class _Stage:
    name: str
    expected_s: float
    state: str = "pending"
    elapsed_s: float = 0.0
    started: float = 0.0
    done: float = 0.0
    text: str = ""

    def now_s(self) -> float:
        return self.elapsed_s + (time.monotonic() - self.started if self.state == "running" else 0.0)


class Board:
    """Shows named stages: live on a terminal, as plain lines elsewhere.

    Expected times are those of the last run with the same home, else the given ones.
    """

    def __init__(self, stages: dict[str, float], home: Path, console: Console | None = None):
        self.console = console or Console(stderr=True, soft_wrap=True)
        self._memory = home / "cache" / "durations.json"
        self._remembered: dict[str, float] = {}
        with suppress(OSError, ValueError):
            self._remembered = json.loads(self._memory.read_text())
        self.stages = {name: _Stage(name, self._remembered.get(name, s)) for name, s in stages.items()}
        self._began = time.monotonic()
        self._live: Live | None = None
        self._last_line = 0.0

    @contextmanager
    def shown(self) -> Iterator["Board"]:
        """Draw the board for the duration of a `with` block."""
        if not self.console.is_terminal:
            yield self
            return
        with Live(get_renderable=self._render, console=self.console, refresh_per_second=4) as live:
            self._live = live
            try:
                yield self
            finally:
                self._live = None

    @contextmanager
    def stage(self, name: str) -> Iterator["Board"]:
        """Run a stage; what it takes is remembered as the next run's expectation if it succeeds."""
        stage = self.stages[name]
        stage.state, stage.started = "running", time.monotonic()
        self._say(f"{name}: started, about {_span(stage.expected_s)} expected", always=True)
        try:
            yield self
        except BaseException:
            stage.elapsed_s, stage.state = stage.now_s(), "failed"
            raise
        stage.elapsed_s, stage.state, stage.done = stage.now_s(), "done", 1.0
        self._remembered[name] = round(stage.elapsed_s, 1)
        with suppress(OSError):
            write_atomic(self._memory, json.dumps(self._remembered))
        self._say(f"{name}: done in {_span(stage.elapsed_s)}. {stage.text}", always=True)

    def skip(self, name: str, text: str) -> None:
        """Mark a stage as already done or not needed."""
        self.stages[name].state, self.stages[name].done, self.stages[name].text = "done", 1.0, text
        self._say(f"{name}: {text}", always=True)

    def update(self, done: float, text: str) -> None:
        """Progress within the running stage: `done` from 0 to 1, and one short line."""
        for stage in self.stages.values():
            if stage.state == "running":
                stage.done, stage.text = min(1.0, max(0.0, done)), text
                self._say(f"{stage.name}: {done:.0%} {text}")

    def _say(self, line: str, always: bool = False) -> None:
        if self._live is not None:
            return
        now = time.monotonic()
        if always or now - self._last_line > LINE_EVERY_S:
            self._last_line = now
            print(f"[{_span(now - self._began)}] {line}", file=sys.stderr, flush=True)

    def _render(self) -> Group:
        table = Table(box=None, padding=(0, 1), show_header=False, expand=False)
        for width in (1, 12, 24, 16):
            table.add_column(min_width=width, no_wrap=True)
        table.add_column(ratio=1, overflow="ellipsis", no_wrap=True)
        left_s = 0.0
        for stage in self.stages.values():
            mark, style = {
                "pending": ("·", "dim"), "running": ("▶", "bold cyan"), "done": ("✓", "green"), "failed": ("✗", "red"),
            }[stage.state]  # fmt: skip
            now_s = stage.now_s()
            if stage.state in ("pending", "running"):
                left_s += max(0.0, stage.expected_s - now_s)
            fraction = stage.done if stage.done > 0 else min(0.95, now_s / max(stage.expected_s, 1e-3))
            bar = ProgressBar(total=1.0, completed=fraction if stage.state != "pending" else 0.0, width=24)
            clock = (
                _span(stage.elapsed_s)
                if stage.state == "done"
                else f"{_span(now_s)} of ~{_span(stage.expected_s)}"
            )
            table.add_row(
                Text(mark, style), Text(stage.name, style), bar, Text(clock, "dim"), Text(stage.text, style)
            )
        total = Text(f"elapsed {_span(time.monotonic() - self._began)}, about {_span(left_s)} left", "dim")
        return Group(table, total)


def _span(seconds: float) -> str:
    return f"{int(seconds // 60)}:{int(seconds % 60):02d}"
