"""Suites: which parts an evaluation asks, how long each may take, and the gates that decide.

A suite is a YAML file: `quick.yaml`, `full.yaml` and `lossless.yaml` beside this file, or your own. Parts are named
where they are registered and imported when a suite asks for them.
"""

import hashlib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError

from strop.evals.gates import Gate
from strop.evals.observation import EvalError, Metric, Part
from strop.serving.settings import Section
from strop.serving.stack import canonical_json

PARTS = {
    "fidelity": "strop.evals.fidelity:Fidelity",
    "behaviour": "strop.evals.behaviour:Behaviour",
    "failures": "strop.evals.failures:Failures",
    "regressions": "strop.evals.regressions:Regressions",
    "speed": "strop.evals.speed:Speed",
}
SHIPPED = ("quick", "full", "lossless")
SECONDS = "seconds"
DEFAULT_SECONDS = 600.0


class SuiteError(EvalError):
    """A suite that cannot be used; the message names file, key and way out."""


class Suite(Section):
    """What a suite's file holds."""

    parts: dict[str, dict[str, Any]] = Field(min_length=1)
    """Options of each part by its name, in the order they run. `seconds` is the time a part may take."""
    gates: tuple[Gate, ...] | None = None
    """None takes those of the full suite whose metrics these parts have."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A part with its options, and the seconds after which it is ended with what it has seen."""

    part: Part
    seconds: float
    plans: bool
    """Whether the part knows its seconds and plans with them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A suite that was checked: all it takes to run it."""

    name: str
    parts: tuple[Planned, ...]
    gates: tuple[Gate, ...]
    digest: str
    """SHA-256 of the parts and their options; gates do not enter, so that they can be decided anew."""

    @property
    def metrics(self) -> dict[str, Metric]:
        return _metrics([planned.part for planned in self.parts])


def load(suite: str | Path) -> Plan:
    """The plan of a shipped suite by its name, or of a suite's file.

    Raises SuiteError for a file that cannot be read, an unknown key, part or metric, or a bad value.
    """
    path = Path(__file__).with_name(f"{suite}.yaml") if suite in SHIPPED else Path(suite)
    name = str(suite) if suite in SHIPPED else path.name
    content = _read(path, name)
    wanted = _validated(Suite, content, name)
    parts = tuple(_planned(part, options, name, path.parent) for part, options in wanted.parts.items())
    metrics = _metrics([planned.part for planned in parts])
    gates = wanted.gates
    if gates is None:
        defaults = _validated(Suite, _read(Path(__file__).with_name("full.yaml"), "full"), "full").gates or ()
        gates = tuple(gate for gate in defaults if gate.metric in metrics)
    for number, gate in enumerate(gates):
        if gate.metric not in metrics:
            raise SuiteError(
                f"{name}: gates.{number}: no part of this suite measures {gate.metric!r}; its parts measure "
                f"{', '.join(sorted(metrics))}."
            )
    described = {planned.part.name: _options(planned.part) for planned in parts}
    digest = hashlib.sha256(
        canonical_json([described, [[p.part.name, p.seconds] for p in parts]])
    ).hexdigest()
    return Plan(name, parts, gates, digest)


def part_class(name: str, suite: str = "suite") -> Any:
    """The class of a registered part. Raises SuiteError if there is none of that name."""
    if name not in PARTS:
        raise SuiteError(f"{suite}: {name!r} is not a part of an evaluation; there are {', '.join(PARTS)}.")
    module, _, attribute = PARTS[name].partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise SuiteError(
            f"{suite}: the part {name!r} cannot be loaded ({error}). Leave it out of the suite."
        ) from None


def text(suite: str | Path) -> str:
    """The file of a suite, to begin one's own from. Raises SuiteError."""
    load(suite)
    path = Path(__file__).with_name(f"{suite}.yaml") if suite in SHIPPED else Path(suite)
    return path.read_text(encoding="utf-8")


