"""The prompt linter on traffic whose breakers are planted; one byte is one token, so that costs are known."""

import json
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from strop.evals.prompt_lint import (
    Lint,
    Prompt,
    common_beginning,
    lint,
    prompts_of,
    read_prompts,
    shared_with_earlier,
)
from strop.evals.prompt_pieces import Kind, parts_of
from strop.pipelines.cli import app
from strop.serving.traces import Trace, TraceStore
from strop.serving.workload import code_assistant

START = datetime(2026, 3, 2, 9, 58, tzinfo=UTC)
RULES = "\n".join(
    f"- Rule {word}: whatever is asked about {word}, answer in {number} short sentences and name the source."
    for number, word in enumerate(
        ["invoices", "refunds", "parcels", "returns", "payments", "accounts", "discounts", "vouchers"], 2
    )
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Looks up {name} by its number.",
            "parameters": {
                "type": "object",
                "properties": {"number": {"type": "string"}},
                "required": ["number"],
            },
        },
    }
    for name in ("invoice", "parcel", "refund", "voucher")
]
QUESTIONS = ("Where is my parcel", "I want my money back", "Which voucher may I use", "Change my address")


def asked(
    number: int,
    system: str,
    turns: list[str],
    tools: list[Any] | None = None,
    *,
    session: str | None = None,
    tenant: str = "shop",
    tools_first: bool = True,
) -> Prompt:
    """A prompt as a chat template would write it, one token a byte."""
    messages = [{"role": "system", "content": system}, *({"role": "user", "content": turn} for turn in turns)]
    of_tools = json.dumps(tools, separators=(",", ":")) if tools else ""
    head = of_tools + system if tools_first else system + of_tools
    text = head + "".join("user\n" + turn for turn in turns)
    return Prompt(
        request_id=f"r{number}",
        started_at=START + timedelta(minutes=number),
        tenant=tenant,
        session=session or f"s{number}",
        model="m",
        messages=json.dumps(messages),
        format=json.dumps({"tools": tools}) if tools else None,
        token_ids=np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32),
        prefill_s=len(text) / 1000,
        cached_tokens=0,
    )


def question(number: int) -> str:
    return f"{QUESTIONS[number % 4]}, customer {number * 7919 % 1000}?"


Made = Callable[[int], Prompt]


def _moment(number: int) -> datetime:
    return START + timedelta(minutes=number, seconds=number * 13 % 60)


def _system(changing: str) -> str:
    return f"You help the customers of a shop.\n{changing}\n{RULES}"


def _shuffled(number: int) -> list[Any]:
    tools = list(TOOLS)
    random.Random(number).shuffle(tools)
    return tools


def _keys(number: int) -> list[Any]:
    return [dict(reversed(tool.items())) if number % 2 else tool for tool in TOOLS]


def _hex(number: int) -> str:
    return random.Random(number).randbytes(8).hex()


