"""The judge: champion and candidate answer the same held-out requests, and one Verdict comes out."""

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from strop.evals.evaluate import evaluate
from strop.evals.evaluation import Evaluation
from strop.evals.losslessness import compare_outputs
from strop.evals.metrics import compare, same_lengths, samples
from strop.evals.observation import Side
from strop.evals.proposal import Progress
from strop.evals.replay import Pair, Request, Server, play, select
from strop.evals.sampled import MIN_SAMPLED, compare_sampled
from strop.evals.settings import EvalSettings
from strop.evals.suite import Plan, load
from strop.evals.verdict import Comparison, Gate, Losslessness, SampledLikelihood, Verdict
from strop.serving.stack import Stack
from strop.serving.traces import Trace


class JudgeError(RuntimeError):
    """No judgement is possible, whatever the candidate is like; the message says why and what to do."""


def plan_for(champion: Stack, candidate: Stack, settings: EvalSettings) -> Plan:
    """The suite that the candidate must meet. Raises SuiteError."""
    same = champion.numerics == candidate.numerics
    return load(settings.suite or ("lossless" if same else "quick"))


def judge(
    champion: Side,
    candidate: Side,
    heldout: Sequence[Trace],
    settings: EvalSettings,
    folder: Path,
    progress: Progress,
) -> Verdict:
    """Replay held-out requests to both servers, one at a time, then ask the suite, and judge the candidate.

    `heldout` is oldest first. The suite is left out for a candidate that is refused without it; its
    journal and `evaluation.json` lie in `folder`. Both servers must be quiet: nothing else may use their
    cores meanwhile. Raises JudgeError if there is nothing to replay or the champion does not answer,
    SuiteError for a suite that cannot be used; a candidate that fails is a failed Verdict.
    """
    plan = plan_for(champion.stack, candidate.stack, settings)
    requests, warmup = select(heldout, settings)
    if not requests:
        raise JudgeError(
            "No held-out trace can be replayed: none was answered with status 200 and holds a prompt."
        )
    salt = uuid.uuid4().hex
    here = Server(champion.url, champion.model, salt)
    there = Server(candidate.url, candidate.model, salt)
    same_numerics = champion.stack.numerics == candidate.stack.numerics
    dtype = champion.stack.engine.dtype if same_numerics else None

    def replaying(done: float, text: str) -> None:
        progress(_REPLAY_SHARE * done, text)

    found = asyncio.run(_replay(here, there, requests, warmup, dtype, settings, replaying))
    comparisons = compare(found.pairs, settings)
    gates = [
        _enough_data(found.pairs, settings),
        _no_new_errors(found.pairs),
        *([_lossless(found.losslessness), _sampled_alike(found.sampled)] if found.losslessness else []),
        _faster(comparisons, found.pairs, settings),
    ]
    if all(gate.passed for gate in gates):

        def asking(done: float, text: str) -> None:
            progress(_REPLAY_SHARE + (1 - _REPLAY_SHARE) * done, text)

        evaluation = evaluate(champion, candidate, heldout, plan, folder, asking)
        gates.append(_meets_suite(evaluation, same_numerics))
    progress(1.0, f"judged on {len(found.pairs)} requests")
    return Verdict(
        champion=champion.stack.fingerprint,
        candidate=candidate.stack.fingerprint,
        passed=all(gate.passed for gate in gates),
        summary=_summary(gates, comparisons, found.losslessness),
        comparisons=comparisons,
        losslessness=found.losslessness,
        sampled=found.sampled,
        gates=tuple(gates),
        samples=samples(found.pairs),
    )


_REPLAY_SHARE = 0.8
"""Of the judge's progress."""


@dataclass(frozen=True, slots=True)
class _Found:
    pairs: list[Pair]
    losslessness: Losslessness | None = None
    sampled: SampledLikelihood | None = None


