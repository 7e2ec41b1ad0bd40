"""The learner: traffic in, a Stack with a better draft out."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from strop.evals.proposal import Budget, Candidate, Declined, Progress
from strop.serving.home import write_atomic
from strop.serving.stack import Artifact, Speculator, Stack
from strop.serving.traces import TraceSet
from strop.speculators.eagle3 import DraftConfig, DraftError, Eagle3Draft, load_draft
from strop.speculators.features import (
    Target,
    compute_device,
    compute_dtype,
    extract,
    feature_path,
    load_features,
)
from strop.speculators.samples import (
    Sample,
    draft_vocabulary,
    mark_shared,
    samples_from_traces,
    split_validation,
)
from strop.speculators.settings import SpeculatorSettings
from strop.speculators.start import closed_form_start
from strop.speculators.steps import Batch, anchors_of, make_batch
from strop.speculators.train import Status, has_checkpoint, train

SUPPORTED = ("LlamaForCausalLM",)
_FEATURE_SHARE = 0.4
_TRAINING_SHARE = 0.35
_START_TOKENS = 50_000
_PROVENANCE = "training.json"


@dataclass(frozen=True, slots=True)
class SpeculatorLearner:
    """Trains an EAGLE-3 draft on the champion's own answers."""

    settings: SpeculatorSettings = field(default_factory=SpeculatorSettings)
    name: str = "speculator"

    def propose(
        self, champion: Stack, traces: TraceSet, budget: Budget, progress: Progress
    ) -> Candidate | Declined:
        """Hidden states of the target, training, and the draft's folder in `budget.folder`.

        Called again with the same folder it resumes: features and checkpoints are kept there.
        """
        started = time.monotonic()
        model = Path(champion.model.location)
        config = json.loads((model / "config.json").read_text())
        samples = _newest(samples_from_traces(traces, self.settings.max_sequence_tokens), self.settings)
        if reason := self._refusal(champion, config, samples, traces):
            return Declined(self.name, reason)
        progress(0.0, "loading the target")
        target = Target.load(model, compute_dtype(), compute_device())
        features = budget.folder / "features" / champion.model.weights_digest[:16]
        positions = extract(
            target,
            samples,
            features,
            lambda done, total: progress(
                _FEATURE_SHARE * done / total, f"hidden states of the target: {done} of {total} conversations"
            ),
            lambda: budget.left_s > _TRAINING_SHARE * budget.seconds,
        )
        features_s = time.monotonic() - started
        training, validation = (
            [s for s in part if feature_path(features, s).is_file()]
            for part in split_validation(samples, self.settings.validation_share)
        )
        if not validation or not any(len(anchors_of(s)) for s in training):
            return Declined(
                self.name, "the time ran out before the hidden states of the traffic were computed"
            )
        training = mark_shared(training)
        special = _special_tokens(model, config)
        vocabulary = draft_vocabulary(training, config["vocab_size"], self.settings.draft_vocab, special)
        checkpoints = budget.folder / "checkpoints"
        torch.manual_seed(0)
        form = DraftConfig.for_target(config, len(vocabulary.target_ids_V), target.aux_layers)
        draft = Eagle3Draft(form, target.embeddings.float(), vocabulary).to(target.embeddings.device)
        draft.initialise(target)
        if not has_checkpoint(checkpoints) and not _continue_from(champion, draft):
            progress(_FEATURE_SHARE, "fitting the start of the draft")
            closed_form_start(draft, _start_batches(draft, training, features, self.settings))
        journal = train(
            draft,
            target.head[torch.from_numpy(vocabulary.target_ids_V).to(target.head.device)],
            training,
            validation,
            features,
            checkpoints,
            self.settings,
            compute_dtype(),
            time.monotonic() + 0.95 * budget.left_s,
            lambda status: progress(_FEATURE_SHARE + (1 - _FEATURE_SHARE) * status.done, _line(status)),
        )
        if journal.best_length <= 1:
            return Declined(
                self.name, "the draft predicted no token that the target said; more traffic is needed"
            )
        folder = budget.folder / "draft"
        draft.save(folder, _engine_dtype(champion, config))
        write_atomic(
            folder / _PROVENANCE,
            json.dumps({"traces": traces.digest, "target": champion.model.weights_digest}),
        )
        notes: dict[str, object] = {
            "curve": journal.curve,
            "predicted_acceptance": journal.best_acceptance,
            "predicted_acceptance_length": journal.best_length,
            "train_tokens": sum(s.output_tokens for s in training),
            "validation_tokens": sum(s.output_tokens for s in validation),
            "trained_tokens": journal.trained_tokens,
            "draft_vocab": len(vocabulary.target_ids_V),
            "vocab_coverage": vocabulary.coverage(validation),
            "parameters": sum(p.numel() for p in draft.parameters()),
            "features_s": features_s,
            "feature_positions": positions,
            "training_s": journal.spent_s,
        }
        speculator = Speculator(
            method="eagle3", draft_tokens=self.settings.draft_tokens, weights=Artifact.of(folder)
        )
        return Candidate(
            stack=champion.model_copy(update={"speculator": speculator}),
            learner=self.name,
            expects={"acceptance_length": journal.best_length},
            cost_s=time.monotonic() - started,
            notes=notes,
        )

    def _refusal(
        self, champion: Stack, config: dict[str, Any], samples: list[Sample], traces: TraceSet
    ) -> str | None:
        architecture = (config.get("architectures") or ["an unnamed architecture"])[0]
        if architecture not in SUPPORTED:
            return f"{architecture} is not supported; drafts are trained for {', '.join(SUPPORTED)}"
        if champion.quantization and "quantization_config" in config:
            return f"the weights are quantised ({champion.quantization}); train the draft on the unquantised model"
        have, need = sum(s.output_tokens for s in samples), self.settings.min_output_tokens
        if have < need:
            return f"only {have} output tokens of {need} needed"
        if len({s.session for s in samples}) < 2:
            return "all traffic is one session, so there is nothing to validate on"
        if _trained_on(champion) == traces.digest:
            return "the champion's draft was trained on the same traffic"
        return None