NAMES = ("Alice", "Boris", "Chiara", "Dmitri", "Elena", "Farid")
PLANTED: dict[str, tuple[Kind, Made]] = {
    "ISO time": ("time", lambda n: asked(n, _system(f"Now it is {_moment(n).isoformat()}."), [question(n)])),
    "clock": ("time", lambda n: asked(n, _system(f"Current time: {_moment(n):%H:%M:%S}"), [question(n)])),
    "day": ("time", lambda n: asked(n, _system(f"Today is {START + timedelta(days=n):%B %-d, %Y}."), [question(n)])),
    "epoch": ("time", lambda n: asked(n, _system(f"ts={_moment(n).timestamp():.0f}"), [question(n)])),
    "uuid": ("id", lambda n: asked(n, _system(f"Request {uuid.UUID(int=random.Random(n).getrandbits(128))}."), [question(n)])),
    "hex": ("id", lambda n: asked(n, _system(f"trace: {_hex(n)}"), [question(n)])),
    "counter": ("counter", lambda n: asked(n, _system(f"This is request number {n + 17} today."), [question(n)])),
    "tools": ("tool order", lambda n: asked(n, _system("Be kind."), [question(n)], _shuffled(n))),
    "keys": ("key order", lambda n: asked(n, _system("Be kind."), [question(n)], _keys(n))),
    "name": ("name", lambda n: asked(n, _system(f"You talk to {NAMES[n % 6]}."), [question(n)])),
    "JSON in the prompt": (
        "order",
        lambda n: asked(n, _system('{"tone": "kind", "length": "short"}' if n % 2 else '{"length": "short", "tone": "kind"}'), [question(n)]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_breaker_is_found_with_its_place_and_cost(name: str) -> None:
    kind, made = PLANTED[name]
    prompts = [made(n) for n in range(40)]
    found = lint(prompts, 16)
    assert [b.kind for b in found.breakers] == [kind], found.breakers
    breaker = found.breakers[0]
    assert breaker.where == (
        "tools" if "tools" in kind or kind in ("tool order", "key order") else "system prompt"
    )
    assert (breaker.tenant, breaker.model) == ("shop", "m") and breaker.fix
    assert breaker.wasted_tokens == found.wasted_tokens
    if kind in ("time", "id", "counter"):
        # Everything behind it, in blocks, for all but the first prompt.
        head = len(parts_of(prompts[1].messages, None).system)
        assert abs(breaker.position - head + len(RULES)) < 50
        assert breaker.requests >= 36
        assert breaker.wasted_tokens == pytest.approx(39 * len(RULES), rel=0.1)
    if kind in ("tool order", "key order"):
        # The tools come first here, and all of the system prompt behind them.
        assert breaker.wasted_tokens > len(RULES) * breaker.requests
    assert "»" in breaker.excerpt and breaker.examples


def test_a_clean_set_has_none() -> None:
    for tools in (None, TOOLS):
        prompts = [asked(n, _system("Be kind."), [question(n)], tools) for n in range(60)]
        found = lint(prompts, 16)
        assert not found.breakers and found.wasted_tokens == 0
        assert found.shared_tokens > 0.5 * found.prompt_tokens


def test_the_built_in_traffic_has_none() -> None:
    """Its system prompts show another file each, in excerpts that partly repeat."""
    prompts = []
    for session in code_assistant(0, 60, "m"):
        said: list[dict[str, Any]] = []
        for turn in session.turns:
            said += turn.messages
            tools = turn.options.get("tools")
            text = json.dumps(tools or "") + "".join(m["role"] + str(m["content"]) for m in said)
            made = asked(len(prompts), "", [], tools, session=session.id)
            ids = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
            prompts.append(replace(made, messages=json.dumps(said), token_ids=ids))
            said.append({"role": "assistant", "content": f"Answer {len(prompts)}."})
    assert lint(prompts, 16).breakers == ()


words = st.text("abcdefghij klmnop", min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(words, min_size=1, max_size=12), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.lists(words, min_size=1, max_size=3)), min_size=1, max_size=30),
    st.integers(1, 32),
)
def test_fixed_system_prompts_never_have_breakers(
    systems: list[list[str]], requests: list[tuple[int, list[str]]], block: int
) -> None:
    """Several applications, each with its own fixed words, whose users write whatever they like."""
    texts = [f"Application {'xyzw'[n]}.\n" + "\n".join(lines) for n, lines in enumerate(systems)]
    prompts = [asked(n, texts[which % len(texts)], turns) for n, (which, turns) in enumerate(requests)]
    names = {which % len(texts) for which, _ in requests}
    if len(names) == 1:
        assert not lint(prompts, block).breakers
    # What several share is no time, id or counter.
    assert not {b.kind for b in lint(prompts, block).breakers} & {
        "time",
        "id",
        "counter",
        "tool order",
        "key order",
    }


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(PLANTED)), st.integers(0, 10_000), st.integers(4, 40))
def test_planted_breakers_are_found_wherever_they_begin(name: str, first: int, count: int) -> None:
    kind, made = PLANTED[name]
    prompts = [made(first + n) for n in range(count)]
    changed = {parts_of(p.messages, p.format).head for p in prompts}
    found = lint(prompts, 8)
    if len(changed) > 1:
        assert kind in [b.kind for b in found.breakers]
    else:
        assert not found.breakers


def test_two_breakers_in_one_prompt_are_both_found_and_count_once_together() -> None:
    prompts = [
        asked(
            n, _system(f"Now it is {_moment(n).isoformat()}.") + f"\nTrace {_hex(n)}.\n{RULES}", [question(n)]
        )
        for n in range(30)
    ]
    found = lint(prompts, 16)
    assert {b.kind for b in found.breakers} == {"time", "id"}
    assert found.wasted_tokens < sum(b.wasted_tokens for b in found.breakers)
    assert max(b.wasted_tokens for b in found.breakers) == found.wasted_tokens


