"""`strop kernels` on records that are there."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from strop.kernels.promotion import PromotionError, Promotions
from strop.pipelines.cli import app
from strop.serving.home import home

from .conftest import isolated
from .test_promotion import OBJECT, engine, record, verification


def strop(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["kernels", *arguments])


@pytest.fixture
def identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("STROP_HOME", str(tmp_path))
    return Promotions(home()).propose(record(verification()), OBJECT)


def test_a_person_decides_and_is_told_what_speaks_against_it(identity: str) -> None:
    [listed] = json.loads(strop("ls", "--json").stdout)
    assert (
        listed["identity"] == identity and listed["state"] == "proposed" and listed["credited_gain"] is None
    )
    assert "not shown" in strop("ls").stdout
    refused = strop("approve", identity[:8])
    assert isinstance(refused.exception, PromotionError) and "not measured" in str(refused.exception)
    reviewed = json.loads(strop("review", identity[:8], "--json").stdout)
    assert reviewed["objections"] == ["it was not measured in the engine"]
    assert reviewed["predicted_gain"] == pytest.approx(4 / 3)
    Promotions(home()).measured(identity, engine())
    shown = strop("review", identity[:8]).stdout
    assert (
        "against it" not in shown and "int kernel;" in shown and "1.495 times as fast in the engine" in shown
    )
    assert json.loads(strop("approve", identity[:8], "--by", "ada", "--json").stdout)["state"] == "approved"
    assert "approved    by ada" in strop("review", identity[:8]).stdout
    assert "is rejected" in strop("reject", identity[:8], "--reason", "drifts").stdout
    assert isinstance(strop("review", "nothing").exception, PromotionError)


@isolated
def test_a_file_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_HOME", str(tmp_path))
    file = tmp_path / "mine.cpp"
    file.write_text(
        '#include "kernel.h"\nSTROP_KERNEL rope(const DLTensor* const*, int, DLTensor* const*, int) { return 0; }'
    )
    wrong = strop("verify", str(file), "--operator", "rope", "--json")
    found = json.loads(wrong.stdout)
    assert wrong.exit_code == 1 and not found["passed"]
    assert found["checks"][-1]["name"] == "served shapes"
    assert "greedy" in strop("verify", str(file), "--operator", "nothing").output
