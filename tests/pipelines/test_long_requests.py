"""Prompts as long as the model takes, and clients that leave, through the whole fleet."""

from collections.abc import Callable

import httpx
import pytest

from strop.serving.cluster import connect
from strop.serving.journal import recover
from strop.serving.monitoring import scrape
from strop.serving.traces import Trace, TraceStore

from .conftest import Served, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CONTEXT = 1024
HEADROOM = 16


def _recorded(served: Served, session: str) -> Trace:
    found: list[Trace] = []

    def there() -> bool:
        recover(served.home / "traces")
        found[:] = TraceStore(served.home / "traces").scan(lambda t: t.session == session)
        return bool(found)

    wait_for(there, 30)
    (trace,) = found
    return trace


def _tokens(served: Served, text: str) -> int:
    return served.ask(text, max_tokens=1).json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_fills_the_context_is_answered_and_recorded_whole(served: Served, stream: bool) -> None:
    two, four = _tokens(served, "the " * 2), _tokens(served, "the " * 4)
    each = (four - two) / 2
    text = "the " * int((CONTEXT - HEADROOM - two) / each)
    session = f"as long as can be {stream}"
    answer = served.ask(text, session=session, stream=stream, ignore_eos=True)
    assert answer.status_code == 200
    trace = _recorded(served, session)
    assert CONTEXT - HEADROOM - 2 * each <= len(trace.prompt_token_ids) <= CONTEXT - HEADROOM
    assert len(trace.choices[0].token_ids) == 16 and trace.choices[0].finish_reason == "length"


def test_a_prompt_beyond_the_context_is_refused_in_words(served: Served) -> None:
    answer = served.ask("the " * 3000, session="too long")
    assert answer.status_code == 400
    assert "1024" in answer.json()["error"]["message"]
    trace = _recorded(served, "too long")
    assert trace.status == 400 and trace.error


def _reads_some(served: Served, body: dict, headers: dict) -> None:
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body | {"stream": True}, headers=headers, timeout=60) as answer:  # fmt: skip
        for number, _ in enumerate(answer.iter_lines()):
            if number == 20:
                return


def _waits_a_little(served: Served, body: dict, headers: dict) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{served.url}/v1/chat/completions", json=body, headers=headers, timeout=httpx.Timeout(60, read=1)
        )


@pytest.mark.parametrize("leaves", [_reads_some, _waits_a_little], ids=["stream", "whole"])
def test_a_client_that_leaves_ends_the_generation_and_its_trace_says_so(
    served: Served, leaves: Callable[[Served, dict, dict], None]
) -> None:
    (replica,) = connect(served.home).status().pools[0].replicas
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": f"count for ever {leaves.__name__}"}],
        "max_tokens": 900, "ignore_eos": True, "temperature": 0,
    }  # fmt: skip
    session = f"left {leaves.__name__}"
    before = scrape(f"{replica.url}/metrics").total("vllm:generation_tokens_total")
    leaves(served, body, {"X-Session-Id": session})
    wait_for(lambda: not scrape(f"{replica.url}/metrics").total("vllm:num_requests_running"), 10)
    made = scrape(f"{replica.url}/metrics").total("vllm:generation_tokens_total") - before
    assert made < 900
    trace = _recorded(served, session)
    assert trace.status == 499 and trace.error == "the client went away"
    if leaves is _reads_some:
        assert 0 < len(trace.choices[0].token_ids) < 900