def test_what_changes_at_the_end_or_once_a_session_costs_nothing() -> None:
    at_the_end = [asked(n, f"{RULES}\nNow it is {_moment(n).isoformat()}.", [question(n)]) for n in range(20)]
    assert not lint(at_the_end, 64).breakers
    once = [
        asked(n, _system(f"Now it is {_moment(n // 10).isoformat()}."), [question(m) for m in range(n % 10 + 1)], session=f"s{n // 10}")
        for n in range(20)
    ]  # fmt: skip
    found = lint(once, 16)
    assert [(b.kind, b.requests) for b in found.breakers] == [("time", 1)]


def test_tools_before_and_behind_the_system_prompt_are_told_apart() -> None:
    for tools_first in (True, False):
        prompts = [
            asked(n, _system(f"trace: {_hex(n)}"), [question(n)], TOOLS, tools_first=tools_first)
            for n in range(30)
        ]
        (breaker,) = lint(prompts, 16).breakers
        expected = len(RULES) + (0 if tools_first else len(json.dumps(TOOLS, separators=(",", ":"))))
        assert breaker.wasted_tokens == pytest.approx(29 * expected, rel=0.1)


def test_a_time_in_an_earlier_turn_breaks_the_sessions_own_prefix() -> None:
    def turn(session: int, turns: int) -> Prompt:
        n = session * 10 + turns
        first = (
            f"[{_moment(n).isoformat()}] {question(session)} "
            + "Here is all that I know about it: it is late. " * 8
        )
        return asked(n, RULES, [first, *(question(n) for n in range(turns))], session=f"s{session}")

    found = lint([turn(session, turns) for session in range(4) for turns in range(5)], 16)
    assert [(b.kind, b.where) for b in found.breakers] == [("time", "earlier turn")]
    assert found.breakers[0].requests == 16


def test_other_tenants_and_other_tools_are_other_prompts() -> None:
    prompts = [
        asked(n, _system(f"You talk to tenant {n % 5}."), [question(n)], tenant=f"t{n % 5}")
        for n in range(30)
    ]
    assert not lint(prompts, 16).breakers
    subsets = [asked(n, _system("Be kind."), [question(n)], TOOLS[: 1 + n % 3]) for n in range(30)]
    assert not lint(subsets, 16).breakers


tokens = st.lists(st.integers(0, 2), max_size=12)


@given(st.lists(tokens, max_size=20))
def test_sharing_is_that_of_the_best_earlier_prompt(sequences: list[list[int]]) -> None:
    arrays = [np.array(ids, dtype=np.int32) for ids in sequences]
    expected = [
        max((common_beginning(arrays[i], arrays[j]) for j in range(i)), default=0) for i in range(len(arrays))
    ]
    assert shared_with_earlier(arrays).tolist() == expected


@given(tokens, tokens)
def test_common_beginning_counts_equal_tokens(a: list[int], b: list[int]) -> None:
    common = common_beginning(np.array(a, dtype=np.int32), np.array(b, dtype=np.int32))
    assert a[:common] == b[:common]
    assert common == min(len(a), len(b)) or a[common] != b[common]


@given(st.text(), st.text() | st.none())
def test_whatever_a_trace_holds_is_read(messages: str, format_: str | None) -> None:
    parts_of(messages, format_)
    parts_of(json.dumps([{"role": messages, "content": [{"text": format_}]}, messages]), json.dumps({"tools": [messages, {"function": messages}]}))  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text(max_size=60), st.text(max_size=20), st.lists(st.integers(0, 9), min_size=1, max_size=9)
        ),
        max_size=8,
    )
)
def test_odd_prompts_are_no_failure(rows: list[tuple[str, str, list[int]]]) -> None:
    prompts = [
        replace(
            asked(n, system, [turn], [turn, {"function": {"name": system}}]),
            token_ids=np.array(ids, dtype=np.int32),
        )
        for n, (system, turn, ids) in enumerate(rows)
    ]
    assert lint(prompts, 1).prompts == len(prompts)


def test_the_rate_of_prefill_is_the_traces_own() -> None:
    found = lint([asked(n, _system(f"trace: {_hex(n)}"), [question(n)]) for n in range(10)], 16)
    assert found.prefill_tokens_per_s == pytest.approx(1000)
    assert found.seconds(2000) == pytest.approx(2)
    untold = [replace(asked(n, RULES, [question(n)]), cached_tokens=None) for n in range(10)]
    assert lint(untold).prefill_tokens_per_s is None and lint([]).prompts == 0


