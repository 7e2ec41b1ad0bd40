"""Capture inside a real vLLM server."""

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from strop.serving.sse import EventSplitter, payload
from strop.serving.traces import Trace, TraceStore

pytestmark = pytest.mark.slow

LINES = (Path(__file__).parent / "vllm_wire.jsonl").read_text().splitlines()
CASES = {case["case"]: case for case in map(json.loads, LINES)}
SERVED = [name for name, case in CASES.items() if case["status"] == 200]


def ask(engine: Any, name: str, **changes: Any) -> tuple[str, Any]:
    """The recorded request of that name to the real server: the request's id and the parsed answer."""
    case = CASES[name]
    response = httpx.post(engine.url + case["path"], json={**case["request"], **changes}, timeout=60)
    assert response.status_code == 200, response.text
    assert response.headers["x-strop-stack"] == engine.stack.fingerprint
    return response.headers["x-request-id"], parsed(response.content, "stream" in name)


def parsed(body: bytes, stream: bool) -> Any:
    if not stream:
        return json.loads(body)
    data = [payload(event) for event in EventSplitter().feed(body)]
    assert data[-1] == b"[DONE]"
    return [json.loads(d or b"") for d in data[:-1]]


def shape(value: Any) -> Any:
    """Keys in their order and which values are null; a chunk's text may be any."""
    if isinstance(value, dict):
        return [(k, shape(v)) for k, v in value.items() if k not in ("prompt_tokens_details", "metrics")]
    if isinstance(value, list):
        return [shape(v) for v in value[:1]]
    return type(value).__name__


@pytest.mark.parametrize("name", SERVED)
def test_answer_has_the_shape_of_one_without_capture(engine_with_capture, name):
    _, answer = ask(engine_with_capture, name)
    recorded = parsed(CASES[name]["plain"].encode(), "stream" in name)
    if "stream" in name:
        # How many tokens come before the end depends on the weights: the kinds of chunks do not.
        assert {str(shape(c)) for c in answer} == {str(shape(c)) for c in recorded}
    else:
        assert shape(answer) == shape(recorded)


def test_recorded_token_ids_are_those_the_engine_tells(engine_with_capture):
    told: dict[str, tuple[list[int], list[int]]] = {}
    streamed: dict[str, tuple[str, str]] = {}
    for name in ("chat whole", "completion whole", "chat_n2 whole", "chat_tool_required whole"):
        request_id, answer = ask(engine_with_capture, name, return_token_ids=True)
        prompt = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
        told[request_id] = prompt, [t for choice in answer["choices"] for t in choice["token_ids"]]
        quiet_id, quiet = ask(engine_with_capture, name)
        assert "token_ids" not in json.dumps(quiet).replace('token_ids": null', "")
        told[quiet_id] = told[request_id]
        stream_id, chunks = ask(engine_with_capture, name.replace("whole", "stream"))
        told[stream_id] = told[request_id]
        text = "".join(
            (c.get("delta") or c).get("content") or c.get("text") or ""
            for x in chunks
            for c in x["choices"]
            if c["index"] == 0
        )
        first = quiet["choices"][0]
        streamed[stream_id] = text, first.get("text") or first["message"]["content"]
    assert all(text == whole for text, whole in streamed.values())

    deadline = time.monotonic() + 20
    traces: dict[str, Trace] = {}
    while not told.keys() <= traces.keys() and time.monotonic() < deadline:
        time.sleep(0.2)
        traces = {t.request_id: t for t in TraceStore(engine_with_capture.traces).scan()}
    assert told.keys() <= traces.keys()
    for request_id, (prompt, output) in told.items():
        trace = traces[request_id]
        assert trace.prompt_token_ids == prompt
        assert [t for choice in trace.choices for t in choice.token_ids] == output
    for request_id, (text, _) in streamed.items():
        assert traces[request_id].choices[0].text == text
    assert all(map(plausible, traces.values()))


def plausible(trace: Trace) -> bool:
    assert trace.ttft_s is None or trace.e2e_s is None or 0 < trace.ttft_s <= trace.e2e_s < 60
    assert (trace.status, trace.error) == (200, None)
    assert trace.cached_tokens is not None
    return all(0 <= gap < 60 for gap in trace.inter_token_s)


def test_a_request_that_opts_out_is_answered_and_leaves_no_trace(engine_with_capture):
    case = CASES["chat whole"]
    headers = {"X-Strop-Capture": "off", "X-Session-Id": "private"}
    answer = httpx.post(
        engine_with_capture.url + case["path"], json=case["request"], headers=headers, timeout=60
    )
    assert answer.status_code == 200
    assert answer.headers["x-strop-stack"] == engine_with_capture.stack.fingerprint
    after, _ = ask(engine_with_capture, "chat whole")
    deadline = time.monotonic() + 20
    found: list[Trace] = []
    while not any(t.request_id == after for t in found):
        assert time.monotonic() < deadline
        found = list(TraceStore(engine_with_capture.traces).scan())
    assert not any(t.session == "private" for t in found)


def test_the_engine_tells_the_router_a_prompts_tokens(engine_with_capture):
    """What vllm-router asks of it to find the replica that has a prompt's beginning cached."""
    request = CASES["chat whole"]["request"]
    response = httpx.post(f"{engine_with_capture.url}/v1/chat/completions/render", json=request)
    assert response.status_code == 200, response.text
    assert response.json()["token_ids"] == json.loads(CASES["chat whole"]["ids"])["prompt_token_ids"]
