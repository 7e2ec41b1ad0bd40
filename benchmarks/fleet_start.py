"""How long a fleet takes to start, and what memory it holds.

Starts `--replicas` replicas of one Stack with router and gateway, sends each some requests, and
sums the memory of all their processes: resident (shared pages counted in every process) and
proportional (shared pages divided among those that share them). Last line: one JSON object with
start_s (until the first answer through the gateway), replica_start_s, stop_s, rss_gib, pss_gib.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from strop.pipelines import demo_model
from strop.pipelines.deployment import plain_stack, temporary_fleet
from strop.pipelines.settings import Settings
from strop.serving.settings import ServingSettings


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="4 requests instead of 32")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--model", type=Path, help="model folder (default: SmolLM2-135M-Instruct)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="strop-") as folder:
        home = Path(folder)
        os.environ["STROP_HOME"] = folder
        model = arguments.model or demo_model.fetch(home / "models")
        serving = ServingSettings(served_model="model", replicas=arguments.replicas)
        settings = Settings(model=str(model), serving=serving)
        began = time.monotonic()
        with temporary_fleet(settings, home, plain_stack(settings)) as fleet:
            status = fleet.status()
            start_s = 0.0
            for number in range(4 if arguments.quick else 32):
                body = {
                    "model": "model",
                    "max_tokens": 16,
                    "messages": [{"role": "user", "content": f"count to {number}"}],
                }
                httpx.post(f"{status.gateway}/v1/chat/completions", json=body, timeout=300).raise_for_status()
                if number == 0:
                    start_s = time.monotonic() - began
            replicas = fleet.status().pools[0].replicas
            rss, pss = _memory()
            stopping = time.monotonic()
        stop_s = time.monotonic() - stopping
    result = {
        "replicas": arguments.replicas,
        "start_s": round(start_s, 1),
        "replica_start_s": [round(r.started_in_s, 1) for r in replicas],
        "stop_s": round(stop_s, 1),
        "rss_gib": round(rss / 2**30, 2),
        "pss_gib": round(pss / 2**30, 2),
    }
    table = Table("figure", "value")
    for name, value in result.items():
        table.add_row(name, str(value))
    Console().print(table)
    print(json.dumps(result))


def _memory() -> tuple[int, int]:
    """Resident and proportional bytes of all vLLM, router and HAProxy processes below this one."""
    rss = pss = 0
    for process in psutil.Process().children(recursive=True):
        try:
            if any(word in " ".join(process.cmdline()).lower() for word in ("vllm", "haproxy")):
                memory = process.memory_full_info()
                rss, pss = rss + memory.rss, pss + memory.pss
        except psutil.Error:
            continue
    return rss, pss


if __name__ == "__main__":
    main()
