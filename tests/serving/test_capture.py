"""The fake engine answers with what a real vLLM 0.32 server answered (vllm_wire.jsonl): `plain` to a
request as clients send it, `ids` to the same request with token ids and usage asked for."""

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.serving import asgi, capture
from strop.serving.capture import Capture
from strop.serving.interest import in_sample
from strop.serving.sse import EventSplitter, payload
from strop.serving.traces import WITHHELD, Trace, TraceStore

STACK = "5a" * 32
FINGERPRINT = "vllm-0.32.0-42988010"
LINES = (Path(__file__).parent / "vllm_wire.jsonl").read_text().splitlines()
CASES = {case["case"]: case for case in map(json.loads, LINES)}
ANSWERED = [name for name, case in CASES.items() if case["status"] == 200 and "echo" not in name]


@dataclass
class Engine:
    """An ASGI app in vLLM's place."""

    answer: bytes
    status: int = 200
    kind: bytes = b"application/json"
    pieces: list[bytes] | None = None
    """The answer cut into body messages; whole if None."""
    seen: list[dict[str, Any]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append({k.decode(): v.decode("latin-1") for k, v in scope["headers"]})
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        headers = [(b"content-type", self.kind)]
        if not self.kind.startswith(b"text/event-stream"):
            headers.append((b"content-length", str(len(self.answer)).encode()))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        for piece in self.pieces or [self.answer]:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@dataclass
class Served:
    status: int
    headers: dict[str, str]
    body: bytes
    messages: list[Any]


class Client:
    """Calls the middleware as a server would, and reads back what it recorded."""

    def __init__(self, root: Path, engine: Callable[..., Awaitable[None]]):
        self.root, self.capture = root, Capture(engine)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None, pieces: int = 1) -> Served:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        size = max(1, -(-len(raw) // pieces))
        incoming: list[Any] = [
            {"type": "http.request", "body": raw[i : i + size], "more_body": i + size < len(raw)}
            for i in range(0, max(1, len(raw)), size)
        ]
        return self.call("POST", path, incoming, {"content-length": str(len(raw)), **(headers or {})})

    def call(self, method: str, path: str, incoming: list[Any], headers: dict[str, str]) -> Served:
        messages: list[Any] = []

        async def receive() -> Any:
            if not incoming:
                await asyncio.sleep(3600)
            return incoming.pop(0)

        async def send(message: Any) -> None:
            messages.append(message)

        names = ("openai_serving_chat", "openai_serving_completion")
        serving = SimpleNamespace(system_fingerprint=FINGERPRINT)
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(k.encode(), v.encode("latin-1")) for k, v in headers.items()],
            "app": SimpleNamespace(state=SimpleNamespace(**dict.fromkeys(names, serving))),
        }
        asyncio.run(self.capture(scope, receive, send))
        start, *rest = messages
        return Served(
            start["status"],
            {k.decode(): v.decode() for k, v in start["headers"]},
            b"".join(m.get("body", b"") for m in rest),
            messages,
        )

    def traces(self) -> list[Trace]:
        self.capture.writer.close()
        return list(TraceStore(self.root).scan())


@pytest.fixture
def client(tmp_path, monkeypatch):
    monkeypatch.setenv("STROP_CAPTURE", json.dumps({"root": str(tmp_path / "traces"), "stack": STACK}))
    monkeypatch.setattr(capture, "counts", capture.Counts())
    made = []

    def make(engine: Callable[..., Awaitable[None]]) -> Client:
        made.append(Client(tmp_path / "traces", engine))
        return made[-1]

    yield make
    for one in made:
        one.capture.writer.close()


def engine_for(case: dict[str, Any], asked: str = "ids", **changes: Any) -> Engine:
    stream = case["request"].get("stream") and case["status"] == 200
    kind = b"text/event-stream; charset=utf-8" if stream else b"application/json"
    return Engine(case[asked].encode(), status=case["status"], kind=kind, **changes)


def content(body: bytes | str, stream: bool) -> Any:
    """What an answer says, without what differs between any two: ids, times, state of the cache."""

    def scrub(value: Any) -> Any:
        if isinstance(value, list):
            return [scrub(v) for v in value]
        if isinstance(value, dict):
            volatile = ("id", "created", "metrics", "prompt_tokens_details")
            return [(k, scrub(v) if k not in volatile else v is None) for k, v in value.items()]
        return value

    body = body.encode() if isinstance(body, str) else body
    if not stream:
        return scrub(json.loads(body))
    parts = [payload(event) for event in EventSplitter().feed(body)]
    return [p if p == b"[DONE]" else scrub(json.loads(p or b"null")) for p in parts]


