"""A server that the tests of this folder build on."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from strop.serving.engine import cores_of_replica, engine_command, engine_environment
from strop.serving.process import Child, free_port
from strop.serving.stack import Stack


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
