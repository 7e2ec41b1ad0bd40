"""What governing traces costs: for a record in the server's thread and the writer's, for a store on disk.

Needs no server. Times are CPU times, for single records the best of several, so that a busy machine
changes them little. Prints a table and, as its last line, one JSON object whose keys are the names in
the table.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tiny_model import make_tiny_model
from tokenizers import Tokenizer

from strop.serving.deletion import delete
from strop.serving.interest import Interest, in_sample
from strop.serving.personal import Redactor
from strop.serving.redaction import without_content
from strop.serving.retention import Sizes, prune
from strop.serving.tombstones import epoch, read_tombstones
from strop.serving.traces import Choice, Speculation, Trace, TraceStore, to_table

TEXT_BYTES = 12_000
TOOLS = 20


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true", help="A tenth of the files and requests.")
    size = 100 if arguments.parse_args().quick else 1000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result = {**of_a_record(folder), **of_a_store(folder / "home", size)}
    table = Table("what", "measured")
    for what, value in result.items():
        table.add_row(what, f"{value:g}")
    Console(width=100).print(table)
    print(json.dumps(result))


def of_a_record(folder: Path) -> dict[str, float]:
    """A chat of 12 kB of code with 20 tools, as it passes capture."""
    model = make_tiny_model(folder / "model")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    code = Path(__file__).with_name("loop_demo.py").read_text() * 10
    clean = a_chat(code[:TEXT_BYTES], tokenizer)
    personal = a_chat(code[:TEXT_BYTES] + "\nwrite to ada@example.org or call (555) 123-4567", tokenizer)
    redactor, interest, root = Redactor(model), Interest(), folder / "root"

    def between_deletions() -> None:
        with epoch(root):
            read_tombstones(root).kept([clean])

    return {
        "sample and interest, ms": cpu_ms(lambda: (in_sample("t", "s", 0.1), interest.of(clean))),
        "without content, ms": cpu_ms(lambda: without_content(clean)),
        "looking for deletions, ms": cpu_ms(between_deletions),
        "redaction with nothing to find, ms": cpu_ms(lambda: redactor(clean)),
        "redaction with something found, ms": cpu_ms(lambda: redactor(personal)),
    }


def a_chat(text: str, tokenizer: Tokenizer) -> Trace:
    function = {"name": "f", "description": "d" * 400, "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": {**function, "name": f"f{n}"}} for n in range(TOOLS)]
    answer = text[:2000]
    return replace(
        a_trace(0, "t", tokenizer.encode(text).ids),
        messages=json.dumps([{"role": "user", "content": text}]),
        format=json.dumps({"tools": tools}),
        choices=[Choice(0, tokenizer.encode(answer).ids, answer, "stop")],
        speculation=Speculation(200, 600, 300, [200, 80, 20]),
    )


def of_a_store(home: Path, files: int) -> dict[str, float]:
    """Files of 100 records, of which each tenth holds the tenant that is deleted."""
    store = TraceStore(home / "traces")
    for number in range(files):
        tenants = ["gone" if number % 10 == 0 and n % 2 else "stays" for n in range(100)]
        rows = [a_trace(n, tenant, list(range(300))) for n, tenant in enumerate(tenants)]
        at = datetime.now(UTC) - timedelta(minutes=10 * number)
        store.append_table(to_table([replace(row, started_at=at) for row in rows]), f"{number:06}")
    started = time.process_time()
    done = delete(home, "gone", None)
    deleted = time.process_time() - started
    assert not done.left and done.records == files // 10 * 50
    sizes = Sizes()
    prune(home, 365, 1000, sizes)
    time.sleep(2.1)
    prune(home, 365, 1000, sizes)
    return {
        "deletion, s for 1,000 files": round(1000 * deleted / files, 2),
        "a look at age and size, ms for 1,000 files": cpu_ms(lambda: prune(home, 365, 1000, sizes))
        * 1000
        / files,
    }


def a_trace(number: int, tenant: str, prompt: list[int]) -> Trace:
    return Trace(
        request_id=f"r{number}", started_at=datetime.now(UTC), tenant=tenant, session=f"s{number}", stack="ab" * 32,
        endpoint="chat", stream=True, model="m", sampling='{"temperature":0}', format=None, messages="[]",
        prompt_token_ids=prompt, choices=[Choice(0, [1, 2], "ok", "stop")], status=200,
    )  # fmt: skip


def cpu_ms(work: Callable[[], object], times: int = 20) -> float:
    taken = []
    for _ in range(times):
        started = time.thread_time()
        work()
        taken.append(time.thread_time() - started)
    return round(1e3 * min(taken), 3)


if __name__ == "__main__":
    main()