def _continue_from(champion: Stack, draft: Eagle3Draft) -> bool:
    """Whether the champion has a draft of this form, which is then taken over."""
    previous = champion.speculator.weights if champion.speculator else None
    if previous is None:
        return False
    try:
        draft.warm_start(load_draft(Path(previous.location), draft.embeddings_VH))
    except DraftError:
        return False
    return True


def _start_batches(
    draft: Eagle3Draft, training: Sequence[Sample], features: Path, settings: SpeculatorSettings
) -> list[Batch]:
    batches: list[Batch] = []
    tokens = 0
    for sample in training:
        if tokens < _START_TOKENS and len(anchors_of(sample)):
            batch = make_batch(
                [sample],
                [load_features(features, sample)],
                draft.vocabulary.draft_ids(),
                settings.draft_tokens,
                settings.prompt_weight,
            )
            batches.append(batch.to(draft.fc.weight.device))
            tokens += batch.anchors
    return batches


def _newest(samples: list[Sample], settings: SpeculatorSettings) -> list[Sample]:
    """The last samples that together stay within `max_output_tokens`."""
    kept: list[Sample] = []
    left = settings.max_output_tokens
    for sample in reversed(samples):
        left -= sample.output_tokens
        if left < 0:
            break
        kept.append(sample)
    return kept[::-1]


def _special_tokens(model: Path, config: dict[str, Any]) -> list[int]:
    """Ids that end an answer or structure a conversation: always worth a place in the draft vocabulary."""
    path = model / "generation_config.json"
    sources = [config, json.loads(path.read_text()) if path.is_file() else {}]
    ids: list[int] = []
    for source in sources:
        end = source.get("eos_token_id")
        ids += end if isinstance(end, list) else [end] if end is not None else []
    return [*ids, *AutoTokenizer.from_pretrained(model, local_files_only=True).all_special_ids]


def _engine_dtype(champion: Stack, config: dict[str, Any]) -> torch.dtype:
    name = champion.engine.dtype
    if name == "auto":
        name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]


def _trained_on(champion: Stack) -> str | None:
    """Digest of the traffic that the champion's draft was trained on, where it is one of ours."""
    weights = champion.speculator.weights if champion.speculator else None
    path = Path(weights.location) / _PROVENANCE if weights else None
    return json.loads(path.read_text()).get("traces") if path and path.is_file() else None


def _line(status: Status) -> str:
    return (
        f"loss {status.loss:.2f}, acceptance length {status.acceptance_length:.2f}, "
        f"{status.tokens_per_s:.0f} tokens/s, {status.left_s:.0f} s left"
    )
