"""Train a draft on stored features: checkpointed, resumable to the bit, bounded in time."""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from strop.serving.home import write_atomic
from strop.speculators.eagle3 import Eagle3Draft
from strop.speculators.features import load_features
from strop.speculators.optimiser import optimiser_for
from strop.speculators.samples import Sample
from strop.speculators.settings import SpeculatorSettings
from strop.speculators.steps import (
    Acceptance,
    Batch,
    anchors_of,
    distillation_loss,
    make_batch,
    measure,
    run_steps,
)

_WARMUP_SHARE = 0.05
_FINAL_RATE = 0.05
_CALIBRATION_STEPS = 8
_FITS = 0.95
"""Share of the time left that the schedule is made to fill."""
_MOMENTS = ("average", "square", "count")


@dataclass(slots=True)
class Journal:
    """Where training stands; the checkpoint holds it beside the weights and moments it belongs to."""

    step: int = 0
    total_steps: int = 0
    """Length of the schedule: all epochs, or what fits in the time."""
    spent_s: float = 0.0
    """Wall time of training, validations included."""
    validation_s: float = 0.0
    """Of one validation."""
    trained_tokens: int = 0
    loss_sum: float = 0.0
    """Of the training losses since the last validation."""
    best_length: float = 0.0
    """Predicted acceptance length of the best checkpoint, the bonus token included."""
    best_acceptance: list[float] = field(default_factory=list)
    """Accepted drafts by position per drafting step, of the best checkpoint."""
    validations_since_best: int = 0
    curve: list[dict[str, object]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Status:
    """Progress after an optimiser step."""

    done: float
    loss: float
    acceptance_length: float
    tokens_per_s: float
    left_s: float


@dataclass(frozen=True, slots=True)
class _Setup:
    draft: Eagle3Draft
    head_VH: Tensor
    features: Path
    settings: SpeculatorSettings
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.draft.fc.weight.device

    def batch(self, samples: Sequence[Sample], prompt_weight: float) -> Batch:
        features = [load_features(self.features, s) for s in samples]
        ids = self.draft.vocabulary.draft_ids()
        return make_batch(samples, features, ids, self.settings.draft_tokens, prompt_weight).to(self.device)

    def loss_and_logits(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits = run_steps(self.draft, batch)
            return distillation_loss(logits, batch, self.head_VH, self.settings.step_weight), logits


def train(
    draft: Eagle3Draft,
    head_rows_VH: Tensor,
    training: Sequence[Sample],
    validation: Sequence[Sample],
    features: Path,
    folder: Path,
    settings: SpeculatorSettings,
    dtype: torch.dtype,
    deadline_s: float,
    on_status: Callable[[Status], None] = lambda _: None,
) -> Journal:
    """Train `draft` in place and leave it at its best validation checkpoint.

    `head_rows_VH` are the target's output rows of the draft vocabulary. `folder` keeps the
    checkpoints: called again with the same arguments, training goes on as if it had never
    stopped. It ends after its epochs, when validation stops improving, or at `deadline_s`
    (of time.monotonic).
    """
    setup = _Setup(draft, head_rows_VH.to(draft.fc.weight.device, dtype), features, settings, dtype)
    optimiser = optimiser_for(draft, settings.learning_rate, dtype)
    journal = _restore(folder, draft, optimiser)
    per_epoch = max(1, len(batches_of_epoch(training, 0, settings)))
    journal.total_steps = journal.total_steps or settings.epochs * per_epoch
    started = saved = time.monotonic()
    spent_before = journal.spent_s
    stop_at = min(deadline_s, started + settings.minutes * 60 - spent_before)
    draft.train()
    if not journal.curve:
        _validate(setup, validation, journal, folder)
        journal.validation_s = time.monotonic() - started
    for step, samples in _steps(training, settings, journal.step):
        timed_out = time.monotonic() > stop_at
        if timed_out or step >= journal.total_steps or journal.validations_since_best >= settings.patience:
            break
        loss = _optimise(
            setup, optimiser, setup.batch(samples, settings.prompt_weight), step / journal.total_steps
        )
        journal.step, journal.loss_sum = step + 1, journal.loss_sum + loss
        journal.trained_tokens += sum(len(anchors_of(s, settings.prompt_weight > 0)) for s in samples)
        journal.spent_s = spent_before + time.monotonic() - started
        if journal.step == _CALIBRATION_STEPS:
            per_step_s = (journal.spent_s - journal.validation_s) / journal.step
            left_s = _FITS * (stop_at - time.monotonic()) - journal.validation_s
            fits = journal.step + int(left_s / (per_step_s + journal.validation_s / per_epoch))
            journal.total_steps = min(journal.total_steps, max(journal.step, fits))
        if journal.step % per_epoch == 0 or journal.step == journal.total_steps:
            _validate(setup, validation, journal, folder)
        if time.monotonic() - saved > settings.checkpoint_s:
            _checkpoint(folder, draft, optimiser, journal)
            saved = time.monotonic()
        rate = journal.trained_tokens / journal.spent_s
        left_s = journal.spent_s / journal.step * (journal.total_steps - journal.step)
        on_status(Status(journal.step / journal.total_steps, loss, journal.best_length, rate, left_s))
    if not journal.curve or journal.curve[-1]["step"] != journal.step:
        _validate(setup, validation, journal, folder)
    _checkpoint(folder, draft, optimiser, journal)
    _load_weights(draft, load_file(str(folder / "best.safetensors")))
    draft.eval()
    return journal


def batches_of_epoch(
    samples: Sequence[Sample], epoch: int, settings: SpeculatorSettings
) -> list[list[Sample]]:
    """A fixed shuffle of the samples that have anchors, cut where a batch reaches `batch_tokens` anchors to learn from."""
    prompts = settings.prompt_weight > 0
    sizes = [len(anchors_of(s, prompts)) if len(anchors_of(s)) else 0 for s in samples]
    batches: list[list[Sample]] = []
    room = 0
    for i in np.random.default_rng(epoch).permutation(len(samples)):
        if sizes[i]:
            if room <= 0:
                batches.append([])
                room = settings.batch_tokens
            batches[-1].append(samples[i])
            room -= sizes[i]
    return batches


def evaluate(setup: _Setup, samples: Sequence[Sample]) -> tuple[float, Acceptance]:
    """Mean loss and predicted acceptance over `samples`."""
    losses, acceptance = [], Acceptance(0, (0,) * setup.settings.draft_tokens)
    setup.draft.eval()
    with torch.no_grad():
        for group in batches_of_epoch(samples, 0, setup.settings):
            batch = setup.batch(group, 0)
            loss, logits = setup.loss_and_logits(batch)
            losses.append(float(loss))
            acceptance += measure(logits, batch)
    setup.draft.train()
    return sum(losses) / max(1, len(losses)), acceptance


def _optimise(setup: _Setup, optimiser: torch.optim.Optimizer, batch: Batch, place: float) -> float:
    for group in optimiser.param_groups:
        group["lr"] = group["base"] * _schedule(place)
    loss, _ = setup.loss_and_logits(batch)
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(setup.draft.parameters(), 1.0)
    optimiser.step()
    return loss.item()


def _validate(setup: _Setup, samples: Sequence[Sample], journal: Journal, folder: Path) -> None:
    loss, acceptance = evaluate(setup, samples)
    trained: dict[str, object] = {}
    if journal.curve:
        steps = journal.step - int(str(journal.curve[-1]["step"]))
        trained["loss"] = journal.loss_sum / max(1, steps)
    journal.curve.append(
        {
            "step": journal.step,
            **trained,
            "validation_loss": loss,
            "acceptance": acceptance.by_position,
            "acceptance_length": acceptance.length,
            "spent_s": journal.spent_s,
        }
    )
    journal.loss_sum = 0.0
    journal.validations_since_best += 1
    if acceptance.length > journal.best_length:
        journal.best_length, journal.best_acceptance = acceptance.length, acceptance.by_position
        journal.validations_since_best = 0
        _write_tensors(folder / "best.safetensors", dict(setup.draft.named_parameters()))


def _schedule(place: float) -> float:
    """Linear warm-up, then a cosine; `place` is 0 at the first step and 1 at the end."""
    if place < _WARMUP_SHARE:
        return max(0.02, place / _WARMUP_SHARE)
    falling = (place - _WARMUP_SHARE) / (1 - _WARMUP_SHARE)
    return _FINAL_RATE + (1 - _FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, falling)))