@pytest.mark.parametrize("name", ANSWERED)
def test_client_sees_what_it_would_see_without_capture(client, name):
    case = CASES[name]
    stream = bool(case["request"].get("stream"))
    served = client(engine_for(case)).post(case["path"], case["request"])
    plain = case["plain"]
    if not stream:  # the recording server told everyone its metrics
        plain = json.dumps({**json.loads(plain), "metrics": None})
    by_choice = "n2" in name or "two" in name
    seen, expected = content(served.body, stream), content(plain, stream)
    if stream and by_choice:  # choices interleave as they please
        seen, expected = sorted(seen, key=str), sorted(expected, key=str)
    assert seen == expected
    assert capture.counts.errors == 0


@pytest.mark.parametrize("name", ANSWERED)
def test_client_that_asks_gets_exactly_the_engines_answer(client, name):
    case = CASES[name]
    request = {**case["request"], "return_token_ids": True}
    if request.get("stream"):
        request["stream_options"] = {"include_usage": True}
    tell = client(engine_for(case)).post(case["path"], request, {"x-strop-metrics": "1"})
    assert tell.body.decode() == case["ids"]
    quiet = client(engine_for(case)).post(case["path"], request)
    assert b"tokens_per_second" not in quiet.body
    assert quiet.body.count(b"token_ids") == case["ids"].count("token_ids")


@pytest.mark.parametrize("name", ANSWERED)
def test_engine_is_asked_for_ids_and_usage_and_nothing_else_changes(client, name):
    case = CASES[name]
    engine = engine_for(case)
    client(engine).post(case["path"], case["request"])
    asked = json.loads(engine.bodies[0])
    assert asked.pop("return_token_ids") is True
    options = asked.pop("stream_options", None)
    assert options == ({"include_usage": True, "continuous_usage_stats": False} if "stream" in name else None)
    assert asked == case["request"]
    assert engine.seen[0]["content-length"] == str(len(engine.bodies[0]))


def test_length_of_the_answer_is_right(client):
    case = CASES["chat whole"]
    served = client(engine_for(case)).post(case["path"], case["request"])
    assert int(served.headers["content-length"]) == len(served.body) != len(case["ids"])


def test_usage_options_of_the_client_are_kept(client):
    case = CASES["chat stream"]
    engine = engine_for(case)
    options = {"include_usage": True, "continuous_usage_stats": True}
    served = client(engine).post(case["path"], {**case["request"], "stream_options": options})
    assert json.loads(engine.bodies[0])["stream_options"] == options
    assert b'"usage":{' in served.body


@pytest.mark.parametrize("stream", ["whole", "stream"])
def test_chat_is_recorded(client, stream):
    case = CASES[f"chat {stream}"]
    recorder = client(engine_for(case))
    headers = {"x-request-id": "r-1", "x-session-id": "s-1", "x-strop-tenant": "acme"}
    recorder.post(case["path"], {**case["request"], "user": "someone", "tools": []}, headers, pieces=3)
    (trace,) = recorder.traces()
    assert (trace.request_id, trace.session, trace.tenant, trace.stack) == ("r-1", "s-1", "acme", STACK)
    assert (trace.endpoint, trace.model, trace.status, trace.error) == ("chat", "tiny", 200, None)
    assert trace.stream is (stream == "stream")
    assert json.loads(trace.messages) == case["request"]["messages"]
    assert json.loads(trace.sampling) == {"max_tokens": 6, "temperature": 0, "seed": 1}
    assert json.loads(trace.format or "") == {"tools": []}
    assert trace.prompt_token_ids == [1, 340, 201, 267, 400, 385, 2, 201, 1, 67, 331, 388, 201]
    assert trace.output_token_ids == [195] * 6
    assert (trace.choices[0].text, trace.choices[0].finish_reason) == ("\u0004" * 6, "length")
    assert trace.cached_tokens == 0
    assert trace.queue_s is not None and 0 < trace.queue_s < 1
    assert trace.ttft_s is not None and trace.ttft_s > 0
    assert trace.e2e_s is not None and trace.e2e_s > 0
    assert len(trace.inter_token_s) == (5 if stream == "stream" else 0)