async def _replay(
    champion: Server,
    candidate: Server,
    requests: Sequence[Request],
    warmup: Sequence[Request],
    dtype: str | None,
    settings: EvalSettings,
    progress: Progress,
) -> _Found:
    """Time all requests; with `dtype`, that of both engines, also compare what they said."""
    async with httpx.AsyncClient(trust_env=False) as client:
        progress(0.0, f"warming up both servers with {len(warmup)} requests")
        async for _ in play(client, champion, candidate, warmup, settings.request_timeout_s):
            pass
        pairs = await _measure(client, champion, candidate, requests, settings, progress)
        if dtype is None:
            return _Found(pairs)
        progress(0.95, "comparing outputs token by token")
        greedy = await _greedy_copies(client, champion, candidate, pairs, settings)
        losslessness = await compare_outputs(client, champion, dtype, [*pairs, *greedy])
        progress(0.97, "scoring sampled answers")
        drawn = await _sampled_copies(client, champion, candidate, pairs, settings)
        return _Found(pairs, losslessness, await compare_sampled(client, champion, [*pairs, *drawn]))


async def _measure(
    client: httpx.AsyncClient,
    champion: Server,
    candidate: Server,
    requests: Sequence[Request],
    settings: EvalSettings,
    progress: Progress,
) -> list[Pair]:
    pairs: list[Pair] = []
    ends = time.monotonic() + 60 * settings.max_minutes
    async for pair in play(client, champion, candidate, requests, settings.request_timeout_s):
        pairs.append(pair)
        progress(
            0.05 + 0.9 * len(pairs) / len(requests), f"{len(pairs)} of {len(requests)} requests replayed"
        )
        recent = pairs[-_GIVE_UP_AFTER:]
        if len(recent) == _GIVE_UP_AFTER and all(p.champion.error for p in recent):
            raise JudgeError(
                f"The champion at {champion.url} failed {_GIVE_UP_AFTER} requests in a row "
                f"({recent[-1].champion.error}). See its log; without a champion nothing can be compared."
            )
        if len(recent) == _GIVE_UP_AFTER and all(p.candidate.error for p in recent):
            break
        if time.monotonic() > ends and len(pairs) >= settings.min_requests:
            break
    return pairs


# A server that is gone would otherwise cost a time limit for every request left.
_GIVE_UP_AFTER = 3


async def _greedy_copies(
    client: httpx.AsyncClient,
    champion: Server,
    candidate: Server,
    pairs: Sequence[Pair],
    settings: EvalSettings,
) -> list[Pair]:
    """Some sampled requests again at temperature 0, where too few are greedy to test losslessness."""
    missing = _MIN_GREEDY - sum(pair.request.greedy for pair in pairs)
    sampled = [pair.request.made_greedy() for pair in pairs if not pair.request.greedy and pair.answered]
    copies = sampled[: max(0, missing)]
    return [pair async for pair in play(client, champion, candidate, copies, settings.request_timeout_s)]


_MIN_GREEDY = 8


async def _sampled_copies(
    client: httpx.AsyncClient,
    champion: Server,
    candidate: Server,
    pairs: Sequence[Pair],
    settings: EvalSettings,
) -> list[Pair]:
    """Some greedy requests again at a temperature, where too few are sampled: others' traffic may be."""
    answered = [pair for pair in pairs if pair.answered]
    missing = MIN_SAMPLED - sum(pair.request.body.get("temperature") != 0 for pair in answered)
    copies = [p.request.made_sampled() for p in answered if p.request.greedy and p.request.endpoint == "chat"]
    wanted = copies[: max(0, missing)]
    return [pair async for pair in play(client, champion, candidate, wanted, settings.request_timeout_s)]


def _enough_data(pairs: Sequence[Pair], settings: EvalSettings) -> Gate:
    answered = [pair for pair in pairs if pair.answered]
    sessions = len({pair.request.session for pair in answered})
    return Gate(
        name="enough data",
        passed=len(answered) >= settings.min_requests and sessions >= 2,
        detail=f"Both answered {len(answered)} of {len(pairs)} requests from {sessions} sessions; "
        f"{settings.min_requests} requests and 2 sessions are needed.",
    )


