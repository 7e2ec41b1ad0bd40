"""Replay and `strop replay` against a small server that answers by the clock."""

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest
import typer
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from strop.pipelines.commands.replay import replay as command
from strop.serving.client import Outcome
from strop.serving.replay import replay, summarise
from strop.serving.sessions import Session, Turn
from strop.serving.traces import Speculation

TOKEN_S = 0.005
TOKENS = 4


@dataclass
class Server:
    """Answers `TOKENS` tokens, one every `TOKEN_S`; the prompt `fail` gets status 500."""

    url: str = ""
    running: int = 0
    most_running: int = 0
    aborted: int = 0
    asked: list[tuple[str, list[str]]] = field(default_factory=list)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "served"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        texts = [message["content"] for message in body["messages"]]
        self.asked.append((request.headers["X-Session-Id"], texts))
        if body["model"] != "served" or texts[-1] == "fail":
            return web.json_response({"error": {"message": "no such luck"}}, status=500)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            response = web.StreamResponse()
            await response.prepare(request)
            for number in range(TOKENS):
                await asyncio.sleep(TOKEN_S)
                reason = "stop" if number == TOKENS - 1 else None
                chunk = {"choices": [{"delta": {"content": f"{number}"}, "finish_reason": reason}]}
                await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
            usage = {"prompt_tokens": 10, "completion_tokens": TOKENS}
            await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
            return response
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        finally:
            self.running -= 1


@pytest.fixture
def server() -> Iterator[Server]:
    fake, loop, up = Server(), asyncio.new_event_loop(), threading.Event()

    async def main() -> None:
        app = web.Application()
        app.add_routes([web.get("/v1/models", fake.models), web.post("/v1/chat/completions", fake.chat)])
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        up.set()

    thread = threading.Thread(
        target=lambda: (loop.run_until_complete(main()), loop.run_forever()), daemon=True
    )
    thread.start()
    assert up.wait(10)
    yield fake
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def session(name: str, *asked: str) -> Session:
    turns = tuple(Turn("chat", ({"role": "user", "content": text},), {"model": "served"}) for text in asked)
    return Session(name, turns)


def test_turns_are_in_order_and_carry_the_real_answers(server: Server) -> None:
    heard: list[tuple[str, int]] = []
    outcomes = asyncio.run(
        replay(
            server.url,
            [session("a", "one", "two", "three")],
            concurrency=4,
            on_outcome=lambda s, turn, _: heard.append((s.id, turn)),
        )
    )
    assert heard == [("a", 0), ("a", 1), ("a", 2)] and len(outcomes) == 3
    assert server.asked[-1] == ("a", ["one", "0123", "two", "0123", "three"])
    assert all(outcome.error is None and outcome.text == "0123" for outcome in outcomes)


def test_a_failed_turn_ends_its_session_alone(server: Server) -> None:
    outcomes = asyncio.run(
        replay(server.url, [session("a", "one", "fail", "three"), session("b", "one", "two")], concurrency=2)
    )
    by_session = {name: [o.error for o in outcomes if o.session == name] for name in "ab"}
    assert by_session == {"a": [None, "HTTP 500: no such luck"], "b": [None, None]}


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_closed_loop_keeps_its_concurrency(server: Server, concurrency: int) -> None:
    drawn = count()
    sessions = (session(f"s{next(drawn)}", "one", "two") for _ in range(9))
    outcomes = asyncio.run(replay(server.url, sessions, concurrency=concurrency))
    assert len(outcomes) == 18 and server.most_running == concurrency


def test_sessions_start_when_they_arrive(server: Server) -> None:
    sessions = [session(f"s{number}", "one") for number in range(5)]
    outcomes = asyncio.run(replay(server.url, sessions, arrivals=[0.0, 0.0, 0.2, 0.4]))
    first = min(o.started_s for o in outcomes)
    starts = [o.started_s - first for o in sorted(outcomes, key=lambda o: o.session)]
    assert len(starts) == 4
    assert starts == pytest.approx([0.0, 0.0, 0.2, 0.4], abs=0.1)


@pytest.mark.parametrize("load", [{"concurrency": 2}, {"arrivals": [n * 0.01 for n in range(9999)]}])
def test_it_stops_in_time_and_lets_requests_finish(server: Server, load: dict) -> None:
    endless = (session(f"s{number}", "one", "two") for number in count())
    outcomes = asyncio.run(replay(server.url, endless, stop_after_s=0.3, **load))
    assert 2 < len(outcomes) < 500
    assert all(outcome.error is None for outcome in outcomes) and server.aborted == 0


def test_cancelling_leaves_nothing_running(server: Server) -> None:
    async def main() -> int:
        endless = (session(f"s{number}", "one", "two") for number in count())
        task = asyncio.create_task(replay(server.url, endless, concurrency=3))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # Connections need a moment to close.
        for _ in range(100):
            if len(asyncio.all_tasks()) == 1:
                break
            await asyncio.sleep(0.05)
        return len(asyncio.all_tasks()) - 1

    assert asyncio.run(main()) == 0
    asked = len(server.asked)
    deadline = threading.Event()
    for _ in range(100):
        if server.running == 0:
            break
        deadline.wait(0.02)
    assert server.running == 0 and len(server.asked) == asked


@pytest.mark.parametrize("load", [{}, {"concurrency": 1, "arrivals": [0.0]}, {"concurrency": 0}])
def test_a_load_that_makes_no_sense_is_refused(load: dict) -> None:
    with pytest.raises(ValueError, match="concurrency"):
        asyncio.run(replay("http://127.0.0.1:1", [], **load))