@pytest.mark.parametrize("name", [n for n in ANSWERED if n.endswith(" stream")])
def test_stream_and_whole_answer_are_recorded_alike(client, name):
    streamed, whole = CASES[name], CASES[name.replace("stream", "whole")]
    traces = []
    for case in (streamed, whole):
        recorder = client(engine_for(case))
        recorder.post(case["path"], case["request"])
        traces.append([t for t in recorder.traces() if t.stream is bool(case["request"].get("stream"))])
    for one, other in zip(*traces, strict=True):
        assert one.prompt_token_ids == other.prompt_token_ids != []
        assert [c.token_ids for c in one.choices] == [c.token_ids for c in other.choices]
        assert [c.text for c in one.choices] == [c.text for c in other.choices]
        assert [c.finish_reason for c in one.choices] == [c.finish_reason for c in other.choices]
        assert called_functions(one) == called_functions(other)


def called_functions(trace: Trace) -> list[Any]:
    return [call["function"] for choice in trace.choices for call in json.loads(choice.tool_calls or "[]")]


def test_every_prompt_of_a_batch_is_a_record(client):
    case = CASES["completion_two stream"]
    recorder = client(engine_for(case))
    recorder.post(case["path"], case["request"], {"x-request-id": "b"})
    first, second = sorted(recorder.traces(), key=lambda t: t.request_id)
    assert (first.request_id, second.request_id) == ("b-0", "b-1")
    assert (json.loads(first.messages), json.loads(second.messages)) == ("hello", "world wide")
    assert (first.prompt_token_ids, second.prompt_token_ids) == ([267, 400], [89, 370, 274, 75, 266])
    assert ([c.index for c in first.choices], [c.index for c in second.choices]) == ([0], [0])
    assert (first.output_token_ids, second.output_token_ids) == ([335, 335], [134, 134])


def test_token_ids_as_prompt_are_one_prompt(client):
    case = CASES["completion_ids whole"]
    recorder = client(engine_for(case))
    recorder.post(case["path"], case["request"])
    (trace,) = recorder.traces()
    assert json.loads(trace.messages) == trace.prompt_token_ids == [1, 2, 3]


def test_tool_calls_are_put_together(client):
    case = CASES["chat_tool_required stream"]
    recorder = client(engine_for(case))
    recorder.post(case["path"], case["request"])
    (trace,) = recorder.traces()
    (call,) = json.loads(trace.choices[0].tool_calls or "")
    assert call["function"] == {"name": "set_flag", "arguments": "true"}
    assert call["id"].startswith("chatcmpl-tool-")
    assert len(trace.output_token_ids) == 56
    assert set(json.loads(trace.format or "")) == {"tools", "tool_choice"}


def test_speculation_counts_positions(client):
    case = CASES["chat whole"]
    answer = json.loads(case["ids"])
    answer["metrics"]["speculative_decoding"] = {
        "mean_acceptance_length": 2.1,
        "draft_acceptance_rate": 0.36,
        "acceptance_histogram": [4, 3, 1, 2],
        "num_spec_steps": 10,
        "num_accepted_draft_tokens": 11,
        "num_draft_tokens": 30,
        "num_spec_tokens": 3,
    }
    recorder = client(Engine(json.dumps(answer).encode()))
    recorder.post(case["path"], case["request"])
    (trace,) = recorder.traces()
    assert trace.speculation is not None
    assert trace.speculation.accepted_by_position == [6, 3, 2]
    assert sum(trace.speculation.accepted_by_position) == trace.speculation.accepted
    assert trace.speculation.acceptance_length == pytest.approx(2.1)


@pytest.mark.parametrize("name", ["bad_param whole", "bad_model stream"])
def test_refusals_are_recorded_and_passed_on_unchanged(client, name):
    case = CASES[name]
    recorder = client(engine_for(case))
    served = recorder.post(case["path"], case["request"])
    assert (served.status, served.body.decode()) == (case["status"], case["ids"])
    (trace,) = recorder.traces()
    assert (trace.status, trace.choices) == (case["status"], [])
    assert trace.error == json.loads(case["ids"])["error"]["message"]


def test_requests_without_the_right_key_are_not_recorded(client):
    case = CASES["chat whole"]
    recorder = client(Engine(b'{"error":"Unauthorized"}', status=401))
    assert recorder.post(case["path"], case["request"]).status == 401
    assert recorder.traces() == []


