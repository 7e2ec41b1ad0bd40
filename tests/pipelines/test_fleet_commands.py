"""`strop fleet`, `strop top` and what a served request leaves in the metrics, on a real fleet."""

import json

import httpx
import pytest

from strop.serving.monitoring import scrape
from strop.serving.traces import TraceStore

from .conftest import Served, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def _body(*contents: str) -> dict[str, object]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0}


def test_a_conversation_without_a_session_is_recorded_as_one(served: Served) -> None:
    for contents in (("conversation one",), ("conversation one", "yes", "go on"), ("conversation two",)):
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=_body(*contents), timeout=120)
        assert answer.status_code == 200

    def sessions() -> list[str]:
        found = TraceStore(served.home / "traces").scan(lambda t: "conversation " in t.messages)
        return [t.session for t in found]

    wait_for(lambda: len(sessions()) == 3)
    assert len(set(sessions())) == 2


def test_what_operators_see(served: Served) -> None:
    assert served.ask("seen", session="seen").status_code == 200
    status = json.loads(served.strop("fleet", "ls", "--json").stdout)
    [pool] = status["pools"]
    metrics = scrape(f"{pool['replicas'][0]['url']}/metrics")
    assert metrics.total("strop_capture_recorded_total") >= 1
    assert "strop_capture_dropped" in metrics.families
    shown = json.loads(served.strop("top", "--once", "--json").stdout)
    assert [s["share"] for s in shown["stacks"]] == [1.0]
    [replica] = shown["replicas"]
    assert replica["up"] and replica["requests"] >= 1 and replica["ttft_p50_s"] > 0
    assert shown["gateway"]["requests"] >= 1


def test_the_only_stack_is_not_drained_by_mistake(served: Served) -> None:
    status = json.loads(served.strop("fleet", "ls", "--json").stdout)
    refused = served.strop("fleet", "drain", status["pools"][0]["fingerprint"][:8])
    assert refused.returncode == 2 and "Nothing but" in refused.stderr
    assert served.ask("still here").status_code == 200


def test_a_fleet_grows_and_shrinks(served: Served) -> None:
    assert served.strop("fleet", "scale", "2", timeout=500).returncode == 0
    try:
        wait_for(lambda: len(json.loads(served.strop("top", "--once", "--json").stdout)["replicas"]) == 2)
        for number in range(4):
            assert served.ask(f"grown {number}", session=f"grown-{number}").status_code == 200
    finally:
        assert served.strop("fleet", "scale", "1", timeout=500).returncode == 0
    assert served.ask("shrunk").status_code == 200
