"""Tasks of EleutherAI's lm-evaluation-harness, run against both Stacks where it is installed.

The command line and the files it leaves are those of lm_eval 0.4.
"""

import asyncio
import importlib.util
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import Field

from strop.evals.observation import Bench, EvalError, Metric, Observation, Side
from strop.serving.client import PATHS
from strop.serving.settings import Section

METRICS = (
    Metric(
        "lm_eval", "", "higher", "difference", "mean score on the tasks of lm-evaluation-harness (a slice each)"
    ),
)  # fmt: skip

# Where a file does not say itself which of its fields are scores.
_SCORES = ("acc", "exact_match", "pass@1", "f1", "em", "score", "acc_norm", "prompt_level_strict_acc")
_TAIL_BYTES = 2000


class LmEval(Section):
    tasks: tuple[str, ...] = Field(min_length=1)
    """Names of tasks as `lm-eval ls tasks` shows them."""
    include_path: Path | None = None
    """Folder with tasks of your own, as YAML, besides those that lm_eval brings."""
    limit: int | None = Field(default=None, ge=1)
    """Examples of each task; None takes all."""
    endpoint: Literal["chat", "completions"] = "completions"
    """Tasks that score given answers by their likelihood need completions."""
    concurrency: int = Field(default=8, ge=1)
    max_minutes: float = Field(default=240, gt=0)
    """Longest time for one Stack."""


def command(options: LmEval, side: Side, output: Path, seed: int) -> list[str]:
    """The command that runs the tasks against one side and writes results into the folder `output`."""
    chat = options.endpoint == "chat"
    arguments = {
        "model": side.model,
        "base_url": side.url.rstrip("/") + PATHS[options.endpoint],
        "num_concurrent": options.concurrency,
        "max_retries": 3,
        "tokenized_requests": False,
    }
    if not chat:
        arguments["tokenizer"] = side.stack.model.location
    line = [
        sys.executable,
        "-m",
        "lm_eval",
        "--model",
        "local-chat-completions" if chat else "local-completions",
    ]
    line += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    line += ["--tasks", ",".join(options.tasks), "--output_path", str(output), "--log_samples"]
    line += ["--seed", str(seed)]
    if options.include_path:
        line += ["--include_path", str(options.include_path)]
    if options.limit is not None:
        line += ["--limit", str(options.limit)]
    return [*line, "--apply_chat_template"] if chat else line


async def observe(options: LmEval, bench: Bench) -> AsyncIterator[Observation]:
    """Run the tasks that are not done yet against both sides, one after the other.

    Raises EvalError if lm_eval is not installed, fails, or leaves results that cannot be read.
    """
    begun = {name.split("/")[1] for name in bench.done if name.startswith("lm_eval/")}
    options = options.model_copy(update={"tasks": tuple(t for t in options.tasks if t not in begun)})
    if not options.tasks:
        return
    if importlib.util.find_spec("lm_eval") is None:
        raise EvalError(
            "The suite asks for tasks of lm-evaluation-harness, which is not installed here. Install `lm_eval[api]` or "
            "take `lm_eval` out of the suite."
        )
    found: list[dict[str, Scores]] = []
    for number, side in enumerate(bench.sides):
        bench.progress(number / 2, f"lm-evaluation-harness on the {side.arm}")
        with tempfile.TemporaryDirectory(prefix="strop-lm-eval-") as folder:
            await _run(command(options, side, Path(folder), bench.seed), side, options.max_minutes * 60)
            found.append(read(Path(folder)))
    for observation in observations(*found):
        yield observation


Scores = dict[int | str, float]
"""Score by the example's number."""


def read(folder: Path) -> dict[str, Scores]:
    """Scores by task, of the `samples_TASK_DATE.jsonl` files under `folder`. Raises EvalError.

    Of a task with several filters (ways to read an answer) the first counts, and of its scores the first.
    """
    found: dict[str, Scores] = {}
    for path in sorted(folder.rglob("samples_*.jsonl")):
        task = path.stem.removeprefix("samples_").rpartition("_")[0]
        try:
            found[task] = dict(_scores(path.read_bytes()))
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise EvalError(f"{path.name} of lm-evaluation-harness cannot be read: {error!r}") from None
    if not found:
        raise EvalError(
            "lm-evaluation-harness left no samples_*.jsonl. strop reads those of lm_eval 0.4 (--log_samples)."
        )
    return found


def _scores(data: bytes) -> Iterator[tuple[int | str, float]]:
    first_filter, score = None, None
    for line in filter(bytes.strip, data.split(b"\n")):
        sample: dict[str, Any] = orjson.loads(line)
        first_filter = first_filter or sample.get("filter", "none")
        if sample.get("filter", "none") != first_filter:
            continue
        names = sample.get("metrics") or [name for name in _SCORES if name in sample]
        score = score or next((n for n in names if isinstance(sample.get(n), bool | int | float)), None)
        if score is None:
            raise ValueError(f"example {sample['doc_id']} has no score among {', '.join(map(str, names))}")
        yield sample["doc_id"], float(sample[score])


def observations(reference: Mapping[str, Scores], candidate: Mapping[str, Scores]) -> Iterator[Observation]:
    """One for each example that both sides have a score for."""
    for task in sorted(reference.keys() & candidate.keys()):
        for example, score in reference[task].items():
            if example in candidate[task]:
                name = f"lm_eval/{task}/{example}"
                yield Observation("lm_eval", name, name, (task,), (candidate[task][example],), (score,))


async def _run(line: list[str], side: Side, timeout_s: float) -> None:
    # The harness sends the key of this variable, whatever server it is for.
    environment = {**os.environ, "OPENAI_API_KEY": os.environ.get("STROP_API_KEY", "none")}
    process = await asyncio.create_subprocess_exec(
        *line, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(timeout_s):
            tail = b""
            assert process.stdout
            while piece := await process.stdout.read(1 << 16):
                tail = (tail + piece)[-_TAIL_BYTES:]
            code = await process.wait()
    except TimeoutError:
        raise EvalError(
            f"lm-evaluation-harness did not end within {timeout_s / 60:g} minutes on the {side.arm}. "
            "Raise lm_eval.max_minutes or lower lm_eval.limit."
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code:
        said = tail.decode(errors="replace").strip()
        raise EvalError(f"lm-evaluation-harness failed on the {side.arm} (exit {code}): …{said}")
