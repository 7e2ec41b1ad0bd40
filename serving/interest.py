"""Which records are kept when not all are: whole sessions by chance, and whatever is worth a look.

A session is in the sample by a hash of its tenant and name, alike in every replica and after every
restart. Interest is judged when the answer is there, and needs only what this process has seen.
"""

import hashlib
from collections import Counter
from typing import Any

import orjson

from strop.serving.traces import Trace

_NEW = 20
"""A format is rare until it was seen so often, ..."""
_RARE = 0.01
"""... and while it is no more than this share of the requests that ask for any format."""
_FORMATS = 1024
_LOW = 0.5
"""Share of the accepted tokens per step that is usual here, below which acceptance is low."""
_MIN_STEPS = 8
_WARM_UP = 20
_MEMORY = 200
"""Requests that what is usual is averaged over."""


def in_sample(tenant: str, session: str, rate: float) -> bool:
    """Whether a session belongs to the share `rate` of all sessions."""
    digest = hashlib.blake2b(f"{tenant}\0{session}".encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest) < rate * 2**64


class Interest:
    """Tells records that are worth keeping, by what came before them in this process."""

    def __init__(self) -> None:
        self._formats: Counter[str] = Counter()
        self._requests = 0
        self._usual = 0.0

    def of(self, trace: Trace) -> str | None:
        """`failure`, `low acceptance`, `rare format` or None. Learns from every trace it is shown."""
        low, rare = self._accepts_little(trace), self._asks_for_something_rare(trace)
        if trace.error is not None or trace.status >= 400:
            return "failure"
        return "low acceptance" if low else "rare format" if rare else None

    def _accepts_little(self, trace: Trace) -> bool:
        drafted = trace.speculation
        if drafted is None or drafted.steps < _MIN_STEPS:
            return False
        accepted = drafted.accepted / drafted.steps
        low = self._requests >= _WARM_UP and accepted < _LOW * self._usual
        self._requests += 1
        self._usual += (accepted - self._usual) / min(self._requests, _MEMORY)
        return low

    def _asks_for_something_rare(self, trace: Trace) -> bool:
        if not trace.format:
            return False
        name = _name_of(orjson.loads(trace.format))
        self._formats[name] += 1
        rare = self._formats[name] <= max(_NEW, _RARE * self._formats.total())
        if len(self._formats) > _FORMATS:
            self._formats = Counter({n: count // 2 for n, count in self._formats.items() if count > 1})
        return rare


def _name_of(wanted: dict[str, Any]) -> str:
    """What tells one kind of wanted answer from another: names of tools, the kind and name of a schema."""
    tools = wanted.get("tools")
    functions = [_dict(_dict(tool).get("function")) for tool in tools] if isinstance(tools, list) else []
    form = _dict(wanted.get("response_format"))
    schema = _dict(form.get("json_schema"))
    names = sorted(str(function.get("name")) for function in functions)
    return repr((names, form.get("type"), schema.get("name"), sorted(wanted)))[:1000]


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
