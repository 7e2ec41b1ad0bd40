"""strop.yaml: one section a room, every field documented, unknown keys refused."""

from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError

from strop.evals.settings import CostSettings, EvalSettings
from strop.pipelines.drift import Drift
from strop.serving.settings import Section, ServingSettings
from strop.speculators.settings import SpeculatorSettings


class ConfigError(ValueError):
    """A strop.yaml that cannot be used; the message names file, key and way out."""


class LoopSettings(Section):
    heldout_share: float = Field(default=0.2, gt=0, lt=1)
    """Newest share of sessions that is kept from learners and judged on."""
    min_requests: int = Field(default=40, ge=2)
    """With fewer new requests than this, a loop ends at `collect`."""
    budget_minutes: float = Field(default=30, gt=0)
    """Longest time that all learners of one loop may take."""


class DriftSettings(Section):
    reference_sessions: int = Field(default=200, ge=20)
    """First sessions of a champion, which later ones are compared with."""
    sessions_to_false_alarm: float = Field(default=1_000_000, ge=1)
    """While nothing drifts, an alarm comes within n sessions with at most the probability n / this; more is later."""
    hold_sessions: int = Field(default=20, ge=0)
    """Sessions that an alarm must last before it starts a loop."""
    min_acceptance_drop: float = Field(default=0.05, ge=0, lt=1)
    """A smaller fall of acceptance length, as a share, starts no loop."""
    budget_minutes_per_day: float = Field(default=120, gt=0)
    """Minutes that loops may take in 24 hours, however they were started."""

    def drift(self) -> Drift:
        return Drift(
            self.reference_sessions,
            self.sessions_to_false_alarm,
            self.hold_sessions,
            self.min_acceptance_drop,
        )


class Settings(Section):
    model: str = "model"
    """Folder of the model to serve: config.json, tokenizer and *.safetensors, as `save_pretrained` writes it."""
    experiment: str = "strop"
    """MLflow experiment of the loops and name of the registered model whose versions are Stacks."""
    loop: LoopSettings = LoopSettings()
    """When a loop has enough to learn from, and what it may spend."""
    drift: DriftSettings = DriftSettings()
    """When `strop loop watch` starts a loop."""
    serving: ServingSettings = ServingSettings()
    """The fleet, capture and the canary."""
    speculators: SpeculatorSettings = SpeculatorSettings()
    """The learner of draft models."""
    evals: EvalSettings = EvalSettings()
    """The judge."""
    cost: CostSettings = CostSettings()
    """Prices for `strop cost` and the reports of `strop eval`."""

    @property
    def model_path(self) -> Path:
        return Path(self.model).expanduser().absolute()


def load_settings(path: Path | None) -> Settings:
    """Read a configuration file; None means ./strop.yaml if it exists, else the defaults.

    Raises ConfigError for a missing file, broken YAML, an unknown key or a value out of range.
    """
    if path is None:
        path = Path("strop.yaml")
        if not path.is_file():
            return Settings()
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{where} is not valid YAML: {getattr(error, 'problem', error)}.") from None
    if not isinstance(content or {}, dict):
        raise ConfigError(f"{path} must hold keys and values, not {type(content).__name__}.")
    try:
        settings = Settings.model_validate(content or {})
    except ValidationError as error:
        problems = "; ".join(_explain(e) for e in error.errors())  # type: ignore[arg-type]
        raise ConfigError(f"{path}: {problems}. `strop config` shows every key.") from None
    # A relative path is relative to the file that names it.
    near = {
        name: str((path.parent / Path(value).expanduser()).absolute())
        for name in ("keys_file", "tls_certificate")
        if (value := getattr(settings.serving.gateway, name))
    }
    gateway = settings.serving.gateway.model_copy(update=near)
    return settings.model_copy(
        update={
            "model": str((path.parent / Path(settings.model).expanduser()).absolute()),
            "serving": settings.serving.model_copy(update={"gateway": gateway}),
        }
    )


def _explain(error: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{key} is not a known key"
    return f"{key}: {error['msg'].lower()} (got {error['input']!r})"


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def describe(model: type[BaseModel] = Settings, indent: int = 0) -> str:
    """The whole configuration as commented YAML with its defaults."""
    lines = []
    pad = "  " * indent
    for name, field in model.model_fields.items():
        lines += [f"{pad}# {line}" for line in (field.description or "").splitlines()]
        default = field.get_default(call_default_factory=True)
        section = next((a for a in get_args(field.annotation) if _is_section(a)), None)
        if default is None and section:
            # Its keys, to be uncommented by who wants it.
            keys = describe(section, indent + 1).splitlines()
            lines += [f"{pad}{name}: null", *(f"{pad}# {line.removeprefix(pad)}" for line in keys)]
        elif isinstance(default, BaseModel):
            lines += [f"{pad}{name}:", describe(type(default), indent + 1)]
        else:
            shown = default.model_dump() if isinstance(default, BaseModel) else default
            text = yaml.safe_dump({name: shown}, default_flow_style=False, sort_keys=False).rstrip()
            lines += [f"{pad}{line}" for line in text.splitlines()]
        if indent == 0:
            lines.append("")
    return "\n".join(lines)
