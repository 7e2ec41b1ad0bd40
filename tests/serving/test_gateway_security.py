"""What the gateway lets through, from whom, and as what."""

import hashlib
import os
import socket
import ssl
import subprocess
import time
from pathlib import Path

import httpx
import psutil
import pytest

from strop.serving.gateway import Gateway
from strop.serving.keys import KeysError, take_keys
from strop.serving.process import ProcessError, free_port
from strop.serving.settings import GatewaySettings

KEY, OTHER_KEY = "k-" + "a" * 30, "k-" + "b" * 30
TENANTS = {hashlib.sha256(k.encode()).hexdigest(): t for k, t in ((KEY, "red"), (OTHER_KEY, "blue"))}
CHAT = "/v1/chat/completions"
BODY = b'{"messages":[{"role":"user","content":"hi"}]}'


def raw(gateway: Gateway, data: bytes, timeout_s: float = 10) -> bytes:
    """Everything the gateway answers to `data` before it closes or is quiet for `timeout_s`."""
    host, port = gateway.url.removeprefix("http://").split(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout_s) as connection:
        connection.sendall(data)
        try:
            while chunk := connection.recv(65536):
                answer += chunk
        except (TimeoutError, ConnectionResetError):
            pass
    return answer


def statuses(answer: bytes) -> list[int]:
    return [int(line.split()[1]) for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.")]


def post(headers: str = "", target: str = CHAT, body: bytes = BODY) -> bytes:
    head = f"POST {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode("latin-1") + body


def test_only_known_keys_come_in_and_each_is_its_tenant(start_gateway, fake_router):
    gateway = start_gateway(TENANTS)
    with httpx.Client(base_url=gateway.url) as client:
        for wrong in ({}, {"Authorization": "Bearer " + KEY[:-1]}, {"Authorization": f"Basic {KEY}"}, {"Authorization": KEY},
                      {"Authorization": "Bearer"}, {"Authorization": f"Bearer {next(iter(TENANTS))}"}):  # fmt: skip
            answer = client.post(CHAT, content=BODY, headers=wrong)
            assert answer.status_code == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert client.get("/v1/models", headers=wrong).status_code == 401
            assert client.get("/metrics", headers=wrong).status_code == 401
        assert fake_router.received == []
        for key, tenant in ((KEY, "red"), (OTHER_KEY, "blue")):
            claims = {"Authorization": f"Bearer {key}", "X-Strop-Tenant": "strop"}
            assert client.post(CHAT, content=BODY, headers=claims).status_code == 200
            assert fake_router.received[-1].all("X-Strop-Tenant") == [tenant]
            assert fake_router.received[-1].all("Authorization") == []
        assert client.get("/health").status_code == 200


def test_keys_are_nowhere_but_where_the_operator_put_them(start_gateway, tmp_path):
    gateway = start_gateway(TENANTS)
    for key in (KEY, "k-" + "wrong" * 6):
        httpx.post(
            f"{gateway.url}{CHAT}?api_key={key}", content=BODY, headers={"Authorization": f"Bearer {key}"}
        )
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"tenants.map", "haproxy.cfg", "haproxy.log"} <= {path.name for path in files}
    for path in files:
        content = path.read_text()
        assert KEY not in content and "wrongwrong" not in content
        if path.name == "tenants.map":
            assert path.stat().st_mode & 0o777 == 0o600
    processes = [
        psutil.Process(gateway.child.process.pid),
        *psutil.Process(gateway.child.process.pid).children(True),
    ]
    for process in processes:
        assert not any(digest in " ".join(process.cmdline()) for digest in (KEY, *TENANTS))


def test_headers_that_change_how_a_request_is_served_are_the_gateways(start_gateway, fake_router):
    gateway = start_gateway(TENANTS)
    headers = "".join(
        f"{name}: {value}\r\n"
        for name, value in (
            ("Authorization", f"Bearer {KEY}"),
            ("X-Strop-Tenant", "a"), ("x-strop-tenant", "strop"), ("X-Strop-Anything", "1"),
            ("X-Vllm-Priority", "-9"), ("X-data-parallel-rank", "3"), ("X-Strop-Metrics", "1"),
        )
    )  # fmt: skip
    assert statuses(raw(gateway, post(headers))) == [200]
    [received] = fake_router.received
    assert received.all("X-Strop-Tenant") == ["red"]
    assert received.all("X-Strop-Metrics") == ["1"]
    for name in ("X-Strop-Anything", "X-Vllm-Priority", "X-Data-Parallel-Rank"):
        assert received.all(name) == []


