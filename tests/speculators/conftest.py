"""Conversations, features and a draft of the tiny model."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from strop.speculators.eagle3 import DraftConfig, Eagle3Draft
from strop.speculators.features import Target, extract, load_features
from strop.speculators.samples import DraftVocabulary, Sample, draft_vocabulary
from strop.speculators.steps import Batch, make_batch


@dataclass(frozen=True)
class Lesson:
    target: Target
    samples: list[Sample]
    features: Path
    vocabulary: DraftVocabulary

    def draft(self, seed: int = 0) -> Eagle3Draft:
        torch.manual_seed(seed)
        config = DraftConfig.for_target(
            self.target.config, len(self.vocabulary.target_ids_V), self.target.aux_layers
        )
        draft = Eagle3Draft(config, self.target.embeddings.float(), self.vocabulary)
        draft.initialise(self.target)
        return draft

    def batch(self, samples: list[Sample], steps: int = 3) -> Batch:
        features = [load_features(self.features, s) for s in samples]
        return make_batch(samples, features, self.vocabulary.draft_ids(), steps)

    @property
    def head_rows(self) -> torch.Tensor:
        return self.target.head[torch.from_numpy(self.vocabulary.target_ids_V)]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Matrices this small are slower on more threads, and much slower on a busy machine."""
    torch.set_num_threads(1)


def a_sample(session: str, tokens: np.ndarray, spans: list[tuple[int, int]]) -> Sample:
    marks = np.zeros(len(tokens), dtype=bool)
    for start, end in spans:
        marks[start:end] = True
    return Sample(session, tokens, marks)


@pytest.fixture(scope="session")
def lesson(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Lesson:
    """Twelve conversations that share a 20-token start, of two turns that the tiny model answered."""
    rng = np.random.default_rng(0)
    target = Target.load(tiny_model, torch.float32, torch.device("cpu"))
    start = rng.integers(3, 500, 20)
    samples = []
    for i in range(12):
        text = torch.from_numpy(np.concatenate([start, rng.integers(3, 500, 8)]))
        text = _answer(target, text, 22)
        text = _answer(target, torch.cat([text, torch.from_numpy(rng.integers(3, 500, 10))]), 30)
        samples.append(a_sample(f"s{i}", text.numpy().astype(np.int64), [(28, 50), (60, 90)]))
    folder = tmp_path_factory.mktemp("features")
    extract(target, samples, folder)
    return Lesson(target, samples, folder, draft_vocabulary(samples, 512, 64, [2]))


def _answer(target: Target, prompt_T: torch.Tensor, tokens: int) -> torch.Tensor:
    return target.model.generate(
        prompt_T[None], max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
    )[0]
