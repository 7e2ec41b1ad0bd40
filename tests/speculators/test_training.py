"""Training: it learns, it resumes to the bit, and what it saves is what the engine loads."""

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from strop.speculators.eagle3 import DraftError, load_draft
from strop.speculators.settings import SpeculatorSettings
from strop.speculators.train import Status, batches_of_epoch, train

SETTINGS = SpeculatorSettings(
    epochs=6, batch_tokens=150, learning_rate=3e-3, patience=99, checkpoint_s=0.001, minutes=60
)


def run(lesson, folder: Path, on_status=lambda _: None, settings=SETTINGS, seconds=3600.0):
    draft = lesson.draft()
    journal = train(
        draft,
        lesson.head_rows,
        lesson.samples[:10],
        lesson.samples[10:],
        lesson.features,
        folder,
        settings,
        torch.float32,
        time.monotonic() + seconds,
        on_status,
    )
    return draft, journal


def test_the_loss_falls_and_drafts_are_accepted(lesson, tmp_path):
    seen: list[Status] = []
    _, journal = run(lesson, tmp_path, seen.append, SETTINGS.model_copy(update={"epochs": 25}))
    losses = [float(str(point["loss"])) for point in journal.curve[1:]]
    assert journal.curve[0]["step"] == 0 and "loss" not in journal.curve[0]
    assert losses[-1] < 0.5 * losses[0]
    assert journal.best_length > 1.2
    assert journal.best_length == pytest.approx(1 + sum(journal.best_acceptance))
    assert seen[-1].done == 1.0 and seen[-1].left_s == 0


def test_interrupted_and_resumed_equals_uninterrupted(lesson, tmp_path):
    whole, journal = run(lesson, tmp_path / "whole")

    def pull_the_plug(status: Status) -> None:
        if status.done > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(lesson, tmp_path / "cut", pull_the_plug)
    halfway = load_file(tmp_path / "cut" / "last.safetensors")
    resumed, again = run(lesson, tmp_path / "cut")
    assert journal.step == again.step and journal.best_acceptance == again.best_acceptance
    assert [p["validation_loss"] for p in journal.curve] == [p["validation_loss"] for p in again.curve]
    for (name, one), two in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two), name
    moved = [not torch.equal(halfway[f"weight.{n}"], p) for n, p in resumed.named_parameters()]
    assert any(moved)


def test_training_ends_in_time_with_a_usable_draft(lesson, tmp_path):
    started = time.monotonic()
    _, journal = run(lesson, tmp_path, settings=SETTINGS.model_copy(update={"epochs": 100_000}), seconds=3)
    assert time.monotonic() - started < 8
    assert journal.step > 0 and (tmp_path / "best.safetensors").is_file()


def test_batches_hold_every_sample_once_in_an_order_of_their_epoch(lesson):
    few = SETTINGS.model_copy(update={"batch_tokens": 100})
    first, second = (batches_of_epoch(lesson.samples, epoch, few) for epoch in (0, 1))
    assert sorted(s.session for b in first for s in b) == sorted(s.session for s in lesson.samples)
    assert [s.session for b in first for s in b] != [s.session for b in second for s in b]
    assert all(len(b) == 2 for b in first)


def test_the_checkpoint_has_the_names_and_shapes_that_the_engine_loads(lesson, tmp_path):
    draft = lesson.draft()
    draft.save(tmp_path, torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = "midlayer."
    expected = {
        f"{layer}self_attn.q_proj.weight": (128, 128),
        f"{layer}self_attn.k_proj.weight": (64, 128),
        f"{layer}self_attn.v_proj.weight": (64, 128),
        f"{layer}self_attn.o_proj.weight": (64, 128),
        f"{layer}mlp.gate_proj.weight": (128, 64),
        f"{layer}mlp.up_proj.weight": (128, 64),
        f"{layer}mlp.down_proj.weight": (64, 128),
        f"{layer}input_layernorm.weight": (64,),
        f"{layer}hidden_norm.weight": (64,),
        f"{layer}post_attention_layernorm.weight": (64,),
        "fc_norm.0.weight": (64,),
        "fc_norm.1.weight": (64,),
        "fc.weight": (64, 128),
        "norm.weight": (64,),
        "lm_head.weight": (64, 64),
        "d2t": (64,),
        "t2d": (512,),
    }
    assert {n: tuple(t.shape) for n, t in tensors.items()} == expected
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert tensors["fc.weight"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "config.json").read_text())
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    assert [config[f] for f in flags] == [False, False, True, False]
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == 64
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2]


def test_a_saved_draft_loads_as_it_was(lesson, tmp_path):
    draft = lesson.draft()
    draft.save(tmp_path, torch.float32)
    again = load_draft(tmp_path, draft.embeddings_VH)
    assert again.config == draft.config
    assert again.vocabulary.target_ids_V.tolist() == draft.vocabulary.target_ids_V.tolist()
    for (name, one), two in zip(draft.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two), name


def test_a_broken_draft_is_named(lesson, tmp_path):
    lesson.draft().save(tmp_path, torch.float32)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(DraftError, match=str(tmp_path)):
        load_draft(tmp_path, lesson.target.embeddings)


def test_a_warm_start_keeps_what_was_learned_and_the_rows_of_new_tokens(lesson):
    from strop.speculators.samples import DraftVocabulary

    old, new = lesson.draft(0), lesson.draft(1)
    shifted = new.vocabulary.target_ids_V.copy()
    missing = next(i for i in range(512) if i not in shifted)
    shifted[-1] = missing
    new.vocabulary = DraftVocabulary(shifted, 512)
    fresh_row = new.lm_head.weight[-1].clone()
    with torch.no_grad():
        old.lm_head.weight.add_(1)
    new.warm_start(old)
    assert torch.equal(new.fc.weight, old.fc.weight)
    assert torch.equal(new.lm_head.weight[:-1], old.lm_head.weight[:-1])
    assert torch.equal(new.lm_head.weight[-1], fresh_row)
