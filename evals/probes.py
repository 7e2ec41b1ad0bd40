"""Small requests that show how a server makes its prompts and picks its tokens.

Sampled answers are completions of given token ids, so that neither template nor tokenizer enters.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import numpy as np

from strop.evals.distances import NO_TOKEN, Floats, TopLogprobs, row_of
from strop.evals.reference_logits import ScoreError, ask
from strop.evals.replay import Request, Server
from strop.serving.client import Outcome

GREEDY_TOKENS = 4
SAMPLED_TOKENS = 16
SAMPLED_LOGPROBS = 20
TEMPERATURE = 0.7
TOP_P = 0.9
_NUCLEUS_MARGIN = 0.02
"""Of probability: two sides' arithmetic may disagree on where exactly the nucleus ends."""
_ROUNDING = 1e-5
# What shapes the prompt. A grammar would only be compiled for nothing.
_OF_THE_PROMPT = frozenset(
    {
        "messages", "prompt", "tools", "tool_choice", "documents", "chat_template", "chat_template_kwargs",
        "add_generation_prompt", "continue_final_message", "add_special_tokens", "reasoning_effort",
    }
)  # fmt: skip


def template_probe(request: Request) -> Request:
    """The request, greedy and short: it shows what prompt the server makes of the messages, and how it begins."""
    kept = {name: value for name, value in request.body.items() if name in _OF_THE_PROMPT}
    extra = {"max_tokens": GREEDY_TOKENS, "temperature": 0, "stream": False, "return_token_ids": True}
    if request.endpoint == "chat":
        # The first that vLLM tells is the token that was picked, whether or not any is likelier.
        extra |= {"logprobs": True, "top_logprobs": 2}
    return replace(request, body={**kept, **extra})


def greedy_is_argmax(probe: Request, outcome: Outcome) -> tuple[float, ...]:
    """For each token of a greedy answer: 1 if the server itself holds none to be likelier, else 0.

    Empty where the server does not say, or a tool's grammar may have forbidden the likeliest token.
    """
    if probe.body.get("tools") and probe.body.get("tool_choice") != "none":
        return ()
    try:
        return tuple(
            float(entry["logprob"] >= max(top["logprob"] for top in entry["top_logprobs"]) - _ROUNDING)
            for entry in outcome.logprobs or ()
        )
    except (ValueError, KeyError, TypeError):
        return ()


def sampled_body(prompt: Sequence[int], seed: int, k: int) -> dict[str, Any]:
    return {
        "prompt": list(prompt),
        "max_tokens": SAMPLED_TOKENS,
        "temperature": TEMPERATURE,
        "top_p": TOP_P,
        "seed": seed,
        "logprobs": k,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


async def sampled(
    client: httpx.AsyncClient, server: Server, prompt: Sequence[int], seed: int, k: int, timeout_s: float
) -> TopLogprobs:
    """Tokens drawn at `TEMPERATURE` and `TOP_P`, with the server's own k log-probabilities before either.

    Raises ScoreError.
    """
    choice = await ask(client, server, sampled_body(prompt, seed, k), timeout_s)
    try:
        tokens = [int(token) for token in choice["token_ids"]]
        rows = []
        for token, entry in zip(tokens, choice["logprobs"]["top_logprobs"], strict=True):
            known = [(int(name.removeprefix("token_id:")), float(logprob)) for name, logprob in entry.items()]
            rows.append(row_of(sorted(known, key=lambda one: -one[1])[: k + 1], token, k))
        return TopLogprobs.of_rows(rows, tokens)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise ScoreError(f"no log-probabilities in the answer ({type(error).__name__}: {error})") from None


def sampling_excess(top: TopLogprobs, temperature: float = TEMPERATURE, top_p: float = TOP_P) -> Floats:
    """[T], log-probability of each token drawn minus what draws from this distribution have on average, nats.

    The distribution is `top`'s at that temperature, cut to its nucleus (Holtzman et al. 2020). The mean over
    rightly drawn tokens is 0 whatever the texts are, which the mean log-probability itself is far from. What
    lies beyond the told tokens is left out of the average.
    """
    logprobs_TK = top.logprobs[:, :-1]
    weights_TK, before_TK = _tempered(logprobs_TK, temperature)
    inside_TK = np.where(before_TK < top_p, weights_TK, 0.0)
    told_TK = np.where(np.isfinite(logprobs_TK), logprobs_TK, 0.0)
    return top.of_tokens - (inside_TK * told_TK).sum(axis=1) / inside_TK.sum(axis=1)


def outside_nucleus(top: TopLogprobs, temperature: float = TEMPERATURE, top_p: float = TOP_P) -> Floats:
    """[T], 1 where the token that was drawn certainly lies outside the nucleus, else 0; for temperatures up to 1."""
    weights_TK, before_TK = _tempered(top.logprobs[:, :-1], temperature)
    before_all = before_TK[:, -1] + weights_TK[:, -1]
    drawn_TK = (top.ids[:, :-1] == top.tokens[:, None]) & (top.ids[:, :-1] != NO_TOKEN)
    before_T = np.where(drawn_TK.any(axis=1), (before_TK * drawn_TK).sum(axis=1), before_all)
    return (before_T >= top_p + _NUCLEUS_MARGIN).astype(float)


def _tempered(logprobs_TK: Floats, temperature: float) -> tuple[Floats, Floats]:
    """Probability of each told token at a temperature up to 1, and of all likelier ones: both at least.

    Of the tokens that are not told, p^(1/T) sums to no more than their sum times the largest p^(1/T - 1).
    """
    powers_TK = np.exp(logprobs_TK / temperature)
    rest_T = np.maximum(1.0 - np.exp(logprobs_TK).sum(axis=1), 0.0)
    least_T = np.where(np.isfinite(logprobs_TK), logprobs_TK, 0.0).min(axis=1)
    total_T = powers_TK.sum(axis=1) + rest_T * np.exp(least_T * (1 / temperature - 1))
    weights_TK = powers_TK / total_T[:, None]
    return weights_TK, np.cumsum(weights_TK, axis=1) - weights_TK
