"""Whether a candidate says exactly what the champion says, up to the noise of its own arithmetic."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import httpx

from strop.evals.replay import Pair, Request, Server, play, rebuild
from strop.evals.settings import EvalSettings
from strop.evals.verdict import Losslessness, OutputDifference
from strop.serving.stack import Stack
from strop.serving.traces import Trace

NO_TOKEN = -1
"""Stands for the token of an answer that had already ended, or whose server gave no token ids."""


def tie_bound(dtype: str) -> float:
    """Largest log-probability gap, nats, between two tokens that the dtype cannot tell apart.

    Raises ValueError for a dtype whose noise is not known.
    """
    try:
        return _TIE_BOUND[dtype]
    except KeyError:
        raise ValueError(
            f"The numeric noise of dtype {dtype!r} is not known; one of {', '.join(_TIE_BOUND)} is. "
            "Build the Stack with one of these."
        ) from None


# How many rows are computed together changes the order of sums, hence the last bits of a logit, and a
# logit between 16 and 32 has steps of 0.125 in bfloat16 and 0.0156 in float16: the bounds are three steps.
# SmolLM2-135M in bfloat16, 36 prompts of 96 greedy tokens: 23 parted in a batch and 24 with an n-gram
# drafter, all at gaps of 0 to 2 steps (0.25). In float32 all 72 answers were the same.
_TIE_BOUND = {"bfloat16": 0.4, "float16": 0.05, "float32": 1e-3}


def first_difference(champion: Sequence[int], candidate: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing on one side; None for equal sequences."""
    if list(champion) == list(candidate):
        return None
    shorter = min(len(champion), len(candidate))
    return next((i for i in range(shorter) if champion[i] != candidate[i]), shorter)


async def compare_outputs(
    client: httpx.AsyncClient, champion: Server, dtype: str, pairs: Iterable[Pair], timeout_s: float = 60
) -> Losslessness:
    """Compare the token ids of greedy answers; pairs that are sampled or unanswered are passed over.

    Where two answers part, the champion is asked for both tokens' log-probabilities after exactly the
    common prefix. Both tokens come from the same grammar, if there is one, so it cancels in the gap.
    """
    bound = tie_bound(dtype)
    greedy = [pair for pair in pairs if pair.request.greedy and pair.answered]
    found = [await _difference(client, champion, pair, bound, timeout_s) for pair in greedy]
    differences = tuple(difference for difference in found if difference is not None)
    ties = sum(difference.tie for difference in differences)
    return Losslessness(
        requests=len(greedy),
        identical=len(greedy) - len(differences),
        ties=ties,
        different=len(differences) - ties,
        tie_bound=bound,
        differences=differences,
    )


async def _difference(
    client: httpx.AsyncClient, champion: Server, pair: Pair, bound: float, timeout_s: float
) -> OutputDifference | None:
    here, there = pair.champion.token_ids, pair.candidate.token_ids
    if here is None or there is None:
        return None if _same_text(pair) else _unexplained(pair.request, 0, NO_TOKEN, NO_TOKEN)
    position = first_difference(here, there)
    if position is None:
        return None
    if position == min(len(here), len(there)):
        # A stop string may end inside the tokens of one speculative step; the rest of the step is not said.
        if _same_text(pair) and pair.champion.finish_reason == pair.candidate.finish_reason:
            return None
        ended = [tokens[position] if position < len(tokens) else NO_TOKEN for tokens in (here, there)]
        return _unexplained(pair.request, position, *ended)
    gap = None
    if pair.champion.prompt_token_ids and pair.champion.prompt_token_ids == pair.candidate.prompt_token_ids:
        prefix = [*pair.champion.prompt_token_ids, *here[:position]]
        gap = await logprob_gap(client, champion, prefix, here[position], there[position], timeout_s)
    return OutputDifference(
        request_id=pair.request.request_id,
        position=position,
        champion_token=here[position],
        candidate_token=there[position],
        logprob_gap=gap,
        tie=gap is not None and abs(gap) <= bound,
    )


