"""A real fleet, driven as its users and operators drive it."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import ray
import yaml

from strop.pipelines.deployment import champion_of, checker, recent_traces
from strop.pipelines.registry import LoopJournal, Registry
from strop.serving.cluster import connect
from strop.serving.journal import recover
from strop.serving.rollout import Event, Rollout, roll_out
from strop.serving.stack import Speculator, Stack
from strop.serving.traces import PROBE_TENANT, TraceStore

from .conftest import Served, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEVELOPMENT = [
    "/collective_rpc",
    "/pause",
    "/sleep",
    "/update_weights",
    "/reset_prefix_cache",
    "/list_workers",
    "/metrics",
]


def _traces(served: Served) -> list:
    recover(served.home / "traces")
    return list(TraceStore(served.home / "traces").scan(lambda t: t.tenant != PROBE_TENANT))


@contextmanager
def _steady_load(served: Served, threads: int = 3) -> Iterator[list[httpx.Response]]:
    """Clients that keep asking while the block runs; yields every answer they got."""
    answers: list[httpx.Response] = []
    over = threading.Event()

    def client(number: int) -> None:
        turn = 0
        while not over.is_set():
            answers.append(served.ask(f"count {turn}", session=f"load-{number}-{turn}", max_tokens=12))
            turn += 1
            # Steady, not saturating: the candidate needs the cores to start.
            time.sleep(0.5)

    workers = [threading.Thread(target=client, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield answers
    finally:
        over.set()
        for worker in workers:
            worker.join()


def _roll_out(served: Served, candidate: Stack, on_event=lambda _: None) -> Rollout:
    fleet = connect(served.home)
    champion = champion_of(fleet)
    return roll_out(
        fleet,
        champion,
        candidate,
        store=TraceStore(served.home / "traces"),
        check=checker(champion, candidate, recent_traces(served.home, champion)),
        warm=[{"messages": [{"role": "user", "content": "hello"}]}],
        settings=served.settings.serving.canary,
        on_event=on_event,
    )


@pytest.fixture
def champion(served: Served) -> Stack:
    for number in range(3):
        assert served.ask(f"warm {number}", session=f"w{number}").status_code == 200
    wait_for(lambda: _traces(served))  # Without any, a check has nothing to compare.
    return champion_of(connect(served.home))


def test_requests_are_answered_named_and_recorded(served: Served) -> None:
    answer = served.ask("hello", session="first", stream=False)
    assert answer.status_code == 200
    champion = champion_of(connect(served.home))
    assert answer.headers["X-Strop-Stack"] == champion.fingerprint
    request_id = answer.headers["X-Request-Id"]
    content = answer.json()
    assert content["prompt_token_ids"] is None and content["choices"][0]["token_ids"] is None
    assert not content.get("metrics")
    wait_for(lambda: any(t.request_id == request_id for t in _traces(served)))
    trace = next(t for t in _traces(served) if t.request_id == request_id)
    assert trace.session == "first" and trace.stack == champion.fingerprint
    assert len(trace.output_token_ids) == answer.json()["usage"]["completion_tokens"]
    assert trace.queue_s is not None and trace.e2e_s is not None


def test_what_was_recorded_of_a_session_is_deleted_beside_living_writers(served: Served) -> None:
    """From the journals of the replicas too, and the next request of the session is recorded again."""
    for number in range(3):
        assert served.ask(f"my secret {number}", session="forget").status_code == 200
    assert served.ask("other", session="keep").status_code == 200
    done = served.strop("traces", "delete", "--session", "forget", "--yes", "--json")
    assert json.loads(done.stdout)["left"] == []
    assert not any(t.session == "forget" for t in _traces(served))
    assert served.ask("again", session="forget").status_code == 200
    wait_for(lambda: any(t.session == "keep" for t in _traces(served)))
    wait_for(lambda: [t.session for t in _traces(served)].count("forget") == 1)


@pytest.mark.parametrize("path", DEVELOPMENT)
def test_development_endpoints_are_unreachable(served: Served, path: str) -> None:
    assert httpx.get(served.url + path).status_code == 404
    assert httpx.post(served.url + path, json={}).status_code == 404


def test_the_fleet_says_how_it_is(served: Served) -> None:
    status = connect(served.home).status()
    assert status.alive and [p.share for p in status.pools] == [1.0]
    (replica,) = status.pools[0].replicas
    assert replica.alive and replica.rss_bytes > 100 << 20 and replica.started_in_s > 0
    assert "haproxy_process" in httpx.get(status.metrics).text


def test_the_projects_folders_are_not_importable_in_workers(served: Served) -> None:
    connect(served.home)

    @ray.remote(num_cpus=0)
    def origin() -> str:
        import importlib.util

        spec = importlib.util.find_spec("kernels")
        return str(spec.origin or list(spec.submodule_search_locations or [])) if spec else "none"

    assert str(Path(__file__).parents[2]) not in ray.get(origin.remote())


def test_a_candidate_that_does_not_start_costs_no_request(served: Served, champion: Stack) -> None:
    broken = champion.model_copy(
        update={
            "engine": champion.engine.model_copy(
                update={"args": {**champion.engine.args, "max-model-len": 10**9}}
            )
        }
    )
    with _steady_load(served) as answers:
        result = _roll_out(served, broken)
    assert not result.promoted and "did not start" in result.reason
    assert answers and {a.status_code for a in answers} == {200}
    assert champion_of(connect(served.home)).fingerprint == champion.fingerprint


def test_a_candidate_whose_answers_are_wrong_gets_no_traffic(
    served: Served, champion: Stack, tmp_path: Path
) -> None:
    template = tmp_path / "other.jinja"
    template.write_text("{% for m in messages %}shout {{ m.content }} {% endfor %}")
    args = {**champion.engine.args, "chat-template": str(template)}
    wrong = champion.model_copy(update={"engine": champion.engine.model_copy(update={"args": args})})
    assert wrong.numerics == champion.numerics and wrong.fingerprint != champion.fingerprint
    with _steady_load(served) as answers:
        result = _roll_out(served, wrong)
    assert not result.promoted and "answers are wrong" in result.reason
    assert "canary" not in [e.event for e in result.events]
    assert {a.status_code for a in answers} == {200}
    assert {a.headers["X-Strop-Stack"] for a in answers} == {champion.fingerprint}


def test_a_candidate_that_crashes_in_its_canary_costs_no_request(served: Served, champion: Stack) -> None:
    candidate = champion.model_copy(update={"speculator": Speculator(method="ngram", draft_tokens=2)})

    def crash(event: Event) -> None:
        if event.event == "canary":
            threading.Thread(target=kill, daemon=True).start()

    def kill() -> None:
        time.sleep(1)
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if "--speculative-config" in command and "supervise.py" not in " ".join(command):
                os.kill(process.pid, signal.SIGKILL)

    settings = served.settings.serving.canary.model_copy(update={"min_requests": 10_000})
    fleet = connect(served.home)
    with _steady_load(served) as answers:
        result = roll_out(
            fleet, champion, candidate,
            store=TraceStore(served.home / "traces"),
            check=lambda *_: [], warm=[], settings=settings, on_event=crash,
        )  # fmt: skip
    assert not result.promoted and "crashed" in result.reason
    assert {a.status_code for a in answers} == {200}
    assert [p.fingerprint for p in fleet.status().pools] == [champion.fingerprint]


def test_an_abandoned_candidate_is_taken_back_when_its_lease_ends(served: Served, champion: Stack) -> None:
    fleet = connect(served.home)
    abandoned = champion.model_copy(update={"speculator": Speculator(method="ngram", draft_tokens=1)})
    fleet.add(abandoned, 3.0)
    fleet.route({champion.fingerprint: 0.5, abandoned.fingerprint: 0.5})
    wait_for(lambda: len(fleet.status().pools) == 1, 90)
    (pool,) = fleet.status().pools
    assert (pool.fingerprint, pool.share) == (champion.fingerprint, 1.0)
    assert served.ask("still there?").status_code == 200


def test_a_loop_killed_in_the_middle_resumes_and_leaves_nothing_over(served: Served, champion: Stack) -> None:
    """Traffic, a loop that is SIGKILLed while it judges, the same loop resumed to its end, a rollback."""
    for session in range(12):
        for turn in range(3):
            served.ask(f"session {session} turn {turn}", session=f"train-{session}", max_tokens=48)
    registry = Registry(served.home, served.settings.experiment)
    import subprocess
    import sys

    command = [sys.executable, "-m", "strop.pipelines.cli", "loop", "run", "--config", str(served.config)]
    env = {**os.environ, "STROP_HOME": str(served.home), "PYTHONSAFEPATH": "1"}
    loop = subprocess.Popen(command, env=env, cwd=served.home, stderr=subprocess.PIPE, text=True)

    def judging() -> bool:
        assert loop.poll() is None, loop.communicate()[1][-2000:]
        loops = registry.loops()
        stages = LoopJournal(registry, loops[0]["loop"], loops[0]["run_id"]).stages() if loops else []
        return any(s["stage"] == "judge" for s in stages)

    wait_for(judging, 240)
    loop.kill()
    loop.wait()
    with _steady_load(served, threads=1) as answers:
        resumed = served.strop("loop", "resume", "--config", str(served.config), "--json", timeout=600)
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    result = json.loads(resumed.stdout.splitlines()[-1])
    assert result["outcome"] in ("promoted", "refused", "taken back")
    assert {a.status_code for a in answers} == {200}

    (newest, *_) = registry.loops()
    stages = LoopJournal(registry, newest["loop"], newest["run_id"]).stages()
    finished = [s["stage"] for s in stages if s["status"] == "FINISHED"]
    assert finished == ["collect", "learn", "judge", "rollout", "record"]
    assert Path(result["report"]).is_file()
    pools = connect(served.home).status().pools
    assert [p.share for p in pools if p.share] == [1.0]
    wait_for(lambda: len(connect(served.home).status().pools) == 1, 120)

    if result["outcome"] == "promoted":
        back = served.strop("rollback", "--config", str(served.config))
        assert back.returncode == 0, back.stderr[-2000:]
        assert champion_of(connect(served.home)).fingerprint == champion.fingerprint


def test_the_schedule_is_set_shown_and_ended(served: Served) -> None:
    assert "next at" in served.strop("loop", "schedule", "--every", "6h").stdout
    assert "every 6h" in served.strop("loop", "schedule").stdout
    assert "ended" in served.strop("loop", "schedule", "--stop").stdout
    assert "no schedule" in served.strop("loop", "schedule").stdout


def test_a_schedule_runs_a_loop_when_it_is_due(served: Served) -> None:
    patient = served.home / "patient.yaml"
    content = yaml.safe_load(served.config.read_text())
    content["loop"]["min_requests"] = 1_000_000
    patient.write_text(yaml.safe_dump(content))
    served.strop("loop", "schedule", "--every", "3s", "--config", str(patient))
    try:
        wait_for(lambda: "last: exit code 0" in served.strop("loop", "schedule").stdout, 120)
    finally:
        served.strop("loop", "schedule", "--stop")
    newest = json.loads(served.strop("loop", "history", "--config", str(patient), "--json").stdout)[0]
    assert newest["outcome"] == "no candidate"


def test_seeded_requests_side_by_side_do_not_end_the_engine(served: Served) -> None:
    answers: list[httpx.Response] = []
    words = " ".join(f"w{i}" for i in range(100))

    def ask(seed: int) -> None:
        answers.append(served.ask(f"{seed} {words}", session=f"seed-{seed}", temperature=0.7, seed=seed))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [a.status_code for a in answers] == [200] * 12
