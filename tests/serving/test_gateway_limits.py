"""How much the gateway takes, and where it sends a conversation."""

import csv
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

CHAT = "/v1/chat/completions"
MIB = 1 << 20


def chat(*contents, roles=("user", "assistant")):
    messages = [{"role": roles[i % len(roles)], "content": c} for i, c in enumerate(contents)]
    return {"model": "m", "messages": messages}


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _waiting(gateway):
    rows = csv.DictReader(gateway.command("show stat").removeprefix("# ").splitlines())
    return next(int(row["qcur"]) for row in rows if row["svname"] == "slot0.0")


def test_bodies_up_to_the_limit_arrive_whole_and_larger_ones_answer_413(start_gateway, fake_router):
    gateway = start_gateway()
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        for size in (1000, 300_000, 524_288, MIB, 8 * MIB):
            body = json.dumps(chat("x" * (size - 80)))
            body += " " * (size - len(body))
            answer = client.post(CHAT, content=body)
            assert answer.status_code == 200, size
            assert fake_router.received[-1].body == body.encode()
        seen = len(fake_router.received)
        answer = client.post(CHAT, content=b" " * (8 * MIB + 1))
        assert answer.status_code == 413
        assert answer.json()["error"]["message"].startswith("The request is larger than 8 MiB")
        assert len(fake_router.received) == seen


def test_a_chunked_body_must_fit_into_the_buffer(start_gateway, fake_router):
    gateway = start_gateway()
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        for size, status in ((10, 200), (399_000, 200), (500_000, 413), (8 * MIB, 413)):
            body = json.dumps(chat("x" * size)).encode()
            pieces = (body[i : i + 10_000] for i in range(0, len(body), 10_000))
            answer = client.post(CHAT, content=pieces)
            assert answer.status_code == status, size
            if status == 413:
                assert answer.json()["error"]["code"] == "request_too_large"
            else:
                assert fake_router.received[-1].body == body
    assert len(fake_router.received) == 2


def test_headers_are_limited(start_gateway, fake_router):
    gateway = start_gateway()
    for size, status in ((30_000, 200), (33_000, 431), (450_000, 431)):
        answer = httpx.get(f"{gateway.url}/v1/models", headers={"X-Long": "x" * size})
        assert answer.status_code == status
    assert answer.json()["error"]["code"] == "headers_too_large"
    many = {f"X-{i}": "x" for i in range(200)}
    assert httpx.get(f"{gateway.url}/v1/models", headers=many).status_code == 400
    assert len(fake_router.received) == 1


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[" * 100_000, b'{"messages":' * 10_000, b"\xff\x00", b'{"messages":[]}', b"null"]
)
def test_bodies_that_are_no_chat_are_the_engines_to_refuse(start_gateway, fake_router, body):
    gateway = start_gateway()
    assert httpx.post(f"{gateway.url}{CHAT}", content=body).status_code == 200
    assert fake_router.received[-1].body == body
    assert len(fake_router.received[-1].all("X-Session-Id")[0]) == 32


def test_a_tenant_has_so_many_requests_at_once_and_others_are_not_its_business(start_gateway, fake_router):
    gateway = start_gateway(requests_per_tenant=3)
    fake_router.hold.clear()
    url = f"{gateway.url}{CHAT}"
    with ThreadPoolExecutor(8) as pool:
        under_way = [
            pool.submit(httpx.post, url, json=chat("a"), headers={"X-Strop-Tenant": "red"}) for _ in range(3)
        ]
        wait_for(lambda: len(fake_router.received) == 3)
        for _ in range(5):
            refused = httpx.post(url, json=chat("b"), headers={"X-Strop-Tenant": "red"})
            assert refused.status_code == 429
            assert int(refused.headers["Retry-After"]) >= 1
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        other = pool.submit(httpx.post, url, json=chat("c"), headers={"X-Strop-Tenant": "blue"})
        wait_for(lambda: len(fake_router.received) == 4)
        assert httpx.get(f"{gateway.url}/v1/models", headers={"X-Strop-Tenant": "red"}).status_code == 200
        fake_router.hold.set()
        assert {f.result().status_code for f in [*under_way, other]} == {200}
    # The places are free again, on connections that stay open too.
    with httpx.Client() as client:
        for _ in range(5):
            assert client.post(url, json=chat("d"), headers={"X-Strop-Tenant": "red"}).status_code == 200


def test_a_full_queue_answers_429_at_once(start_gateway, fake_router):
    gateway = start_gateway(capacity=2, queue=3)
    fake_router.hold.clear()
    url = f"{gateway.url}{CHAT}"
    with ThreadPoolExecutor(8) as pool:
        taken = [pool.submit(httpx.post, url, json=chat(str(i)), timeout=30) for i in range(5)]
        wait_for(lambda: (len(fake_router.received), _waiting(gateway)) == (2, 3))
        refused = httpx.post(url, json=chat("b"))
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"] == {
            "message": "The server has as many requests waiting as it takes.",
            "type": "overloaded_error",
            "param": None,
            "code": "overloaded",
        }
        assert httpx.get(f"{gateway.url}/health").status_code == 200
        fake_router.hold.set()
        assert {f.result().status_code for f in taken} == {200}


