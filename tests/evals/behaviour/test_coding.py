"""Programs that models write: what is taken for the answer, and when it counts."""

import gzip
import json
from pathlib import Path

import pytest

from strop.evals.behaviour import coding
from strop.evals.behaviour.sandbox import isolation_missing
from strop.evals.behaviour.tasks import Answer

DATA = Path(__file__).parents[4] / "shared" / "data" / "HumanEval.jsonl.gz"
isolated = pytest.mark.skipif(isolation_missing() is not None, reason="programs cannot be isolated here")
ROW = {
    "task_id": "T/0",
    "prompt": 'import math\n\ndef helper(x):\n    return x\n\n\ndef twice(x: int) -> int:\n    """Twice x.\n    >>> twice(2)\n    4\n    """\n',
    "entry_point": "twice",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
}  # fmt: skip

RIGHT = [
    "```python\ndef twice(x):\n    return 2 * x\n```",
    "Here it is:\n\n```python\nimport os\n\ndef twice(x: int) -> int:\n    return helper(x) * 2\n```\nIt doubles.",
    "```\ndef twice(x):\n    return 2 * x\n```",
    "```python\nprint('an example')\n```\n\n```python\ndef twice(x):\n    return 2 * x\n```",
    "    return 2 * x",
    "return 2 * x",
    "```python\n    y = x\n    return y + x\n```",
    "def twice(x):\n    return 2 * x",
    "```python\ndef twice(x):\n    return 2 * x\n",
    "```python\ndef twice(x):\n    return 2 * x\nprint('loud' * 100)\n```",
]
WRONG = [
    "",
    "I cannot do that.",
    "```python\ndef twice(x):\n    return x\n```",
    "```python\ndef thrice(x):\n    return 2 * x\n```",
    "```python\ndef twice(x)\n    return 2 * x\n```",
    "```python\nimport os\nos._exit(0)\ndef twice(x):\n    return 2 * x\n```",
    "```python\ndef twice(x):\n    import os; os._exit(0)\n```",
    "```python\ndef twice(x):\n    raise SystemExit(0)\n```",
    "```python\ndef twice(x):\n    while True: pass\n```",
    "```python\ndef twice(x):\n    import sys\n    while True: sys.stdout.write('x' * 10**6)\n```",
    "```python\ndef twice(x):\n    return open('/etc/passwd')\n```",
    "\x00```python",
    "(" * 3000,
    "```python\ndef twice(x):\n    return x\ndef check(candidate): pass\n```",
]


@isolated
@pytest.mark.parametrize("text", RIGHT)
def test_right_programs(text: str) -> None:
    assert coding.grade(Answer(text), ROW)[0].reason == ""


@isolated
@pytest.mark.parametrize("text", WRONG)
def test_wrong_programs(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding, "_LIMITS", coding.sandbox.Limits(seconds=2, cpu_seconds=1))
    [grade] = coding.grade(Answer(text), ROW)
    assert grade.value == 0 and grade.reason


@isolated
def test_leaving_before_the_tests_is_named() -> None:
    text = "```python\nimport os\ndef twice(x):\n    os._exit(0)\n```"
    assert "before its tests had run" in coding.grade(Answer(text), ROW)[0].reason


@isolated
@pytest.mark.skipif(not DATA.is_file(), reason=f"{DATA} is not there")
def test_real_problems_accept_their_solutions_and_nothing_empty() -> None:
    rows = [json.loads(line) for line in gzip.decompress(DATA.read_bytes()).splitlines()]
    for row in rows[::20]:
        body = row["canonical_solution"]
        whole = f"```python\n{row['prompt']}{body}\n```"
        for text in (body, whole):
            assert coding.grade(Answer(text), row)[0].reason == "", row["task_id"]
        assert coding.grade(Answer("    pass"), row)[0].value == 0, row["task_id"]