def test_without_keys_clients_name_their_tenant_but_never_strops_own(start_gateway, fake_router):
    gateway = start_gateway()
    assert statuses(raw(gateway, post("X-Strop-Tenant: team\r\nAuthorization: Bearer x\r\n"))) == [200]
    assert fake_router.received[-1].all("X-Strop-Tenant") == ["team"]
    assert fake_router.received[-1].all("Authorization") == ["Bearer x"]
    assert statuses(raw(gateway, post())) == [200]
    assert fake_router.received[-1].all("X-Strop-Tenant") == ["default"]
    seen = len(fake_router.received)
    for claim in ("strop", "STROP", " strop ", "\tstrop"):
        answer = raw(gateway, post(f"X-Strop-Tenant:{claim}\r\n"))
        assert statuses(answer) == [400] and b"reserved_tenant" in answer
    assert len(fake_router.received) == seen
    # One value reaches capture, whatever was sent.
    raw(gateway, post("X-Strop-Tenant: strop\r\nX-Strop-Tenant: b\r\n"))
    assert [r.all("X-Strop-Tenant") for r in fake_router.received[seen:]] == [["b"]]
    assert statuses(raw(gateway, post("X-Strop-Tenant: b\r\nX-Strop-Tenant: strop\r\n"))) == [400]


@pytest.mark.parametrize(
    ("host", "settings", "refused"),
    [("0.0.0.0", {}, True), ("0.0.0.0", {"allow_unauthenticated": True}, False), ("127.0.0.2", {}, False)],
)
def test_nothing_is_exposed_without_keys_by_accident(tmp_path, host, settings, refused):
    if refused:
        with pytest.raises(ProcessError, match="keys_file"):
            Gateway.start(host, free_port(), tmp_path, GatewaySettings(**settings))
    else:
        Gateway.start(host, free_port(), tmp_path, GatewaySettings(**settings)).child.stop()


# Whatever the installed engine and router serve beside the public API; a test below checks the list.
INTERNAL = Path(__file__).with_name("internal_endpoints.txt").read_text().split()
DISGUISED = [
    "/v1/models/../../pause", "/v1/models/..%2f..%2fpause", "/v1/models/%2e%2e/%2e%2e/pause", "/v1/models/x",
    "/v1/chat/completions/../../../sleep", "/v1/../pause", "/./pause", "//pause", "//v1/models", "/v1//models",
    "/v1/models/", "/v1/models;/../pause", "/v1/models%00", "/v1/models%0d%0a", "/v1/mod%65ls", "/V1/models",
    "/v1\\models", "/v1/models%3f", "http://x/pause", "http://x//v1/models", "/pause?/v1/models", "/pause#/v1/models",
]  # fmt: skip


