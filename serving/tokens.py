"""Conversations as a model's token ids, by its own tokenizer and chat template."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import orjson

from strop.serving.formats import BadRow, Exchange, Message


class TokenizerError(ValueError):
    """A model folder that cannot tokenise chats; the message says why."""


@dataclass(frozen=True)
class Tokens:
    """The tokenizer of a model folder; loaded where it is first used, so that it can be sent elsewhere."""

    model: str

    @cached_property
    def tokenizer(self) -> Any:
        """Raises TokenizerError for a folder without a tokenizer or a chat template."""
        from transformers import AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(self.model, local_files_only=True)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0][:200]
            raise TokenizerError(f"{self.model} is not a folder with a tokenizer: {reason}") from None
        if not tokenizer.chat_template:
            raise TokenizerError(f"{self.model} has no chat template, so chats cannot be tokenised.")
        return tokenizer

    def __getstate__(self) -> dict[str, str]:
        return {"model": self.model}

    def ids(self, exchange: Exchange) -> tuple[list[int], list[int]]:
        """Token ids of prompt and answer as the engine would have them; recorded ids are taken as they are.

        An answer that was not cut off ends with the end-of-turn token. Raises BadRow where the
        template refuses.
        """
        if isinstance(exchange.prompt, str):
            prompt, answer = exchange.prompt, exchange.answer["content"]
        else:
            prompt, answer = self._rendered(exchange.prompt, exchange.answer, exchange.format.get("tools"))
        # Of a completion's prompt the engine adds what the tokenizer adds; a chat template has it already.
        prompt_ids = exchange.prompt_token_ids or self._encode(prompt, isinstance(exchange.prompt, str))
        end = self.tokenizer.eos_token or ""
        if end and end in answer:
            answer = answer[: answer.rindex(end)]
        cut_off = exchange.finish_reason in ("length", "abort")
        return prompt_ids, exchange.output_token_ids or self._encode(answer + ("" if cut_off else end), False)

    def _rendered(self, messages: list[Message], answer: Message, tools: Any) -> tuple[str, str]:
        """Text of the prompt, and of what the model writes after it."""
        from jinja2 import TemplateError

        render = partial(self.tokenizer.apply_chat_template, tools=tools, tokenize=False)
        given = [_for_template(message) for message in messages]
        try:
            prompt = render(given, add_generation_prompt=True)
            whole = render([*given, _for_template(answer)])
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise BadRow(f"the chat template refuses it: {str(error)[:200]}") from None
        if whole.startswith(prompt):
            return prompt, whole[len(prompt) :]
        if answer.get("tool_calls"):
            raise BadRow("the chat template does not write tool calls after its generation prompt")
        return prompt, answer["content"]

    def _encode(self, text: str, special: bool) -> list[int]:
        return self.tokenizer(text, add_special_tokens=special)["input_ids"]


def _for_template(message: Message) -> Message:
    """As vLLM hands it to a template: the arguments of a tool call as an object."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        if isinstance(arguments := function.get("arguments"), str):
            try:
                function["arguments"] = orjson.loads(arguments or "{}")
            except orjson.JSONDecodeError:
                raise BadRow("the arguments of a tool call are not JSON") from None
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}
