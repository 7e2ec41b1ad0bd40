"""How long a prompt may be, and how long a text is, in a Stack's tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
from tokenizers import Tokenizer

from strop.evals.observation import Side
from strop.serving.client import auth_headers

ASSUMED_TOKENS = 4096
"""Context of a server that does not say."""
CHARS_PER_TOKEN = 2.5
"""English has 4 to 5: an estimate that errs towards a prompt that is too short."""


async def max_model_len(client: httpx.AsyncClient, side: Side) -> int:
    """Longest prompt and answer together, tokens: what the server says, else its Stack."""
    try:
        response = await client.get(side.url.rstrip("/") + "/v1/models", headers=auth_headers(), timeout=10)
        cards = response.json()["data"]
        said = next(card.get("max_model_len") for card in cards if card.get("id") == side.model)
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError, StopIteration):
        said = None
    known = said or side.stack.engine.args.get("max-model-len")
    return int(known) if isinstance(known, int | str) and str(known).isdigit() else ASSUMED_TOKENS


def token_counter(sides: Sequence[Side]) -> Callable[[str], int]:
    """Tokens of a text: by the tokenizer that needs more of them, or estimated where there is none here."""
    found: list[Tokenizer] = []
    for location in dict.fromkeys(side.stack.model.location for side in sides):
        try:
            found.append(Tokenizer.from_file(str(Path(location) / "tokenizer.json")))
        except Exception:  # the library raises plain Exception for missing and for broken files
            return lambda text: int(len(text) / CHARS_PER_TOKEN)
    return lambda text: max(len(t.encode(text, add_special_tokens=False).ids) for t in found)
