import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from strop.pipelines.registry import Registry, RegistryError
from strop.serving.process import free_port
from strop.serving.stack import Artifact, Speculator, Stack


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    return Registry(tmp_path_factory.mktemp("r"), "test")


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Stack:
    return Stack.build(tiny_model, "tiny", "float32")


@pytest.fixture(scope="module")
def drafted(plain: Stack, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Stack:
    folder = tmp_path_factory.mktemp("draft")
    for file in ("config.json", "model.safetensors"):
        (folder / file).write_bytes((tiny_model / file).read_bytes())
    drafter = Speculator(method="eagle3", draft_tokens=3, weights=Artifact.of(folder))
    return plain.model_copy(update={"speculator": drafter})


def test_a_stack_is_registered_once(registry: Registry, plain: Stack) -> None:
    number = registry.ensure(plain)
    assert registry.ensure(plain) == number
    assert [v.fingerprint for v in registry.versions()].count(plain.fingerprint) == 1


def test_promotion_moves_the_aliases_and_rollback_moves_them_back(
    registry: Registry, plain: Stack, drafted: Stack
) -> None:
    first, second = registry.ensure(plain), registry.ensure(drafted)
    registry.promote(first)
    registry.set_alias("challenger", second)
    registry.promote(second)
    assert registry.find("champion").fingerprint == drafted.fingerprint
    assert registry.find("previous").fingerprint == plain.fingerprint
    with pytest.raises(RegistryError):
        registry.find("challenger")
    registry.promote(registry.find("previous").number)
    assert registry.find("champion").fingerprint == plain.fingerprint
    assert registry.find("previous").fingerprint == drafted.fingerprint


def test_a_stack_comes_back_with_its_drafter_on_another_machine(
    registry: Registry, drafted: Stack, tmp_path: Path
) -> None:
    registry.ensure(drafted)
    elsewhere = Registry(registry.home, "test")
    elsewhere.home = tmp_path
    stack = elsewhere.stack(drafted.fingerprint)
    assert stack.fingerprint == drafted.fingerprint
    assert stack.speculator and stack.speculator.weights
    assert stack.speculator.weights.location.startswith(str(tmp_path))


def test_names(registry: Registry, plain: Stack) -> None:
    number = registry.ensure(plain)
    assert registry.find(number).number == number
    assert registry.find(plain.fingerprint[:8]).number == number
    with pytest.raises(RegistryError, match="No registered Stack"):
        registry.find("nobody")


def test_a_killed_stage_is_started_anew_and_a_finished_one_is_read_back(home: Path) -> None:
    registry = Registry(home, "loops")
    journal = registry.begin("loop-1", {"strop.champion": "x"})
    child = journal.start("collect")
    assert journal.output("collect") is None
    journal.interrupted()

    again = registry.unfinished()
    assert again and again.loop == "loop-1"
    again.reopen()
    second = again.start("collect")
    assert registry.client.get_run(child).info.status == "KILLED"
    again.finish(second, {"requests": 3}, {"seconds": 1.0})
    assert again.output("collect") == {"requests": 3}
    again.end("refused")
    assert registry.unfinished() is None
    assert registry.loops()[0]["outcome"] == "refused"


@pytest.fixture
def deaf_server() -> str:
    return f"http://127.0.0.1:{free_port()}"


def test_a_dead_tracking_server_is_one_clear_sentence(
    deaf_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", deaf_server)
    with pytest.raises(RegistryError, match="does not answer.*Nothing was lost"):
        Registry(tmp_path, "test")


def test_a_broken_tracking_server_is_one_clear_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.end_headers()

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Broken)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}")
    with pytest.raises(RegistryError, match="does not answer"):
        Registry(tmp_path, "test")
    server.shutdown()
