"""The engine loads the draft, and accepts what was predicted for the very same text."""

import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from strop.serving.engine import cores_of_replica, engine_command, engine_environment
from strop.serving.process import Child, free_port
from strop.serving.stack import Artifact, Speculator, Stack
from strop.speculators.features import extract, load_features
from strop.speculators.samples import Sample
from strop.speculators.settings import SpeculatorSettings
from strop.speculators.start import closed_form_start
from strop.speculators.steps import Acceptance, make_batch, measure, run_steps
from strop.speculators.train import train

SETTINGS = SpeculatorSettings(
    draft_vocab=64, epochs=40, batch_tokens=150, learning_rate=2e-3, patience=99, minutes=1
)


@pytest.mark.slow
def test_the_engine_accepts_what_was_predicted(lesson, tiny_model: Path, tmp_path: Path):
    draft = lesson.draft()
    closed_form_start(draft, [lesson.batch([s]) for s in lesson.samples])
    parts = (lesson.samples[:10], lesson.samples[10:])
    deadline = time.monotonic() + 60
    train(
        draft, lesson.head_rows, *parts, lesson.features, tmp_path / "run", SETTINGS, torch.float32, deadline
    )
    draft.save(tmp_path / "draft", torch.float32)
    plain = Stack.build(
        tiny_model, "m", dtype="float32", engine_args={"enforce-eager": True, "max-model-len": 1024}
    )
    weights = Artifact.of(tmp_path / "draft")
    speculator = Speculator(method="eagle3", draft_tokens=3, weights=weights)
    stack = plain.model_copy(update={"speculator": speculator})
    port = free_port()
    environment = engine_environment(stack, 1, cores_of_replica(0, 1), None)
    child = Child.start(
        "engine",
        engine_command(stack, "127.0.0.1", port, capture=False),
        tmp_path / "engine.log",
        environment,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        child.wait_until_answers(f"{url}/health", 300)
        counted = Acceptance(0, (0, 0, 0))
        texts = []
        for sample in lesson.samples:
            prompt = sample.tokens_T[:28].tolist()
            tokens, acceptance = _ask(url, prompt)
            counted += acceptance
            texts.append((len(prompt), np.array([*prompt, *tokens])))
    finally:
        child.stop()
    predicted = _predict(lesson, draft, texts, tmp_path / "features")
    assert counted.length > 1.3
    # The engine drafts past the last token that a request may have, the prediction does not.
    assert counted.length == pytest.approx(predicted.length, rel=0.05)
    assert counted.steps == pytest.approx(predicted.steps, rel=0.05)


def _ask(url: str, prompt: list[int]) -> tuple[list[int], Acceptance]:
    body = {
        "model": "m", "prompt": prompt, "max_tokens": 120, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status().json()
    counts = answer["metrics"]["speculative_decoding"]
    runs = counts["acceptance_histogram"]
    accepted = tuple(sum(runs[j + 1 :]) for j in range(3))
    return answer["choices"][0]["token_ids"], Acceptance(counts["num_spec_steps"], accepted)


def _predict(lesson, draft, texts: list[tuple[int, np.ndarray]], folder: Path) -> Acceptance:
    samples = [Sample(str(i), text, np.arange(len(text)) >= start) for i, (start, text) in enumerate(texts)]
    extract(lesson.target, samples, folder)
    batch = make_batch(samples, [load_features(folder, s) for s in samples], draft.vocabulary.draft_ids(), 3)
    with torch.no_grad():
        return measure(run_steps(draft, batch), batch)
