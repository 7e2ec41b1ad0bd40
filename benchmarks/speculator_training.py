"""Train a draft on recorded traffic, then measure it in the engine on held-out traffic.

    python benchmarks/speculator_training.py MODEL TRAIN HELDOUT [--minutes 8] [--work FOLDER]

MODEL is a model folder, TRAIN and HELDOUT are folders of trace files. Prints JSON: the time of
each phase, predicted and counted acceptance, and decode tokens/s with and without the draft, one
request at a time.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import httpx

from strop.evals.proposal import Budget, Candidate
from strop.serving.engine import cores_of_replica, engine_command, engine_environment
from strop.serving.process import Child, free_port
from strop.serving.stack import Stack
from strop.serving.traces import Trace, TraceSet
from strop.speculators.learner import SpeculatorLearner
from strop.speculators.settings import SpeculatorSettings
from strop.speculators.steps import Acceptance

_ENGINE_ARGS: dict[str, str | int | float | bool | None] = {
    "max-model-len": 4096,
    "max-num-seqs": 16,
    "enforce-eager": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("train", type=Path)
    parser.add_argument("heldout", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--work", type=Path, default=Path(tempfile.mkdtemp(prefix="speculator-")))
    options = parser.parse_args()
    os.environ.setdefault("STROP_HOME", str(options.work / "home"))
    champion = Stack.build(options.model, "benchmark", engine_args=_ENGINE_ARGS)
    learner = SpeculatorLearner(SpeculatorSettings(minutes=options.minutes))
    budget = Budget(options.work / "learner", seconds=3600)
    candidate = learner.propose(champion, TraceSet(options.train), budget, _print_progress())
    if not isinstance(candidate, Candidate):
        raise SystemExit(candidate.reason)
    heldout = [t for t in TraceSet(options.heldout) if t.output_token_ids][: options.requests]
    plain = serve(champion, heldout, options.work)
    drafted = serve(candidate.stack, heldout, options.work)
    print(
        json.dumps(
            {
                "hardware": champion.hardware.model_dump(),
                "engine": champion.engine.model_dump(),
                "notes": candidate.notes,
                "cost_s": candidate.cost_s,
                "plain": plain,
                "with_draft": drafted,
                "speedup": drafted["decode_tokens_per_s"] / plain["decode_tokens_per_s"],
            },
            indent=2,
        )
    )


def serve(stack: Stack, heldout: list[Trace], work: Path) -> dict:
    """Answer the prompts one after another, greedily and as long as recorded; statistics of the server."""
    port = free_port()
    environment = engine_environment(stack, 1, cores_of_replica(0, 1), None)
    log = work / f"engine-{stack.fingerprint[:8]}.log"
    child = Child.start("engine", engine_command(stack, "127.0.0.1", port, capture=False), log, environment)
    rates: list[float] = []
    counted, same = Acceptance(0, (0,) * 3), 0
    tokens, seconds = 0, 0.0
    try:
        child.wait_until_answers(f"http://127.0.0.1:{port}/health", 600)
        for number, trace in enumerate(heldout):
            body = {
                "model": stack.served_model, "prompt": trace.prompt_token_ids, "temperature": 0,
                "max_tokens": len(trace.output_token_ids), "return_token_ids": True,
            }  # fmt: skip
            url = f"http://127.0.0.1:{port}/v1/completions"
            answer = httpx.post(url, json=body, timeout=600).raise_for_status().json()
            metrics, ids = answer["metrics"], answer["choices"][0]["token_ids"]
            same += ids == trace.output_token_ids
            if number >= 2 and len(ids) > 8:
                tokens += len(ids) - 1
                seconds += metrics["generation_time_ms"] / 1000
                rates.append((len(ids) - 1) / metrics["generation_time_ms"] * 1000)
            if counts := metrics.get("speculative_decoding"):
                runs = counts["acceptance_histogram"]
                accepted = tuple(sum(runs[j + 1 :]) for j in range(3))
                counted += Acceptance(counts["num_spec_steps"], accepted)
    finally:
        child.stop()
    return {
        "requests": len(heldout),
        "same_as_recorded": same,
        "decode_tokens_per_s": tokens / seconds,
        "decode_tokens_per_s_median": statistics.median(rates),
        "acceptance": counted.by_position,
        "acceptance_length": counted.length,
        "drafting_steps": counted.steps,
    }


def _print_progress():
    last = 0.0

    def show(done: float, text: str) -> None:
        nonlocal last
        if time.monotonic() - last > 10:
            last = time.monotonic()
            print(f"{done:4.0%} {text}", flush=True)

    return show


if __name__ == "__main__":
    main()
