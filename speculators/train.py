"""Train a draft on stored features: checkpointed, resumable to the bit, bounded in time."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save
from torch import Tensor

from strop.serving.home import write_atomic
from strop.speculators.eagle3 import Eagle3Draft
from strop.speculators.features import load_features
from strop.speculators.samples import Sample
from strop.speculators.settings import SpeculatorSettings
from strop.speculators.steps import Acceptance, anchors_of, distillation_loss, make_batch, measure, run_steps, soft_targets

_WARMUP_SHARE = 0.05
_CALIBRATION_STEPS = 8


@dataclass(slots=True)
class Journal:
    """Where training stands; the weights and the optimiser's moments lie beside it."""

    step: int = 0
    total_steps: int = 0
    spent_s: float = 0.0
    trained_tokens: int = 0
    best_length: float = 0.0
    validations_since_best: int = 0
    curve: list[dict[str, object]] = field(default_factory=list)
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Status:
    """One line of progress."""

    done: float
    loss: float
    acceptance_length: float
    tokens_per_s: float
    left_s: float


def batches_of_epoch(samples: Sequence[Sample], epoch: int, batch_tokens: int) -> list[list[Sample]]:
    """A fixed shuffle of the samples that have anchors, cut into batches of about `batch_tokens` anchors."""
    usable = [s for s in samples if len(anchors_of(s.output_T))]
    order = np.random.default_rng(epoch).permutation(len(usable))
    batches: list[list[Sample]] = [[]]
    size = 0
    for i in order:
        if size >= batch_tokens:
            batches.append([])
            size = 0
        batches[-1].append(usable[i])
        size += len(anchors_of(usable[i].output_T))
    return batches if usable else []


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
    checkpoints: called again with the same arguments, training continues as if it had never
    stopped. Ends after its epochs, when validation stops improving, or before `deadline_s`
    (time.monotonic). Under torch.distributed each rank takes every world-size-th batch.
    """
    device = draft.fc.weight.device
    optimiser = torch.optim.AdamW(draft.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    journal = _restore(folder, draft, optimiser)
    draft_ids = draft.vocabulary.draft_ids()
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    head = head_rows_VH.to(device, dtype)

    def loaded(group: Sequence[Sample]):
        return make_batch(group, [load_features(features, s) for s in group], draft_ids, settings.draft_tokens).to(device)

    def validate() -> tuple[float, Acceptance]:
        groups = batches_of_epoch(validation or training[:8], 0, settings.batch_tokens)
        total, losses = Acceptance(0, (0,) * settings.draft_tokens), []
        draft.eval()
        with torch.no_grad(), autocast:
            for group in groups:
                batch = loaded(group)
                logits = run_steps(draft, batch)
                losses.append(float(distillation_loss(logits, batch, soft_targets(batch, head), settings.step_weight)))
                total = total + measure(logits, batch)
        draft.train()
        return sum(losses) / max(1, len(losses)), total

    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    steps_per_epoch = math.ceil(len(batches_of_epoch(training, 0, settings.batch_tokens)) / world)
    planned = settings.epochs * steps_per_epoch
    started, before_s, saved = time.monotonic(), journal.spent_s, time.monotonic()
    stop_at = min(deadline_s, started + settings.minutes * 60 - before_s)
    journal.total_steps = journal.total_steps or planned
    validate_every = max(1, steps_per_epoch)
    draft.train()
    loss_sum = 0.0
    for step, group in _steps(training, settings, journal.step, rank, world):
        if journal.finished or step >= journal.total_steps or time.monotonic() > stop_at:
            break
        for parameters in optimiser.param_groups:
            parameters["lr"] = settings.learning_rate * _schedule(step, journal.total_steps)
        with autocast:
            batch = loaded(group)
            loss = distillation_loss(run_steps(draft, batch), batch, soft_targets(batch, head), settings.step_weight)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        _average_gradients(draft, world)
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimiser.step()
        journal.step, journal.trained_tokens = step + 1, journal.trained_tokens + batch.tokens * world
        journal.spent_s = before_s + time.monotonic() - started
        loss_sum += loss.item()
        if journal.step == _CALIBRATION_STEPS and world == 1:
            fits = int((stop_at - started) / (journal.spent_s / journal.step) * 0.9)
            journal.total_steps = max(_CALIBRATION_STEPS, min(planned, fits))
        if journal.step % validate_every == 0 or journal.step == journal.total_steps:
            validation_loss, acceptance = validate()
            journal.curve.append(
                {
                    "step": journal.step,
                    "loss": loss_sum / max(1, journal.step % validate_every or validate_every),
                    "validation_loss": validation_loss,
                    "acceptance": acceptance.by_position,
                    "acceptance_length": acceptance.length,
                    "spent_s": journal.spent_s,
                }
            )
            loss_sum = 0.0
            if acceptance.length > journal.best_length:
                journal.best_length, journal.validations_since_best = acceptance.length, 0
                _write_tensors(folder / "best.safetensors", dict(draft.named_parameters()))
            else:
                journal.validations_since_best += 1
            journal.finished = journal.validations_since_best >= settings.patience
        if time.monotonic() - saved > settings.checkpoint_s:
            _checkpoint(folder, draft, optimiser, journal)
            saved = time.monotonic()
        rate = journal.trained_tokens / max(journal.spent_s, 1e-9)
        left = journal.spent_s / journal.step * (journal.total_steps - journal.step)
        on_status(Status(journal.step / journal.total_steps, loss.item(), journal.best_length, rate, left))
    return journal


def _schedule(step: int, total: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    warmup = max(1, round(total * _WARMUP_SHARE))
    if step < warmup:
        return (step + 1) / warmup
    place = (step - warmup) / max(1, total - warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, place)))


def _steps(
    samples: Sequence[Sample], settings: SpeculatorSettings, first: int, rank: int, world: int
) -> Iterator[tuple[int, list[Sample]]]:
    """(optimiser step, this rank's batch) from `first` on, epoch after epoch."""
    step = 0
    for epoch in range(1 << 30):
        groups = batches_of_epoch(samples, epoch, settings.batch_tokens)
        for start in range(0, len(groups), world):
            if step >= first:
                yield step, groups[min(start + rank, len(groups) - 1)]
            step += 1


def _average_gradients(draft: Eagle3Draft, world: int) -> None:
    if world > 1:
        for parameter in draft.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world


def _checkpoint(folder: Path, draft: Eagle3Draft, optimiser: torch.optim.Optimizer, journal: Journal) -> None:
    """Weights, moments and journal in one file, so that they can never disagree."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in draft.named_parameters():
        tensors[f"weight.{name}"] = parameter.detach()
        for key, value in optimiser.state[parameter].items():
            tensors[f"{key}.{name}"] = value
    _write_tensors(folder / "last.safetensors", tensors, {"journal": json.dumps(asdict(journal))})


def _restore(folder: Path, draft: Eagle3Draft, optimiser: torch.optim.Optimizer) -> Journal:
    path = folder / "last.safetensors"
    if not path.is_file():
        return Journal()
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        journal = Journal(**json.loads(file.metadata()["journal"]))
    tensors = load_file(str(path), device=str(draft.fc.weight.device))
    for name, parameter in draft.named_parameters():
        with torch.no_grad():
            parameter.copy_(tensors[f"weight.{name}"])
        optimiser.state[parameter] = {
            key: tensors[f"{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{name}" in tensors
        }
    return journal


def _write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomic(path, save(whole, metadata=metadata))
