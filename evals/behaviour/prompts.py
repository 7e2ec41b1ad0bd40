"""A user's own prompts, each with the grader that says what a right answer is."""

import ast
import json
import math
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
import regex
import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from strop.evals.behaviour import judging, sandbox
from strop.evals.behaviour.structured import mismatch
from strop.evals.behaviour.tasks import Answer, Grade, GradingError, Task, json_value
from strop.evals.observation import EvalError, Metric
from strop.serving.settings import Section

METRICS = (Metric("graded", "", "higher", "difference", "mean grade on the user's own prompts"),)

MAX_FILE_BYTES = 256 << 20
_SHOWN_FAULTS = 10
_REGEX_S = 1.0


class Exact(Section):
    type: Literal["exact"]
    answer: str
    """What the answer must be, apart from white space around it."""

    def grade(self, answer: Answer, row: "Row") -> tuple[float, str]:
        same = answer.text.strip() == self.answer.strip()
        return float(same), "" if same else f"is not {self.answer[:80]!r}"


class Regex(Section):
    type: Literal["regex"]
    pattern: str
    """Must be found in the answer, in the syntax of Python's `regex` package; `(?s)^...$` asks for all of it."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            regex.compile(pattern)
        except regex.error as error:
            raise ValueError(f"no regular expression: {error}") from None
        return pattern

    def grade(self, answer: Answer, row: "Row") -> tuple[float, str]:
        try:
            found = regex.search(self.pattern, answer.text, timeout=_REGEX_S)
        except TimeoutError:
            raise GradingError(
                f"the pattern {self.pattern[:80]!r} took more than {_REGEX_S:g} s on an answer; make it simpler"
            ) from None
        return float(found is not None), "" if found else f"does not match {self.pattern[:80]!r}"


class Schema(Section):
    type: Literal["json_schema"]
    json_schema: dict[str, Any]
    """The answer must be JSON that fits it."""

    def grade(self, answer: Answer, row: "Row") -> tuple[float, str]:
        value, why = json_value(answer.text)
        why = f"not JSON: {why}" if why else mismatch(value, self.json_schema)
        return float(not why), why or ""


class Function(Section):
    type: Literal["python"]
    function: str = Field(pattern=r"^.+\.py:[A-Za-z_]\w*$")
    """`file.py:name`, the file beside the prompts. It is called with the answer's text and the row, and
    returns true, false, a grade from 0 to 1, or a grade and a reason. It runs in the sandbox, so that
    an answer it evaluates can do no harm, with the standard library alone."""
    source: str = Field(default="", exclude=True, repr=False)
    allow_without_isolation: bool = Field(default=False, exclude=True, repr=False)

    def grade(self, answer: Answer, row: "Row") -> tuple[float, str]:
        # An answer that the function runs could print a grade of its own: it is not told this.
        nonce = secrets.token_hex(16)
        given = {"answer": answer.text, "row": row.model_dump(mode="json"), "nonce": nonce}
        program = _CALL.format(source=self.source, file=self.function, name=self.function.rpartition(":")[2])
        try:
            ran = sandbox.run(
                program, json.dumps(given), allow_without_isolation=self.allow_without_isolation
            )
        except sandbox.SandboxError as error:
            raise GradingError(str(error)) from None
        _, told, said = ran.stdout.rpartition(nonce)
        result, why = json_value(said)
        if ran.how != "exit 0" or why or not told:
            raise GradingError(f"{self.function} gave no grade: {ran.words}")
        value, reason = result if isinstance(result, list) and len(result) == 2 else (result, "")
        if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
            raise GradingError(f"{self.function} returned {result!r:.80}, which is no grade from 0 to 1")
        return float(value), str(reason)[:300] or (
            "" if value == 1 else f"graded {value:g} by {self.function}"
        )


_CALL = """\
import json, sys
given = json.load(sys.stdin)
nonce = given.pop("nonce")
scope = {{"__name__": "grader"}}
exec(compile({source!r}, {file!r}, "exec"), scope)
result = scope[{name!r}](given["answer"], given["row"])
sys.stdout.write(nonce + json.dumps(result))
"""


class Judge(Section):
    type: Literal["judge"]
    rubric: str = Field(min_length=1)
    """What a good answer is, in words."""
    by: judging.JudgeModel | None = Field(default=None, exclude=True)

    def grade(self, answer: Answer, row: "Row") -> tuple[float, str]:
        if self.by is None:
            raise GradingError("no judge is named: set `judge` in the suite")
        return judging.verdict(self.by, row.shown, answer.whole, self.rubric)


Graders = Annotated[Exact | Regex | Schema | Function | Judge, Field(discriminator="type")]


class Row(Section):
    """One prompt of a user's file."""

    id: str | None = Field(default=None, max_length=200)
    prompt: str | None = None
    """Text of a single user message; or give `messages`."""
    messages: list[dict[str, Any]] | None = None
    grader: Graders
    max_tokens: int | None = Field(default=None, ge=1)
    """Instead of the suite's."""
    slices: tuple[str, ...] = ()
    """Kinds to report by themselves."""
    request: dict[str, Any] = Field(default={})
    """More of the request: tools, response_format, ..."""

    @model_validator(mode="after")
    def _one_prompt(self) -> "Row":
        if (self.prompt is None) == (not self.messages):
            raise ValueError("give either prompt or messages")
        return self

    @property
    def shown(self) -> str:
        return self.prompt if self.prompt is not None else json.dumps(self.messages, ensure_ascii=False)


