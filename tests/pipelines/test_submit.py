"""A loop as a job on a Ray cluster that somebody else started."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from strop.pipelines.registry import Registry
from strop.serving.process import Child, free_port

pytestmark = pytest.mark.slow

ELSEWHERE = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONSAFEPATH": "1",
}


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    head = Child.start(
        "Ray head",
        [
            str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--num-cpus", "2",
            "--port", str(free_port()), "--dashboard-port", str(port), "--ray-client-server-port", str(free_port()),
            "--dashboard-agent-listen-port", str(free_port()), "--object-store-memory", str(200 << 20), "--disable-usage-stats",
        ],
        tmp_path / "head.log",
        {"RAY_AUTH_MODE": "disabled"},
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    head.wait_until_answers(f"{url}/api/version", 120)
    yield url
    head.stop()


def test_a_loop_runs_as_a_job_on_a_cluster(dashboard: str, tiny_model: Path, tmp_path: Path) -> None:
    home, config = tmp_path / "home", tmp_path / "strop.yaml"
    home.mkdir()
    config.write_text(yaml.safe_dump({"model": str(tiny_model), "serving": {"served_model": "tiny"}}))
    command = [sys.executable, "-m", "strop.pipelines.cli", "loop", "submit", "--wait"]
    done = subprocess.run(
        [*command, "--address", dashboard, "--config", str(config)],
        env=ELSEWHERE | {"STROP_HOME": str(home)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "SUCCEEDED" in done.stdout, done.stdout + done.stderr
    (loop,) = Registry(home, "strop").loops()
    assert loop["outcome"] == "no candidate"