def test_waiting_too_long_answers_429(start_gateway, fake_router):
    gateway = start_gateway(capacity=1, queue_timeout_s=1)
    fake_router.hold.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(httpx.post, f"{gateway.url}{CHAT}", json=chat("a"), timeout=30)
        wait_for(lambda: len(fake_router.received) == 1)
        waited = httpx.post(f"{gateway.url}{CHAT}", json=chat("b"), timeout=30)
        assert waited.status_code == 429
        assert int(waited.headers["Retry-After"]) >= 1
        assert waited.json()["error"]["code"] == "overloaded"
        fake_router.hold.set()
        assert first.result().status_code == 200


def test_no_engine_is_503_and_not_429(start_gateway, fake_router):
    gateway = start_gateway()
    gateway.detach(0)
    for path in (CHAT, "/health"):
        answer = httpx.request("POST" if path == CHAT else "GET", f"{gateway.url}{path}", json=chat("a"))
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "server_error"


def test_a_router_that_cannot_be_reached_is_503_and_not_429(start_gateway, fake_router):
    gateway = start_gateway()
    # Up by its last health check, and gone.
    gateway.command("set server stacks/slot0.0 addr 127.0.0.1 port 1")
    gateway.command("set server stacks/slot0.0 health up")
    answer = httpx.post(f"{gateway.url}{CHAT}", json=chat("a"), timeout=30)
    assert answer.status_code == 503


def send_and_leave(gateway):
    host, port = gateway.url.removeprefix("http://").split(":")
    body = json.dumps(chat("a")).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head + body)
        time.sleep(0.5)


def test_a_client_that_leaves_ends_its_request(start_gateway, fake_router):
    gateway = start_gateway()
    fake_router.hold.clear()
    send_and_leave(gateway)
    wait_for(lambda: fake_router.left == 1)


def test_a_client_that_leaves_the_queue_is_never_served(start_gateway, fake_router):
    gateway = start_gateway(capacity=1)
    fake_router.hold.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(httpx.post, f"{gateway.url}{CHAT}", json=chat("first"), timeout=30)
        wait_for(lambda: len(fake_router.received) == 1)
        send_and_leave(gateway)
        wait_for(lambda: _waiting(gateway) == 0)
        fake_router.hold.set()
        assert first.result().status_code == 200
    assert httpx.post(f"{gateway.url}{CHAT}", json=chat("last")).status_code == 200
    assert [json.loads(r.body)["messages"][0]["content"] for r in fake_router.received] == ["first", "last"]


def session(gateway, fake_router, body, path=CHAT, **headers):
    assert httpx.post(f"{gateway.url}{path}", json=body, headers=headers, timeout=30).status_code == 200
    [found] = fake_router.received[-1].all("X-Session-Id")
    return found


def test_a_conversation_is_one_session_from_its_first_turn_to_its_last(start_gateway, fake_router):
    gateway = start_gateway()

    def of(body, **headers):
        return session(gateway, fake_router, body, **headers)

    turns = ("hi", "hello", "and then?", "that", "thanks")
    sessions = {of(chat(*turns[:n])) for n in (1, 3, 5)}
    assert len(sessions) == 1
    with_system = {
        of(chat("be kind", *turns[:n], roles=("system", *("user", "assistant") * 3))) for n in (1, 3, 5)
    }
    assert len(with_system) == 1
    parts = {of(chat([{"type": "text", "text": "hi"}], *turns[1:n])) for n in (1, 3, 5)}
    assert parts == sessions
    other = [
        of(chat("hi", "x", roles=("system", "user"))),
        of(chat("hi", "y", roles=("system", "user"))),
        of(chat("hi", "x", roles=("developer", "user"))),
        of(chat("Hi")),
        of(chat("hi"), **{"X-Strop-Tenant": "red"}),
        of(chat('hé 😀\n"')),
    ]
    everything = [*sessions, *with_system, *other]
    # A system and a developer message of one content begin the same conversation.
    assert len(set(everything)) == len(everything) - 1
    # Options that change from turn to turn change nothing.
    assert of(chat("hi") | {"temperature": 1, "stream": True}) in sessions
    assert of({"stream": True, "messages": chat("hi")["messages"]}) in sessions


def test_a_long_conversation_is_one_session(start_gateway, fake_router):
    gateway = start_gateway()
    for size in (1000, 300_000, MIB):
        first = "x" * size
        turns = [session(gateway, fake_router, chat(first, *["more"] * n)) for n in (0, 2, 4)]
        assert len(set(turns)) == 1, size
    # The beginning fits and the rest does not.
    turns = [session(gateway, fake_router, chat("hi", "y" * size)) for size in (10, MIB, 4 * MIB)]
    assert len(set(turns)) == 1


def test_a_session_that_is_named_stays_as_it_is_named(start_gateway, fake_router):
    gateway = start_gateway()
    for body in (chat("hi"), chat("other")):
        assert session(gateway, fake_router, body, **{"X-Session-Id": "mine, and yours"}) == "mine, and yours"
    assert len(session(gateway, fake_router, chat("hi"), **{"X-Session-Id": ""})) == 32


def test_completions_with_the_same_prompt_are_one_session(start_gateway, fake_router):
    gateway = start_gateway()
    of = [session(gateway, fake_router, {"prompt": p}, "/v1/completions") for p in ("a", "a", "b")]
    assert of[0] == of[1] != of[2]