def test_error_in_the_middle_of_a_stream(client):
    case = CASES["chat stream"]
    events = case["ids"].split("\n\n")
    error = 'data: {"error":{"message":"the engine died","type":"X","param":null,"code":500}}'
    recorder = client(engine_for({**case, "ids": "\n\n".join([*events[:3], error, "data: [DONE]", ""])}))
    served = recorder.post(case["path"], case["request"])
    assert error.encode() in served.body
    (trace,) = recorder.traces()
    assert (trace.status, trace.error) == (500, "the engine died")
    assert trace.output_token_ids == [195, 195]


def test_app_that_raises(client):
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("engine is gone")

    recorder = client(broken)
    with pytest.raises(RuntimeError, match="engine is gone"):
        recorder.post("/v1/chat/completions", {"messages": []})
    (trace,) = recorder.traces()
    assert trace.status == 500
    assert "engine is gone" in (trace.error or "")


def test_client_that_leaves_is_recorded_as_499_with_what_it_got(client):
    case = CASES["chat stream"]
    events = [e + "\n\n" for e in case["ids"].split("\n\n")]

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for event in events[:4]:
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        assert (await receive())["type"] == "http.disconnect"

    recorder = client(engine)
    body = {"type": "http.request", "body": json.dumps(case["request"]).encode()}
    recorder.call("POST", case["path"], [body, {"type": "http.disconnect"}], {})
    (trace,) = recorder.traces()
    assert (trace.status, trace.output_token_ids) == (499, [195] * 3)


@pytest.mark.parametrize(
    "given, kept", [("abc-1.2:Z_", True), ("", False), ("a" * 129, False), ("ä", False), ("a b", False)]
)
def test_request_id_is_the_clients_if_it_is_sane(client, given, kept):
    case = CASES["chat whole"]
    engine = engine_for(case)
    served = client(engine).post(case["path"], case["request"], {"x-request-id": given})
    request_id = served.headers["x-request-id"]
    assert (request_id == given) is kept
    assert engine.seen[0]["x-request-id"] == request_id
    assert kept or len(request_id) == 32
    assert served.headers["x-strop-stack"] == STACK


def test_other_paths_are_announced_but_not_touched(client):
    engine = Engine(b'{"object":"list"}')
    recorder = client(engine)
    served = recorder.call("GET", "/v1/models", [{"type": "http.request"}], {})
    assert (served.body, served.headers["x-strop-stack"]) == (b'{"object":"list"}', STACK)
    health = recorder.call("GET", "/health", [{"type": "http.request"}], {})
    assert "x-strop-stack" not in health.headers
    assert recorder.traces() == []


@pytest.mark.parametrize(
    "body", [b"", b"{nope", b"[1]", b"null", b"\xff\xfe{}", b'{"a": NaN}', b'{"prompt": "x", "echo": true}']
)
def test_bodies_that_cannot_be_recorded_reach_the_engine_as_they_are(client, body):
    engine = Engine(b'{"x": 1,  "token_ids": [1]}')
    recorder = client(engine)
    served = recorder.post("/v1/completions", body, pieces=2)
    assert engine.bodies == [body]
    assert served.body == engine.answer
    assert recorder.traces() == []
    assert capture.counts.passed_untouched == 1


@pytest.mark.parametrize("announced", [True, False])
def test_huge_bodies_pass_untouched(client, monkeypatch, announced):
    monkeypatch.setattr(asgi, "MAX_BODY_BYTES", 1000)
    engine = Engine(b"{}")
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 2000}]}).encode()
    recorder = client(engine)
    recorder.post("/v1/chat/completions", body, {} if announced else {"content-length": ""}, pieces=5)
    assert engine.bodies == [body]
    assert recorder.traces() == []


@pytest.mark.parametrize("answer", [b"", b"{torn", b"[]", b'{"choices": [{}]}', b'{"choices": 3}', b'"text"'])
def test_answers_that_make_no_sense_are_passed_on(client, answer):
    served = client(Engine(answer)).post("/v1/chat/completions", {"messages": []})
    assert (served.status, served.body) == (200, answer)
    assert served.headers["content-length"] == str(len(answer))


@pytest.mark.parametrize(
    "event",
    [
        "data: {torn\n\n",
        ": comment\n\n",
        "event: x\ndata: 1\n\n",
        "data: 3\n\n",
        'data: {"choices": [{}]}\n\n',
        "unfinished",
    ],
)
def test_events_that_make_no_sense_are_passed_on(client, event):
    case = CASES["chat stream"]
    served = client(engine_for({**case, "ids": event + case["ids"]})).post(case["path"], case["request"])
    assert served.body.startswith(event.split("data: {torn")[0].encode())
    assert served.body.endswith(b"data: [DONE]\n\n")


