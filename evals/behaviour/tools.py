"""Tool calls: the right function with the right arguments, and none where none fits.

Cases and accepted answers in the form of the Berkeley Function-Calling Leaderboard (Patil et al., ICML
2025, data version 4), compared as that benchmark's syntax-tree check does: by function, by parameter,
each value against the accepted ones, calls in any order.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strop.evals.behaviour.tasks import Answer, Call, Grade, Task, json_value, pick, right, wrong
from strop.evals.observation import Metric

METRICS = (
    Metric("tool_call_right", "", "higher", "difference", "share of requests answered with exactly the right calls"),
    Metric("no_call_right", "", "higher", "difference", "share of requests left without a call where no tool fits"),
    Metric("no_invented_result", "", "higher", "difference", "share of answers that make up no tool's result"),
    Metric(
        "stream_agrees", "", "higher", "difference",
        "share of requests whose streamed answer is read like the one that came whole",
    ),
)  # fmt: skip

_TYPES = {
    "dict": "object", "float": "number", "double": "number", "tuple": "array", "list": "array",
    "int": "integer", "long": "integer", "bool": "boolean", "str": "string", "char": "string", "byte": "integer",
}  # fmt: skip
_KEPT = ("description", "enum", "default", "required")
_CALL_MARKUP = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function=", "<|tool_calls_begin|>")
_RESULT_MARKUP = re.compile(
    r"</?tool_response>|</?tool_result>|</?function_results?>|</?function_response>|\[/?TOOL_RESULTS\]"
    r"|<\|(?:start_header_id\|>\s*ipython|im_start\|>\s*tool|tool_response\|?|tool▁outputs?▁begin\|)"
    r"|<｜tool▁outputs?▁begin｜>|^\s*Observation:|\"role\"\s*:\s*\"tool\"",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Names:
    """The functions' own names by those that an OpenAI request can carry."""

    own: dict[str, str]

    @classmethod
    def of(cls, functions: Iterable[Mapping[str, Any]]) -> "Names":
        """Only letters, digits, `_` and `-` are allowed, 64 of them; what then collides is numbered."""
        own: dict[str, str] = {}
        for function in functions:
            plain = safe = re.sub(r"[^a-zA-Z0-9_-]", "_", function["name"])[:64]
            number = 2
            while safe in own:
                safe = f"{plain[:60]}_{number}"
                number += 1
            own[safe] = function["name"]
        return cls(own)


