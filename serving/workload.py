"""The built-in workload: sessions of a coding assistant about Python's standard library.

The traffic of such a deployment in small: one long stable system prompt, a file excerpt shared by all
sessions on that file, a few turns a session, answers that quote their input, JSON and tool calls
between free text. Everything follows from the seed and the Python version.
"""

import random
from collections.abc import Iterator
from typing import Any

from strop.serving.sessions import Message, Request, Session, Turn, WorkloadError, load_jsonl
from strop.serving.source_code import Function, Module, estimate_tokens, modules

__all__ = ["Request", "Session", "Turn", "WorkloadError", "code_assistant", "load_jsonl"]

KINDS = {
    "explain": 0.19,
    "docstring": 0.13,
    "types": 0.10,
    "test": 0.10,
    "list": 0.08,
    "edit": 0.10,
    "json": 0.15,
    "tools": 0.15,
}
"""Share of each kind of turn."""

MAX_TOKENS = {
    "explain": 128,
    "docstring": 128,
    "types": 192,
    "test": 192,
    "list": 160,
    "edit": 192,
    "json": 192,
    "tools": 96,
}
"""`max_tokens` by kind."""

ON_SELECTION = ("docstring", "types", "test", "edit")
"""Kinds for which the editor sends the selected function along, even if it was shown before."""

SAMPLED_SHARE = 0.15
TURNS = (2, 3, 4)
TURN_WEIGHTS = (0.4, 0.35, 0.25)
ZIPF_EXPONENT = 1.1
EDITABLE_CHARS = 560

SYSTEM = """\
You are a coding assistant inside an editor. The user's open Python file is shown below.

Rules:
- Begin with the answer and be brief: no greeting, no closing remark.
- Put code into one ```python block. Asked for code only, write nothing outside of it.
- Asked for a list, write one markdown bullet a line: - `name`: what it does.
- Asked for JSON, write one JSON object and nothing else.
- Asked for a change, return the whole function with that change and keep the rest of it as it is.

Tools:
- read_file(path, first_line, last_line): shows part of a file.
- search(query, where): finds a word in the code, the tests or the documentation.
- run_tests(target, verbosity): runs the tests of one module.

Open file: {name}.py (excerpt)
```python
{excerpt}
```"""

ASK: dict[str, tuple[str, ...]] = {
    "explain": (
        "What does `{function}` do?",
        "Explain `{function}` in three sentences.",
        "I don't understand `{function}`. What is it for and what does it return?",
        "When would `{function}` fail? Name the cases.",
        "Walk me through `{function}` step by step.",
    ),
    "docstring": (
        "Write a docstring for `{function}`.",
        "`{function}` has no good docstring. Write one with arguments and return value.",
        "Document `{function}`, Google style. Only the docstring.",
    ),
    "types": (
        "Add type hints to `{function}`.",
        "Rewrite `{function}` with type hints, code only.",
        "Rewrite `{function}` so that it is easier to read, with type hints.",
    ),
    "test": (
        "Write a unit test for `{function}`.",
        "Write a pytest test for `{function}` that covers the normal case and one error.",
        "Give me two short pytest tests for `{function}`.",
    ),
    "list": (
        "List the functions and classes of the open file with a one-line summary each.",
        "Which functions are in `{module}.py`? One bullet each.",
        "Give me an overview of the open file as a markdown list.",
    ),
    "edit": (
        "Rename the argument `{old}` of `{function}` to `{new}`. Return the whole function.",
        "In `{function}`, rename `{old}` to `{new}` everywhere. Code only.",
        "Apply this edit: argument `{old}` becomes `{new}` in `{function}`. Output the edited function.",
    ),
    "json": (
        "Describe `{function}` as JSON.",
        "Extract the signature and a summary of `{function}` as JSON.",
        "Fill in the JSON record for `{function}`.",
    ),
    "tools": (
        "Use {tool} to find out more about `{function}`.",
        "Before you change `{function}`, call {tool}.",
        "Call {tool} for `{function}` in {module}.py.",
    ),
}

NEW_NAMES = ("value", "source", "target", "options", "item", "text", "data", "handle", "limit", "context")


def code_assistant(seed: int, sessions: int, model: str, max_prompt_tokens: int = 2048) -> Iterator[Session]:
    """`sessions` sessions of 2 to 4 turns, the same for the same seed and Python version.

    A session ends early rather than let a prompt exceed `max_prompt_tokens` by estimate.
    Raises SourceError if this Python came without the source of its standard library.
    """
    every = modules()
    weights = [1 / rank**ZIPF_EXPONENT for rank in range(1, len(every) + 1)]
    by_popularity = random.Random("popularity").sample(every, len(every))

    def session(number: int) -> Session:
        rng = random.Random(f"{seed}/{number}")
        module = rng.choices(by_popularity, weights)[0]
        return Session(f"code-{seed}-{number:05d}", tuple(_turns(rng, module, model, max_prompt_tokens)))

    return map(session, range(sessions))


