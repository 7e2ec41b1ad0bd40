import json
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from strop.pipelines.cli import main


@dataclass(frozen=True)
class Result:
    returncode: int
    stdout: str
    stderr: str


Strop = Callable[..., Result]


@pytest.fixture
def strop(home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Strop:
    """Runs a `strop` command in this process, in a folder of its own."""
    monkeypatch.chdir(home)
    monkeypatch.setenv("STROP_HOME", str(home))

    def run(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["strop", *arguments])
        capfd.readouterr()
        code = main()
        out, err = capfd.readouterr()
        return Result(code, str(out), str(err))

    return run


def test_help_names_every_command(strop: Strop, tmp_path: Path) -> None:
    text = strop("--help").stdout
    for command in (
        "serve",
        "replay",
        "loop",
        "traces",
        "stack",
        "promote",
        "rollback",
        "doctor",
        "demo",
        "ui",
        "config",
    ):
        assert f" {command} " in text


def test_a_command_that_ends_with_a_code_ends_the_program_with_it(strop: Strop) -> None:
    assert strop("eval", "champion", "champion").returncode == 3
    assert strop("eval", "suites").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "config", "message"),
    [
        (("serve",), "model: [", "not valid YAML"),
        (("serve",), "sreving: {}", "sreving is not a known key"),
        (("serve",), "model: nowhere", "is not a folder"),
        (("loop", "run"), "model: nowhere", "is not a folder"),
        (("loop", "status"), "{}", "No loop has run yet"),
        (("loop", "resume"), "{}", "no interrupted loop"),
        (("rollback",), "{}", "No registered Stack is called 'previous'"),
        (("loop", "schedule", "--every", "6h"), "{}", "Start it with `strop serve`"),
        (("loop", "schedule", "--every", "soon"), "{}", "is not an interval"),
    ],
)
def test_mistakes_are_one_sentence(
    strop: Strop, tmp_path: Path, arguments: tuple[str, ...], config: str, message: str
) -> None:
    (tmp_path / "strop.yaml").write_text(config)
    result = strop(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_shard_is_named(strop: Strop, tmp_path: Path, tiny_model: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "strop.yaml").write_text("model: model")
    result = strop("serve")
    assert result.returncode == 2 and "model-00002.safetensors" in result.stderr


def test_a_busy_port_is_named(strop: Strop, tmp_path: Path, tiny_model: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        (tmp_path / "strop.yaml").write_text(f"model: {tiny_model}\nserving: {{port: {port}}}")
        result = strop("serve")
        assert result.returncode == 2 and f"Port {port} on 127.0.0.1 is in use" in result.stderr
        doctor = json.loads(strop("doctor", "--json").stdout)
        assert next(f for f in doctor if f["check"] == "port")["state"] == "problem"


def test_a_dead_tracking_server_is_one_sentence(
    strop: Strop, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    (tmp_path / "strop.yaml").write_text(f"model: {tiny_model}")
    result = strop("loop", "run")
    assert result.returncode == 2 and "does not answer" in result.stderr and "Traceback" not in result.stderr


def test_doctor_reports_every_check(strop: Strop, tmp_path: Path) -> None:
    result = strop("doctor", "--json")
    checks = {f["check"] for f in json.loads(result.stdout)}
    assert {"python", "memory", "disk", "engine", "packages", "compiler", "allocator", "port"} <= checks