def _same_text(pair: Pair) -> bool:
    return pair.champion.text == pair.candidate.text and [
        call["function"] for call in pair.champion.tool_calls
    ] == [call["function"] for call in pair.candidate.tool_calls]


def _unexplained(request: Request, position: int, token: int, other: int) -> OutputDifference:
    return OutputDifference(
        request_id=request.request_id,
        position=position,
        champion_token=token,
        candidate_token=other,
        logprob_gap=None,
        tie=False,
    )


async def logprob_gap(
    client: httpx.AsyncClient,
    server: Server,
    prefix_token_ids: list[int],
    token: int,
    other: int,
    timeout_s: float = 60,
) -> float | None:
    """Log-probability of `token` minus that of `other` as the next token after the prefix, nats.

    None if the server does not say.
    """
    try:
        ask = {"prompt": prefix_token_ids, "logprobs": 20, "return_tokens_as_token_ids": True}
        choice = await complete(client, server, ask, timeout_s)
        top = choice["logprobs"]["top_logprobs"][0]
        here, there = top.get(f"token_id:{token}"), top.get(f"token_id:{other}")
        if here is None or there is None:
            here, there = [
                await _logprob_as_prompt(client, server, [*prefix_token_ids, t], timeout_s)
                for t in (token, other)
            ]
        return float(here) - float(there)
    except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError):
        return None


async def _logprob_as_prompt(
    client: httpx.AsyncClient, server: Server, token_ids: list[int], timeout_s: float
) -> float:
    """Log-probability of the last token, wherever it ranks: a grammar can allow only unlikely tokens."""
    choice = await complete(client, server, {"prompt": token_ids, "prompt_logprobs": 0}, timeout_s)
    return choice["prompt_logprobs"][-1][str(token_ids[-1])]["logprob"]


async def complete(client: httpx.AsyncClient, server: Server, ask: dict[str, Any], timeout_s: float) -> Any:
    body = {"model": server.model, "max_tokens": 1, "temperature": 0, **ask}
    response = await client.post(server.url.rstrip("/") + "/v1/completions", json=body, timeout=timeout_s)
    response.raise_for_status()
    return response.json()["choices"][0]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Whether a candidate may be given traffic at all."""

    errors: tuple[str, ...]
    """What the candidate failed at that the champion could do."""
    losslessness: Losslessness | None
    """None where the two Stacks' numerics differ, so that outputs need not agree."""

    @property
    def ok(self) -> bool:
        return not self.errors and (self.losslessness is None or self.losslessness.different == 0)


async def outputs_agree(
    champion: Stack,
    champion_url: str,
    candidate: Stack,
    candidate_url: str,
    traces: Iterable[Trace],
    n: int = 4,
    timeout_s: float = 120,
) -> Agreement:
    """Put a few requests to both, greedily: the check before a candidate gets its first live request.

    Raises ValueError if none of the traces can be replayed.
    """
    requests = list(islice(_greedy_requests(traces), n))
    if not requests:
        raise ValueError("None of the traces holds a request to replay, so the outputs cannot be compared.")
    servers = Server(champion_url, champion.served_model), Server(candidate_url, candidate.served_model)
    async with httpx.AsyncClient(trust_env=False) as client:
        pairs = [pair async for pair in play(client, *servers, requests, timeout_s)]
        losslessness = None
        if champion.numerics == candidate.numerics:
            losslessness = await compare_outputs(client, servers[0], champion.engine.dtype, pairs)
    errors = tuple(
        f"{pair.request.request_id}: {pair.candidate.error}"
        for pair in pairs
        if pair.candidate.error and not pair.champion.error
    )
    return Agreement(errors, losslessness)


def _greedy_requests(traces: Iterable[Trace]) -> Iterable[Request]:
    settings = EvalSettings(max_output_tokens=64)
    for trace in traces:
        if trace.status == 200:
            try:
                yield rebuild(trace, settings).made_greedy()
            except (ValueError, AttributeError, TypeError):
                continue
