"""A Stack whose long prompts are computed by replicas of their own, in a real fleet with a real LMCache."""

import json
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from strop.pipelines.deployment import champion_of
from strop.serving.cluster import RemoteFleet, connect
from strop.serving.journal import recover
from strop.serving.monitoring import scrape
from strop.serving.stack import Disaggregation, Stack, Topology
from strop.serving.traces import TraceStore

from .conftest import Served, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORDS = ["the", "a", "of", "to", "and", "in", "is", "it", "you", "that", "he", "was", "for", "on", "are"]


@dataclass(frozen=True)
class Apart:
    """The fleet with a second Stack, whose work is divided."""

    fleet: RemoteFleet
    home: Path
    stack: Stack
    together: str
    """URL of the Stack in which every replica does both."""
    url: str

    def ask(self, text: str, url: str | None = None, **more: object) -> httpx.Response:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 12,
            "temperature": 0,
        }
        return httpx.post(f"{url or self.url}/v1/chat/completions", json=body | more, timeout=120)

    def counted(self, name: str, **labels: str) -> float:
        """Of the replica that answers."""
        (replica,) = self.pool.replicas
        return scrape(f"{replica.url}/metrics").total(name, **labels)

    @property
    def pool(self):
        return next(p for p in self.fleet.status().pools if p.fingerprint == self.stack.fingerprint)

    @property
    def loaded(self) -> float:
        return self.counted("vllm:external_prefix_cache_hits_total")

    @property
    def known(self) -> dict:
        state = json.loads((self.home / "run" / "fleet-state.json").read_text())
        return next(p for p in state["pools"] if p["prefill"])["prefill"]


@pytest.fixture(scope="module")
def apart(served: Served) -> Iterator[Apart]:
    fleet = connect(served.home)
    champion = champion_of(fleet)
    how = Disaggregation(min_request_bytes=800, buffer_gib=0.5)
    stack = champion.model_copy(update={"topology": Topology(disaggregation=how)})
    (pool,) = fleet.status().pools
    url = fleet.add(stack)
    yield Apart(fleet, served.home, stack, pool.url, url)
    fleet.remove(stack)
    left = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    assert not [line for line in left if "lmcache" in line and str(served.home) in line]


def _long(seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(400))


def _pid(folder: str) -> int:
    return json.loads((Path(folder) / "state").read_text())["pid"]


def test_a_long_prompt_is_computed_once_and_the_answer_is_the_same(apart: Apart) -> None:
    before, tokens = apart.loaded, 0
    for seed in range(3):
        answer, expected = apart.ask(_long(seed)), apart.ask(_long(seed), apart.together)
        assert answer.status_code == expected.status_code == 200
        assert answer.json()["choices"] == expected.json()["choices"]
        tokens = answer.json()["usage"]["prompt_tokens"]
    # All but what does not fill a chunk of 128 comes from the prefill replica.
    assert apart.loaded - before >= 3 * (tokens - 160)
    assert apart.counted("strop_prefill_requests_total", where="elsewhere") >= 3


def test_a_short_prompt_stays_where_it_is_answered(apart: Apart) -> None:
    before = apart.counted("strop_prefill_requests_total", where="elsewhere")
    assert apart.ask("short").status_code == 200
    assert apart.counted("strop_prefill_requests_total", where="elsewhere") == before


def test_a_request_is_recorded_once_by_the_replica_that_answers(apart: Apart) -> None:
    answer = apart.ask(_long(50))
    recorded = []

    def found() -> bool:
        recover(apart.home / "traces")
        recorded[:] = TraceStore(apart.home / "traces").scan(
            lambda t: t.stack == apart.stack.fingerprint and _long(50) in t.messages
        )
        return bool(recorded)

    wait_for(found, 30)
    (trace,) = recorded
    assert trace.choices[0].text == answer.json()["choices"][0]["message"]["content"]
    assert len(trace.prompt_token_ids) == answer.json()["usage"]["prompt_tokens"]


def test_streams_tools_and_clients_that_name_kv_are_served(apart: Apart) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    before = apart.loaded
    stolen = {"do_remote_prefill": True, "remote_block_ids": [1, 2], "remote_engine_id": "x"}
    answer = apart.ask(_long(60), stream=True, tools=[tool], kv_transfer_params=stolen)
    assert answer.status_code == 200 and answer.text.rstrip().endswith("data: [DONE]")
    assert apart.loaded > before


def test_every_helper_may_die_and_the_answers_stay_what_they_are(apart: Apart) -> None:
    """LMCache, then the prefill replica: what they would have saved is computed where it is answered."""
    notes = list((apart.home / "run").glob(f"prefill-{apart.stack.fingerprint[:12]}-*.json"))
    victims = {
        "LMCache": lambda: apart.known["lmcache"]["folder"],
        "the prefill replica": lambda: json.loads(notes[0].read_text())["folder"],
        "its router": lambda: apart.known["group"]["routers"][0]["folder"],
    }
    for number, (name, folder) in enumerate(victims.items()):
        pid = _pid(folder())
        os.kill(pid, signal.SIGKILL)
        for attempt in range(3):
            text = _long(100 + 10 * number + attempt)
            answer, expected = apart.ask(text), apart.ask(text, apart.together)
            assert answer.status_code == 200, (name, answer.text)
            assert answer.json()["choices"] == expected.json()["choices"], name
        wait_for(lambda pid=pid, folder=folder: _restarted(folder(), pid), 60)
        wait_for(lambda: all(r.alive for r in apart.pool.prefill), 120)

    def loads_again() -> bool:
        before = apart.loaded
        apart.ask(_long(random.randrange(10**6)))
        return apart.loaded > before

    wait_for(loads_again, 120)


def _restarted(folder: str, dead: int) -> bool:
    try:
        return _pid(folder) != dead
    except (OSError, ValueError):
        return False
