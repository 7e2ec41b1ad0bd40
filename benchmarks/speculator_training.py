"""What a draft learns from answers alone, and from answers and prompts, in the same time.

    python benchmarks/speculator_training.py LOOP [--minutes 4] [--quick]

LOOP is the folder of a loop that has learned, for example .strop/demo/loops/loop-...: its train
split is learned from and its newer held-out split is measured on, by replaying drafting over the
recorded text (docs/speculators.md, "Predicted acceptance"). Both drafts start alike and get the
same minutes, one after the other. Run it on a quiet machine.

Keys of the last line: al_answers, al_prompts (predicted acceptance length on held-out traffic,
the bonus token counted), al_ratio, steps_answers, steps_prompts (of the optimiser), and minutes.
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from strop.evals.proposal import Budget, Candidate
from strop.serving.stack import Stack
from strop.serving.traces import TraceSet
from strop.speculators.eagle3 import Eagle3Draft, load_draft
from strop.speculators.features import Target, compute_device, compute_dtype, extract, load_features
from strop.speculators.learner import SpeculatorLearner
from strop.speculators.samples import Sample, samples_from_traces
from strop.speculators.settings import SpeculatorSettings
from strop.speculators.steps import Acceptance, anchors_of, make_batch, measure, run_steps

ARMS = {"answers": 0.0, "prompts": SpeculatorSettings().prompt_weight}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("loop", type=Path, help="folder of a loop, with train/ and heldout/ in it")
    parser.add_argument("--minutes", type=float, default=4.0, help="of training, for each of the two")
    parser.add_argument("--quick", action="store_true", help="1 minute of training each")
    arguments = parser.parse_args()
    minutes = 1.0 if arguments.quick else arguments.minutes
    began = time.monotonic()
    champion = _champion(arguments.loop)
    work = Path(tempfile.mkdtemp(prefix="speculator-"))
    try:
        rows = {name: _learn(champion, arguments.loop, work, name, minutes) for name in ARMS}
    finally:
        shutil.rmtree(work, ignore_errors=True)
    table = Table("learned from", "steps", "acceptance length, held out", "by position")
    for name, row in rows.items():
        shares = " ".join(f"{share:.2f}" for share in row["acceptance"].by_position)
        table.add_row(name, str(row["steps"]), f"{row['acceptance'].length:.3f}", shares)
    Console().print(table)
    lengths = {name: row["acceptance"].length for name, row in rows.items()}
    last = {f"al_{name}": round(length, 3) for name, length in lengths.items()}
    last |= {f"steps_{name}": row["steps"] for name, row in rows.items()}
    last |= {"al_ratio": round(lengths["prompts"] / lengths["answers"], 3)}
    print(json.dumps(last | {"minutes": round((time.monotonic() - began) / 60, 1)}))


def _champion(loop: Path) -> Stack:
    """The Stack that served the loop's traffic."""
    served = next(iter(TraceSet(loop / "train"))).stack
    return Stack.load(loop.parents[1] / "stacks" / served[:16] / "stack.json")


def _learn(champion: Stack, loop: Path, work: Path, name: str, minutes: float) -> dict:
    folder = work / name
    folder.mkdir()
    # The hidden states of the target are the same for both.
    (work / "features").mkdir(exist_ok=True)
    (folder / "features").symlink_to(work / "features")
    settings = SpeculatorSettings(minutes=minutes, prompt_weight=ARMS[name])
    plain = champion.model_copy(update={"speculator": None})
    budget = Budget(folder, 60 * (3 * minutes + 20))
    console = Console(stderr=True)
    with console.status(name) as status:
        found = SpeculatorLearner(settings).propose(
            plain,
            TraceSet(loop / "train"),
            budget,
            lambda done, text: status.update(f"{name} {done:.0%} {text}"),
        )
    if not isinstance(found, Candidate) or not found.stack.speculator or not found.stack.speculator.weights:
        raise SystemExit(f"Nothing was learned from {name}: {getattr(found, 'reason', found)}")
    target = Target.load(Path(champion.model.location), compute_dtype(), compute_device())
    draft = load_draft(Path(found.stack.speculator.weights.location), target.embeddings.float())
    heldout = samples_from_traces(TraceSet(loop / "heldout"), settings.max_sequence_tokens)
    extract(target, heldout, work / "heldout")
    curve = found.notes["curve"]
    steps = curve[-1]["step"] if isinstance(curve, list) else 0
    return {"steps": steps, "acceptance": _accepted(draft, heldout, work / "heldout", settings.draft_tokens)}


@torch.no_grad()
def _accepted(draft: Eagle3Draft, heldout: list[Sample], features: Path, steps: int) -> Acceptance:
    total = Acceptance(0, (0,) * steps)
    for sample in heldout:
        if len(anchors_of(sample)):
            stored = [load_features(features, sample)]
            batch = make_batch([sample], stored, draft.vocabulary.draft_ids(), steps)
            total += measure(run_steps(draft, batch), batch)
    return total


if __name__ == "__main__":
    main()
