"""Fixtures that several folders share."""

import os
import runpy
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from strop.serving.traces import Choice, Trace

for name, value in {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@pytest.fixture(autouse=True)
def strop_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a `STROP_HOME` of its own."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("STROP_HOME", str(home))
    return home


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight bf16 Llama (4 layers, hidden 64, vocab 512) with a ChatML tokenizer."""
    make = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "tiny_model.py"))["make_tiny_model"]
    return make(tmp_path_factory.mktemp("tiny") / "model")


MakeTrace = Callable[..., Trace]


@pytest.fixture(scope="session")
def make_trace() -> MakeTrace:
    """Builds a plausible chat trace; keyword arguments replace its fields."""

    def make(number: int = 0, **changes: Any) -> Trace:
        defaults: dict[str, Any] = {
            "request_id": f"r{number}",
            "started_at": datetime(2026, 3, 1, 12, 0, number % 60, number, tzinfo=UTC),
            "tenant": "default",
            "session": f"s{number}",
            "stack": "ab" * 32,
            "endpoint": "chat",
            "stream": True,
            "model": "tiny",
            "sampling": '{"temperature":0}',
            "format": None,
            "messages": '[{"role":"user","content":"hé\\n"}]',
            "prompt_token_ids": [1, 2, 3],
            "choices": [Choice(0, [4, 5, 2], "ok 😀\n", "stop")],
            "status": 200,
            "ttft_s": 0.25,
            "e2e_s": 0.5,
            "inter_token_s": [0.125, 0.125],
        }
        return Trace(**{**defaults, **changes})

    return make
