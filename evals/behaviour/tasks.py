"""What a task is: a request, and a function that says how good an answer to it is."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from strop.serving.client import Endpoint, Outcome

MAX_ANSWER_CHARS = 1 << 18
"""More of an answer than this is not looked at; no bound on tokens that is of use lets one be longer."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool."""

    name: str
    arguments: str
    """As they came: JSON, if all is well."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said, as graders see it."""

    text: str
    calls: tuple[Call, ...] = ()
    finish_reason: str | None = "stop"
    token_ids: tuple[int, ...] | None = None

    @classmethod
    def of(cls, outcome: Outcome) -> "Answer":
        functions = [call["function"] for call in outcome.tool_calls]
        return cls(
            text=outcome.text[:MAX_ANSWER_CHARS],
            calls=tuple(Call(str(f["name"]), str(f["arguments"])[:MAX_ANSWER_CHARS]) for f in functions),
            finish_reason=outcome.finish_reason,
            token_ids=None if outcome.token_ids is None else tuple(outcome.token_ids),
        )

    @property
    def whole(self) -> str:
        """Text and calls, to be shown."""
        calls = [f"{call.name}({call.arguments})" for call in self.calls]
        return "\n".join([self.text, *calls] if self.text else calls)

    @property
    def cut_off(self) -> str:
        """To be added to a reason."""
        return " (cut off at max_tokens)" if self.finish_reason == "length" else ""


@dataclass(frozen=True, slots=True)
class Grade:
    """How good one answer is by one metric."""

    metric: str
    value: float
    """0 is wrong, 1 is right."""
    reason: str
    """What is wrong, in plain words; empty for a right answer."""


class GradingError(RuntimeError):
    """An answer cannot be graded, through no fault of it: a judge that does not answer, for example."""


Grader = Callable[[Answer], tuple[Grade, ...]]


@dataclass(frozen=True, slots=True)
class Task:
    """One request that both Stacks are asked."""

    id: str
    """Of the request, unique in a suite and the same in every run."""
    kind: str
    body: dict[str, Any]
    """Everything but the model's name."""
    grade: Grader
    """A function of the answer alone. May block: run in a thread. Raises GradingError."""
    endpoint: Endpoint = "chat"
    slices: tuple[str, ...] = ()
    stream_too: bool = False
    """Ask it a second time without streaming: both answers must be the same."""


def right(metric: str) -> Grade:
    return Grade(metric, 1.0, "")


def wrong(metric: str, reason: str) -> Grade:
    return Grade(metric, 0.0, reason)


def ask(prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """The body of a greedy chat request."""
    return {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": max_tokens,
        **more,
    }


T = TypeVar("T")


def pick(items: Iterable[T], count: int, *seed: object) -> list[T]:
    """`count` of them, the same for the same seed, in the order they came."""
    every = list(items)
    chosen = random.Random("/".join(map(str, seed))).sample(range(len(every)), min(count, len(every)))
    return [every[index] for index in sorted(chosen)]


def json_value(text: str) -> tuple[Any, str]:
    """The JSON value in `text` and why there is none (empty if there is one).

    Strict (RFC 8259): no NaN, at most 1024 levels deep, nothing around it but white space.
    """
    try:
        return orjson.loads(text), ""
    except orjson.JSONDecodeError as error:
        return None, str(error)
    except RecursionError:
        return None, "nested too deeply"