class PromptFileError(EvalError):
    """A file of prompts cannot be used; says which rows and why."""


def load(
    path: Path, judge: judging.JudgeModel | None = None, allow_without_isolation: bool = False
) -> list[Row]:
    """Read a file of prompts: JSON lines, or YAML with a list.

    Raises PromptFileError that names every bad row (up to ten) by its line.
    """
    rows: list[Row] = []
    faults: list[str] = []
    seen: dict[str, int] = {}
    for line, content in _rows(path):
        try:
            if isinstance(content, Exception):
                raise content
            row = _bound(Row.model_validate(content), path, judge, allow_without_isolation)
            row = row if row.id else row.model_copy(update={"id": f"line-{line}"})
            if (other := seen.setdefault(str(row.id), line)) != line:
                raise ValueError(f"has the id {row.id!r} of line {other}")
            rows.append(row)
        except (ValueError, OSError) as error:
            faults.append(f"line {line}: {_reason(error)}")
    if faults:
        more = f"\n… and {len(faults) - _SHOWN_FAULTS} more" if len(faults) > _SHOWN_FAULTS else ""
        raise PromptFileError(
            f"{path} has {len(faults)} bad rows:\n" + "\n".join(faults[:_SHOWN_FAULTS]) + more
        )
    if not rows:
        raise PromptFileError(f"{path} holds no prompts.")
    return rows


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(Line, content or why it cannot be read), one a row."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise PromptFileError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB.")
        data = path.read_bytes()
    except OSError as error:
        raise PromptFileError(f"{path} cannot be read: {error.strerror}.") from None
    if path.suffix in (".yaml", ".yml"):
        yield from _yaml_rows(path, data)
        return
    for line, text in enumerate(data.split(b"\n"), 1):
        if text.strip():
            try:
                yield line, orjson.loads(text)
            except ValueError as error:
                yield line, ValueError(f"no JSON: {error}")


def _yaml_rows(path: Path, data: bytes) -> Iterator[tuple[int, Any]]:
    try:
        # Nodes know their lines, values do not.
        node = yaml.compose(data.decode(), Loader=yaml.SafeLoader)
        values = yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise PromptFileError(f"{path} is no YAML: {str(error)[:300]}") from None
    if not isinstance(node, yaml.SequenceNode):
        raise PromptFileError(f"{path} must be a list of prompts.")
    for child, value in zip(node.value, values, strict=True):
        yield child.start_mark.line + 1, value


def _bound(row: Row, path: Path, judge: judging.JudgeModel | None, allow_without_isolation: bool) -> Row:
    """The row with what its grader needs besides: the function's source, the judge."""
    if isinstance(row.grader, Judge):
        if judge is None:
            raise ValueError("its grader is a judge, but the suite names none: set `judge`")
        return row.model_copy(update={"grader": row.grader.model_copy(update={"by": judge})})
    if isinstance(row.grader, Function):
        file, _, name = row.grader.function.rpartition(":")
        source = (path.parent / file).read_text(encoding="utf-8")
        try:
            tree = ast.parse(source)
        except SyntaxError as error:
            raise ValueError(f"{file} is no Python: {error}") from None
        if not any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body):
            raise ValueError(f"{file} defines no function {name}")
        update = {"source": source, "allow_without_isolation": allow_without_isolation}
        return row.model_copy(update={"grader": row.grader.model_copy(update=update)})
    return row


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        return f"{where}: {first['msg']}" if where else first["msg"].removeprefix("Value error, ")
    if isinstance(error, OSError):
        return f"{error.filename} cannot be read: {error.strerror}"
    return str(error)


def tasks(rows: Sequence[Row], max_tokens: int) -> Iterator[Task]:
    for row in rows:
        yield Task(
            id=f"prompts/{row.id}",
            kind="prompts",
            body={
                "messages": row.messages or [{"role": "user", "content": row.prompt}],
                "temperature": 0,
                "max_tokens": row.max_tokens or max_tokens,
                **row.request,
            },
            grade=lambda answer, row=row: grade(answer, row),
            slices=row.slices,
        )


def grade(answer: Answer, row: Row) -> tuple[Grade]:
    """Raises GradingError."""
    value, reason = row.grader.grade(answer, row)
    if not math.isfinite(value):
        raise GradingError(f"the grade of {row.id} is {value}")
    return (Grade("graded", value, reason + answer.cut_off if reason else ""),)