def _steps(
    samples: Sequence[Sample], settings: SpeculatorSettings, first: int
) -> Iterator[tuple[int, list[Sample]]]:
    """(optimiser step, its batch) from step `first` on, epoch after epoch."""
    step = epoch = 0
    while batches := batches_of_epoch(samples, epoch, settings):
        for batch in batches:
            if step >= first:
                yield step, batch
            step += 1
        epoch += 1


def _checkpoint(folder: Path, draft: Eagle3Draft, optimiser: torch.optim.Optimizer, journal: Journal) -> None:
    tensors: dict[str, Tensor] = {}
    for name, parameter in draft.named_parameters():
        tensors[f"weight.{name}"] = parameter
        state = optimiser.state[parameter]
        tensors |= {f"{key}.{name}": state[key] for key in _MOMENTS if key in state}
    _write_tensors(folder / "last.safetensors", tensors, {"journal": json.dumps(asdict(journal))})


def has_checkpoint(folder: Path) -> bool:
    return (folder / "last.safetensors").is_file()


def _restore(folder: Path, draft: Eagle3Draft, optimiser: torch.optim.Optimizer) -> Journal:
    path = folder / "last.safetensors"
    if not path.is_file():
        return Journal()
    with safe_open(str(path), framework="pt") as file:
        journal = Journal(**json.loads(file.metadata()["journal"]))
    tensors = load_file(str(path))
    _load_weights(
        draft, {n.removeprefix("weight."): t for n, t in tensors.items() if n.startswith("weight.")}
    )
    for name, parameter in draft.named_parameters():
        for key in _MOMENTS:
            if f"{key}.{name}" in tensors:
                value = tensors[f"{key}.{name}"]
                optimiser.state[parameter][key] = value if key == "count" else value.to(parameter.device)
    return journal


def _load_weights(draft: Eagle3Draft, tensors: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            parameter.copy_(tensors[name])


def _write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomic(path, save(whole, metadata=metadata))
