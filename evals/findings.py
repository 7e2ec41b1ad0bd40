"""Findings as a file, and one of them asked again of any server.

The file has one JSON object a line, a Finding's fields. A Finding is known by a digest of what was asked
and what was wrong, so that the same one has the same id in every evaluation.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import httpx
import orjson

from strop.evals.observation import Finding
from strop.serving.client import Endpoint, Outcome, send
from strop.serving.home import write_atomic
from strop.serving.traces import PROBE_TENANT

ID_DIGITS = 12
_TYPES = {f.name: dict if f.name == "body" else str for f in fields(Finding)}
_NEEDED = ("kind", "arm", "stack", "request_id", "detail", "body")


class FindingError(ValueError):
    """No such Finding, or a file that holds none; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """A Finding and what its request was answered now."""

    finding: Finding
    outcome: Outcome


def finding_id(finding: Finding) -> str:
    """Twelve hex digits of the kind, the arm, the Stack and the request."""
    content = [finding.kind, finding.arm, finding.stack, finding.request_id, finding.body]
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()[:ID_DIGITS]


def write_findings(path: Path, findings: Iterable[Finding]) -> None:
    """Raises OSError with nothing left behind."""
    write_atomic(path, b"".join(orjson.dumps(asdict(finding)) + b"\n" for finding in findings))


def read_findings(path: Path) -> list[Finding]:
    """All Findings of a file. Raises FindingError naming the line that is none."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise FindingError(f"{path} cannot be read: {error.strerror}.") from None
    return [_parsed(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _parsed(path: Path, number: int, line: bytes) -> Finding:
    try:
        values: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise FindingError(f"{path}, line {number} is not JSON: {str(error).split(':')[0]}.") from None
    if not isinstance(values, dict) or any(name not in values for name in _NEEDED):
        raise FindingError(f"{path}, line {number} is no Finding: it lacks one of {', '.join(_NEEDED)}.")
    known = {name: value for name, value in values.items() if name in _TYPES}
    wrong = [name for name, value in known.items() if not isinstance(value, _TYPES[name])]
    if wrong or known["arm"] not in ("reference", "candidate"):
        raise FindingError(f"{path}, line {number} is no Finding: {', '.join(wrong) or 'arm'} is not right.")
    return Finding(**known)


def find_findings(name: str) -> list[Finding]:
    """The Findings of `FILE`, or the one of `FILE:ID`, by its id's beginning or its request's id. Raises FindingError."""
    if Path(name).is_file() or ":" not in name:
        return read_findings(Path(name))
    file, _, wanted = name.rpartition(":")
    findings = read_findings(Path(file))
    found = [f for f in findings if wanted and (finding_id(f).startswith(wanted) or f.request_id == wanted)]
    if not found:
        some = ", ".join(dict.fromkeys(finding_id(finding) for finding in findings[:10]))
        raise FindingError(f"{file} has no Finding {wanted!r}. It has: {some or 'none at all'}.")
    return found


async def replay_finding(
    finding: Finding,
    url: str,
    *,
    model: str | None = None,
    client: httpx.AsyncClient | None = None,
    timeout_s: float = 300,
) -> Replayed:
    """Send exactly a Finding's request to the server at `url`, under `model`'s name if that is another.

    A server that fails is an Outcome with `error` set.
    """
    endpoint: Endpoint = "completions" if "prompt" in finding.body else "chat"
    body = {**finding.body, "model": model} if model else finding.body

    async def ask(client: httpx.AsyncClient) -> Outcome:
        return await send(
            client,
            url,
            endpoint,
            body,
            session=f"replay-{finding_id(finding)}",
            tenant=PROBE_TENANT,
            timeout_s=timeout_s,
        )

    if client is not None:
        return Replayed(finding, await ask(client))
    async with httpx.AsyncClient(trust_env=False) as own:
        return Replayed(finding, await ask(own))
