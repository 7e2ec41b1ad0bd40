"""Training-time test: the parallel steps are the drafting loop of the engine, one position at a time."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from strop.serving.traces import WITHHELD
from strop.speculators.features import extract, load_features
from strop.speculators.samples import Sample, mark_shared
from strop.speculators.steps import (
    Acceptance,
    anchors_of,
    distillation_loss,
    make_batch,
    measure,
    run_steps,
)

DRAFT_IDS = np.arange(512) % 64


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def rope(x_hd: Tensor, position: int, theta: float = 10000.0) -> Tensor:
    half = x_hd.shape[-1] // 2
    angle = position / theta ** (torch.arange(half) / half)
    a, b = x_hd[:, :half], x_hd[:, half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def engine_drafts(
    weights: dict[str, Tensor], embeddings: Tensor, aux_TA: Tensor, tokens: list[int], steps: int
):
    """Greedy drafts after `tokens`, whose last one the target has just sampled, as vLLM's proposer makes
    them: token ids shifted left by one, positions as they are, and one more key per drafted token."""
    w = {n.removeprefix("midlayer.").removesuffix(".weight"): t.float() for n, t in weights.items()}
    kv: list[tuple[Tensor, Tensor]] = []
    norms = [w[f"fc_norm.{i}"] for i in range(2)]
    drafted: list[int] = []
    hidden = torch.zeros(0)
    for position in range(len(tokens) - 2 + steps):
        if position < len(tokens) - 1:
            chunks = aux_TA[position].float().chunk(2)
            hidden = w["fc"] @ torch.cat([rms(c, n) for c, n in zip(chunks, norms, strict=True)])
            token = tokens[position + 1]
        else:
            token = drafted[-1]
        x = torch.cat([rms(embeddings[token], w["input_layernorm"]), rms(hidden, w["hidden_norm"])])
        q, k, v = (((w[f"self_attn.{n}_proj"] @ x).view(-1, 32)) for n in "qkv")
        kv.append((rope(k, position), v))
        out = []
        for head, query in enumerate(rope(q, position)):
            keys, values = (torch.stack([pair[i][head // 2] for pair in kv]) for i in (0, 1))
            out.append(F.softmax(keys @ query / 32**0.5, dim=0) @ values)
        hidden = hidden + w["self_attn.o_proj"] @ torch.cat(out)
        normed = rms(hidden, w["post_attention_layernorm"])
        gated = F.silu(w["mlp.gate_proj"] @ normed) * (w["mlp.up_proj"] @ normed)
        hidden = hidden + w["mlp.down_proj"] @ gated
        if position >= len(tokens) - 2:
            draft_id = int((w["lm_head"] @ rms(hidden, w["norm"])).argmax())
            drafted.append(draft_id + int(weights["d2t"][draft_id]))
    return drafted


def test_parallel_steps_equal_the_drafting_loop(lesson, tmp_path):
    """Every step's greedy draft, wherever the recorded text is what the loop would have drafted."""
    draft = lesson.draft()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    draft.save(tmp_path, torch.float32)
    weights = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-6 and config["head_dim"] == 32
    sample = lesson.samples[3]
    aux_TA, _ = load_features(lesson.features, sample)
    batch = lesson.batch([lesson.samples[0], sample])
    offset, first = len(lesson.samples[0].tokens_T), len(anchors_of(lesson.samples[0]))
    ids = draft.vocabulary.target_ids_V
    for anchor in (30, 47, 61):
        known = sample.tokens_T[: anchor + 2].tolist()
        expected = engine_drafts(weights, draft.embeddings_VH, aux_TA, known, 3)
        with torch.no_grad():
            # The loop feeds its own drafts; teach the parallel steps the same text.
            batch.tokens_T[offset + anchor + 2 : offset + anchor + 5] = torch.tensor(expected)
            logits = run_steps(draft, batch)
            row = first + int(np.flatnonzero(anchors_of(sample) == anchor)[0])
            batch.tokens_T[offset:] = torch.from_numpy(sample.tokens_T)
        assert [int(ids[int(step[row].argmax())]) for step in logits] == expected


def test_samples_in_a_batch_do_not_see_each_other(lesson):
    draft = lesson.draft()
    with torch.no_grad():
        alone = run_steps(draft, lesson.batch([lesson.samples[1]]))
        together = run_steps(draft, lesson.batch([lesson.samples[0], lesson.samples[1], lesson.samples[2]]))
    count = len(alone[0])
    for one, many in zip(alone, together, strict=True):
        torch.testing.assert_close(one, many[count : 2 * count], atol=1e-2, rtol=1e-2)


def test_a_step_sees_nothing_of_the_tokens_it_predicts(lesson):
    draft, sample = lesson.draft(), lesson.samples[0]
    anchor, row = 40, int(np.flatnonzero(anchors_of(sample) == 40)[0])
    batch = lesson.batch([sample])
    with torch.no_grad():
        before = [step[row].clone() for step in run_steps(draft, batch)]
        batch.tokens_T[anchor + 4 :] = 3
        batch.aux_TA[anchor + 1 :] = 7.0
        after = [step[row] for step in run_steps(draft, batch)]
    for one, two in zip(before, after, strict=True):
        torch.testing.assert_close(one, two)


