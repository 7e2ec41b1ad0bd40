"""Traces that the tests of this folder build on."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from strop.serving.traces import Choice, Trace

MakeTrace = Callable[..., Trace]


@pytest.fixture(scope="session")
def make_trace() -> MakeTrace:
    """Builds a plausible chat trace; keyword arguments replace its fields."""

    def make(number: int = 0, **changes: Any) -> Trace:
        defaults: dict[str, Any] = {
            "request_id": f"r{number}",
            "started_at": datetime(2026, 3, 1, 12, 0, number % 60, number, tzinfo=UTC),
            "tenant": "default",
            "session": f"s{number}",
            "stack": "ab" * 32,
            "endpoint": "chat",
            "stream": True,
            "model": "tiny",
            "sampling": '{"temperature":0}',
            "format": None,
            "messages": '[{"role":"user","content":"hé\\n"}]',
            "prompt_token_ids": [1, 2, 3],
            "choices": [Choice(0, [4, 5, 2], "ok 😀\n", "stop")],
            "status": 200,
            "ttft_s": 0.25,
            "e2e_s": 0.5,
            "inter_token_s": [0.125, 0.125],
        }
        return Trace(**{**defaults, **changes})

    return make