def test_only_the_public_api_is_reachable_however_it_is_spelt(start_gateway, fake_router):
    gateway = start_gateway()
    for target in INTERNAL + DISGUISED:
        for method in ("GET", "POST"):
            answer = raw(
                gateway,
                f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode(),
            )
            assert statuses(answer) in ([404], [400]), (method, target)
    for method in ("PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "PRI", "GET"):
        answer = raw(gateway, f"{method} {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert statuses(answer) in ([405], [400]), method
    assert fake_router.received == []


def test_the_list_of_internal_endpoints_is_complete():
    import importlib.util
    import re

    spec = importlib.util.find_spec("vllm")
    assert spec and spec.origin
    found = set()
    route = re.compile(
        r"@\w*(?:router|app)\.(?:get|post|put|delete|patch|api_route|websocket)\(\s*\"(/[^\"]*)\""
    )
    for source in (Path(spec.origin).parent / "entrypoints").rglob("*.py"):
        found |= {re.sub(r"\{\w+\}", "1", path) for path in route.findall(source.read_text())}
    assert len(found) > 40
    assert found - set(INTERNAL) <= {CHAT, "/v1/completions", "/v1/models", "/health"}


def test_absolute_targets_and_queries_reach_the_engine_as_plain_paths(start_gateway, fake_router):
    gateway = start_gateway()
    for target in (f"http://x{CHAT}", f"{CHAT}?a=/../../pause&b", f"{CHAT}?"):
        assert statuses(raw(gateway, post(target=target))) == [200]
    assert {r.target for r in fake_router.received} == {CHAT}


PAUSE = "POST /pause HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
CHUNKED = "Transfer-Encoding: chunked\r\n"
SMUGGLED = {
    "CL.TE": f"Content-Length: {5 + len(PAUSE)}\r\n{CHUNKED}\r\n0\r\n\r\n{PAUSE}",
    "TE.CL": f"{CHUNKED}Content-Length: 4\r\n\r\n{len(PAUSE):x}\r\n{PAUSE}\r\n0\r\n\r\n",
    "two lengths": f"Content-Length: 0\r\nContent-Length: {len(PAUSE)}\r\n\r\n{PAUSE}",
    "list of lengths": f"Content-Length: 0, {len(PAUSE)}\r\n\r\n{PAUSE}",
    "signed length": f"Content-Length: +{len(PAUSE)}\r\n\r\n{PAUSE}",
    "hex length": f"Content-Length: 0x2\r\n\r\n{PAUSE}",
    "endless length": f"Content-Length: {'9' * 30}\r\n\r\n{PAUSE}",
    "negative length": f"Content-Length: -1\r\n\r\n{PAUSE}",
    "TE twice": f"{CHUNKED}Transfer-Encoding: identity\r\n\r\n0\r\n\r\n{PAUSE}",
    "TE unknown": f"Transfer-Encoding: xchunked\r\nContent-Length: 0\r\n\r\n{PAUSE}",
    "TE with space": f"Transfer-Encoding : chunked\r\nContent-Length: 0\r\n\r\n{PAUSE}",
    "TE folded": f"Transfer-Encoding:\r\n chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n{PAUSE}",
    "TE vertical tab": f"Transfer-Encoding: \x0bchunked\r\nContent-Length: 0\r\n\r\n{PAUSE}",
    "chunk size overflow": f"{CHUNKED}\r\n{'f' * 17}\r\n{PAUSE}",
    "chunk without size": f"{CHUNKED}\r\nz\r\n{PAUSE}",
    "bare LF in a chunk": f"{CHUNKED}\r\n0\n\n{PAUSE}",
    "header after fold": f"X-A: b\r\n Content-Length: 0\r\nContent-Length: 0\r\n\r\n{PAUSE}",
    "null in a header": f"X-A: b\x00\r\nContent-Length: 0\r\n\r\n{PAUSE}",
    "null in a name": f"X\x00A: b\r\nContent-Length: 0\r\n\r\n{PAUSE}",
    "bare CR": f"X-A: b\rX-Strop-Tenant: strop\r\nContent-Length: 0\r\n\r\n{PAUSE}",
    "upgrade": f"Connection: upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\nContent-Length: 0\r\n\r\n{PAUSE}",
}


@pytest.mark.parametrize("name", SMUGGLED)
def test_no_second_request_hides_in_a_first(start_gateway, fake_router, name):
    gateway = start_gateway()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n"
    answer = raw(gateway, (head + SMUGGLED[name]).encode("latin-1"), timeout_s=1)
    # The hidden request is refused as the request of its own that it is, or both are.
    assert set(statuses(answer)) <= {200, 400, 404, 405, 408, 413}
    assert {r.target for r in fake_router.received} <= {CHAT}
    assert all(
        "/pause" not in str(r.headers) and "strop" not in r.all("X-Strop-Tenant")
        for r in fake_router.received
    )
    assert all(PAUSE.encode() == r.body or b"POST" not in r.body for r in fake_router.received)
    # What the router got is framed one way only.
    for received in fake_router.received:
        assert len(received.all("Content-Length")) + len(received.all("Transfer-Encoding")) == 1


@pytest.mark.parametrize(
    "data",
    [b"GET /v1/models\r\n", b"GET /v1/models HTTP/0.9\r\n\r\n", b"GET /v1/models HTTP/2.0\r\nHost: x\r\n\r\n",
     b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"GET\x00/v1/models HTTP/1.1\r\n\r\n",
     b"GET http://a/v1/models HTTP/1.1\r\nHost: b\r\n\r\n", b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
     b"GET /v1/models\x00 HTTP/1.1\r\nHost: x\r\n\r\n"],
)  # fmt: skip
def test_what_is_not_http_1_is_refused(start_gateway, fake_router, data):
    gateway = start_gateway()
    assert set(statuses(raw(gateway, data, timeout_s=1))) == {400}
    assert fake_router.received == []


def test_keys_are_exchanged_while_it_runs(start_gateway, fake_router):
    gateway = start_gateway(TENANTS)
    digests = list(TENANTS)
    many = {hashlib.sha256(str(i).encode()).hexdigest(): f"t{i}" for i in range(2000)}
    gateway.replace_tenants({digests[1]: "green", **many})
    with httpx.Client(base_url=gateway.url) as client:
        for key, status in ((KEY, 401), (OTHER_KEY, 200), ("1999", 200)):
            answer = client.post(CHAT, content=BODY, headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == status
    assert [r.all("X-Strop-Tenant") for r in fake_router.received] == [["green"], ["t1999"]]
    with pytest.raises(ProcessError, match="not introduced"):
        start_gateway().replace_tenants(TENANTS)
    with pytest.raises(ProcessError, match="given up"):
        gateway.replace_tenants({})
    assert client_status(gateway, OTHER_KEY) == 200


def client_status(gateway, key):
    return httpx.get(f"{gateway.url}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code


def make_certificate(pem: Path) -> None:
    key, chain = pem.with_name("key.pem"), pem.with_name("chain.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(chain)],
        check=True, capture_output=True,
    )  # fmt: skip
    pem.write_text(chain.read_text() + "\n" + key.read_text())


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    pem = tmp_path / "of us both.pem"
    make_certificate(pem)
    return pem


def test_tls_from_1_2_on(start_gateway, fake_router, certificate):
    gateway = start_gateway(TENANTS, tls_certificate=str(certificate))
    assert gateway.url.startswith("https://")
    trusted = ssl.create_default_context(cafile=str(certificate))
    answer = httpx.get(f"{gateway.url}/v1/models", verify=trusted, headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200
    host, port = gateway.url.removeprefix("https://").split(":")
    for version, accepted in (
        (ssl.TLSVersion.TLSv1_1, False),
        (ssl.TLSVersion.TLSv1_2, True),
        (ssl.TLSVersion.TLSv1_3, True),
    ):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.minimum_version = context.maximum_version = version
        context.set_ciphers("ALL:@SECLEVEL=0")
        with socket.create_connection((host, int(port)), 10) as connection:
            try:
                with context.wrap_socket(connection) as wrapped:
                    assert accepted and wrapped.version() == version.name.replace("_", ".")
            except ssl.SSLError:
                assert not accepted
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://{host}:{port}/v1/models")


def test_a_certificate_is_renewed_while_it_runs(start_gateway, certificate):
    gateway = start_gateway(tls_certificate=str(certificate))
    host, port = gateway.url.removeprefix("https://").split(":")
    first = ssl.get_server_certificate((host, int(port)))
    make_certificate(certificate)
    assert ssl.get_server_certificate((host, int(port))) == first
    gateway.replace_certificate()
    second = ssl.get_server_certificate((host, int(port)))
    assert second != first and second.strip() in certificate.read_text()
    certificate.write_text("nonsense")
    with pytest.raises(ProcessError, match="HAProxy refused"):
        gateway.replace_certificate()
    assert ssl.get_server_certificate((host, int(port))) == second


def test_a_missing_certificate_is_one_clear_sentence(tmp_path):
    with pytest.raises(ProcessError, match="no certificate .*nowhere"):
        Gateway.start("127.0.0.1", free_port(), tmp_path, GatewaySettings(tls_certificate="/nowhere.pem"))


def test_keys_are_read_from_a_file_only_its_owner_can_read(tmp_path, monkeypatch):
    monkeypatch.delenv("STROP_GATEWAY_KEYS", raising=False)
    assert take_keys(None) == {}
    file = tmp_path / "keys"
    file.write_text(f"# who\n\nred {KEY}\nblue\t{OTHER_KEY}\n")
    file.chmod(0o640)
    with pytest.raises(KeysError, match="chmod 600"):
        take_keys(str(file))
    file.chmod(0o600)
    assert take_keys(str(file)) == TENANTS
    with pytest.raises(KeysError, match="No such file"):
        take_keys(str(tmp_path / "none"))
    monkeypatch.setenv("STROP_GATEWAY_KEYS", f"green {KEY}")
    assert list(take_keys(str(file)).values()) == ["green"]
    assert "STROP_GATEWAY_KEYS" not in os.environ


@pytest.mark.parametrize(
    "text", ["", "red", f"red {KEY} more", "red short", f"strop {KEY}", f"Strop {KEY}", f"a/b {KEY}", f"a {KEY}\nb {KEY}"]
)  # fmt: skip
def test_keys_that_cannot_be_used_are_errors_that_show_no_key(text, monkeypatch):
    monkeypatch.setenv("STROP_GATEWAY_KEYS", text)
    with pytest.raises(KeysError) as raised:
        take_keys(None)
    assert KEY not in str(raised.value) and "short " not in str(raised.value)
    assert "STROP_GATEWAY_KEYS" in str(raised.value)


def test_slow_headers_and_slow_bodies_end(start_gateway, fake_router, monkeypatch):
    monkeypatch.setattr("strop.serving.gateway.RECEIVE_TIMEOUT_S", 1)
    gateway = start_gateway()
    slow_bodies = post()[:-10], post(CHUNKED, body=b"5\r\n{}").replace(b"Content-Length", b"X-Length")
    for beginning in (b"POST /v1/chat", post()[:60], *slow_bodies):
        started = time.monotonic()
        answer = raw(gateway, beginning)
        assert statuses(answer) == [408]
        assert b"request_timeout" in answer or beginning not in slow_bodies
        assert time.monotonic() - started < 4
    assert fake_router.received == []
