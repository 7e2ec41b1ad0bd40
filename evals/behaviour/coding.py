"""HumanEval (Chen et al., arXiv 2107.03374): complete a function; it counts if it passes its tests.

Data in that benchmark's form, JSON lines with `task_id`, `prompt`, `entry_point` and `test`.
"""

import ast
import re
import secrets
import textwrap
from collections.abc import Iterator
from typing import Any

from strop.evals.behaviour import sandbox
from strop.evals.behaviour.tasks import Answer, Grade, GradingError, Task, ask, pick, right, wrong
from strop.evals.observation import Metric

METRICS = (
    Metric(
        "humaneval_pass", "", "higher", "difference", "share of programming problems solved at the first try"
    ),
)

PROMPT = """\
Complete this Python function. Answer with the whole function in one ```python block and nothing else.

```python
{prompt}```"""

_LIMITS = sandbox.Limits()


def tasks(
    rows: list[dict[str, Any]], count: int, max_tokens: int, seed: int, allow_without_isolation: bool
) -> Iterator[Task]:
    for row in pick(rows, count, "coding", seed):
        yield Task(
            id=f"coding/{row['task_id']}",
            kind="coding",
            body=ask(PROMPT.format(prompt=row["prompt"]), max_tokens),
            grade=lambda answer, row=row: grade(answer, row, allow_without_isolation),
        )


def grade(answer: Answer, row: dict[str, Any], allow_without_isolation: bool = False) -> tuple[Grade]:
    """Run the answer with its tests in the sandbox. Raises GradingError if there can be none."""
    code = solution(answer.text, row["prompt"], row["entry_point"])
    why = failure(code, row["test"], row["entry_point"], allow_without_isolation)
    return (wrong("humaneval_pass", why + answer.cut_off) if why else right("humaneval_pass"),)


def failure(code: str, test: str, entry_point: str, allow_without_isolation: bool = False) -> str:
    """Why `code` fails the tests, empty if it passes.

    It passes if it prints a number that the program is not told and that is read only
    when the tests are through: an early `exit(0)` is no success. A program written against just this
    check could look for the number itself; models do not write those.
    """
    nonce = secrets.token_hex(16)
    program = f"{code}\n\n{test}\n\ncheck({entry_point})\n{_AFTERWARDS}"
    try:
        ran = sandbox.run(program, nonce, _LIMITS, allow_without_isolation)
    except sandbox.SandboxError as error:
        raise GradingError(str(error)) from None
    if ran.how == "exit 0" and nonce in ran.stdout:
        return ""
    return "it ended before its tests had run" if ran.how == "exit 0" else ran.words


_AFTERWARDS = """
import os as _os
_os.write(1, b"\\n" + _os.read(0, 64) + b"\\n")
"""


def solution(text: str, prompt: str, entry_point: str) -> str:
    """The program that an answer makes of the prompt: a whole function, or the body that follows it."""
    code = _code(text, entry_point)
    if _defines(code, entry_point):
        # The prompt is a function whose body is its documentation; the answer defines it once more.
        return f"{prompt}\n    pass\n\n{code}"
    body = code if code.startswith((" ", "\t")) else textwrap.indent(code, "    ")
    return f"{prompt}{body}"


def _code(text: str, entry_point: str) -> str:
    """The block that defines the function, or the first block, or all of an answer without blocks."""
    # A block may be left open, by an answer that was cut off.
    blocks = re.findall(r"```[a-zA-Z0-9]*[ \t]*\n(.*?)(?:```|\Z)", text, re.DOTALL)
    named = [block for block in blocks if re.search(rf"^\s*def\s+{re.escape(entry_point)}\b", block, re.M)]
    return (named or blocks or [text])[0].rstrip()


def _defines(code: str, name: str) -> bool:
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return re.search(rf"^def\s+{re.escape(name)}\b", code, re.M) is not None
    return any(isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == name for n in tree.body)
