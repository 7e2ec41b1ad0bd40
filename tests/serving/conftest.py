"""Traces and a server that the tests of this folder build on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from strop.serving.engine import cores_of_replica, engine_command, engine_environment
from strop.serving.process import Child, free_port
from strop.serving.stack import Stack
from strop.serving.traces import Choice, Trace

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


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    model: str
    stack: Stack
    traces: Path


@pytest.fixture(scope="session")
def engine_with_capture(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A real vLLM server of the tiny model that records what it serves."""
    folder = tmp_path_factory.mktemp("engine")
    args = {"max-model-len": 1024, "max-num-seqs": 8, "enforce-eager": True}
    tools = {"enable-auto-tool-choice": True, "tool-call-parser": "hermes"}
    stack = Stack.build(tiny_model, "tiny", engine_args={**args, **tools})
    capture: dict[str, object] = {"root": str(folder / "traces"), "stack": stack.fingerprint, "roll_s": 1}
    port = free_port()
    child = Child.start(
        "engine",
        engine_command(stack, "127.0.0.1", port),
        folder / "engine.log",
        engine_environment(stack, 1, cores_of_replica(0, 1), capture),
    )
    try:
        child.wait_until_answers(f"http://127.0.0.1:{port}/health", 240)
        yield Served(f"http://127.0.0.1:{port}", "tiny", stack, folder / "traces")
    finally:
        child.stop()