def outcome(
    started_s: float = 0.0,
    e2e_s: float = 1.0,
    error: str | None = None,
    gaps: tuple[float, ...] = (),
    ttft_s: float | None = 0.5,
    tokens: tuple[int, int] = (10, 5),
    cached_tokens: int | None = None,
    speculation: Speculation | None = None,
) -> Outcome:
    return Outcome(
        request_id="r", session="s", status=200, error=error, stack=None, started_s=started_s, ttft_s=ttft_s,
        e2e_s=e2e_s, inter_token_s=list(gaps), prompt_tokens=tokens[0], cached_tokens=cached_tokens,
        output_tokens=tokens[1], text="", token_ids=None, prompt_token_ids=None, logprobs=None, tool_calls=[],
        finish_reason="stop", speculation=speculation,
    )  # fmt: skip


def test_the_summary_of_known_outcomes() -> None:
    summary = summarise(
        [
            outcome(0.0, 1.0, gaps=(0.1, 0.3), cached_tokens=8, speculation=Speculation(4, 12, 6, [3, 2, 1])),
            outcome(1.0, 3.0, gaps=(0.2,), cached_tokens=0, speculation=Speculation(4, 12, 2, [1, 1, 0])),
            outcome(1.0, 0.5, error="truncated: gone", gaps=(9.0,)),
            outcome(1.0, 0.5, error="HTTP 500: no"),
        ]
    )
    assert (summary.requests, summary.errors, summary.truncated, summary.wall_s) == (4, 2, 1, 4.0)
    assert summary.inter_token_s is not None and summary.inter_token_s.p50 == pytest.approx(0.2)
    assert summary.token_s is not None and summary.token_s.p50 == pytest.approx((0.5 / 4 + 2.5 / 4) / 2)
    assert (summary.prompt_tok_s, summary.output_tok_s) == (5.0, 2.5)
    assert summary.cached_share == 0.4
    assert summary.acceptance_length == 2.0


def test_the_summary_of_nothing() -> None:
    summary = summarise([])
    assert (summary.requests, summary.output_tok_s, summary.ttft_s) == (0, 0.0, None)
    assert summary.cached_share is None and summary.acceptance_length is None


@given(
    st.lists(
        st.builds(
            outcome,
            started_s=st.floats(0, 1e6),
            e2e_s=st.floats(0, 1e4),
            error=st.none() | st.just("truncated: x") | st.just("HTTP 500: x"),
            gaps=st.lists(st.floats(0, 100), max_size=4).map(tuple),
            ttft_s=st.none() | st.floats(0, 100),
            tokens=st.tuples(st.integers(0, 999), st.integers(0, 999)),
        )
    )
)
def test_any_outcomes_can_be_summed_up(outcomes: list[Outcome]) -> None:
    summary = summarise(outcomes)
    assert summary.requests == len(outcomes) and summary.truncated <= summary.errors <= summary.requests
    if summary.inter_token_s:
        assert summary.inter_token_s.p50 <= summary.inter_token_s.p95 <= summary.inter_token_s.p99


app = typer.Typer()
app.command()(command)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


def test_the_command_plays_the_built_in_workload(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    code, stdout, _ = run("--url", server.url, "--sessions", "4", "--json", "--out", str(out))
    summary = json.loads(stdout)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert code == 0 and summary["errors"] == 0
    assert summary["requests"] == len(rows) == len(server.asked) >= 8
    assert {row["session"] for row in rows} == {f"code-0-{number:05d}" for number in range(4)}
    assert {"kind", "turn", "ttft_s", "text"} <= rows[0].keys()


def test_the_command_plays_a_file_and_shows_a_table(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(
        json.dumps({"messages": [{"role": "user", "content": "hi"}], "model": "other"}) + "\nbad\n"
    )
    code, stdout, _ = run("--url", server.url, "--workload", str(path), "--skip-bad", "--rate", "50")
    assert code == 0 and "1 requests, 0 failed" in stdout and "1 bad lines left out" in stdout
    code, stdout, _ = run("--url", server.url, "--workload", str(path))
    assert code == 2 and "line 2: not JSON" in " ".join(stdout.split())


def test_a_failed_request_is_a_failed_command(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "fail"}]}) + "\n")
    code, stdout, stderr = run("--url", server.url, "--workload", str(path), "--json")
    assert code == 1 and json.loads(stdout)["errors"] == 1
    assert "1 failed: HTTP 500: no such luck" in stderr


def test_the_command_says_what_is_wrong(server: Server, tmp_path: Path) -> None:
    for arguments, reason in [
        (["--url", "http://127.0.0.1:1"], "Nothing answers at http://127.0.0.1:1"),
        (["--url", server.url + "/elsewhere"], "/elsewhere/v1/models answers 404"),
        (["--url", server.url, "--model", "gpt"], "does not serve gpt. Give --model one of: served"),
        (["--url", server.url, "--rate", "1", "--concurrency", "2"], "exclude each other"),
        (["--url", server.url, "--rate", "0"], "give one above 0"),
        (["--url", server.url, "--arrivals", str(tmp_path / "x.csv")], "x.csv cannot be read"),
        (["--url", server.url, "--workload", str(tmp_path / "x.jsonl")], "x.jsonl cannot be read"),
    ]:
        code, _, stderr = run(*arguments, "--json")
        assert code == 2 and reason in stderr, (arguments, stderr)
