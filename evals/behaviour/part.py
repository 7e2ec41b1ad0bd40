"""The part of an evaluation that asks both Stacks what can be checked."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from strop.evals.behaviour import (
    coding,
    harness,
    instructions,
    judging,
    prompts,
    retrieval,
    structured,
    tools,
)
from strop.evals.behaviour.context import max_model_len, token_counter
from strop.evals.behaviour.datafiles import FILES, read
from strop.evals.behaviour.sandbox import isolation_missing
from strop.evals.behaviour.tasks import Answer, Grade, GradingError, Task
from strop.evals.observation import ARMS, Arm, Bench, EvalError, Finding, Metric, Observation, Side
from strop.serving.client import Outcome, send
from strop.serving.settings import Section
from strop.serving.traces import PROBE_TENANT

Kind = Literal["structured", "tools", "instructions", "coding", "retrieval"]
KINDS: tuple[Kind, ...] = ("structured", "tools", "instructions", "coding", "retrieval")

SHOWN_CHARS = 4000
"""Of an answer in a finding."""

METRICS = (
    *structured.METRICS,
    *tools.METRICS,
    *instructions.METRICS,
    *coding.METRICS,
    *retrieval.METRICS,
    *prompts.METRICS,
    *harness.METRICS,
    Metric("refused", "", "lower", "difference", "share of requests refused as such (HTTP 400 or 422)"),
    Metric("error", "", "lower", "difference", "share of requests that failed"),
)

FINDING_KINDS = {
    "json_valid": "invalid_json",
    "json_valid_constrained": "invalid_json",
    "schema_valid": "invalid_schema",
    "schema_valid_constrained": "invalid_schema",
    "tool_call_right": "wrong_call",
    "no_call_right": "needless_call",
    "no_invented_result": "invented_result",
    "stream_agrees": "stream_differs",
    "instructions_kept": "instruction_broken",
    "humaneval_pass": "failed_program",
    "retrieval_right": "not_found",
    "graded": "graded_lower",
    "refused": "refused",
    "error": "error",
}
"""Kind of finding by the metric in which one side was worse than the other."""


class Behaviour(Section):
    """Structured output, tool calls, instructions, programs, long contexts, and the user's own prompts."""

    name: Literal["behaviour"] = "behaviour"
    kinds: tuple[Kind, ...] = KINDS
    """What to ask. Left out, and said to be: kinds that need public data if `data` names none, coding
    where programs cannot be isolated, and tools where a Stack has no parser for calls."""
    tasks: int = Field(default=8, ge=1)
    """Tasks of each kind (schemas are asked with a grammar and without; tool calls of each sort)."""
    data: Path | None = None
    """Folder with BFCL_v4_*.json.gz, HumanEval.jsonl.gz and jsonschemabench_sample.jsonl.gz."""
    prompts: Path | None = None
    """Your own prompts with their graders, JSON lines or YAML; all of them are asked."""
    judge: judging.JudgeModel | None = None
    """Model that grades the answers to prompts whose grader is `judge`."""
    lm_eval: harness.LmEval | None = None
    """Tasks of lm-evaluation-harness."""
    max_tokens: int = Field(default=192, ge=1)
    """Longest answer; programs may be half as long again."""
    context_lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
    """Prompt lengths at which something is to be found, tokens; those that a Stack cannot take are left out."""
    context_depths: tuple[float, ...] = (0.0, 0.5, 1.0)
    """Where in the prompt it stands, from 0 (first) to 1 (last)."""
    concurrency: int = Field(default=8, ge=1)
    """Tasks asked at a time, each of both Stacks."""
    timeout_s: float = Field(default=300, gt=0)
    """Longest time one request may take."""
    allow_code_without_isolation: bool = False
    """Run programs that a model wrote with your own rights where the kernel cannot isolate them."""

    @property
    def metrics(self) -> Sequence[Metric]:
        return METRICS

    async def observe(self, bench: Bench) -> AsyncGenerator[Observation | Finding, None]:
        """Ask both sides every task. Raises EvalError for files that cannot be read."""
        every = await self._tasks(bench)
        waiting = [task for task in every if task.id not in bench.done]
        finished = len(every) - len(waiting)
        async with aclosing(_asked(self, bench, waiting)) as asked:
            async for task, seen in asked:
                finished += 1
                bench.progress(finished / len(every), f"{task.kind}: {finished} of {len(every)} tasks")
                for each in seen:
                    yield each
        if self.lm_eval:
            async for observation in harness.observe(self.lm_eval, bench):
                yield observation
        bench.progress(1.0, f"{len(every)} tasks")

    async def _tasks(self, bench: Bench) -> list[Task]:
        found: list[Iterator[Task]] = []
        if self.prompts:
            rows = prompts.load(self.prompts, self.judge, self.allow_code_without_isolation)
            found.append(prompts.tasks(rows, self.max_tokens))
        for kind in self.kinds:
            missing = [
                name for name in FILES.get(kind, ()) if self.data is None or not (self.data / name).is_file()
            ]
            if missing:
                if self.data is not None:
                    raise EvalError(
                        f"{self.data} holds no {missing[0]}. Put it there, or take {kind} out of `kinds`."
                    )
                bench.progress(0.0, f"{kind} is left out: `data` names no folder with {missing[0]}")
                continue
            if kind == "coding" and not self.allow_code_without_isolation and (why := isolation_missing()):
                bench.progress(0.0, f"coding is left out: programs cannot be isolated here ({why})")
                continue
            found.append(await self._of_kind(kind, bench))
        # Kinds take turns: an evaluation that is ended early has seen something of each.
        turns = zip_longest(*found)
        return [task for turn in turns for task in turn if task is not None]

    async def _of_kind(self, kind: Kind, bench: Bench) -> Iterator[Task]:
        count, seed = self.tasks, bench.seed
        if kind == "instructions":
            return instructions.tasks(count, self.max_tokens, seed)
        if kind == "retrieval":
            longest = [await max_model_len(bench.client, side) for side in bench.sides]
            tokens = token_counter(bench.sides)
            return retrieval.tasks(
                count, self.context_lengths, self.context_depths, min(longest), tokens, seed
            )
        files = [read(self.data or Path(), name) for name in FILES[kind]]
        if kind == "structured":
            return structured.tasks(files[0], count, self.max_tokens, seed)
        if kind == "coding":
            longer = self.max_tokens * 3 // 2
            return coding.tasks(files[0], count, longer, seed, self.allow_code_without_isolation)
        return self._tool_tasks(files, bench)

    def _tool_tasks(self, files: list[list[dict[str, Any]]], bench: Bench) -> Iterator[Task]:
        simple, simple_answers, parallel, parallel_answers, irrelevant = files
        # Without a parser vLLM refuses every request that wants a call, even of a function it names.
        needed = {"tool-call-parser", "enable-auto-tool-choice"}
        if not all(needed <= side.stack.engine.args.keys() for side in bench.sides):
            bench.progress(0.0, f"tools is left out: a Stack has no {' and '.join(sorted(needed))}")
            return
        sorts = {
            "simple": (simple, simple_answers),
            "parallel": (parallel, parallel_answers),
            "irrelevance": (irrelevant, []),
        }
        for name, (rows, answers) in sorts.items():
            accepted = {row["id"]: row["ground_truth"] for row in answers} or None
            yield from tools.tasks(rows, accepted, name, self.tasks, self.max_tokens, bench.seed)


