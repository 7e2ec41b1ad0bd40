"""The whole loop on real parts: is the model faster on its own traffic afterwards?

Runs the demo in a fresh home: SmolLM2-135M-Instruct is served, the code-assistant workload is
sent, a draft model is trained from the traces, and the judge replays held-out requests to both
Stacks, alternating, one at a time. The figures are the judge's. `--dtype` serves both Stacks in
another dtype than this machine's default, so that dtypes can be compared; each run stays within
one. `--replicas 2` also gives the peak memory of a two-replica fleet.

Keys of the last line: al, decode_speedup, decode_speedup_low (lower end of the 95 % interval),
latency_ratio, promoted, minutes, and besides: al_predicted, dtype, stage_seconds, serve_seconds,
start_s (a replica's start), peak_rss_gib (all processes of the fleet, shared pages counted once a process).
"""

import argparse
import json
import shutil
import tempfile
import threading
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from strop.pipelines.demo import play
from strop.pipelines.registry import LoopJournal, Registry
from strop.serving.process import free_port


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="2 minutes of traffic and of training instead of 5 and 6"
    )
    parser.add_argument("--minutes", type=float, help="minutes of traffic")
    parser.add_argument("--train-minutes", type=float, help="most minutes of training")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument(
        "--home", type=Path, help="keep everything here (default: a temporary folder, removed)"
    )
    arguments = parser.parse_args()
    traffic_minutes = arguments.minutes or (2 if arguments.quick else 5)
    train_minutes = arguments.train_minutes or (2 if arguments.quick else 6)
    home = arguments.home or Path(tempfile.mkdtemp(prefix="strop-"))

    peak = _Peak()
    serving = {"dtype": arguments.dtype, "replicas": arguments.replicas}
    result = play(home.absolute(), traffic_minutes, train_minutes, free_port(), serving)
    verdict = result.loop.verdict
    registry = Registry(home.absolute(), "strop-demo")
    loop = registry.loops()[0]
    learned = LoopJournal(registry, loop["loop"], loop["run_id"]).output("learn") or {"results": []}
    expects = learned["results"][0].get("expects", {}) if learned["results"] else {}
    last: dict[str, object] = {
        "promoted": int(result.loop.outcome == "promoted"),
        "outcome": result.loop.outcome,
        "reason": result.loop.reason,
        "minutes": round(result.minutes, 2),
        "stage_seconds": result.stage_seconds,
        "serve_seconds": round(result.serve_seconds, 1),
        "peak_rss_gib": round(peak.stop() / 2**30, 2),
        "dtype": registry.stack(loop["champion"]).engine.dtype,
    }
    if verdict:
        decode = verdict.metric("decode_tokens_per_s")
        acceptance = verdict.metric("acceptance_length")
        last |= {
            "al": round(acceptance.candidate, 3),
            "al_predicted": expects.get("acceptance_length"),
            "decode_speedup": round(decode.ratio, 3),
            "decode_speedup_low": round(decode.ratio_low, 3),
            "latency_ratio": round(verdict.metric("e2e_s").ratio, 3),
            "requests": decode.requests,
        }
        table = Table(
            "metric", "champion", "candidate", "ratio", "95 % interval", "slice", "n", title=verdict.summary
        )
        for c in verdict.comparisons:
            interval = f"{c.ratio_low:.3f} to {c.ratio_high:.3f}"
            table.add_row(
                c.metric,
                f"{c.champion:.4g}",
                f"{c.candidate:.4g}",
                f"{c.ratio:.3f}",
                interval,
                c.slice,
                str(c.requests),
            )
        Console().print(table)
    else:
        last |= {"al": None, "decode_speedup": None, "decode_speedup_low": None, "latency_ratio": None}
    if not arguments.home:
        shutil.rmtree(home, ignore_errors=True)
    print(json.dumps(last))


class _Peak:
    """Samples the resident memory of all vLLM, router and HAProxy processes below this one."""

    def __init__(self) -> None:
        self.bytes = 0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)
        self.thread.start()

    def stop(self) -> int:
        self.over.set()
        self.thread.join()
        return self.bytes

    def _sample(self) -> None:
        while not self.over.wait(2):
            total = 0
            for process in psutil.Process().children(recursive=True):
                try:
                    name = " ".join(process.cmdline()).lower()
                    if "vllm" in name or "haproxy" in name:
                        total += process.memory_info().rss
                except psutil.Error:
                    continue
            self.bytes = max(self.bytes, total)


if __name__ == "__main__":
    main()