def _traces(make_trace: Callable[..., Trace], prompts: list[Prompt]) -> list[Trace]:
    return [
        make_trace(
            n,
            request_id=prompt.request_id,
            started_at=prompt.started_at,
            tenant=prompt.tenant,
            session=prompt.session,
            model=prompt.model,
            messages=prompt.messages,
            format=prompt.format,
            prompt_token_ids=prompt.token_ids.tolist(),
            ttft_s=prompt.prefill_s,
            cached_tokens=0,
        )
        for n, prompt in enumerate(prompts)
    ]


def test_read_from_files_they_are_the_same_prompts(tmp_path: Path, make_trace: Callable[..., Trace]) -> None:
    traces = _traces(make_trace, [PLANTED["hex"][1](n) for n in range(12)])
    store = TraceStore(tmp_path)
    store.append([*traces[:7], make_trace(99, tenant="strop"), make_trace(98, messages="")])
    store.append(traces[7:])
    (tmp_path / "day=2026-03-03" / "stack_id=x").mkdir(parents=True)
    (tmp_path / "day=2026-03-03" / "stack_id=x" / "torn.parquet").write_bytes(b"PAR1")
    here, there = read_prompts(store, 100), list(prompts_of(traces))
    assert [p.token_ids.tolist() for p in here] == [p.token_ids.tolist() for p in there]
    told = [{f.name: getattr(p, f.name) for f in fields(p) if f.name != "token_ids"} for p in (*here, *there)]
    assert told[: len(here)] == told[len(here) :]
    assert lint(here) == lint(there)
    assert [p.request_id for p in read_prompts(store, 3)] == ["r9", "r10", "r11"]
    assert not read_prompts(store, 10, "nobody")


def test_the_command_shows_what_was_found_and_says_so_by_its_exit_code(
    strop_home: Path, make_trace: Callable[..., Trace]
) -> None:
    run = CliRunner().invoke
    assert run(app, ["prompts", "lint"]).exit_code == 0
    evil = [asked(n, _system(f"trace: {_hex(n)} \x1b[31m[bold]"), [question(n)]) for n in range(20)]
    TraceStore(strop_home / "traces").append(_traces(make_trace, evil))
    shown = run(app, ["prompts", "lint", "--price-per-million", "2"], env={"COLUMNS": "200"})
    assert shown.exit_code == 1 and "\x1b[31m" not in shown.output
    assert "trace:" in shown.output and "money" in shown.output and "s of prefill" in shown.output
    found = json.loads(run(app, ["prompts", "lint", "--json", "--price-per-million", "2"]).stdout)
    (breaker,) = found["breakers"]
    assert breaker["cost"] == pytest.approx(breaker["wasted_tokens"] * 2e-6) and breaker["wasted_s"] > 0


def big(count: int, length: int) -> list[Prompt]:
    """Long prompts that all begin with a time and hold a random id, four bytes a token."""
    rng = random.Random(0)
    filler = " ".join(
        rng.choice(("invoice", "parcel", "is", "late", "refund,", "shop.", "\n", "customer"))
        for _ in range(length)
    )
    prompts = []
    for n in range(count):
        system = f"Now it is {START + timedelta(seconds=n)}.\n{filler}\nTrace {_hex(n)}.\n{RULES}"
        text = (system + question(n)).encode()
        text += b" " * (-len(text) % 4)
        ids = (np.frombuffer(text, dtype="<u4") * np.uint32(2654435761)) >> 15
        prompts.append(replace(asked(n, system, [question(n)]), token_ids=ids.astype(np.int32)))
    return prompts


def test_thousands_of_long_prompts_take_seconds() -> None:
    """The whole size, 10,000 prompts of 4,000 tokens, is bound to a minute; this is a tenth of it."""
    prompts = big(1000, 2500)
    assert np.mean([len(p.token_ids) for p in prompts]) > 3500
    started = time.process_time()
    found: Lint = lint(prompts, 16)
    assert time.process_time() - started < 6
    assert {b.kind for b in found.breakers} == {"time", "id"}
    assert found.breakers[0].kind == "time" and found.breakers[0].wasted_tokens > 999 * 3900