def _turns(rng: random.Random, module: Module, model: str, max_prompt_tokens: int) -> Iterator[Turn]:
    system = SYSTEM.format(name=module.name, excerpt=module.excerpt)
    prompt_tokens = estimate_tokens(system)
    known = set(module.shown)
    function = _pick(rng, module)
    for number in range(rng.choices(TURNS, TURN_WEIGHTS)[0]):
        if number and rng.random() < 0.4:
            function = _pick(rng, module)
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        if kind == "edit" and not _editable(function):
            editable = [other for other in module.others if _editable(other)]
            function, kind = (rng.choice(editable), kind) if editable else (function, "docstring")
        asked, extra = _ask(rng, kind, module, function)
        if kind in ON_SELECTION or (kind != "list" and function not in known):
            asked = f"```python\n{function.code}\n```\n{asked}"
            known.add(function)
        prompt_tokens += estimate_tokens(asked)
        if number and prompt_tokens > max_prompt_tokens:
            return
        prompt_tokens += MAX_TOKENS[kind]
        user: Message = {"role": "user", "content": asked}
        messages = (user,) if number else ({"role": "system", "content": system}, user)
        yield Turn(kind, messages, {"model": model, **_sampling(rng, kind), **extra})


def _pick(rng: random.Random, module: Module) -> Function:
    return rng.choice(module.shown if rng.random() < 0.3 else module.others)


def _editable(function: Function) -> bool:
    return bool(function.arguments) and len(function.code) <= EDITABLE_CHARS


def _ask(rng: random.Random, kind: str, module: Module, function: Function) -> tuple[str, dict[str, Any]]:
    """The user's words, and what else the request carries."""
    fill = {"module": module.name, "function": function.name}
    extra: dict[str, Any] = {}
    if kind == "edit":
        fill["old"] = rng.choice(function.arguments)
        fill["new"] = rng.choice([name for name in NEW_NAMES if name not in function.code] or ["renamed"])
    elif kind == "tools":
        fill["tool"] = rng.choice(list(TOOLS))
        extra = {
            "tools": list(TOOLS.values()),
            "tool_choice": {"type": "function", "function": {"name": fill["tool"]}},
        }
    elif kind == "json":
        name = rng.choice(list(FORMATS))
        schema = {"name": name, "schema": FORMATS[name], "strict": True}
        extra = {"response_format": {"type": "json_schema", "json_schema": schema}}
    return rng.choice(ASK[kind]).format(**fill), extra


def _sampling(rng: random.Random, kind: str) -> dict[str, Any]:
    sampled = rng.random() < SAMPLED_SHARE
    seed = rng.randrange(2**31)
    options = {"temperature": 0.7, "seed": seed} if sampled else {"temperature": 0.0}
    return {**options, "max_tokens": MAX_TOKENS[kind]}


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _text(max_length: int) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": max_length}


def _list(items: dict[str, Any], max_items: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": max_items}


# Every string and list is bounded: a small model would otherwise not come to an end.
FORMATS: dict[str, dict[str, Any]] = {
    "function_record": _object(
        name=_text(40), args=_list(_text(24), 6), returns=_text(40), summary=_text(160)
    ),
    "review": _object(
        function=_text(40),
        severity={"type": "string", "enum": ["none", "minor", "major"]},
        issues=_list(_text(80), 3),
        suggestion=_text(120),
    ),
    "test_plan": _object(
        function=_text(40),
        cases=_list(_object(input=_text(32), expected=_text(32)), 3),
        needs_mock={"type": "boolean"},
    ),
}


def _tool(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    # vLLM holds only a strict tool's arguments to their schema.
    parameters = _object(**properties)
    function = {"name": name, "description": description, "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


_LINE = {"type": "integer", "minimum": 1, "maximum": 9999}

TOOLS: dict[str, dict[str, Any]] = {
    "read_file": _tool(
        "read_file", "Shows part of a file.", path=_text(40), first_line=_LINE, last_line=_LINE
    ),
    "search": _tool(
        "search",
        "Finds a word in the project.",
        query=_text(40),
        where={"type": "string", "enum": ["code", "tests", "docs"]},
    ),
    "run_tests": _tool(
        "run_tests",
        "Runs the tests of one module.",
        target=_text(40),
        verbosity={"type": "string", "enum": ["quiet", "normal", "verbose"]},
    ),
}