def test_other_kinds_of_answers_are_passed_on(client):
    engine = Engine(b"Internal Server Error", status=500, kind=b"text/plain")
    recorder = client(engine)
    served = recorder.post("/v1/chat/completions", {"messages": []})
    assert (served.status, served.body) == (500, engine.answer)
    (trace,) = recorder.traces()
    assert (trace.status, trace.error) == (500, "HTTP status 500")


@pytest.mark.parametrize("broken", ["restore_chunk", "restore_whole", "_Exchange", "Answer"])
def test_a_bug_in_capture_does_not_reach_the_client(client, monkeypatch, broken, caplog):
    def bug(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug")

    if broken == "_Exchange":
        monkeypatch.setattr(capture._Exchange, "begin", bug)
    elif broken == "Answer":
        monkeypatch.setattr(capture.Answer, "traces", bug)
    else:
        monkeypatch.setattr(capture, broken, bug)
    monkeypatch.setattr(capture, "_complained", float("-inf"))
    for name in ("chat whole", "chat stream"):
        case = CASES[name]
        served = client(engine_for(case)).post(case["path"], case["request"])
        assert served.status == 200
        assert len(content(served.body, "stream" in name)) >= 8
    assert capture.counts.errors > 0
    assert len([r for r in caplog.records if r.levelno >= logging.ERROR]) == 1


def test_events_leave_as_soon_as_they_are_complete(client):
    case = CASES["chat stream"]
    pieces = [e.encode() + b"\n\n" for e in case["ids"].split("\n\n") if e]
    served = client(engine_for(case, pieces=pieces)).post(case["path"], case["request"])
    bodies = [m["body"] for m in served.messages[1:]]
    hidden = 1  # the usage chunk, which this client did not ask for
    assert len([b for b in bodies if b]) == len(pieces) - hidden
    assert bodies[-1] == b"" and served.messages[-1]["more_body"] is False


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(st.integers(0, 1700), max_size=12),
    name=st.sampled_from([n for n in ANSWERED if "stream" in n]),
)
def test_where_a_stream_is_cut_makes_no_difference(client, cuts, name):
    case = CASES[name]
    raw = case["ids"].encode()
    bounds = [0, *sorted(min(c, len(raw)) for c in cuts), len(raw)]
    pieces = [raw[a:b] for a, b in pairwise(bounds)]
    recorder = client(engine_for(case))
    whole = recorder.post(case["path"], case["request"]).body
    recorder.capture.app = engine_for(case, pieces=pieces)
    assert recorder.post(case["path"], case["request"]).body == whole
    recorder.capture.writer.close()


@given(
    st.binary(max_size=200) | st.text("a\r\n:d ", max_size=60).map(str.encode),
    st.lists(st.integers(0, 200), max_size=8),
)
def test_splitter_gives_the_same_events_for_any_cut(data, cuts):
    bounds = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    splitter = EventSplitter()
    events = [e for a, b in pairwise(bounds) for e in splitter.feed(data[a:b])]
    whole = EventSplitter()
    assert events == whole.feed(data)
    rest = splitter.rest()
    assert b"".join(events) + rest == data
    assert rest == whole.rest()
    assert b"\n\n" not in rest


@pytest.mark.parametrize(
    "value", [None, "", "{}", '{"root": "/x"}', '{"root": "/x", "stack": "y", "typo": 1}']
)
def test_wrong_configuration_is_refused_at_start(monkeypatch, value):
    monkeypatch.delenv("STROP_CAPTURE", raising=False)
    if value is not None:
        monkeypatch.setenv("STROP_CAPTURE", value)
    before = threading.active_count()
    with pytest.raises(ValueError, match="STROP_CAPTURE must hold JSON"):
        Capture(Engine(b""))
    assert threading.active_count() == before


def configured(client, monkeypatch, tmp_path, engine: Engine, **settings: Any) -> Client:
    monkeypatch.setenv(
        "STROP_CAPTURE", json.dumps({"root": str(tmp_path / "traces"), "stack": STACK, **settings})
    )
    return client(engine)


