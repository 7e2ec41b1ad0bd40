"""The learner: it proposes a Stack with a draft, or says why not."""

import dataclasses
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from safetensors.torch import load_file

from strop.evals.proposal import Budget, Candidate, Declined
from strop.serving.redaction import without_content
from strop.serving.stack import Stack
from strop.serving.traces import Choice, Trace, TraceSet
from strop.speculators.learner import SpeculatorLearner
from strop.speculators.settings import SpeculatorSettings

SETTINGS = SpeculatorSettings(
    draft_vocab=64, min_output_tokens=300, epochs=4, batch_tokens=150, learning_rate=3e-3
)


@pytest.fixture(scope="module")
def traffic(lesson, tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    """The lesson's conversations as a server would have recorded them, one trace a turn."""
    traces = []
    for i, sample in enumerate(lesson.samples):
        tokens = sample.tokens_T.tolist()
        for turn, (start, end) in enumerate([(28, 50), (60, 90)]):
            traces.append(
                Trace(
                    request_id=f"{i}-{turn}",
                    started_at=datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=10 * i + turn),
                    tenant="t",
                    session=str(i),
                    stack="",
                    endpoint="chat",
                    stream=False,
                    model="m",
                    sampling="{}",
                    format=None,
                    messages="[]",
                    prompt_token_ids=tokens[:start],
                    choices=[Choice(0, tokens[start:end], "", "stop")],
                    status=200,
                )
            )
    return TraceSet.create(tmp_path_factory.mktemp("traffic") / "set", traces)


def quiet(done: float, text: str) -> None:
    assert 0 <= done <= 1 and text


@pytest.fixture(scope="module")
def champion(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Stack:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STROP_HOME", str(tmp_path_factory.mktemp("home")))
        return Stack.build(tiny_model, "m", dtype="bfloat16")


def test_a_candidate_is_the_champion_with_a_draft(champion, traffic, tmp_path):
    answer = SpeculatorLearner(SETTINGS).propose(champion, traffic, Budget(tmp_path, 600), quiet)
    assert isinstance(answer, Candidate)
    speculator = answer.stack.speculator
    assert speculator is not None and speculator.weights is not None
    assert speculator.method == "eagle3" and speculator.draft_tokens == 3
    answer.stack.verify()
    changed = answer.stack.diff(champion)
    assert all(path.startswith("speculator") for path in changed)
    assert answer.stack.numerics == champion.numerics
    weights = load_file(Path(speculator.weights.location) / "model.safetensors")
    assert str(weights["fc.weight"].dtype) == "torch.bfloat16"
    assert weights["t2d"][[0, 1, 2]].all()
    assert answer.expects["acceptance_length"] > 1
    assert json.loads(json.dumps(answer.notes))["train_tokens"] == 52 * 11
    again = SpeculatorLearner(SETTINGS).propose(champion, traffic, Budget(tmp_path, 600), quiet)
    assert isinstance(again, Candidate) and again.stack == answer.stack
    learned = SpeculatorLearner(SETTINGS).propose(
        answer.stack, traffic, Budget(tmp_path / "next", 600), quiet
    )
    assert isinstance(learned, Declined) and "same traffic" in learned.reason


def test_a_draft_goes_on_from_the_champions(champion, traffic, tmp_path):
    first = SpeculatorLearner(SETTINGS).propose(champion, traffic, Budget(tmp_path / "a", 600), quiet)
    assert isinstance(first, Candidate)
    newer = TraceSet.create(
        tmp_path / "newer", [dataclasses.replace(t, request_id=f"n{t.request_id}") for t in traffic]
    )
    short = SETTINGS.model_copy(update={"epochs": 1, "learning_rate": 1e-6})
    second = SpeculatorLearner(short).propose(first.stack, newer, Budget(tmp_path / "b", 600), quiet)
    assert isinstance(second, Candidate)
    assert second.expects["acceptance_length"] == pytest.approx(first.expects["acceptance_length"], abs=0.15)


def test_too_little_traffic_is_declined_with_the_numbers(champion, traffic, tmp_path):
    settings = SETTINGS.model_copy(update={"min_output_tokens": 10_000})
    answer = SpeculatorLearner(settings).propose(champion, traffic, Budget(tmp_path, 60), quiet)
    assert answer == Declined("speculator", "only 624 output tokens of 10000 needed")


def test_records_without_content_are_declined(champion, traffic, tmp_path):
    bare = TraceSet.create(tmp_path / "bare", [without_content(t) for t in traffic])
    answer = SpeculatorLearner(SETTINGS).propose(champion, bare, Budget(tmp_path, 60), quiet)
    assert answer == Declined("speculator", "only 0 output tokens of 300 needed")


def test_one_session_cannot_be_validated(champion, traffic, tmp_path):
    one = TraceSet.create(tmp_path / "one", [dataclasses.replace(t, session="s") for t in traffic])
    answer = SpeculatorLearner(SETTINGS).propose(champion, one, Budget(tmp_path, 60), quiet)
    assert isinstance(answer, Declined) and "one session" in answer.reason


def test_another_architecture_is_declined_by_name(champion, traffic, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((Path(champion.model.location) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    other = champion.model_copy(update={"model": champion.model.model_copy(update={"location": str(folder)})})
    answer = SpeculatorLearner(SETTINGS).propose(other, traffic, Budget(tmp_path, 60), quiet)
    assert isinstance(answer, Declined)
    assert "MambaForCausalLM" in answer.reason and "LlamaForCausalLM" in answer.reason


def test_the_newest_traffic_is_kept_when_there_is_too_much(champion, traffic, tmp_path):
    settings = SETTINGS.model_copy(update={"max_output_tokens": 52 * 8, "epochs": 1})
    answer = SpeculatorLearner(settings).propose(champion, traffic, Budget(tmp_path, 600), quiet)
    assert isinstance(answer, Candidate | Declined)
    assert len(list(tmp_path.glob("features/*/*.safetensors"))) == 8