@dataclass(frozen=True, slots=True)
class _Said:
    """What one side said to one task."""

    side: Side
    body: dict[str, Any]
    outcome: Outcome
    grades: tuple[Grade, ...]
    """Empty unless it answered."""
    ungraded: str = ""
    """Why there are no grades although it answered."""


async def _asked(
    options: Behaviour, bench: Bench, waiting: Sequence[Task]
) -> AsyncGenerator[tuple[Task, list[Observation | Finding]], None]:
    """Every task with what was seen of it, as they end; `concurrency` at a time."""
    left = iter(waiting)
    running: dict[asyncio.Task[list[Observation | Finding]], Task] = {}
    try:
        while True:
            while len(running) < options.concurrency and (task := next(left, None)) is not None:
                running[asyncio.create_task(_both(options, bench, task))] = task
            if not running:
                return
            ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for each in ended:
                yield running.pop(each), each.result()
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _both(options: Behaviour, bench: Bench, task: Task) -> list[Observation | Finding]:
    said = await asyncio.gather(*(_ask(options, bench, side, task) for side in bench.sides))
    return list(_seen(task, dict(zip(ARMS, said, strict=True))))


async def _ask(options: Behaviour, bench: Bench, side: Side, task: Task) -> _Said:
    body = {"model": side.model, **task.body}

    async def put(streamed: bool) -> Outcome:
        return await send(
            bench.client,
            side.url,
            task.endpoint,
            {**body, "stream": streamed},
            session=task.id,
            tenant=PROBE_TENANT,
            timeout_s=options.timeout_s,
        )

    outcome = await put(True)
    if outcome.error is not None:
        return _Said(side, body, outcome, ())
    answer = Answer.of(outcome)
    try:
        grades = await asyncio.to_thread(task.grade, answer)
    except GradingError as error:
        return _Said(side, body, outcome, (), ungraded=str(error))
    if task.stream_too:
        whole = await put(False)
        if whole.error is not None:
            return _Said(side, body, whole, ())
        agreement = tools.same_reading(answer, Answer.of(whole))
        grades += () if agreement is None else (agreement,)
    return _Said(side, body, outcome, grades)


