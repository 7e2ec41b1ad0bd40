"""Requests that once failed: what is kept, what is let go, what is deleted, and how they are asked again."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.evals.observation import Bench, EvalError, Finding, Observation, Side
from strop.evals.regressions import (
    SEVERITY,
    Case,
    Regressions,
    cases_of_findings,
    cases_of_traces,
    kept_cases,
    remember,
    remember_evaluation,
)
from strop.pipelines.deployment import remember_taken_back
from strop.serving.deletion import delete
from strop.serving.hardware import Hardware
from strop.serving.retention import prune
from strop.serving.stack import Artifact, Engine, Stack
from strop.serving.tombstones import bury
from strop.serving.traces import Choice, Trace, TraceStore

MakeTrace = Callable[..., Trace]
START = datetime(2026, 3, 1, tzinfo=UTC)
STACK = Stack(
    served_model="m",
    model=Artifact(location="/models/m", files={"config.json": "0" * 64, "model.safetensors": "1" * 64}),
    engine=Engine(version="vllm 0", dtype="float32"),
    hardware=Hardware(device="cpu", name="c", isa="avx2"),
)


def case(number: int = 0, **changes: str) -> Case:
    made = Case(
        tenant="ann", session=f"s{number}", started_at=(START + timedelta(hours=number)).isoformat(), kind="loop",
        detail="repeats", stack="ab" * 32, request_id=f"r{number}",
        noted_at=(START + timedelta(days=1, hours=number)).isoformat(), slice="chat", endpoint="chat",
        body={"messages": [{"role": "user", "content": f"question {number}"}], "temperature": 0, "max_tokens": 64, "stream": True},
    )  # fmt: skip
    return replace(made, **changes)


def ids(home: Path) -> list[str]:
    return [kept.request_id for kept in kept_cases(home)]


def test_what_is_kept_is_read_again_and_kept_once(tmp_path: Path) -> None:
    assert remember(tmp_path, [case(1), case(2), case(1, detail="again", session="other")]) == 2
    assert remember(tmp_path, [case(2)]) == 0
    assert kept_cases(tmp_path) == [case(2), case(1)]
    assert {p.stem for p in (tmp_path / "regressions").iterdir()} == {case(1).id, case(2).id}
    # Another tenant's failure is a case of its own: it goes when that tenant's data goes.
    assert remember(tmp_path, [case(1, tenant="bob"), case(1, kind="empty")]) == 2


def test_the_least_severe_and_oldest_go_first(tmp_path: Path) -> None:
    cases = [
        case(1, kind="race"), case(2, kind="premature_stop"), case(3, kind="premature_stop"), case(4, kind="loop"),
    ]  # fmt: skip
    remember(tmp_path, cases, max_cases=3)
    assert ids(tmp_path) == ["r1", "r4", "r3"]
    size = max(p.stat().st_size for p in (tmp_path / "regressions").iterdir())
    remember(tmp_path, [case(5, kind="race")], max_bytes=2 * size)
    assert ids(tmp_path) == ["r5", "r1"]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from(sorted(SEVERITY))), max_size=25),
    st.integers(1, 10),
)
def test_bounds_hold_and_nothing_better_was_let_go(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, str]], most: int
) -> None:
    home = tmp_path_factory.mktemp("home")
    cases = [case(n, kind=kind) for n, kind in rows]
    remember(home, cases, max_cases=most)
    kept = kept_cases(home)
    assert len(kept) == min(most, len({c.id for c in cases}))
    gone = [c for c in cases if c.id not in {k.id for k in kept}]
    worst = min(((SEVERITY[k.kind], k.noted_at) for k in kept), default=(0, ""))
    assert all((SEVERITY[c.kind], c.noted_at) <= worst for c in gone)


def test_a_huge_request_and_damaged_files_are_passed_over(tmp_path: Path) -> None:
    huge = replace(case(1), body={"messages": [{"role": "user", "content": "x" * (2 << 20)}]})
    assert remember(tmp_path, [huge, case(2)]) == 1
    folder = tmp_path / "regressions"
    for name, content in {
        "a" * 64: "{}", "b" * 64: "\x00", "c" * 64: json.dumps({"kind": []}), "d" * 64: "[1]",
        case(3).id: (folder / f"{case(2).id}.json").read_text(),
    }.items():  # fmt: skip
        (folder / f"{name}.json").write_text(content)
    assert ids(tmp_path) == ["r2"]
    # They are the first to go.
    remember(tmp_path, [], max_cases=1)
    assert [p.stem for p in folder.iterdir()] == [case(2).id]


# -- where they come from -------------------------------------------------------------------


def finding(kind: str, request_id: str = "r1") -> Finding:
    body = {
        "messages": [{"role": "user", "content": "hé"}],
        "temperature": 0,
        "max_tokens": 9,
        "model": "m",
        "cache_salt": "x",
    }
    return Finding(kind, "candidate", "cd" * 32, request_id, "detail", body, "said", "other")


def test_findings_that_count_become_cases_of_their_traces(tmp_path: Path, make_trace: MakeTrace) -> None:
    heldout = [make_trace(1, tenant="ann"), make_trace(2)]
    found = [
        finding("loop"),
        finding("tie"),
        finding("wrong_call"),
        finding("race", "r2"),
        finding("leak", "leak-0-1"),
    ]
    cases = list(cases_of_findings(found, heldout))
    assert [(c.kind, c.tenant, c.session, c.request_id) for c in cases] == [
        ("loop", "ann", "s1", "r1"), ("race", "default", "s2", "r2"),
    ]  # fmt: skip
    assert "model" not in cases[0].body and "cache_salt" not in cases[0].body
    assert (cases[0].stack, cases[0].answer, cases[0].expected) == ("cd" * 32, "said", "other")
    assert cases[0].started_at == heldout[0].started_at.isoformat()
    assert remember_evaluation(tmp_path, found, heldout) == 2 == len(kept_cases(tmp_path))


def test_failed_and_faulty_traces_become_cases(make_trace: MakeTrace) -> None:
    json_wanted = json.dumps({"response_format": {"type": "json_object"}})
    live = [
        make_trace(1),
        make_trace(2, status=500, error="engine died", choices=[]),
        make_trace(3, status=499, choices=[]),
        make_trace(4, choices=[Choice(0, [5, 6, 7] * 30, "x", "length")]),
        make_trace(5, format=json_wanted, choices=[Choice(0, [1], "no", "stop")]),
        make_trace(6, status=500, tenant="strop"),
        make_trace(7, status=500, messages=""),
        make_trace(8, status=500, messages="{"),
        make_trace(9, choices=[Choice(0, [2], "", "stop")]),
    ]
    assert [(c.request_id, c.kind) for c in cases_of_traces(live)] == [
        ("r2", "error"), ("r4", "loop"), ("r5", "invalid_json"), ("r9", "empty"),
    ]  # fmt: skip


def test_what_a_candidate_failed_before_it_was_taken_back_is_kept(
    tmp_path: Path, make_trace: MakeTrace
) -> None:
    since = datetime(2026, 3, 1, 12, 0, 30, tzinfo=UTC)

    def failed(number: int, **changes: str) -> Trace:
        asked = json.dumps([{"role": "user", "content": f"question {number}"}])
        return make_trace(number, messages=asked, status=500, error="died", choices=[], **changes)

    mine = {"stack": STACK.fingerprint}
    # One that was kept for its failure alone counts as well.
    served = [failed(29, **mine), failed(31, **mine), failed(33, kept_for="failure", **mine), failed(34)]
    served.append(make_trace(32, **mine))
    TraceStore(tmp_path / "traces").append(served)
    assert remember_taken_back(tmp_path, STACK, since) == 2
    assert set(ids(tmp_path)) == {"r31", "r33"}
    # A disk that refuses does not end the loop.
    (tmp_path / "traces" / "deletions.json").write_text("{")
    assert remember_taken_back(tmp_path, STACK, since) == 0


# -- deletion and retention -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("tenant", "session", "left"),
    [
        ("ann", None, ["r3"]),
        (None, "s1", ["r3", "r2"]),
        ("ann", "s2", ["r3", "r1"]),
        ("bob", "s1", ["r3", "r2", "r1"]),
    ],
)
def test_deleting_a_tenant_or_a_session_deletes_its_cases(
    tmp_path: Path, tenant: str | None, session: str | None, left: list[str]
) -> None:
    tricky = replace(
        case(3, tenant="bob"), body={"tenant": "ann", "session": "s1", "started_at": "2020-01-01"}
    )
    remember(tmp_path, [case(1), case(2), tricky])
    done = delete(tmp_path, tenant, session)
    assert not done.left and done.records == 3 - len(left)
    assert ids(tmp_path) == left
    assert all(
        (tenant or "ann") not in c.tenant or session for c in kept_cases(tmp_path) if c.tenant == tenant
    )


def test_what_was_deleted_is_not_kept_and_a_later_request_is(tmp_path: Path) -> None:
    bury(tmp_path / "traces", "ann", None)
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    assert remember(tmp_path, [case(1), case(2, tenant="bob"), case(3, started_at=later)]) == 2
    assert set(ids(tmp_path)) == {"r2", "r3"}


def test_files_that_nobody_can_read_go_with_a_deletion(tmp_path: Path) -> None:
    remember(tmp_path, [case(1, tenant="bob")])
    (tmp_path / "regressions" / "torn.json").write_text('{"tenant":"an')
    (tmp_path / "regressions" / ".half.json.x").write_text("secret of ann")
    assert not delete(tmp_path, "ann", None).left
    assert [p.stem for p in (tmp_path / "regressions").iterdir()] == [case(1, tenant="bob").id]


def test_retention_lets_old_cases_go(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    remember(tmp_path, [case(n, started_at=(now - timedelta(days=n)).isoformat()) for n in (1, 5)])
    (tmp_path / "regressions" / "odd.json").write_text('{"started_at": "2026-01-01T00:00:00"}')
    assert prune(tmp_path, 3, None).files == 2
    assert ids(tmp_path) == ["r1"]
    assert prune(tmp_path, None, None).files == 0


# -- asked again ----------------------------------------------------------------------------


@dataclass
class Answers:
    """Says what `texts` has for a piece of the prompt, in words as tokens; status 500 for None."""

    texts: dict[str, str | None] = field(default_factory=dict)
    changes: str = "\0"
    asked: list[str] = field(default_factory=list)

    def answer(self, request: httpx.Request) -> httpx.Response:
        prompt = json.loads(request.content)["messages"][-1]["content"]
        self.asked.append(prompt)
        text = next((said for key, said in self.texts.items() if key in prompt), "A fine answer.")
        if text is None:
            return httpx.Response(500, json={"error": {"message": "planted"}})
        if self.changes in prompt:
            text += f" {len(self.asked)}"
        words = text.split()
        numbers = {word: n for n, word in enumerate(dict.fromkeys(words))}
        choice = {
            "index": 0,
            "delta": {"content": text},
            "token_ids": [numbers[w] for w in words],
            "finish_reason": "stop",
        }
        usage = {"prompt_tokens": 3, "completion_tokens": len(words)}
        events = [{"choices": [choice]}, {"choices": [], "usage": usage}]
        return httpx.Response(
            200, text="".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n"
        )


LOOPING = "one two three four five six seven eight nine ten " * 8


def asked_again(
    reference: Answers, candidate: Answers, tmp_path: Path, part: Regressions | None = None, heldout: tuple[Trace, ...] = (),
    done: frozenset[str] = frozenset(),
) -> tuple[list[Observation], list[Finding]]:  # fmt: skip
    def route(request: httpx.Request) -> httpx.Response:
        return (reference if request.url.host == "reference" else candidate).answer(request)

    async def run() -> list[Observation | Finding]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(route)) as client:
            sides = Side("reference", STACK, "http://reference"), Side("candidate", STACK, "http://candidate")
            bench = Bench(*sides, heldout, client, tmp_path, lambda done, text: None, done=done)
            return [one async for one in (part or Regressions()).observe(bench)]

    seen = asyncio.run(run())
    return [o for o in seen if isinstance(o, Observation)], [f for f in seen if isinstance(f, Finding)]


def test_a_case_that_only_the_candidate_fails_is_a_finding(strop_home: Path, tmp_path: Path) -> None:
    remember(strop_home, [case(n) for n in range(4)])
    both = Answers({"question 2": LOOPING})
    observations, findings = asked_again(
        both, Answers({"question 1": LOOPING, "question 2": LOOPING}), tmp_path
    )
    values = {o.request_id: (o.candidate[0], o.reference and o.reference[0]) for o in observations}
    assert values == {case(0).id: (0, 0), case(1).id: (1, 0), case(2).id: (1, 1), case(3).id: (0, 0)}
    (found,) = findings
    assert (found.kind, found.arm, found.request_id) == ("regression", "candidate", "r1")
    assert "period 10" in found.detail and found.answer == LOOPING and found.other == "A fine answer."
    assert observations[0].slices == ("chat", "loop") and observations[0].session.startswith("ann/")


@pytest.mark.parametrize(
    ("kind", "bad", "expected"),
    [
        ("error", None, ""),
        ("empty", "", ""),
        ("garbage", "a \ufffd b", ""),
        ("premature_stop", "```\nx", ""),
        ("premature_stop", "No.", "word " * 200),
        ("language_switch", "Это ответ на вопрос по-русски", "An answer in English."),
        ("invalid_json", "no JSON", ""),
        ("loop", None, ""),
    ],
)
def test_each_kind_is_seen_again_and_a_good_answer_is_none(
    strop_home: Path, tmp_path: Path, kind: str, bad: str | None, expected: str
) -> None:
    body = (
        {**case().body, "response_format": {"type": "json_object"}} if kind == "invalid_json" else case().body
    )
    remember(strop_home, [replace(case(kind=kind, expected=expected), body=body)])
    good = {"question": '{"a": 1}' if kind == "invalid_json" else "A fine answer. " * 40}
    if kind != "invalid_json":
        good = {"question": "Here is " + " ".join(f"word{n}" for n in range(150)) + "."}
    observations, findings = asked_again(Answers(dict(good)), Answers({"question": bad}), tmp_path)
    assert [(o.candidate, o.reference) for o in observations] == [((1.0,), (0.0,))] and len(findings) == 1


def test_a_race_is_asked_twice(strop_home: Path, tmp_path: Path) -> None:
    remember(strop_home, [case(1, kind="race")])
    (observation,), findings = asked_again(Answers(), Answers(changes="question"), tmp_path)
    assert (observation.candidate, observation.reference) == ((1.0,), (0.0,))
    assert "asked twice" in findings[0].detail


def test_failed_requests_of_the_traffic_are_kept_and_asked(
    strop_home: Path, tmp_path: Path, make_trace: MakeTrace
) -> None:
    heldout = (make_trace(1, status=500, error="died"), make_trace(2))
    observations, _ = asked_again(Answers(), Answers(), tmp_path, heldout=heldout)
    assert ids(strop_home) == ["r1"] and len(observations) == 1


def test_a_folder_that_cannot_be_written_is_named(strop_home: Path, tmp_path: Path) -> None:
    (strop_home / "traces").mkdir()
    (strop_home / "traces" / "deletions.json").write_text("{")
    with pytest.raises(EvalError, match=r"cannot be kept in .*regressions: .*deletions\.json is damaged"):
        asked_again(Answers(), Answers(), tmp_path)


def test_bounds_and_what_is_done(strop_home: Path, tmp_path: Path) -> None:
    remember(strop_home, [case(n) for n in range(6)])
    candidate = Answers()
    asked_again(Answers(), candidate, tmp_path, Regressions(max_cases=2))
    assert candidate.asked == ["question 5", "question 4"]
    done = frozenset(case(n).id for n in range(5))
    observations, _ = asked_again(Answers(), Answers(), tmp_path, done=done)
    assert [o.request_id for o in observations] == [case(5).id]
    assert asked_again(Answers(), Answers(), tmp_path, done=done | {case(5).id}) == ([], [])