@pytest.mark.parametrize(
    ("headers", "recorded"),
    [
        ({"x-strop-capture": "off"}, False),
        ({"X-Strop-Capture": " OFF"}, False),
        ({"x-strop-tenant": "private"}, False),
        ({"x-strop-tenant": "private2"}, True),
        ({"x-strop-capture": "on"}, True),
    ],
)
def test_who_opted_out_is_served_by_an_untouched_engine_and_not_recorded(
    client, monkeypatch, tmp_path, headers, recorded
):
    case = CASES["chat whole"]
    engine = engine_for(case, asked="plain")
    one = configured(client, monkeypatch, tmp_path, engine, opted_out_tenants=["private"])
    served = one.post(case["path"], case["request"], headers)
    assert served.headers["x-strop-stack"] == STACK and "x-request-id" in served.headers
    assert len(one.traces()) == capture.counts.recorded == recorded
    assert capture.counts.opted_out == (not recorded)
    if not recorded:
        assert json.loads(engine.bodies[0]) == case["request"]
        assert served.body.decode() == case["plain"]
        assert not list((tmp_path / "traces").rglob("*.*")), "not even a journal"


@pytest.mark.parametrize("name", ANSWERED)
def test_without_content_the_numbers_are_those_of_the_whole_record(client, monkeypatch, tmp_path, name):
    case = CASES[name]
    (bare, *_) = traces_of(
        configured(client, monkeypatch, tmp_path / "bare", engine_for(case), content=False), case
    )
    (whole, *_) = traces_of(configured(client, monkeypatch, tmp_path / "whole", engine_for(case)), case)
    assert not bare.has_content and whole.has_content
    assert len(bare.prompt_token_ids) == len(whole.prompt_token_ids) > 0
    assert [len(c.token_ids) for c in bare.choices] == [len(c.token_ids) for c in whole.choices]
    assert {i for c in bare.choices for i in c.token_ids} | set(bare.prompt_token_ids) == {WITHHELD}
    assert not any(c.text or c.tool_calls for c in bare.choices)
    assert [c.finish_reason for c in bare.choices] == [c.finish_reason for c in whole.choices]
    assert (bare.status, bare.speculation, bare.cached_tokens) == (
        whole.status,
        whole.speculation,
        whole.cached_tokens,
    )


def traces_of(one: Client, case: dict[str, Any]) -> list[Trace]:
    one.root.parent.mkdir(exist_ok=True)
    one.root = Path(one.capture.config.root)
    one.post(case["path"], case["request"])
    return one.traces()


def test_a_sample_keeps_sessions_whole_and_what_is_of_interest(client, monkeypatch, tmp_path):
    case = CASES["chat whole"]
    one = configured(client, monkeypatch, tmp_path, engine_for(case), sample_rate=0.3)
    bad = configured(client, monkeypatch, tmp_path, Engine(b"{}", status=500), sample_rate=0.3)
    for _ in range(3):
        for session in range(40):
            one.post(case["path"], case["request"], {"x-session-id": f"s{session}"})
    for session in range(40, 60):
        bad.post(case["path"], case["request"], {"x-session-id": f"s{session}"})
    one.capture.writer.close()
    found = bad.traces()
    ordinary = [t.session for t in found if t.status == 200]
    assert set(ordinary) == {f"s{n}" for n in range(40) if in_sample("default", f"s{n}", 0.3)}
    assert len(ordinary) == 3 * len(set(ordinary)) > 0
    assert sorted(t.session for t in found if t.status == 500) == sorted(f"s{n}" for n in range(40, 60))
    for trace in found:
        assert trace.kept_for == (None if in_sample("default", trace.session, 0.3) else "failure")
    assert capture.counts.sampled_out == 120 - len(ordinary) and capture.counts.errors == 0


def test_redaction_needs_a_model_and_masks_what_is_recorded(client, monkeypatch, tmp_path, tiny_model):
    case = CASES["chat whole"]
    with pytest.raises(ValueError, match="must name the folder"):
        configured(client, monkeypatch, tmp_path, engine_for(case), redact=True)
    with pytest.raises(ValueError, match=r"Redaction needs .*tokenizer\.json"):
        configured(client, monkeypatch, tmp_path, engine_for(case), redact=True, model=str(tmp_path))
    engine = engine_for(case)
    one = configured(client, monkeypatch, tmp_path, engine, redact=True, model=str(tiny_model))
    request = {**case["request"], "messages": [{"role": "user", "content": "I am ada@example.org"}]}
    one.post(case["path"], request)
    assert json.loads(engine.bodies[0])["messages"] == request["messages"], "the engine is told everything"
    (trace,) = one.traces()
    assert json.loads(trace.messages) == [{"role": "user", "content": "I am [EMAIL]"}]