def openai_tools(functions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The functions as `tools` of a chat request, their types as JSON Schema has them."""
    return [
        {
            "type": "function",
            "function": {
                "name": safe,
                "description": function.get("description", ""),
                "parameters": json_schema(function["parameters"]),
            },
        }
        for safe, function in zip(Names.of(functions).own, functions, strict=True)
    ]


def json_schema(parameter: Mapping[str, Any]) -> dict[str, Any]:
    """One parameter's document as a JSON schema; `any` and unknown types allow everything."""
    schema = {key: parameter[key] for key in _KEPT if key in parameter}
    kind = str(parameter.get("type", "any")).lower()
    kind = _TYPES.get(kind, kind)
    if kind in ("object", "array", "string", "integer", "number", "boolean", "null"):
        schema["type"] = kind
    if isinstance(properties := parameter.get("properties"), Mapping):
        schema["properties"] = {name: json_schema(inner) for name, inner in properties.items()}
    if isinstance(items := parameter.get("items"), Mapping):
        schema["items"] = json_schema(items)
    return schema


def tasks(
    rows: list[dict[str, Any]],
    accepted: Mapping[str, list[dict[str, Any]]] | None,
    name: str,
    count: int,
    max_tokens: int,
    seed: int,
) -> Iterator[Task]:
    """Tasks of one file of cases; `accepted` holds the right calls by case, None where none is right."""
    for row in pick(rows, count, "tools", name, seed):
        functions = row["function"]
        wanted = None if accepted is None else accepted[row["id"]]
        body = {
            "messages": row["question"][0],
            "tools": openai_tools(functions),
            "tool_choice": "auto",
            "temperature": 0,
            "max_tokens": max_tokens,
            "return_token_ids": True,
        }
        yield Task(
            id=f"tools/{row['id']}",
            kind="tools",
            body=body,
            grade=lambda answer, f=functions, w=wanted: grade(answer, f, w),
            slices=(name,),
            stream_too=True,
        )


def grade(
    answer: Answer, functions: Sequence[Mapping[str, Any]], wanted: list[dict[str, Any]] | None
) -> tuple[Grade, ...]:
    """`wanted`: function name -> parameter -> accepted values, one a call; None if no call is right."""
    if wanted is None:
        first = _no_call(answer)
    else:
        why = difference(answer.calls, functions, wanted)
        if why and not answer.calls and any(markup in answer.text for markup in _CALL_MARKUP):
            why = "the call was left in the text as markup, so that no client sees it"
        metric = "tool_call_right"
        first = wrong(metric, why + answer.cut_off) if why else right(metric)
    return first, _no_invented_result(answer)


def _no_call(answer: Answer) -> Grade:
    if answer.calls:
        return wrong("no_call_right", f"calls {answer.calls[0].name[:80]}, which does not fit the question")
    if any(markup in answer.text for markup in _CALL_MARKUP):
        return wrong("no_call_right", "tries to call a tool, in markup that was left in the text")
    return right("no_call_right")


def _no_invented_result(answer: Answer) -> Grade:
    """No tool was run, so any result of one is made up. Seen by its markup: prose may claim anything."""
    if found := _RESULT_MARKUP.search(answer.text):
        where = answer.text[found.start() : found.start() + 80]
        return wrong("no_invented_result", f"goes on with a tool's result that nobody gave it: {where!r}")
    return right("no_invented_result")


def difference(
    calls: Sequence[Call], functions: Sequence[Mapping[str, Any]], wanted: Sequence[Mapping[str, Any]]
) -> str:
    """Why the calls are not the wanted ones in some order; empty if they are."""
    if len(calls) != len(wanted):
        return f"{len(calls)} calls instead of {len(wanted)}"
    own, documents = Names.of(functions).own, {f["name"]: f for f in functions}
    reasons = [[_call_difference(call, own, documents, want) for want in wanted] for call in calls]
    if _matched([[not why for why in row] for row in reasons]):
        return ""
    first = next((row for row in reasons if all(row)), reasons[0])
    return next(why for why in first if why)


def _matched(fits: list[list[bool]]) -> bool:
    """Whether every call can have a wanted one of its own (augmenting paths)."""
    taken: dict[int, int] = {}

    def place(call: int, seen: set[int]) -> bool:
        for want, fit in enumerate(fits[call]):
            if fit and want not in seen:
                seen.add(want)
                if want not in taken or place(taken[want], seen):
                    taken[want] = call
                    return True
        return False

    return all(place(call, set()) for call in range(len(fits)))


def _call_difference(
    call: Call, own: Mapping[str, str], documents: Mapping[str, Any], wanted: Mapping[str, Any]
) -> str:
    [(name, parameters)] = wanted.items()
    called = own.get(call.name, call.name)
    if called not in documents:
        return f"calls {called[:80]!r}, which was not offered"
    if called != name:
        return f"calls {called} instead of {name}"
    arguments, why = json_value(call.arguments)
    if why or not isinstance(arguments, dict):
        return f"the arguments of {name} are no JSON object: {why or type(arguments).__name__}"
    schemas = documents[name]["parameters"].get("properties", {})
    for parameter in arguments:
        if parameter not in parameters:
            return f"{name} is given {parameter[:80]!r}, which it must not be"
    for parameter, values in parameters.items():
        if parameter not in arguments:
            if "" in values:
                continue
            return f"{name} is not given {parameter!r}"
        kind = str(schemas.get(parameter, {}).get("type", "any")).lower()
        if not accepted(arguments[parameter], values, _TYPES.get(kind, kind)):
            given = json.dumps(arguments[parameter], ensure_ascii=False)[:80]
            return f"{name}: {parameter} is {given}, not {json.dumps(values, ensure_ascii=False)[:120]}"
    return ""


def accepted(value: Any, values: Sequence[Any], kind: str = "any") -> bool:
    """Whether `value` is of the JSON type `kind` and equals one of the accepted values."""
    if not _is_of(value, kind):
        return False
    return any(_equal(value, want) for want in values)


def _is_of(value: Any, kind: str) -> bool:
    if value is None or kind not in ("integer", "number", "string", "boolean", "array", "object"):
        return True
    if kind == "boolean":
        return isinstance(value, bool)
    if kind in ("integer", "number"):
        whole = kind == "number" or (isinstance(value, int | float) and float(value).is_integer())
        return isinstance(value, int | float) and not isinstance(value, bool) and whole
    return isinstance(value, {"string": str, "array": list, "object": dict}[kind])


def _equal(value: Any, want: Any) -> bool:
    if isinstance(want, dict):
        return isinstance(value, dict) and _fits(value, want)
    if isinstance(want, list):
        return isinstance(value, list) and len(value) == len(want) and all(map(_equal, value, want))
    if isinstance(want, str):
        return isinstance(value, str) and _plain(value) == _plain(want)
    if isinstance(want, bool) or isinstance(value, bool) or want is None or value is None:
        return value is want
    return isinstance(value, int | float) and math.isclose(value, want, rel_tol=1e-9)


def _fits(value: dict[str, Any], want: dict[str, Any]) -> bool:
    """Members of an accepted object hold accepted values of their own, in a list."""
    if not value.keys() <= want.keys():
        return False
    for name, values in want.items():
        values = values if isinstance(values, list) else [values]
        if name not in value:
            if "" not in values:
                return False
        elif not any(_equal(value[name], each) for each in values):
            return False
    return True


def _plain(text: str) -> str:
    """Letters and digits in lower case: how a place or a date is punctuated makes no call wrong."""
    return re.sub(r"[\s,./\-_*^'\"`]", "", text).lower()


def same_reading(streamed: Answer, whole: Answer) -> Grade | None:
    """Whether one answer was read alike both ways; None if the model itself said two different things.

    The same tokens must give the same text and calls. Other tokens are another answer: greedy decoding
    in another batch may take the other side of a numeric tie, which is no fault of a parser.
    """
    if None not in (streamed.token_ids, whole.token_ids) and streamed.token_ids != whole.token_ids:
        return None
    if _reading(streamed) == _reading(whole):
        return right("stream_agrees")
    return wrong(
        "stream_agrees",
        f"streamed it is read as {streamed.whole[:150]!r}, whole as {whole.whole[:150]!r}",
    )


def _reading(answer: Answer) -> tuple[str, list[tuple[str, Any]]]:
    return answer.text.strip(), [
        (c.name, json_value(c.arguments)[0] or c.arguments.strip()) for c in answer.calls
    ]
