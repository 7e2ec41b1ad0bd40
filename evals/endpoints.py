"""A running server that nobody told us about, as one side of an evaluation."""

from pathlib import Path
from typing import Any

import httpx

from strop.evals.observation import Arm, EvalError, Side
from strop.serving.client import auth_headers
from strop.serving.hardware import Hardware
from strop.serving.stack import Artifact, Engine, Stack, StackError

UNKNOWN = "unknown"
ASSUMED_DTYPE = "bfloat16"
"""Of a server that does not say: the one whose arithmetic is the noisiest, so that noise is not taken for harm."""


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def side_at(arm: Arm, url: str, manifest: Path | None = None, timeout_s: float = 10) -> Side:
    """What an OpenAI-compatible server at `url` is: its manifest, if there is one, else what it says itself.

    A server that names a model folder on this machine is known by that folder's files; of any other
    only the address and the model's name are known. Raises EvalError if none answers there, or if it
    does not serve the model of the manifest.
    """
    url = url.rstrip("/").removesuffix("/v1")
    served = _models(url, timeout_s)
    if manifest is None:
        return Side(arm, _described(url, served[0]), url)
    try:
        stack = Stack.from_json(manifest.read_text(encoding="utf-8"), str(manifest))
    except (OSError, UnicodeDecodeError) as error:
        raise EvalError(
            f"{manifest} cannot be read: {error}. Give the manifest of what {url} serves."
        ) from None
    names = [str(entry["id"]) for entry in served]
    if stack.served_model not in names:
        raise EvalError(
            f"{url} does not serve {stack.served_model}, which {manifest} is of, but {', '.join(names)[:200]}."
        )
    return Side(arm, stack, url)


def _models(url: str, timeout_s: float) -> list[dict[str, Any]]:
    try:
        with httpx.Client(trust_env=False, timeout=timeout_s) as client:
            response = client.get(f"{url}/v1/models", headers=auth_headers())
        response.raise_for_status()
        served = [entry for entry in response.json()["data"] if isinstance(entry["id"], str)]
    except httpx.HTTPStatusError as error:
        way_out = " Set STROP_API_KEY." if error.response.status_code in (401, 403) else ""
        raise EvalError(f"{url}/v1/models answers {error.response.status_code}.{way_out}") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EvalError(
            f"Nothing answers at {url} ({error or type(error).__name__}). Start it first."
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise EvalError(
            f"{url}/v1/models is not an OpenAI model list. Give the address of a server."
        ) from None
    if not served:
        raise EvalError(f"{url} serves no model.")
    return served


def _described(url: str, model: dict[str, Any]) -> Stack:
    root = model.get("root")
    artifact = Artifact(location="", files={})
    if isinstance(root, str) and Path(root).is_absolute() and Path(root).is_dir():
        try:
            artifact = Artifact.of(root)
        except StackError:
            pass
    return Stack(
        served_model=model["id"],
        model=artifact,
        engine=Engine(version=UNKNOWN, dtype=ASSUMED_DTYPE),
        hardware=Hardware(device="cpu", name=UNKNOWN, isa=UNKNOWN),
        # Two servers of which nothing is known are not the same Stack for that.
        image=url,
    )