def describe(suite: str | Path) -> str:
    """The suite as a person reads it: its parts with their options and metrics, then its gates."""
    plan = load(suite)
    lines = [f"Suite {plan.name}"]
    for planned in plan.parts:
        lines.append(f"\n{planned.part.name}, at most {planned.seconds:g} s")
        fields = type(planned.part).model_fields if isinstance(planned.part, BaseModel) else {}
        for option, field in fields.items():
            lines.append(f"  {option}: {getattr(planned.part, option)!r}")
            lines += [f"      {line}" for line in (field.description or "").splitlines()]
        lines.append("  measures:")
        for metric in planned.part.metrics:
            lines.append(f"    {metric.name}: the candidate's {metric.words}{_unit(metric)}")
    lines.append("\nGates; every one must be shown, those of each slice must not be refuted")
    lines += [
        f"  {gate.words} ({gate.confidence:.0%}, {gate.min_samples} sessions or more)" for gate in plan.gates
    ]
    return "\n".join(lines)


def _unit(metric: Metric) -> str:
    what = {"level": "", "difference": ", difference from the reference", "ratio": ", ratio to the reference"}
    return f"{f' in {metric.unit}' if metric.unit else ''}{what[metric.compare]}; {metric.better} is better"


def _planned(name: str, options: dict[str, Any], suite: str, near: Path) -> Planned:
    cls = part_class(name, suite)
    known = getattr(cls, "model_fields", {})
    seconds = options.get(SECONDS, DEFAULT_SECONDS)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise SuiteError(f"{suite}: parts.{name}.seconds: must be a number of seconds (got {seconds!r}).")
    # A part that can plan its time does so; one that cannot is ended.
    own = {key: value for key, value in options.items() if key != SECONDS or SECONDS in known}
    part: Any = _validated(cls, own, suite, f"parts.{name}.")
    if known:
        # A relative path is relative to the file that names it.
        paths = {
            k: near / v
            for k, v in dict(part).items()
            if isinstance(v, Path) and k in own and not v.is_absolute()
        }
        part = part.model_copy(update=paths)
    return Planned(part, float(seconds), SECONDS in known)


def _options(part: Part) -> Any:
    return part.model_dump(mode="json") if isinstance(part, BaseModel) else repr(part)


def _metrics(parts: Sequence[Part]) -> dict[str, Metric]:
    """By name; several parts may have the same one, `error`, and must then mean the same by it."""
    found: dict[str, Metric] = {}
    for part in parts:
        for metric in part.metrics:
            first = found.setdefault(metric.name, metric)
            if (first.unit, first.better, first.compare) != (metric.unit, metric.better, metric.compare):
                raise SuiteError(f"Two parts mean different things by the metric {metric.name!r}.")
    return found


def _read(path: Path, name: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SuiteError(
            f"There is no suite {name}: {error.strerror}. Give {', '.join(SHIPPED)}, or a suite's YAML file "
            f"({path})."
        ) from None
    except UnicodeDecodeError:
        raise SuiteError(f"{name} is not UTF-8 text.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise SuiteError(f"{name}{where} is not valid YAML: {getattr(error, 'problem', error)}.") from None
    if not isinstance(content, dict):
        raise SuiteError(f"{name} must hold the keys `parts` and `gates`.")
    # `speed:` alone is a part with its defaults.
    if isinstance(content.get("parts"), dict):
        content["parts"] = {part: options or {} for part, options in content["parts"].items()}
    return content


def _validated(model: Any, content: Any, name: str, within: str = "") -> Any:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problems = "; ".join(_explain(e, within) for e in error.errors())  # type: ignore[arg-type]
        raise SuiteError(f"{name}: {problems}. `strop eval suites` shows every key.") from None


def _explain(error: dict[str, Any], within: str) -> str:
    key = within + ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{key} is not a known key"
    if error["type"] == "value_error":
        return f"{key}: {error['ctx']['error']}"
    return f"{key}: {error['msg'].lower()} (got {str(error['input'])[:200]!r})"
