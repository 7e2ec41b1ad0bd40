"""Fixtures that several folders share."""

import os
import runpy
from pathlib import Path

import pytest

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
