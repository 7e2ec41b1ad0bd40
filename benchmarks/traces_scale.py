"""A million traces selected, deduplicated, split and written: how fast, and within how much memory.

Writes synthetic traces as capture would (files of 1,000), with copies planted among them: equal ones
that differ in case and spacing, and near ones with a few words replaced. `strop traces dataset create`
then runs in a process of its own, whose memory is watched together with that of all processes it
starts. Prints a table and, as its last line, one JSON object with `traces`, `traces_per_s`, `peak_gb`
and what was found of the planted copies.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.progress import track
from rich.table import Table

from strop.serving.traces import SCHEMA, Choice, Trace, TraceStore, to_table

TRACES, QUICK_TRACES = 1_000_000, 20_000
PER_FILE = 1_000
EQUAL_SHARE, NEAR_SHARE = 0.03, 0.03
PROMPT_TOKENS, ANSWER_WORDS = 300, (60, 160)
REPLACED_WORDS = 3
WHERE = "status = 200 AND output_tokens >= 8"
FAILED_SHARE = 0.02
START = datetime(2026, 3, 1, tzinfo=UTC)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true", help=f"{QUICK_TRACES:,} traces only.")
    arguments.add_argument("--traces", type=int, help="That many traces.")
    options = arguments.parse_args()
    count = options.traces or (QUICK_TRACES if options.quick else TRACES)
    with tempfile.TemporaryDirectory(prefix="traces") as name:
        home = Path(name)
        planted = record(home, count)
        seconds, peak, dataset = create(home)
        report(count, seconds, peak, dataset, planted, found(home, planted))


def record(home: Path, count: int) -> dict[str, str]:
    """Write the traces; returns the kind of copy, `equal` or `near`, by the request id of each copy."""
    rng = np.random.default_rng(0)
    vocabulary = np.array(
        ["".join(rng.choice(list("abcdefghijklmnoprst"), n)) for n in rng.integers(3, 9, 4000)]
    )
    popularity = 1 / np.arange(1, len(vocabulary) + 1) ** 0.9
    popularity /= popularity.sum()
    store = TraceStore(home / "traces")
    planted: dict[str, str] = {}
    earlier: list[Trace] = []
    for first in track(range(0, count, PER_FILE), f"writing {count:,} traces", console=Console(stderr=True)):
        traces = list(
            _file(rng, vocabulary, popularity, first, min(PER_FILE, count - first), earlier, planted)
        )
        originals = [t for t in traces if t.request_id not in planted and t.status == 200]
        # A sample of all that came before, since a copy may come much later.
        earlier = [*earlier[-4000:], *originals[:: PER_FILE // 20]]
        table = to_table(traces)
        assert table.schema == SCHEMA
        store.append_table(table, f"{first:012d}")
    return planted


def _file(
    rng: np.random.Generator,
    vocabulary: np.ndarray,
    popularity: np.ndarray,
    first: int,
    count: int,
    earlier: list[Trace],
    planted: dict[str, str],
) -> Iterator[Trace]:
    lengths = rng.integers(*ANSWER_WORDS, count)
    words = rng.choice(vocabulary, int(lengths.sum()), p=popularity).tolist()
    kinds = rng.random(count)
    places = np.cumsum(lengths)
    prompts = rng.integers(0, 50_000, (count, PROMPT_TOKENS))
    for row in range(count):
        number = first + row
        answer = words[places[row] - lengths[row] : places[row]]
        question = " ".join(words[(places[row] * 7) % max(len(words) - 12, 1) :][:12])
        status = 500 if rng.random() < FAILED_SHARE else 200
        messages = json.dumps(
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{number} {question}"}]
        )
        request_id = f"{number:09d}"
        if earlier and kinds[row] < EQUAL_SHARE + NEAR_SHARE:
            original = earlier[int(rng.integers(len(earlier)))]
            messages, answer, status = original.messages, original.choices[0].text.split(" "), 200
            if kinds[row] < EQUAL_SHARE:
                planted[request_id] = "equal"
                answer = [" ", *(word.capitalize() for word in answer)]
            else:
                planted[request_id] = "near"
                for place in rng.integers(0, len(answer), REPLACED_WORDS):
                    answer[place] = str(rng.choice(vocabulary))
        text = " ".join(answer)
        yield Trace(
            request_id=request_id,
            started_at=START + timedelta(seconds=number / 10),
            tenant=f"t{number % 7}",
            session=f"s{number // 3}",
            stack="ab" * 32,
            endpoint="chat",
            stream=True,
            model="bench",
            sampling='{"temperature":0,"max_tokens":256}',
            format=None,
            messages=messages,
            prompt_token_ids=prompts[row].tolist(),
            choices=[Choice(0, list(range(len(answer))), text, "stop")] if status == 200 else [],
            status=status,
            error=None if status == 200 else "planted",
            ttft_s=0.1,
            e2e_s=1.0,
            inter_token_s=[],
        )


def create(home: Path) -> tuple[float, float, dict[str, Any]]:
    """Seconds, peak GB of all processes, and the dataset that `strop traces dataset create` prints."""
    command = [sys.executable, "-m", "strop.pipelines.cli", "traces", "dataset", "create", "bench"]
    environment = {**os.environ, "STROP_HOME": str(home), "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
    started = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--where", WHERE, "--json"], env=environment, stdout=subprocess.PIPE, text=True, cwd=home
    )
    peak = [0.0]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            peak[0] = max(peak[0], memory_gb(process.pid))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    out, _ = process.communicate()
    over.set()
    thread.join()
    if process.returncode:
        raise SystemExit("strop traces dataset create failed.")
    return time.perf_counter() - started, peak[0], json.loads(out.splitlines()[-1])


def memory_gb(pid: int) -> float:
    """Memory of a process and all it started; what they share is divided among them (PSS)."""
    total = 0
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.Error):
                total += process.memory_full_info().pss
    return total / 1e9


def found(home: Path, planted: dict[str, str]) -> dict[str, int]:
    """How many copies of each kind are not in the dataset."""
    import pyarrow.parquet as pq

    kept: set[str] = set()
    for file in (home / "datasets" / "bench").glob("*/*.parquet"):
        kept.update(pq.read_table(file, columns=["request_id"])["request_id"].to_pylist())
    return {kind: sum(k == kind and i not in kept for i, k in planted.items()) for kind in ("equal", "near")}


def report(
    count: int,
    seconds: float,
    peak: float,
    dataset: dict[str, Any],
    planted: dict[str, str],
    gone: dict[str, int],
) -> None:
    total = {kind: sum(k == kind for k in planted.values()) for kind in gone}
    left_out = dataset["identical"] + dataset["similar"]
    result = {
        "traces": count,
        "seconds": round(seconds, 1),
        "traces_per_s": round(count / seconds),
        "peak_gb": round(peak, 2),
        "planted": total,
        "missed": {kind: total[kind] - gone[kind] for kind in gone},
        "wrongly_left_out": left_out - sum(gone.values()),
        "kept": {name: split["requests"] for name, split in dataset["splits"].items()},
    }
    table = Table("", "", title=f"A dataset of {count:,} traces")
    for name, value in result.items():
        table.add_row(name.replace("_", " "), str(value))
    Console().print(table)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
