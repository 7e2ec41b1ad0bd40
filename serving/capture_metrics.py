"""Capture's counters on the engine's /metrics.

vLLM serves the default registry of prometheus_client there (with several API servers it serves
only what they share through files, and these counters are not shown).
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from strop.serving.journal import WriterCounts

if TYPE_CHECKING:
    from strop.serving.capture import Counts

_HELP = {
    "recorded": "Records handed to the writer",
    "passed_untouched": "Requests that could not be recorded: too large, not JSON, an echo of the prompt",
    "opted_out": "Requests that were not to be recorded",
    "sampled_out": "Records of sessions outside the sample that were of no interest",
    "errors": "Failures of capture itself; the requests were served all the same",
    "written": "Records in the journal on disk",
    "dropped": "Records turned away because the writer's queue was full",
    "failed": "Records lost because the disk refused them",
    "deleted": "Records of tenants and sessions that were deleted while they waited",
}


class CaptureCollector(Collector):
    """Reads the counters when somebody asks, so that counting costs nothing more."""

    def __init__(self, counts: "Counts", writer: WriterCounts):
        self.counts, self.writer = counts, writer

    def collect(self) -> Iterator[CounterMetricFamily]:
        for name, value in {**asdict(self.counts), **asdict(self.writer)}.items():
            yield CounterMetricFamily(f"strop_capture_{name}", _HELP.get(name, name), value=value)


_registered: CaptureCollector | None = None


def publish(counts: "Counts", writer: WriterCounts) -> None:
    """Show `counts` and those of the writer; a second call replaces the first's."""
    global _registered
    if _registered is None:
        _registered = CaptureCollector(counts, writer)
        REGISTRY.register(_registered)
    else:
        _registered.counts, _registered.writer = counts, writer
