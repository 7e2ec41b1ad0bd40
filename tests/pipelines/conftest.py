"""A fleet that serves the tiny model, started once, as a user starts it."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import ray
import yaml

from strop.pipelines.registry import Registry
from strop.pipelines.settings import Settings, load_settings
from strop.serving.process import Child, free_port


@dataclass(frozen=True)
class Served:
    home: Path
    config: Path
    url: str
    server: Child

    @property
    def settings(self) -> Settings:
        return load_settings(self.config)

    def strop(self, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a `strop` command with this home, as a user would."""
        return subprocess.run(
            [sys.executable, "-m", "strop.pipelines.cli", *arguments],
            env={**os.environ, "STROP_HOME": str(self.home), "PYTHONSAFEPATH": "1"},
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def ask(self, text: str, session: str = "s", **more: object) -> httpx.Response:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 16,
            "temperature": 0,
        }
        return httpx.post(
            f"{self.url}/v1/chat/completions",
            json={**body, **more},
            headers={"X-Session-Id": session},
            timeout=120,
        )


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with its tables, which take seconds to make."""
    home = tmp_path_factory.mktemp("mlflow")
    Registry(home, "template")
    return home / "mlflow" / "mlflow.db"


@pytest.fixture
def home(tmp_path: Path, empty_database: Path) -> Path:
    """A home with an MLflow database in it."""
    (tmp_path / "mlflow").mkdir()
    shutil.copy(empty_database, tmp_path / "mlflow" / "mlflow.db")
    return tmp_path


@pytest.fixture(scope="session")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("h")
    config = home / "strop.yaml"
    port = free_port()
    content = {
        "model": str(tiny_model),
        "serving": {
            "port": port,
            "served_model": "tiny",
            "dtype": "float32",
            "engine_args": {
                "max-model-len": 1024,
                "max-num-seqs": 8,
                "enforce-eager": True,
                "enable-auto-tool-choice": True,
                "tool-call-parser": "hermes",
            },
            "capture": {"roll_s": 1.0},
            "canary": {"min_requests": 5, "max_latency_ratio": 100.0, "share": 0.5, "deadline_s": 120},
        },
        "speculators": {"minutes": 0.3, "min_output_tokens": 200, "draft_vocab": 256},
        "loop": {"min_requests": 10, "budget_minutes": 3},
        "evals": {"max_requests": 12, "min_requests": 2},
    }
    config.write_text(yaml.safe_dump(content))
    server = Child.start(
        "strop serve",
        [sys.executable, "-m", "strop.pipelines.cli", "serve", "--config", str(config)],
        home / "serve.log",
        {"STROP_HOME": str(home)},
        grace_s=120,
    )
    fleet = Served(home, config, f"http://127.0.0.1:{port}", server)
    server.wait_until_answers(f"{fleet.url}/v1/models", 400)
    yield fleet
    if ray.is_initialized():
        ray.shutdown()
    server.stop()
    mine = [
        p.info["cmdline"]
        for p in psutil.process_iter(["cmdline"])
        if str(home) in " ".join(p.info["cmdline"] or [])
    ]
    assert not mine, "these outlived `strop serve`"


def wait_for(condition, timeout_s: float = 30.0) -> None:
    """Wait until `condition()` is true; fails the test if it does not become so."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.2)
    pytest.fail(f"not within {timeout_s} s: {json.dumps(str(condition))}")
