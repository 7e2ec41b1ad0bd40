"""What is taken out of a record before it is written."""

from dataclasses import replace
from typing import Any

import orjson

from strop.serving.traces import WITHHELD, Trace

_PARAMETERS = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "seed", "n", "best_of", "max_tokens", "max_completion_tokens",
        "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "top_logprobs",
        "prompt_logprobs", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
        "include_stop_str_in_output", "truncate_prompt_tokens", "use_beam_search", "length_penalty",
        "add_generation_prompt", "continue_final_message",
    }
)  # fmt: skip


def without_content(trace: Trace) -> Trace:
    """The record without anything that was said: times, numbers of tokens, sampling parameters, statistics.

    Each token id becomes `WITHHELD`. Of sampling parameters the known numbers and switches stay, of the
    format how many tools there were and the type of the answer; an error is known by its status.
    """
    choices = [
        replace(choice, token_ids=[WITHHELD] * len(choice.token_ids), text="", tool_calls=None)
        for choice in trace.choices
    ]
    return replace(
        trace,
        model=trace.model if trace.status < 400 else "",
        sampling=orjson.dumps(_numbers(orjson.loads(trace.sampling))).decode(),
        format=_shape(orjson.loads(trace.format)) if trace.format else None,
        messages="",
        prompt_token_ids=[WITHHELD] * len(trace.prompt_token_ids),
        choices=choices,
        error=f"HTTP status {trace.status}" if trace.error is not None else None,
    )


def _numbers(sampling: dict[str, Any]) -> dict[str, Any]:
    kept = _PARAMETERS & sampling.keys()
    return {name: sampling[name] for name in sorted(kept) if isinstance(sampling[name], (bool, int, float))}


def _shape(wanted: dict[str, Any]) -> str:
    form = wanted.get("response_format")
    kind = form.get("type") if isinstance(form, dict) else None
    shape = {
        "tools": len(wanted["tools"]) if isinstance(wanted.get("tools"), list) else None,
        "response_format": {"type": kind} if kind in ("text", "json_object", "json_schema") else None,
        "structured_outputs": True if wanted.get("structured_outputs") else None,
    }
    return orjson.dumps({name: value for name, value in shape.items() if value is not None}).decode()
