import asyncio
import json
from dataclasses import asdict, replace
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer import Typer
from typer.testing import CliRunner

from strop.evals.findings import (
    FindingError,
    find_findings,
    finding_id,
    read_findings,
    replay_finding,
    write_findings,
)
from strop.evals.observation import Finding
from strop.pipelines.commands import eval_replay

LOOP = Finding(
    kind="loop", arm="candidate", stack="ab" * 32, request_id="r1", detail="repeats", answer="again again",
    body={"model": "m", "messages": [{"role": "user", "content": "hé 😀"}], "temperature": 0, "max_tokens": 5, "stream": False},
    other="Once.",
)  # fmt: skip
EMPTY = replace(
    LOOP,
    kind="empty",
    request_id="leak-0-1",
    answer="",
    body={"model": "m", "prompt": "Say", "stream": False},
)


class Server(httpx.MockTransport):
    """Serves the model `other` and counts its answers, each another one."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        super().__init__(self._answer)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "other"}]})
        self.bodies.append(json.loads(request.content))
        text = f"answer {len(self.bodies)} \x1b[31m"
        choice = (
            {"index": 0, "text": text}
            if "prompt" in self.bodies[-1]
            else {"index": 0, "message": {"content": text}}
        )
        usage = {"prompt_tokens": 3, "completion_tokens": 2}
        return httpx.Response(200, json={"choices": [{**choice, "finish_reason": "stop"}], "usage": usage})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    transport, client = Server(), httpx.AsyncClient
    monkeypatch.setattr(httpx, "AsyncClient", lambda **options: client(transport=transport, **options))
    return transport


json_text = st.text(st.characters(codec="utf-8"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(st.tuples(json_text, json_text, json_text, st.dictionaries(json_text, json_text)), max_size=4)
)
def test_what_is_written_is_read(tmp_path: Path, rows: list[tuple[str, str, str, dict[str, str]]]) -> None:
    findings = [replace(LOOP, kind=k, request_id=r, answer=a, body=b) for k, r, a, b in rows]
    path = tmp_path / "findings.jsonl"
    write_findings(path, findings)
    assert read_findings(path) == findings
    # A newline in an answer is not the end of a line.
    assert path.read_bytes().count(b"\n") == len(findings)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "line 2 is not JSON"),
        (b"[]", "line 2 is no Finding"),
        (b'{"kind": "loop"}', "lacks one of"),
        (json.dumps({**asdict(LOOP), "body": "x"}).encode(), "body is not right"),
        (json.dumps({**asdict(LOOP), "arm": "champion"}).encode(), "arm is not right"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "findings.jsonl"
    path.write_bytes(json.dumps(asdict(LOOP)).encode() + b"\n" + line)
    with pytest.raises(FindingError, match=reason):
        read_findings(path)


def test_one_is_found_by_its_id_or_its_requests_id(tmp_path: Path) -> None:
    path = tmp_path / "a:b.jsonl"
    write_findings(path, [LOOP, EMPTY])
    assert find_findings(str(path)) == [LOOP, EMPTY]
    assert find_findings(f"{path}:{finding_id(LOOP)[:6]}") == [LOOP]
    assert find_findings(f"{path}:leak-0-1") == [EMPTY]
    with pytest.raises(FindingError, match=finding_id(EMPTY)):
        find_findings(f"{path}:nothing")
    with pytest.raises(FindingError, match="cannot be read"):
        find_findings(str(tmp_path / "absent.jsonl"))


def test_the_id_is_that_of_what_was_asked_and_wrong() -> None:
    assert finding_id(LOOP) == finding_id(replace(LOOP, answer="else", other="", detail="else"))
    others = [
        replace(LOOP, kind="empty"),
        replace(LOOP, arm="reference"),
        replace(LOOP, body={}),
        replace(LOOP, stack="c"),
    ]
    assert len({finding_id(f) for f in (LOOP, *others)}) == 5


def test_exactly_the_request_is_sent(server: Server) -> None:
    for finding in (LOOP, EMPTY):
        replayed = asyncio.run(replay_finding(finding, "http://x"))
        assert server.bodies[-1] == finding.body and replayed.outcome.error is None
    asyncio.run(replay_finding(LOOP, "http://x/", model="other"))
    assert server.bodies[-1] == {**LOOP.body, "model": "other"}


app = Typer()
app.command()(eval_replay.replay)


def test_the_command_shows_both_answers(tmp_path: Path, server: Server) -> None:
    path = tmp_path / "findings.jsonl"
    write_findings(path, [LOOP, EMPTY])
    run = CliRunner().invoke
    listed = run(app, [str(path)], env={"COLUMNS": "160"})
    assert listed.exit_code == 0 and finding_id(LOOP) in listed.stdout
    assert run(app, [str(path), "--url", "http://x"]).exit_code == 2
    assert run(app, [f"{path}:r1", "--url", "http://x", "--stack", "s.json"]).exit_code == 2
    shown = run(app, [f"{path}:r1", "--url", "http://x", "--times", "2"])
    assert shown.exit_code == 0, shown.output
    assert all(
        text in shown.stdout
        for text in ("again again", "Once.", "answer 1", "answer 2", "2 different answers")
    )
    assert "\x1b[31m" not in shown.stdout and "\\x1b" in shown.stdout
    assert server.bodies[-1]["model"] == "other"
    (row,) = [
        json.loads(line)
        for line in run(app, [f"{path}:r1", "--url", "http://x", "--json"]).stdout.splitlines()
    ]
    assert row["outcome"]["text"].startswith("answer 3") and row["finding"] == asdict(LOOP)
