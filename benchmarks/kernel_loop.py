"""One bounded run from a profile to promotion records on this machine, and the planted cheats.

The profile is a table of operator, calls in a decode step and seconds a call: from --profile (JSON, a list
of objects with operator, calls and seconds), or measured here, of torch's operators at the demo model's
sizes. Of the operators that have a template, and with --url of all that a model may write, kernels are
proposed in order of what they could save, verified and recorded. Nothing is measured in an engine here
(benchmarks/kernel_engine.py does), so nothing is credited, and no record can be approved yet.

Keys of the last line: proposed (kernels that were handed to the verifier), verified (that passed every
check, the speed included), credited (gain shown in the engine: 0 here), cheats_planted, cheats_caught
(rejected by the check that is there for them); and besides: records, with operator, share, speedup,
predicted gain and the reason why it may not serve yet; missed, the names of cheats not caught; seconds.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from strop.kernels import promotion
from strop.kernels.build import Source, build
from strop.kernels.cheats import planted, quickly
from strop.kernels.contract import CONTRACTS, Contract, Shape
from strop.kernels.promotion import Promotions, Record
from strop.kernels.propose import Budget, Endpoint, propose
from strop.kernels.timing import overall_speedup
from strop.kernels.tuning import tune
from strop.kernels.verify import Verification
from strop.serving.home import home

console = Console(stderr=True)
TEMPLATES = Path(promotion.__file__).parent / "templates"
PARAMETERS: Mapping[str, Mapping[str, Sequence[int]]] = {
    "fused_add_rms_norm": {"LANES": (8, 32, 64), "KEEP": (1, 0)}
}
LAYERS = 30
CALLS = {"linear": 2, "fused_add_rms_norm": 2, "silu_and_mul": 1, "rope": 2}
"""Calls of each operator in one layer of the demo model, at each of its served shapes with one row."""


@dataclass(frozen=True)
class Row:
    operator: str
    calls: int
    seconds: float

    @property
    def total_s(self) -> float:
        return self.calls * self.seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="search two values of each parameter, rows 1 and 4"
    )
    parser.add_argument("--profile", type=Path, help="JSON table of measured operator times")
    parser.add_argument("--url", help="OpenAI-compatible endpoint that writes kernels besides")
    parser.add_argument("--model", default="", help="its model")
    parser.add_argument("--operators", type=int, default=2, help="how many a model is asked for (default: 2)")
    parser.add_argument("--rounds", type=int, default=6, help="questions for each operator")
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="strop-") as name:
        os.environ.setdefault("STROP_HOME", name)
        objects = home() / "kernels" / "built"
        objects.mkdir(parents=True, exist_ok=True)
        rows = _read(arguments.profile) if arguments.profile else _measured()
        shares = _shares(rows)
        candidates = _tuned(shares, objects, arguments.quick)
        if arguments.url:
            endpoint = Endpoint(arguments.url, arguments.model)
            candidates += _written(shares, endpoint, objects, arguments.operators, arguments.rounds)
        records = [found for found in (_record(each, shares, objects) for each in candidates) if found]
        cheats = planted()
        missed = [cheat.name for cheat in cheats if not cheat.caught(quickly(cheat.source, objects))]
    result = {
        "proposed": sum(len(each.tried) for each in candidates),
        "verified": sum(found.passed for each in candidates for found in each.tried),
        "credited": 0,
        "cheats_caught": len(cheats) - len(missed),
        "cheats_planted": len(cheats),
        "records": records,
        "missed": missed,
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(result))


@dataclass(frozen=True)
class Candidate:
    """What one way to propose came to for one operator."""

    contract: Contract
    by: str
    source: Source | None
    verification: Verification | None
    tried: tuple[Verification, ...]


def _tuned(shares: Mapping[str, float], objects: Path, quick: bool) -> list[Candidate]:
    made: list[Candidate] = []
    for operator in (name for name in shares if name in PARAMETERS):
        contract, parameters = CONTRACTS[operator], PARAMETERS[operator]
        if quick:
            parameters = {name: values[:2] for name, values in parameters.items()}
            contract = replace(contract, served=tuple(s for s in contract.served if s["rows"] <= 4))
        template = Source(operator, (TEMPLATES / f"{operator}.cpp").read_text())
        found = tune(template, parameters, contract, objects)
        console.print(f"{operator}: {dict(found.values)} of {len(found.trials)} choices")
        tried = tuple(trial.verification for trial in found.trials)
        chosen = " ".join(f"{name}={value}" for name, value in found.values.items())
        made.append(Candidate(contract, f"template {chosen}", found.source, found.verification, tried))
    return made


def _written(
    shares: Mapping[str, float], endpoint: Endpoint, objects: Path, operators: int, rounds: int
) -> list[Candidate]:
    made: list[Candidate] = []
    for operator, share in list(shares.items())[:operators]:
        contract = CONTRACTS[operator]
        profile = f"{operator} takes {share:.0%} of the time that these operators take in a decode step."
        found = propose(contract, endpoint, objects, profile, Budget(rounds=rounds))
        console.print(f"{operator}: {len(found.attempts)} attempts; {found.ended}")
        tried = tuple(a.verification for a in found.attempts if a.verification)
        made.append(Candidate(contract, endpoint.model, found.source, found.verification, tried))
    return made


def _record(candidate: Candidate, shares: Mapping[str, float], objects: Path) -> dict[str, object] | None:
    """Keep the promotion record of what passed; None if nothing did."""
    source, verification = candidate.source, candidate.verification
    if source is None or verification is None or verification.object is None or not verification.passed:
        return None
    contract, promotions = candidate.contract, Promotions(home())
    record = Record(
        name=source.name,
        code=source.code,
        flags=source.flags,
        contract=contract.name,
        served=tuple(dict(shape) for shape in contract.served),
        object=verification.object,
        verification=verification,
        share=shares[contract.name],
        proposed_by=candidate.by,
        proposed_at=datetime.now(UTC),
    )
    identity = promotions.propose(record, build(source, objects).read_bytes())
    return {
        "identity": identity,
        "operator": contract.name,
        "proposed_by": candidate.by,
        "share": round(record.share, 4),
        "speedup": round(overall_speedup(verification.timings), 3),
        "predicted_gain": round(record.predicted_gain, 4),
        "objections": promotions.objections(promotions.get(identity)),
    }


def _read(path: Path) -> list[Row]:
    return [
        Row(str(row["operator"]), int(row["calls"]), float(row["seconds"]))
        for row in json.loads(path.read_text())
    ]


def _measured() -> list[Row]:
    """Torch's operators at one row, timed here, best of a few hundred calls."""
    rows: list[Row] = []
    for operator, calls in CALLS.items():
        contract = CONTRACTS[operator]
        for shape in (s for s in contract.served if s["rows"] == 1):
            rows.append(Row(operator, calls * LAYERS, _seconds(contract, shape)))
    return rows


def _seconds(contract: Contract, shape: Shape) -> float:
    inputs = contract.make(shape, contract.dtype, torch.Generator().manual_seed(0))
    times: list[float] = []
    for _ in range(300):
        start = time.perf_counter()
        contract.reference(*inputs)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 4]


def _shares(rows: Sequence[Row]) -> dict[str, float]:
    """Each operator's part of the time of all, the largest first."""
    total = sum(row.total_s for row in rows)
    shares: dict[str, float] = {}
    for row in rows:
        if row.operator in CONTRACTS:
            shares[row.operator] = shares.get(row.operator, 0.0) + row.total_s / total
    ranked = dict(sorted(shares.items(), key=lambda item: -item[1]))
    table = Table("operator", "share of these operators' time", "gain if it took none")
    for operator, share in ranked.items():
        table.add_row(operator, f"{share:.1%}", f"{1 / max(1 - share, 1e-9):.2f}x")
    console.print(table)
    return ranked


if __name__ == "__main__":
    main()
