"""What an evaluation has seen so far, on disk: JSON lines that outlive a killed process.

A part yields a request's observations and findings one after the other. The last request of a part
that was cut short may be half there, so it is asked again.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from strop.evals.observation import EvalError, Finding, Observation

Seen = Observation | Finding


@dataclass(frozen=True, slots=True)
class PartRun:
    """How a part went."""

    name: str
    seconds: float
    requests: int
    ended: bool = False
    """Whether its time was over before it had asked everything."""
    problem: str = ""
    """Why it could say nothing, or not all."""


@dataclass(slots=True)
class Recorded:
    """What the journal holds of one part."""

    seen: list[Seen] = field(default_factory=list)
    run: PartRun | None = None
    """None for a part that has not finished."""

    @property
    def observations(self) -> list[Observation]:
        return [each for each in self.seen if isinstance(each, Observation)]

    @property
    def findings(self) -> list[Finding]:
        return [each for each in self.seen if isinstance(each, Finding)]

    @property
    def requests(self) -> frozenset[str]:
        return frozenset(each.request_id for each in self.seen)


class Journal:
    """The file `journal.jsonl` of one evaluation, which one process at a time writes to."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)

    def begin(self, now: float) -> float:
        """Unix time at which the evaluation was first begun: `now`, unless the journal has another."""
        first = next(self._lines(), None)
        if first is None:
            self._write("", "began", now)
            return now
        try:
            return float(json.loads(first)["began"])
        except (ValueError, KeyError, TypeError):
            raise self._broken(1, "it does not say when it was begun") from None

    def parts(self) -> dict[str, Recorded]:
        """By part, in the order written. Raises EvalError if a line is not one of ours."""
        found: dict[str, Recorded] = {}
        for number, line in enumerate(self._lines()):
            try:
                row = json.loads(line)
                if "began" in row:
                    continue
                recorded = found.setdefault(row["part"], Recorded())
                if "observation" in row:
                    recorded.seen.append(_observation(row["observation"]))
                elif "finding" in row:
                    recorded.seen.append(Finding(**row["finding"]))
                elif "forget" in row:
                    recorded.seen = [s for s in recorded.seen if s.request_id != row["forget"]]
                else:
                    recorded.run = PartRun(**row["run"])
            except (ValueError, KeyError, TypeError) as error:
                raise self._broken(number + 1, str(error)) from None
        return found

    def resume(self, part: str) -> Recorded:
        """What there is of a part, without the request that was under way when it was cut short."""
        recorded = self.parts().get(part, Recorded())
        if recorded.run is None and recorded.seen:
            last = recorded.seen[-1].request_id
            self._write(part, "forget", last)
            recorded.seen = [each for each in recorded.seen if each.request_id != last]
        return recorded

    def saw(self, part: str, seen: Seen) -> None:
        self._write(part, "observation" if isinstance(seen, Observation) else "finding", asdict(seen))

    def finish(self, run: PartRun) -> None:
        """The part is done: from here on it is never asked again."""
        self._write(run.name, "run", asdict(run), sync=True)

    def _broken(self, line: int, reason: str) -> EvalError:
        return EvalError(
            f"{self.path} line {line} cannot be read ({reason}). Delete {self.path.parent} to begin anew."
        )

    def _lines(self) -> Iterator[str]:
        if self.path.is_file():
            with self.path.open(encoding="utf-8") as file:
                yield from file

    def _write(self, part: str, kind: str, content: Any, sync: bool = False) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            # Escaped to ASCII: answers may hold halves of characters, which UTF-8 cannot.
            file.write(json.dumps({"part": part, kind: content}) + "\n")
            file.flush()
            if sync:
                os.fsync(file.fileno())


def _observation(row: dict[str, Any]) -> Observation:
    reference = row["reference"]
    return Observation(
        metric=row["metric"],
        request_id=row["request_id"],
        session=row["session"],
        slices=tuple(row["slices"]),
        candidate=tuple(row["candidate"]),
        reference=None if reference is None else tuple(reference),
    )


def _cut_torn_line(path: Path) -> None:
    """Take away what a process that died left of its last line."""
    if not path.is_file():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
