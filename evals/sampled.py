"""Whether sampled answers are as likely under the model as the champion's own.

Speculation keeps the distribution of sampled answers, not the answers: two runs of one request
differ, so they cannot be compared token by token. Their likelihood can: under the champion's
logits, answers drawn from the same distribution have the same mean log-probability, and an engine
that samples wrongly betrays itself by nats a token.
"""

import math
from collections.abc import Sequence

import httpx
import numpy as np
from scipy import stats

from strop.evals.losslessness import complete
from strop.evals.replay import Pair, Server
from strop.evals.verdict import SampledLikelihood
from strop.serving.client import Outcome

MIN_SAMPLED = 6
MAX_SAMPLED = 12
_CONFIDENCE = 0.99


async def compare_sampled(
    client: httpx.AsyncClient, champion: Server, pairs: Sequence[Pair], timeout_s: float = 120
) -> SampledLikelihood | None:
    """Mean log-probability per token, under the champion, of the candidate's sampled answers minus the champion's.

    With Student's interval at 99 % over requests. None if fewer than two sampled pairs could be scored.
    """
    differences = []
    for pair in [p for p in pairs if p.answered and p.request.body.get("temperature") != 0][:MAX_SAMPLED]:
        scores = [await mean_logprob(client, champion, o, timeout_s) for o in (pair.candidate, pair.champion)]
        if scores[0] is not None and scores[1] is not None:
            differences.append(scores[0] - scores[1])
    if len(differences) < 2:
        return None
    mean, spread = float(np.mean(differences)), float(np.std(differences, ddof=1))
    reach = (
        float(stats.t.ppf(0.5 + _CONFIDENCE / 2, len(differences) - 1)) * spread / math.sqrt(len(differences))
    )
    return SampledLikelihood(requests=len(differences), difference=mean, low=mean - reach, high=mean + reach)


async def mean_logprob(
    client: httpx.AsyncClient, server: Server, outcome: Outcome, timeout_s: float
) -> float | None:
    """Mean log-probability per output token of an answer after its prompt, nats; None if the server does not say."""
    prompt, output = outcome.prompt_token_ids, outcome.token_ids
    if not prompt or not output:
        return None
    try:
        choice = await complete(
            client, server, {"prompt": [*prompt, *output], "prompt_logprobs": 0}, timeout_s
        )
        scored = choice["prompt_logprobs"][len(prompt) :]
        return float(
            np.mean([entry[str(token)]["logprob"] for entry, token in zip(scored, output, strict=True)])
        )
    except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError):
        return None
