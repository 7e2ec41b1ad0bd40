"""A model writes kernels: asked, verified, told what was wrong, and asked again, as long as the budget lasts.

Keep or revert: what is kept is the fastest kernel that passed every check; whatever else comes back only
becomes words for the next question. Any OpenAI-compatible endpoint will do, the deployment's own
included. Its answers are text that is not trusted: they are compiled and run in isolation, and nothing
they say enters a record but the code.
"""

import asyncio
import hashlib
import re
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from strop.kernels.build import CSRC, Source
from strop.kernels.contract import Contract, words
from strop.kernels.timing import overall_speedup
from strop.kernels.verify import Verification, verify
from strop.serving.client import Outcome, send
from strop.serving.home import write_atomic

ANSWER_TOKENS = 4096
FAILURES = 3
"""Answers in a row that the endpoint may fail to give."""
_CODE = re.compile(r"```(?:cpp|c\+\+|c|cc|C\+\+)?[ \t]*\n(.*?)```", re.DOTALL)
_WORDS = 1500
_CODE_BYTES = 200_000


class ProposeError(RuntimeError):
    """A loop that cannot go on; the message says why."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible server (its key, if it needs one, is in STROP_API_KEY)."""

    url: str
    model: str


@dataclass(frozen=True, slots=True)
class Budget:
    """What a loop may take, over all times that it is resumed."""

    rounds: int = 8
    tokens: int = 60_000
    """Of questions and answers."""
    seconds: float = 1800


