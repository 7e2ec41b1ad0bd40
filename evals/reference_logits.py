"""Log-probabilities of given tokens: asked of a server, and kept for the next evaluation.

vLLM tells of each position of a prompt the k likeliest tokens and the one that came (`prompt_logprobs`
of its completions endpoint); it does not use its prefix cache then. Text counts for nothing here: both
sides score the same token ids, whatever their templates and tokenizers are.
"""

import asyncio
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from strop.evals.distances import TopLogprobs, row_of
from strop.evals.replay import Server
from strop.serving.client import CONNECT_TIMEOUT_S, MAX_ERROR_BYTES, PATHS, auth_headers
from strop.serving.home import write_atomic
from strop.serving.stack import Stack, canonical_json
from strop.serving.traces import PROBE_TENANT

WHOLE_VOCABULARY = -1
DEFAULT_MAX_LOGPROBS = 20
"""Of vLLM, where a Stack does not set `max-logprobs`."""
MAX_ANSWER_BYTES = 512 << 20
_FORMAT = 1


class ScoreError(RuntimeError):
    """A server did not give the log-probabilities it was asked for; the message says why."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What a server says of the tokens from some position of a prompt on."""

    top: TopLogprobs
    texts: dict[int, str] = field(default_factory=dict)
    """Of the tokens that came and of the likeliest ones, as the server spells them."""


def most_logprobs(stacks: Sequence[Stack], wanted: int) -> int:
    """How many tokens to ask for, so that all Stacks' engines agree to it; -1 for the whole vocabulary."""
    allowed = [int(stack.engine.args.get("max-logprobs") or DEFAULT_MAX_LOGPROBS) for stack in stacks]
    limits = [n for n in (*allowed, wanted) if n != WHOLE_VOCABULARY]
    return min(limits, default=WHOLE_VOCABULARY)


def score_body(token_ids: Sequence[int], k: int) -> dict[str, Any]:
    """The request that has token ids scored, without the model's name."""
    return {"prompt": list(token_ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": k}


async def score(
    client: httpx.AsyncClient, server: Server, token_ids: Sequence[int], start: int, k: int, timeout_s: float
) -> Scored:
    """Log-probabilities of the tokens from index `start` (at least 1) on, given all before. Raises ScoreError."""
    choice = await ask(client, server, score_body(token_ids, k), timeout_s)
    try:
        return _parse(choice["prompt_logprobs"], token_ids, start, k)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise ScoreError(f"no log-probabilities of these tokens in the answer ({printable(error)})") from None


async def ask(
    client: httpx.AsyncClient, server: Server, body: dict[str, Any], timeout_s: float
) -> dict[str, Any]:
    """The first choice of a completion that is not streamed, with all that the server says in it.

    Raises ScoreError if there is none within the time, or it is larger than MAX_ANSWER_BYTES.
    """
    headers = auth_headers() | {"Content-Type": "application/json", "X-Strop-Tenant": PROBE_TENANT}
    data = bytearray()
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.stream(
                "POST",
                server.url.rstrip("/") + PATHS["completions"],
                content=orjson.dumps({"model": server.model, **body}),
                headers=headers,
                timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            ) as response,
        ):
            limit = MAX_ANSWER_BYTES if response.status_code == 200 else MAX_ERROR_BYTES
            async for chunk in response.aiter_bytes():
                data += chunk
                if len(data) > limit:
                    break
        if response.status_code != 200:
            raise ScoreError(
                f"HTTP {response.status_code}: {printable(data[:1000].decode(errors='replace'))}"
            )
        if len(data) > limit:
            raise ScoreError(
                f"the answer is larger than {MAX_ANSWER_BYTES >> 20} MiB: ask for fewer log-probabilities"
            )
        return orjson.loads(data)["choices"][0]
    except TimeoutError:
        raise ScoreError(f"no whole answer within {timeout_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as failure:
        raise ScoreError(f"{type(failure).__name__}: {printable(failure)}") from None
    except (ValueError, KeyError, TypeError, IndexError) as failure:
        raise ScoreError(f"not an OpenAI answer: {printable(failure)}") from None


def printable(text: object) -> str:
    """The beginning of a text from outside, without what would move a terminal's cursor."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", str(text))[:300]


def _parse(entries: list[dict[str, Any] | None], token_ids: Sequence[int], start: int, k: int) -> Scored:
    if len(entries) != len(token_ids):
        raise ValueError(f"{len(entries)} entries for {len(token_ids)} tokens")
    rows = []
    texts: dict[int, str] = {}
    for token, entry in zip(token_ids[start:], entries[start:], strict=True):
        if entry is None:
            raise ValueError("a position without log-probabilities")
        told = sorted((int(v["rank"]), int(i), float(v["logprob"])) for i, v in entry.items())
        # The token that came is told as well; its rank says whether it is one of the k likeliest.
        within = k if k < 0 else sum(rank <= k for rank, _, _ in told)
        row = row_of([(i, logprob) for _, i, logprob in told], token, within)
        rows.append(row)
        for known in (token, row[0][0][0]):
            texts[known] = str(entry[str(known)].get("decoded_token") or "")[:100]
    return Scored(TopLogprobs.of_rows(rows, token_ids[start:]), texts)


@dataclass(frozen=True, slots=True)
class Cache:
    """Scores of one Stack in a folder, named by all they depend on: weights, tokenizer, template, engine,
    hardware, tokens and k."""

    folder: Path
    stack: Stack

    def path(self, token_ids: Sequence[int], start: int, k: int) -> Path:
        weights = (".safetensors", ".md")
        texts = {name: d for name, d in self.stack.model.files.items() if not name.endswith(weights)}
        depends_on = [_FORMAT, self.stack.numerics, texts, list(token_ids), start, k]
        return self.folder / f"{hashlib.sha256(canonical_json(depends_on)).hexdigest()}.safetensors"

    def load(self, token_ids: Sequence[int], start: int, k: int) -> Scored | None:
        """None for a file that is not there, broken, or does not hold what its name says."""
        try:
            with safe_open(self.path(token_ids, start, k), framework="numpy") as file:
                ids, logprobs = file.get_tensor("ids"), file.get_tensor("logprobs").astype(np.float64)
                texts = {int(i): str(text) for i, text in orjson.loads(file.metadata()["texts"]).items()}
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError):
            return None
        tokens = np.array(token_ids[start:], np.int32)
        if (
            ids.dtype != np.int32
            or ids.shape != logprobs.shape
            or ids.ndim != 2
            or len(ids) != len(tokens)
            or np.isnan(logprobs).any()
            or not (ids == tokens[:, None]).any(axis=1).all()
        ):
            return None
        return Scored(TopLogprobs(ids, logprobs, tokens), texts)

    def save(self, token_ids: Sequence[int], start: int, k: int, scored: Scored) -> None:
        arrays = {"ids": scored.top.ids, "logprobs": scored.top.logprobs.astype(np.float32)}
        texts = orjson.dumps(scored.texts, option=orjson.OPT_NON_STR_KEYS).decode()
        write_atomic(self.path(token_ids, start, k), save(arrays, metadata={"texts": texts}))

    async def score(
        self,
        client: httpx.AsyncClient,
        server: Server,
        token_ids: Sequence[int],
        start: int,
        k: int,
        timeout_s: float,
    ) -> Scored:
        """As `score`, of the server only what is not kept yet. Raises ScoreError."""
        if kept := self.load(token_ids, start, k):
            return kept
        scored = await score(client, server, token_ids, start, k, timeout_s)
        self.save(token_ids, start, k, scored)
        return scored
