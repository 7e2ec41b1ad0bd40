"""Personal data that patterns can tell: taken out of a record so that its tokens keep their number and places.

E-mail addresses, telephone numbers, US social security numbers, payment cards and IPv4 addresses, as
the patterns of `datafog` find them. What was found anywhere in a record is masked everywhere in it:
in text by its kind in brackets, in token ids by `WITHHELD` for every token with a part of it. Names
and postal addresses have no pattern and stay.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
from datafog.processing.text_processing.regex_annotator import RegexAnnotator
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from strop.serving.redaction import without_content
from strop.serving.traces import WITHHELD, Trace

KINDS = ("SSN", "PHONE", "CREDIT_CARD", "IP_ADDRESS", "EMAIL")
"""Where one text is of two kinds, the later is its mask."""
_MOST_CHARACTERS = 1 << 20
# A pattern is matched with the interpreter's lock held: by pieces, the server's thread gets its turn.
_PIECE = 1024
_OVERLAP = 128


class Redactor:
    """Masks personal data in records of one model. Raises ValueError if its tokenizer cannot be read."""

    def __init__(self, model: Path):
        path = model / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more particular
            raise ValueError(
                f"Redaction needs {path} to tell which tokens a text became: {error}. "
                "Add it, or set serving.capture.redact to false."
            ) from None
        patterns = RegexAnnotator().patterns
        self._patterns = {kind: patterns[kind] for kind in KINDS}

    def __call__(self, trace: Trace) -> Trace:
        """The record without personal data; without any content if it is too long to be searched."""
        fields = [trace.messages, trace.format or "", trace.sampling, trace.error or ""]
        answers = [text for choice in trace.choices for text in (choice.text, choice.tool_calls or "")]
        token_lists = [trace.prompt_token_ids, *(choice.token_ids for choice in trace.choices)]
        if (
            sum(map(len, [*fields, *answers])) > _MOST_CHARACTERS
            or max(map(len, token_lists)) > _MOST_CHARACTERS
        ):
            return without_content(trace)
        spoken = [text for field in [*fields[:3], *answers[1::2]] for text in _strings_in(field)]
        decoded = [self._tokenizer.decode(ids, skip_special_tokens=False) for ids in token_lists]
        found = self._values([*spoken, *answers[::2], fields[3], *decoded])
        if not found:
            return trace
        pattern = re.compile("|".join(map(re.escape, sorted(found, key=len, reverse=True))))

        def mask(text: str) -> str:
            return pattern.sub(lambda match: f"[{found[match[0]]}]", text)

        masked = [self._masked(ids, text, pattern) for ids, text in zip(token_lists, decoded, strict=True)]
        choices = [
            replace(
                choice,
                token_ids=ids,
                text=mask(choice.text),
                tool_calls=_each_string(choice.tool_calls, mask),
            )
            for choice, ids in zip(trace.choices, masked[1:], strict=True)
        ]
        return replace(
            trace,
            messages=_each_string(trace.messages, mask) or "",
            format=_each_string(trace.format, mask),
            sampling=_each_string(trace.sampling, mask) or "",
            error=mask(trace.error) if trace.error else trace.error,
            prompt_token_ids=masked[0],
            choices=choices,
        )

    def _values(self, texts: Iterable[str]) -> dict[str, str]:
        """Personal data in texts, and of what kind it is."""
        found: dict[str, str] = {}
        for text in dict.fromkeys(texts):
            for start in range(0, max(1, len(text) - _OVERLAP), _PIECE - _OVERLAP):
                piece = text[start : start + _PIECE]
                for kind, pattern in self._patterns.items():
                    found.update({match[0]: kind for match in pattern.finditer(piece)})
                time.sleep(0)
        return found

    def _masked(self, ids: list[int], decoded: str, pattern: re.Pattern[str]) -> list[int]:
        """Ids with `WITHHELD` for every token that has a part of a match; for all, where places cannot be told."""
        if not pattern.search(decoded):
            return ids
        places = list(self._places(ids))
        text = "".join(piece for _, _, piece in places)
        spans = [match.span() for match in pattern.finditer(text)]
        if len(spans) != len(pattern.findall(decoded)):
            return [WITHHELD] * len(ids)
        masked = list(ids)
        at = 0
        for first, last, piece in places:
            end = at + len(piece)
            if any(start < end and at < stop for start, stop in spans):
                masked[first:last] = [WITHHELD] * (last - first)
            at = end
        return masked

    def _places(self, ids: list[int]) -> Iterator[tuple[int, int, str]]:
        """Tokens `first` to `last` (exclusive) that together are a piece of text: one, unless it takes several
        to make a character."""
        stream = DecodeStream(skip_special_tokens=False)
        first = 0
        for number, token in enumerate(ids):
            try:
                piece = stream.step(self._tokenizer, token)
            except Exception:  # bytes that are no text, of which the library says no more
                return
            if piece:
                yield first, number + 1, piece
                first = number + 1


def _strings_in(text: str) -> list[str]:
    """All strings in a JSON text, names of keys included."""
    found: list[str] = []
    _each_string(text, lambda string: found.append(string) or string)
    return found


def _each_string(text: str | None, change: Callable[[str], str]) -> str | None:
    """A JSON text with every string changed, inside of lists and objects too."""

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, list):
            return [walk(item) for item in value]
        if isinstance(value, dict):
            return {change(name): walk(item) for name, item in value.items()}
        return value

    return orjson.dumps(walk(orjson.loads(text))).decode() if text else text
