"""MLflow as registry and journal: versions of the registered model are Stacks, runs are loops.

There is no second store of state. A stage is finished when its child run is; its output is
that run's `output.json`. Aliases say which Stack serves: `champion`, `previous`, `challenger`.
"""

import json
import logging
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.serving.home import write_atomic
from strop.serving.stack import Artifact, Stack, StackError

# A tracking server that is down must be an error in seconds, not in the minutes of the default retries.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")


class RegistryError(RuntimeError):
    """The tracking server cannot be used, or has no such Stack; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Version:
    """One version of the registered model."""

    number: str
    fingerprint: str
    aliases: tuple[str, ...]
    loop: str | None
    created_ms: int


class Registry:
    """Loops and Stacks of one MLflow experiment. Raises RegistryError when MLflow cannot be reached."""

    def __init__(self, home: Path, experiment: str):
        logging.getLogger("alembic").setLevel(logging.WARNING)
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        self.home = home
        self.name = experiment
        self.uri = os.environ.get("MLFLOW_TRACKING_URI") or self._embedded()
        self._error = MlflowException
        self.client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        try:
            found = self.client.get_experiment_by_name(experiment)
            self.experiment_id: str = (
                found.experiment_id
                if found
                else self.client.create_experiment(experiment, artifact_location=self._artifacts())
            )
            with suppress(MlflowException):
                self.client.create_registered_model(experiment, description="Stacks served by strop")
            self.client.get_registered_model(experiment)
        except MlflowException as error:
            raise RegistryError(
                f"MLflow at {self.uri} does not answer: {str(error).splitlines()[0][:200]}. Start it, or unset "
                "MLFLOW_TRACKING_URI to use the embedded one. Nothing was lost: run the same command again then."
            ) from None

    def _embedded(self) -> str:
        folder = self.home / "mlflow"
        folder.mkdir(parents=True, exist_ok=True)
        return f"sqlite:///{folder / 'mlflow.db'}"

    def _artifacts(self) -> str | None:
        return str(self.home / "mlflow" / "artifacts") if self.uri.startswith("sqlite") else None

    # -- Stacks ---------------------------------------------------------------------------

    def versions(self) -> list[Version]:
        """All registered Stacks, newest first."""
        model = self.client.get_registered_model(self.name)
        by_number: dict[str, list[str]] = {}
        for alias, number in model.aliases.items():
            by_number.setdefault(str(number), []).append(alias)
        found = self.client.search_model_versions(f"name='{self.name}'")
        return [
            Version(
                str(v.version),
                v.tags.get("fingerprint", ""),
                tuple(sorted(by_number.get(str(v.version), []))),
                v.tags.get("loop"),
                v.creation_timestamp,
            )
            for v in sorted(found, key=lambda v: int(v.version), reverse=True)
        ]

    def find(self, name: str) -> Version:
        """A version by number, alias or beginning of its fingerprint. Raises RegistryError."""
        matches = [
            v
            for v in self.versions()
            if name in (v.number, *v.aliases) or (len(name) >= 6 and v.fingerprint.startswith(name))
        ]
        if not matches:
            raise RegistryError(f"No registered Stack is called {name!r}. `strop stack ls` lists them.")
        return matches[0]

    def stack(self, name: str) -> Stack:
        """The Stack of a version, with its drafter's files on this machine. Raises RegistryError, StackError."""
        version = self.find(name)
        local = self.home / "stacks" / version.fingerprint[:16] / "stack.json"
        if not local.is_file():
            with tempfile.TemporaryDirectory() as folder:
                details = self.client.get_model_version(self.name, version.number)
                path = self.client.download_artifacts(
                    str(details.run_id), f"stacks/{version.fingerprint[:16]}", folder
                )
                stack = Stack.from_json((Path(path) / "stack.json").read_text())
                _keep_files(Path(path), local.parent)
                stack = _relocate(stack, local.parent)
            write_atomic(local, stack.to_json())
        return Stack.load(local)

    def champion(self) -> Stack | None:
        with suppress(RegistryError):
            return self.stack("champion")
        return None

    def register(self, stack: Stack, run_id: str, loop: str | None = None) -> str:
        """Make `stack` a version of the registered model (once) and return its number."""
        for version in self.versions():
            if version.fingerprint == stack.fingerprint:
                return version.number
        folder = self.home / "stacks" / stack.fingerprint[:16]
        stack.save(folder / "stack.json")
        target = f"stacks/{stack.fingerprint[:16]}"
        self.client.log_artifact(run_id, str(folder / "stack.json"), target)
        if stack.speculator and stack.speculator.weights:
            self.client.log_artifacts(run_id, stack.speculator.weights.location, f"{target}/speculator")
        # By the run's own URI: the client would else need the model flavour of an MLmodel file.
        source = f"{self.client.get_run(run_id).info.artifact_uri}/{target}"
        version = self.client.create_model_version(
            self.name,
            source=source,
            run_id=run_id,
            tags={"fingerprint": stack.fingerprint, **({"loop": loop} if loop else {})},
            description=_describe(stack),
        )
        return str(version.version)

    def ensure(self, stack: Stack) -> str:
        """Register a Stack that no loop made (the plain model), in a run of its own."""
        for version in self.versions():
            if version.fingerprint == stack.fingerprint:
                return version.number
        run = self.client.create_run(
            self.experiment_id, run_name=f"stack {stack.fingerprint[:12]}", tags={"strop.kind": "stack"}
        )
        number = self.register(stack, run.info.run_id)
        self.client.set_terminated(run.info.run_id)
        return number

    def set_alias(self, alias: str, number: str) -> None:
        self.client.set_registered_model_alias(self.name, alias, number)

    def promote(self, number: str) -> None:
        """Make a version the champion; the champion there was becomes `previous`."""
        current = [v for v in self.versions() if "champion" in v.aliases]
        if current and current[0].number != number:
            self.set_alias("previous", current[0].number)
        self.set_alias("champion", number)
        if any("challenger" in v.aliases and v.number == number for v in self.versions()):
            self.client.delete_registered_model_alias(self.name, "challenger")

    # -- Datasets -------------------------------------------------------------------------

    def log_dataset(self, folder: Path, name: str, digest: str, splits: dict[str, int]) -> str:
        """Log a dataset's manifest and its splits (requests by name) in a run of its own, once; returns the run."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        found = self.client.search_runs([self.experiment_id], f"tags.`strop.dataset.digest` = '{digest}'")
        finished = [r for r in found if r.data.tags["strop.dataset"] == name and r.info.status == "FINISHED"]
        if finished:
            return finished[0].info.run_id
        tags = {"strop.kind": "dataset", "strop.dataset": name, "strop.dataset.digest": digest}
        run = self.client.create_run(self.experiment_id, run_name=f"dataset {name}", tags=tags)
        self.client.log_artifact(run.info.run_id, str(folder / "dataset.json"))
        inputs = [
            DatasetInput(
                # MLflow keeps 36 characters of a digest; the tag has all of it.
                Dataset(
                    f"{name}/{split}",
                    digest[:36],
                    "local",
                    json.dumps({"uri": (folder / split).as_uri()}),
                    profile=json.dumps({"num_rows": requests}),
                ),
                [InputTag("mlflow.data.context", split)],
            )
            for split, requests in splits.items()
        ]
        self.client.log_inputs(run.info.run_id, inputs)
        self.client.set_terminated(run.info.run_id)
        return run.info.run_id

    # -- Loops ----------------------------------------------------------------------------

    def begin(self, loop: str, tags: dict[str, str]) -> "LoopJournal":
        run = self.client.create_run(
            self.experiment_id, run_name=loop, tags={"strop.kind": "loop", "strop.loop": loop, **tags}
        )
        return LoopJournal(self, loop, run.info.run_id)

    def loops(self) -> list[dict[str, Any]]:
        """All loops, newest first: id, run_id, status, outcome, start and end in ms."""
        runs = self.client.search_runs(
            [self.experiment_id], "tags.`strop.kind` = 'loop'", order_by=["attributes.start_time DESC"]
        )
        return [
            {
                "loop": r.data.tags["strop.loop"],
                "run_id": r.info.run_id,
                "status": r.info.status,
                "outcome": r.data.tags.get("strop.outcome"),
                "report": r.data.tags.get("strop.report"),
                "champion": r.data.tags.get("strop.champion", ""),
                "started_ms": r.info.start_time,
                "ended_ms": r.info.end_time,
            }
            for r in runs
        ]

    def unfinished(self) -> "LoopJournal | None":
        """The newest loop that was interrupted, if it can be resumed."""
        loops = self.loops()
        if loops and loops[0]["status"] in ("RUNNING", "FAILED", "KILLED") and not loops[0]["outcome"]:
            return LoopJournal(self, loops[0]["loop"], loops[0]["run_id"])
        return None


@dataclass(frozen=True, slots=True)
class LoopJournal:
    """One loop: a parent run and a child run per stage."""

    registry: Registry
    loop: str
    run_id: str

    def tags(self) -> dict[str, str]:
        return self.registry.client.get_run(self.run_id).data.tags

    def stages(self) -> list[dict[str, Any]]:
        """Child runs, oldest first: name, run_id, status, start and end in ms."""
        runs = self.registry.client.search_runs(
            [self.registry.experiment_id],
            f"tags.`mlflow.parentRunId` = '{self.run_id}'",
            order_by=["attributes.start_time ASC"],
        )
        return [
            {
                "stage": r.data.tags["strop.stage"],
                "run_id": r.info.run_id,
                "status": r.info.status,
                "started_ms": r.info.start_time,
                "ended_ms": r.info.end_time,
            }
            for r in runs
        ]

    def output(self, stage: str) -> dict[str, Any] | None:
        """What a finished stage put down; None if it has not finished."""
        for run in self.stages():
            if run["stage"] == stage and run["status"] == "FINISHED":
                with tempfile.TemporaryDirectory() as folder:
                    path = self.registry.client.download_artifacts(run["run_id"], "output.json", folder)
                    return json.loads(Path(path).read_text())
        return None

    def start(self, stage: str) -> str:
        """Open a child run; one that an interruption left open is closed as KILLED first."""
        for run in self.stages():
            if run["status"] == "RUNNING":
                self.registry.client.set_terminated(run["run_id"], "KILLED")
        run = self.registry.client.create_run(
            self.registry.experiment_id,
            run_name=stage,
            tags={"mlflow.parentRunId": self.run_id, "strop.kind": "stage", "strop.stage": stage},
        )
        return run.info.run_id

    def finish(self, child: str, output: dict[str, Any], metrics: dict[str, float]) -> None:
        """Log the output, then mark the stage finished: in this order, so that finished means whole."""
        for name, value in metrics.items():
            self.registry.client.log_metric(child, name, value)
        self.registry.client.log_text(child, json.dumps(output, indent=1), "output.json")
        self.registry.client.set_terminated(child, "FINISHED")

    def fail(self, child: str, reason: str) -> None:
        self.registry.client.set_tag(child, "strop.error", reason[:4000])
        self.registry.client.set_terminated(child, "FAILED")

    def reopen(self) -> None:
        self.registry.client.update_run(self.run_id, status="RUNNING")

    def end(self, outcome: str) -> None:
        self.registry.client.set_tag(self.run_id, "strop.outcome", outcome)
        self.registry.client.set_terminated(self.run_id, "FINISHED")

    def interrupted(self) -> None:
        with suppress(Exception):  # The server may be what failed; the loop stays resumable either way.
            self.registry.client.set_terminated(self.run_id, "FAILED")


def _describe(stack: Stack) -> str:
    drafter = (
        f"{stack.speculator.method}, {stack.speculator.draft_tokens} draft tokens"
        if stack.speculator
        else "none"
    )
    return f"{stack.served_model} on {stack.engine.version} ({stack.engine.dtype}); speculator: {drafter}"


def _keep_files(source: Path, target: Path) -> None:
    for file in source.rglob("*"):
        if file.is_file() and file.name != "stack.json":
            write_atomic(target / file.relative_to(source), file.read_bytes())


def _relocate(stack: Stack, folder: Path) -> Stack:
    """The same Stack with its drafter where the registry's copy was put."""
    drafter = stack.speculator
    if not drafter or not drafter.weights or not (folder / "speculator").is_dir():
        return stack
    weights = Artifact(location=str(folder / "speculator"), files=drafter.weights.files)
    moved = stack.model_copy(update={"speculator": drafter.model_copy(update={"weights": weights})})
    if moved.fingerprint != stack.fingerprint:
        raise StackError("A Stack's identity must not depend on where its files lie.")
    return moved
