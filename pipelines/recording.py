"""What the loop's last stage writes down: the report, from what the stages logged."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

from strop.evals.verdict import Verdict
from strop.pipelines.registry import LoopJournal
from strop.pipelines.report import Learned, Lineage, ReportData, RolloutEvent, Stage, TraceCounts, render
from strop.pipelines.settings import Settings
from strop.serving.home import write_atomic
from strop.serving.stack import Stack

Outcome = Literal["promoted", "taken back", "refused", "no candidate", "failed"]


def write_report(
    journal: LoopJournal, champion: Stack, outcome: str, reason: str, settings: Settings, home: Path
) -> Path:
    """Render the loop's report to `reports/<loop>.html` and log it with the loop's run; returns its path."""
    output: dict[str, dict[str, Any]] = {
        name: journal.output(name) or {} for name in ("collect", "learn", "judge", "rollout")
    }
    candidate = Stack.from_json(output["judge"]["candidate"]) if output["judge"].get("candidate") else None
    rollout = output["rollout"].get("rollout") or {}
    path = home / "reports" / f"{journal.loop}.html"
    run = journal.registry.client.get_run(journal.run_id)
    data = ReportData(
        loop_id=journal.loop,
        started_at=datetime.fromtimestamp(run.info.start_time / 1000, UTC),
        ended_at=datetime.now(UTC),
        outcome=cast(Outcome, outcome),
        reason=reason,
        stages=tuple(
            Stage(
                name=s["stage"],
                status="done" if s["status"] == "FINISHED" else s["status"].lower(),
                seconds=(s["ended_ms"] - s["started_ms"]) / 1000 if s["ended_ms"] else None,
            )
            for s in journal.stages()
        ),
        traces=tuple(TraceCounts.model_validate(c) for c in output["collect"]["counts"]),
        learned=tuple(
            Learned(
                learner=r["learner"],
                cost_s=r["cost_s"],
                declined=r["declined"],
                expects=r.get("expects", {}),
                notes=r.get("notes", {}),
            )
            for r in output["learn"]["results"]
        ),
        verdicts=(Verdict.model_validate(output["judge"]["verdict"]),)
        if output["judge"].get("verdict")
        else (),
        rollout=tuple(RolloutEvent.model_validate(e) for e in rollout.get("events", [])),
        lineage=Lineage(
            champion_before=champion.fingerprint,
            candidate=candidate.fingerprint if candidate else None,
            champion_after=(candidate or champion).fingerprint
            if outcome == "promoted"
            else champion.fingerprint,
            diff=champion.diff(candidate) if candidate else {},
        ),
        places={
            "Report": str(path),
            "MLflow": f"{journal.registry.uri} (open it with `strop ui`), run {journal.run_id}",
            "Endpoint": f"http://{settings.serving.host}:{settings.serving.port}/v1",
        },
        conditions=(
            f"{champion.engine.version}, {champion.engine.dtype}, on {champion.hardware.name} "
            f"({champion.hardware.device}, {champion.hardware.isa}), {champion.topology.replicas} replica(s) a Stack"
        ),
    )
    write_atomic(path, render(data))
    journal.registry.client.log_artifact(journal.run_id, str(path), "report")
    journal.registry.client.set_tag(journal.run_id, "strop.report", str(path))
    return path