def _seen(task: Task, said: dict[Arm, _Said]) -> Iterator[Observation | Finding]:
    """What is to be told of both sides' answers to one task."""
    failed = {arm: _failure(said[arm].outcome) for arm in ARMS}
    for metric in ("refused", "error"):
        values: dict[Arm, Grade] = {
            arm: Grade(metric, float(failed[arm] == metric), said[arm].outcome.error or "") for arm in ARMS
        }
        yield from _compared(task, said, values, lower_is_better=True)
    if any(failed.values()):
        return
    for one in said.values():
        if one.ungraded:
            yield _finding("not_graded", task, one, one.ungraded, "")
    grades = {arm: {grade.metric: grade for grade in said[arm].grades} for arm in ARMS}
    for metric in grades["reference"]:
        if metric in grades["candidate"]:
            yield from _compared(task, said, {arm: grades[arm][metric] for arm in ARMS})


def _failure(outcome: Outcome) -> str:
    if outcome.error is None:
        return ""
    return "refused" if outcome.status in (400, 422) else "error"


def _compared(
    task: Task, said: dict[Arm, _Said], grades: dict[Arm, Grade], lower_is_better: bool = False
) -> Iterator[Observation | Finding]:
    reference, candidate = grades["reference"], grades["candidate"]
    yield Observation(
        reference.metric, task.id, task.id, (task.kind, *task.slices), (candidate.value,), (reference.value,)
    )
    if reference.value == candidate.value:
        return
    candidate_is_worse = (candidate.value < reference.value) != lower_is_better
    worse: Arm = "candidate" if candidate_is_worse else "reference"
    better: Arm = "reference" if candidate_is_worse else "candidate"
    yield _finding(
        FINDING_KINDS[reference.metric],
        task,
        said[worse],
        grades[worse].reason,
        Answer.of(said[better].outcome).whole,
    )


def _finding(kind: str, task: Task, one: _Said, detail: str, other: str) -> Finding:
    return Finding(
        kind=kind,
        arm=one.side.arm,
        stack=one.side.stack.fingerprint,
        request_id=task.id,
        detail=detail,
        body=one.body,
        answer=Answer.of(one.outcome).whole[:SHOWN_CHARS],
        other=other[:SHOWN_CHARS],
    )