def test_anchors_and_validity_follow_the_turns(lesson):
    batch = lesson.batch([lesson.samples[0]])
    anchors = batch.anchors_N.tolist()
    assert anchors == [*range(27, 48), *range(59, 88)]
    assert batch.valid_NJ[anchors.index(47)].tolist() == [True, False, False]
    assert batch.valid_NJ[anchors.index(46)].tolist() == [True, True, False]
    assert batch.valid_NJ[anchors.index(60)].tolist() == [True, True, True]


def test_prompts_are_learned_from_once_and_never_measured(lesson):
    samples = mark_shared(lesson.samples)
    prefixes = {tuple(s.tokens_T[: i + 3].tolist()) for s in samples for i in range(len(s.tokens_T) - 2)}
    outputs = {tuple(s.tokens_T[: i + 3].tolist()) for s in samples for i in anchors_of(s).tolist()}
    learned = [
        tuple(s.tokens_T[: t + 3].tolist()) for s in samples for t in anchors_of(s, prompts=True).tolist()
    ]
    assert outputs < set(learned) <= prefixes
    assert len(learned) == len(set(learned))
    assert len(learned) > 0.9 * len(prefixes)
    with_prompts = make_batch(
        [samples[0]], [load_features(lesson.features, samples[0])], DRAFT_IDS, 3, prompt_weight=0.25
    )
    plain = make_batch([samples[0]], [load_features(lesson.features, samples[0])], DRAFT_IDS, 3)
    assert plain.anchors < with_prompts.anchors
    assert set(plain.weight_N.tolist()) == {1.0}
    assert set(with_prompts.weight_N.tolist()) == {1.0, 0.25}


def test_what_was_not_kept_is_an_input_like_any_and_never_predicted(lesson, tmp_path):
    whole = lesson.samples[0]
    tokens, marks = whole.tokens_T.copy(), whole.output_T.copy()
    tokens[[10, 40]], marks[40] = WITHHELD, False
    sample = Sample("s", tokens, marks)
    assert extract(lesson.target, [sample], tmp_path) == len(tokens)
    for prompts in (False, True):
        batch = make_batch([sample], [load_features(tmp_path, sample)], DRAFT_IDS, 3, prompts)
        assert batch.tokens_T.min() == 0 and batch.aux_TA.isfinite().all()
        predicted_NJ = batch.anchors_N[:, None] + 2 + torch.arange(3)
        assert batch.valid_NJ[:, 0].all()
        assert not (batch.valid_NJ & ((predicted_NJ == 40) | (predicted_NJ == 10))).any()


def test_the_loss_is_the_divergence_from_the_target(lesson):
    """Zero for a draft that says what the target says, and the plain formula otherwise."""
    batch = lesson.batch([lesson.samples[0]])
    rows = lesson.head_rows.float()
    at = batch.anchors_N[:, None] + 1 + torch.arange(3)
    exact = [
        F.linear(batch.final_TH[at[:, j].clamp(max=len(batch.tokens_T) - 1)].float(), rows) for j in range(3)
    ]
    assert distillation_loss(exact, batch, rows, 0.8).item() == pytest.approx(0, abs=1e-5)
    flat = [torch.zeros_like(step) for step in exact]
    expected = 0.0
    for j in range(3):
        usable = batch.valid_NJ[:, j] & (batch.labels_NJ[:, j] >= 0)
        p = exact[j][usable].softmax(-1)
        expected += 0.8**j * float((p * (p.log() + np.log(64))).sum(-1).mean()) / (1 + 0.8 + 0.64)
    assert distillation_loss(flat, batch, rows, 0.8).item() == pytest.approx(expected, rel=1e-4)


@settings(deadline=None)
@given(hits=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=50, max_size=50))
def test_predicted_acceptance_is_a_replay_of_the_engine(lesson, hits):
    """Against a loop that walks the text as the engine does."""
    batch = lesson.batch([lesson.samples[0]])
    labels = batch.labels_NJ
    wrong = (labels + 1) % 64
    guess = torch.where(torch.tensor(hits) & (labels >= 0), labels, wrong)
    logits = [F.one_hot(guess[:, j].clamp(min=0), 64).float() for j in range(3)]
    place = {a: i for i, a in enumerate(batch.anchors_N.tolist())}
    steps, accepted = 0, [0, 0, 0]
    for start, end in ((27, 48), (59, 88)):
        t = start
        while t < end:
            steps += 1
            run = 0
            while run < 3 and t + run < end and hits[place[t]][run] and labels[place[t], run] >= 0:
                accepted[run] += 1
                run += 1
            t += run + 1
    assert measure(logits, batch) == Acceptance(steps, tuple(accepted))


def test_acceptance_length_counts_the_bonus_token():
    acceptance = Acceptance(10, (6, 3, 1)) + Acceptance(10, (4, 2, 1))
    assert acceptance.by_position == [0.5, 0.25, 0.1]
    assert acceptance.length == 1.85
    assert Acceptance(0, (0, 0)).length == 1