class Attempt(BaseModel):
    """One question, the answer, and what became of it."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    number: int
    answer: str
    code: str | None
    verification: Verification | None
    outcome: str
    """What the next question says of it."""
    kept: bool
    failed: bool
    """Whether the endpoint gave no answer at all."""
    tokens: int
    seconds: float

    @property
    def speedup(self) -> float:
        return overall_speedup(self.verification.timings) if self.verification else 0.0


@dataclass(frozen=True, slots=True)
class Proposal:
    """What came of a loop."""

    source: Source | None
    """The fastest kernel that passed; None if none did."""
    verification: Verification | None
    attempts: tuple[Attempt, ...]
    ended: str
    """Why it ended."""


def propose(
    contract: Contract,
    endpoint: Endpoint,
    folder: Path,
    profile: str = "",
    budget: Budget = Budget(),
    threads: int = 1,
) -> Proposal:
    """Ask for kernels for `contract` until the budget is spent; one that was interrupted goes on.

    `profile` is what the engine's profile says of the operator, in words. Attempts and objects are kept
    in a folder of `folder` that is named by contract and endpoint. Raises SandboxError where code that
    is not trusted cannot be run, ProposeError if the endpoint does not answer.
    """
    folder = folder / _identity(contract, endpoint)
    attempts = _recorded(folder)
    while (ended := _spent(attempts, budget)) is None:
        attempts.append(_attempt(contract, endpoint, folder, profile, budget, threads, attempts))
        last = attempts[-1]
        write_atomic(folder / f"attempt-{last.number:04d}.json", last.model_dump_json(indent=1))
        if len(attempts) >= FAILURES and all(a.failed for a in attempts[-FAILURES:]):
            raise ProposeError(f"{endpoint.url} gave no answer {FAILURES} times: {last.outcome}")
    best = _best(attempts)
    source = Source(contract.name, best.code) if best and best.code else None
    return Proposal(source, best.verification if best else None, tuple(attempts), ended)


def _attempt(
    contract: Contract,
    endpoint: Endpoint,
    folder: Path,
    profile: str,
    budget: Budget,
    threads: int,
    before: list[Attempt],
) -> Attempt:
    started = time.monotonic()
    tokens_left = budget.tokens - sum(a.tokens for a in before)
    seconds_left = budget.seconds - sum(a.seconds for a in before)
    question = _question(contract, profile, threads, before)
    outcome = asyncio.run(_ask(endpoint, question, min(ANSWER_TOKENS, tokens_left), seconds_left))
    code = None if outcome.error else code_of(outcome.text, contract.name)
    found: Verification | None = None
    if outcome.error:
        said = f"The endpoint failed: {outcome.error}"
    elif code is None:
        said = f"The answer had no C++ code block that defines `{contract.name}`."
    elif again := next((a for a in before if a.code == code), None):
        said = f"This is attempt {again.number} again: {again.outcome}"
    else:
        found = verify(Source(contract.name, code), contract, folder, threads)
        said = _verdict(found, _best(before))
    return Attempt(
        number=len(before) + 1,
        answer=outcome.text,
        code=code,
        verification=found,
        outcome=said,
        kept=found is not None and found.passed and _is_better(found, _best(before)),
        failed=outcome.error is not None,
        # A server that counts nothing is not free.
        tokens=(outcome.prompt_tokens + outcome.output_tokens) or (len(question) + len(outcome.text)) // 3,
        seconds=time.monotonic() - started,
    )


def code_of(answer: str, name: str) -> str | None:
    """The last code block that defines the function `name`; None if there is none."""
    blocks = [block for block in _CODE.findall(answer) if re.search(rf"\b{re.escape(name)}\s*\(", block)]
    return blocks[-1].strip() + "\n" if blocks and len(blocks[-1]) <= _CODE_BYTES else None


def _is_better(found: Verification, best: Attempt | None) -> bool:
    """Whether it is faster than the best by more than two bursts of the reference differ."""
    if best is None:
        return True
    noise = max(timing.noise for timing in found.timings)
    return overall_speedup(found.timings) > best.speedup * noise


def _verdict(found: Verification, best: Attempt | None) -> str:
    if found.failure and not found.correct:
        return f"Rejected by the check {found.failure.name!r}: {found.failure.detail[:_WORDS]}"
    timings = "; ".join(
        f"{t.shape}: {t.kernel_s * 1e6:.1f} us, reference {t.reference_s * 1e6:.1f} us" for t in found.timings
    )
    if found.failure:
        return f"Correct, but not fast enough: {found.failure.detail}. {timings}"
    if not _is_better(found, best):
        assert best is not None
        return f"Correct, but no faster than attempt {best.number}, which stays. {timings}"
    return f"Kept: {overall_speedup(found.timings):.2f} times the reference's speed. {timings}"


def _best(attempts: list[Attempt]) -> Attempt | None:
    kept = [attempt for attempt in attempts if attempt.kept]
    return kept[-1] if kept else None


def _spent(attempts: list[Attempt], budget: Budget) -> str | None:
    if len(attempts) >= budget.rounds:
        return f"{budget.rounds} rounds were asked"
    if sum(a.tokens for a in attempts) >= budget.tokens:
        return f"{budget.tokens} tokens were spent"
    if sum(a.seconds for a in attempts) >= budget.seconds:
        return f"{budget.seconds:g} s were spent"
    return None


def _question(contract: Contract, profile: str, threads: int, before: list[Attempt]) -> str:
    parts = [
        f"Write the function `{contract.name}` as one C++17 translation unit for x86-64 "
        f"({torch.backends.cpu.get_cpu_capability()}), as fast as you can on the served shapes.",
        f"What it computes: {contract.about}. Floating tensors are {contract.dtype} where nothing else is said. "
        f"The reference in PyTorch:\n```python\n{contract.source()}```",
        "Served shapes: " + "; ".join(words(shape) for shape in contract.served) + f". Threads: {threads}.",
        _RULES.format(name=contract.name, header=(CSRC / "kernel.h").read_text()),
    ]
    if profile:
        parts.append(f"Profile of the engine:\n{profile}")
    if best := _best(before):
        parts.append(f"The best so far (attempt {best.number}, {best.outcome}):\n```cpp\n{best.code}```")
    if before and before[-1] is not best:
        last = before[-1]
        shown = f"\n```cpp\n{last.code}```" if last.code else ""
        parts.append(f"Your last attempt:{shown}\nWhat the verifier says of it: {last.outcome}")
    parts.append("Answer with the whole file in one ```cpp block.")
    return "\n\n".join(parts)


_RULES = """\
Rules: `#include "kernel.h"`, which is
```cpp
{header}```
and export `STROP_KERNEL {name}(const DLTensor* const* in, int n_in, DLTensor* const* out, int n_out)`. Return 0, or \
something else, before writing anything, for dtypes, sizes or strides that you do not take; the served shapes must be \
taken, other sizes may come. Data are aligned to their element only. Outputs are dense, never what they were before, \
and must be written in whole. Keep no state between calls, start no threads other than OpenMP's, touch nothing beside the \
tensors. Rounding is to nearest even, sums are in float32, NaN and infinities come through, denormals count. Standard \
headers, <immintrin.h> and OpenMP are there; -ffast-math is not."""


async def _ask(endpoint: Endpoint, question: str, tokens: int, seconds: float) -> Outcome:
    messages = [
        {"role": "system", "content": "You write fast and exact C++ kernels for CPUs."},
        {"role": "user", "content": question},
    ]
    body = {"model": endpoint.model, "messages": messages, "max_tokens": tokens, "stream": False}
    async with httpx.AsyncClient() as client:
        session = f"kernels-{hashlib.sha256(question.encode()).hexdigest()[:12]}"
        return await send(client, endpoint.url, "chat", body, session=session, timeout_s=max(seconds, 1.0))


def _identity(contract: Contract, endpoint: Endpoint) -> str:
    shapes = [words(shape) for shape in contract.served]
    parts = [contract.name, str(contract.dtype), contract.source(), *shapes, endpoint.url, endpoint.model]
    return f"{contract.name}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"


def _recorded(folder: Path) -> list[Attempt]:
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Attempt] = []
    for path in sorted(folder.glob("attempt-*.json")):
        try:
            found.append(Attempt.model_validate_json(path.read_bytes()))
        except ValidationError:
            raise ProposeError(f"{path} cannot be read: remove it to ask that question anew.") from None
    return found