def _no_new_errors(pairs: Sequence[Pair]) -> Gate:
    new = [pair for pair in pairs if pair.candidate.error and not pair.champion.error]
    detail = "The candidate answered every request that the champion answered."
    if new:
        detail = (
            f"The candidate failed {len(new)} of {len(pairs)} requests that the champion answered; "
            f"first {new[0].request.request_id}: {new[0].candidate.error}"
        )
    return Gate(name="no new errors", passed=not new, detail=detail)


def _lossless(found: Losslessness) -> Gate:
    return Gate(
        name="lossless",
        passed=found.requests > 0 and found.different == 0,
        detail=f"Of {found.requests} greedy requests, {found.identical} gave the same tokens, {found.ties} "
        f"parted at a numeric tie (gap up to {found.tie_bound:g} nats), {found.different} gave other tokens.",
    )


def _meets_suite(evaluation: Evaluation, same_numerics: bool) -> Gate:
    """Where other numbers are computed, the suite is all that vouches for what is said: it must be shown to hold."""
    passed = evaluation.verdict == "passed" or (same_numerics and evaluation.verdict != "failed")
    return Gate(name=f"suite {evaluation.suite}", passed=passed, detail=evaluation.summary)


def _sampled_alike(sampled: SampledLikelihood | None) -> Gate:
    if sampled is None:
        return Gate(name="sampled alike", passed=True, detail="No sampled answers could be scored.")
    return Gate(
        name="sampled alike",
        passed=sampled.high >= 0 and sampled.difference > -1,
        detail=f"Over {sampled.requests} sampled answers, the candidate's are {sampled.difference:+.2f} nats a token "
        f"as likely under the champion's logits as the champion's own ({sampled.low:+.2f} to {sampled.high:+.2f}); "
        "clearly below 0 would mean that it samples from another distribution.",
    )


def _faster(comparisons: Sequence[Comparison], pairs: Sequence[Pair], settings: EvalSettings) -> Gate:
    """Clearly faster in one of the two times that users feel, and clearly slower in neither."""
    names = {"inter_token_s": "seconds per output token", "e2e_s": "seconds per request"}
    comparable = same_lengths(pairs)
    if not comparable:
        # A shorter answer is sooner done without being faster.
        del names["e2e_s"]
    times = [c for c in comparisons if c.slice == "all" and c.metric in names]
    if not times:
        return Gate(name="faster", passed=False, detail="No time could be compared.")
    gained = any(c.ratio_high < settings.max_time_ratio for c in times)
    lost = any(c.ratio_low > 1 for c in times)
    found = ", ".join(
        f"{names[c.metric]} {c.ratio:.3f} ({c.ratio_low:.3f} to {c.ratio_high:.3f})" for c in times
    )
    unequal = "" if comparable else " Answers differ in length, so that only the time per token counts."
    return Gate(
        name="faster",
        passed=gained and not lost,
        detail=f"Candidate over champion: {found}; one whole interval must lie below "
        f"{settings.max_time_ratio:g} and none above 1.{unequal}",
    )


def _summary(
    gates: Sequence[Gate],
    comparisons: Sequence[Comparison],
    losslessness: Losslessness | None,
) -> str:
    by_name = {c.metric: c for c in comparisons if c.slice == "all"}
    parts = []
    if decode := by_name.get("decode_tokens_per_s"):
        interval = f"95 % interval {decode.ratio_low:.2f} to {decode.ratio_high:.2f}"
        parts.append(
            f"decodes {decode.ratio:.2f} times as fast ({interval}; {decode.champion:.1f} to "
            f"{decode.candidate:.1f} tokens/s)"
        )
    if latency := by_name.get("e2e_s"):
        parts.append(f"needs {latency.ratio:.2f} of the time per request over {latency.requests} requests")
    if acceptance := by_name.get("acceptance_length"):
        parts.append(f"accepts {acceptance.candidate:.2f} tokens a step")
    if losslessness and losslessness.requests:
        right = losslessness.identical + losslessness.ties
        parts.append(f"says the same in {right} of {losslessness.requests} greedy requests")
    found = ", ".join(parts) or "could not be measured"
    failed = [gate.name for gate in gates if not gate.passed]
    if failed:
        return f"Refused (failed: {', '.join(failed)}): the candidate {found}."
    return f"Better: the candidate {found}."
