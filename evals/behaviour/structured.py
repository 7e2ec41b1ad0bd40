"""Structured output: is the answer JSON, and does it fit the schema, with a grammar and without.

Schemas: JSONSchemaBench (Geng et al., arXiv 2501.10868) or anything in its form: JSON lines with `id`
and `schema`. Validity is JSON Schema's, by the dialect that a schema names or else 2020-12.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import referencing
import regex
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for

from strop.evals.behaviour.tasks import Answer, Grade, Task, ask, json_value, pick, right, wrong
from strop.evals.observation import Metric

VALIDATION_S = 2.0
"""A schema that takes longer to check an answer counts as not met: its patterns explode."""
MAX_SCHEMA_CHARS = 1200
"""Schemas are put into the prompt; longer ones cost more prefill than they tell."""

METRICS = (
    Metric("json_valid", "", "higher", "difference", "share of answers that are JSON where the prompt asks for it"),
    Metric("schema_valid", "", "higher", "difference", "share of answers that fit the JSON schema in the prompt"),
    Metric(
        "json_valid_constrained", "", "higher", "difference", "share of answers under a grammar that are JSON"
    ),
    Metric(
        "schema_valid_constrained", "", "higher", "difference", "share of answers under a grammar that fit it"
    ),
)  # fmt: skip

PROMPT = """\
Write one JSON value that is valid against this JSON schema. Make up plausible short values. \
Answer with the JSON alone: no explanation and no code fence.

{schema}"""


def tasks(rows: list[dict[str, Any]], count: int, max_tokens: int, seed: int) -> Iterator[Task]:
    """Two tasks for each of `count` schemas: free, and constrained by `response_format`."""
    usable = [row for row in rows if _usable(row)]
    for row in pick(usable, count, "structured", seed):
        schema = row["schema"]
        body = ask(PROMPT.format(schema=json.dumps(schema, ensure_ascii=False)), max_tokens)
        source = str(row["id"]).split("/")[0]
        for constrained in (False, True):
            how = "constrained" if constrained else "free"
            suffix = "_constrained" if constrained else ""
            wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
            yield Task(
                id=f"structured/{row['id']}/{how}",
                kind="structured",
                body={**body, "response_format": wanted} if constrained else body,
                grade=lambda answer, schema=schema, suffix=suffix: grade(answer, schema, suffix),
                slices=(source,),
            )


def grade(answer: Answer, schema: dict[str, Any], suffix: str = "") -> tuple[Grade, Grade]:
    """Whether the text is JSON, and whether it fits. A fence around it makes it neither."""
    value, why = json_value(answer.text)
    if why:
        reason = f"not JSON: {why}{answer.cut_off}"
        return wrong(f"json_valid{suffix}", reason), wrong(f"schema_valid{suffix}", reason)
    why = mismatch(value, schema)
    valid = right(f"json_valid{suffix}")
    return valid, wrong(f"schema_valid{suffix}", why) if why else right(f"schema_valid{suffix}")


def mismatch(value: Any, schema: Any) -> str | None:
    """Why a JSON value does not fit a schema; None if it does.

    Never fetches a reference, and ends within about `VALIDATION_S` whatever the patterns are.
    """
    try:
        error = next(_validator(schema, VALIDATION_S).iter_errors(value), None)
    except _TooLong:
        return f"checking it against the schema took more than {VALIDATION_S:g} s"
    except RecursionError:
        return "the schema or the answer is nested too deeply to be checked"
    except Exception as broken:  # jsonschema raises many kinds of errors for schemas that are none
        return f"the schema cannot be checked: {type(broken).__name__}: {broken}"[:300]
    if error is None:
        return None
    return f"{error.json_path[:100]}: {error.message[:200]}"


class _TooLong(Exception):
    pass


def _usable(row: dict[str, Any]) -> bool:
    schema = row.get("schema")
    if not isinstance(schema, dict) or len(json.dumps(schema)) > MAX_SCHEMA_CHARS:
        return False
    # What "format" or a remote reference mean is not in the schema itself.
    if any(not str(reference).startswith("#") for reference in _references(schema)):
        return False
    try:
        _dialect(schema).check_schema(schema)
    except (jsonschema.SchemaError, RecursionError):
        return False
    return True


def _references(schema: Any) -> Iterator[Any]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _dialect(schema: Any) -> type[Validator]:
    default = jsonschema.Draft202012Validator
    return validator_for(schema, default=default) if isinstance(schema, dict) else default


def _validator(schema: Any, seconds: float) -> Validator:
    """A validator that stops after `seconds`: Python's own `re` could hold the whole process for ever."""
    deadline = time.monotonic() + seconds

    def found(pattern: str, text: str) -> bool:
        try:
            return bool(regex.search(pattern, text, timeout=max(deadline - time.monotonic(), 1e-3)))
        except TimeoutError:
            raise _TooLong from None

    def pattern(_: Validator, wanted: str, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
        if isinstance(value, str) and not found(wanted, value):
            yield jsonschema.ValidationError(f"{value!r} does not match {wanted!r}")

    def pattern_properties(
        validator: Validator, wanted: dict[str, Any], value: Any, _: Any
    ) -> Iterator[jsonschema.ValidationError]:
        if isinstance(value, dict):
            for each, inner in wanted.items():
                for name in value:
                    if found(each, name):
                        yield from validator.descend(value[name], inner, path=name, schema_path=each)  # pyright: ignore[reportAttributeAccessIssue]

    def additional_properties(
        validator: Validator, wanted: Any, value: Any, schema: dict[str, Any]
    ) -> Iterator[jsonschema.ValidationError]:
        if not isinstance(value, dict):
            return
        patterns, known = schema.get("patternProperties", {}), schema.get("properties", {})
        for name in value:
            if name in known or any(found(each, name) for each in patterns):
                continue
            if wanted is False:
                yield jsonschema.ValidationError(f"{name!r} is not among the properties")
            else:
                yield from validator.descend(value[name], wanted, path=name)  # pyright: ignore[reportAttributeAccessIssue]

    bounded = {
        "pattern": pattern,
        "patternProperties": pattern_properties,
        "additionalProperties": additional_properties,
    }
    dialect = extend(_dialect(schema), bounded)
    return dialect(schema, registry=referencing.Registry())
