"""What Prometheus scrapes, and reading it without Prometheus."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from strop.serving.home import write_atomic

TARGETS = "targets.json"
_CHECK_EVERY_S = 2.0


class MetricsError(RuntimeError):
    """An endpoint that does not answer with metrics."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """One scrape of one endpoint."""

    families: dict[str, Metric]

    def total(self, name: str, **labels: str) -> float:
        """Sum of a sample over its labels, of those with `labels`; 0 where there is none."""
        return math.fsum(
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and all(sample.labels.get(k) == v for k, v in labels.items())
        )

    def buckets(self, name: str) -> dict[float, float]:
        """Cumulative counts of a histogram by upper bound, summed over its labels."""
        found: dict[float, float] = {}
        for family in self.families.values():
            for sample in family.samples:
                if sample.name == f"{name}_bucket":
                    bound = float(sample.labels["le"])
                    found[bound] = found.get(bound, 0.0) + sample.value
        return dict(sorted(found.items()))


def scrape(url: str, timeout_s: float = 5) -> Metrics:
    """Read one endpoint. Raises MetricsError."""
    try:
        answer = httpx.get(url, timeout=timeout_s)
        answer.raise_for_status()
        return Metrics({family.name: family for family in text_string_to_metric_families(answer.text)})
    except (httpx.HTTPError, ValueError) as error:
        raise MetricsError(f"{url} does not answer with metrics: {error}") from None


def quantile(buckets: dict[float, float], share: float) -> float | None:
    """The `share` quantile (0 < share <= 1) of a histogram by linear interpolation in its bucket, as Prometheus computes it.

    `buckets` are cumulative counts by upper bound. None for an empty histogram.
    """
    if not buckets or not (count := max(buckets.values())):
        return None
    rank = share * count
    below, lower = 0.0, 0.0
    for bound, cumulative in sorted(buckets.items()):
        if cumulative >= rank:
            if math.isinf(bound):
                return lower
            inside = cumulative - below
            return lower + (bound - lower) * ((rank - below) / inside if inside else 1.0)
        below, lower = cumulative, bound
    return lower


def target(part: str, url: str, stack: str = "", **numbers: int) -> dict[str, Any]:
    """One entry of Prometheus' file-based service discovery; `part` is gateway, router, engine or prefill.

    `numbers` become labels: `slot`, the router's server in the gateway, or `replica`.
    """
    labels = {"part": part} | ({"stack": stack} if stack else {})
    return {"targets": [urlsplit(url).netloc], "labels": labels | {k: str(v) for k, v in numbers.items()}}


def keep_targets(folder: Path, targets: Callable[[], list[dict[str, Any]]]) -> None:
    """Keep `folder/targets.json` as `targets` says, for ever."""
    written = ""
    while True:
        content = json.dumps(targets(), indent=1)
        if content != written:
            try:
                write_atomic(folder / TARGETS, content)
                # Prometheus may run as another user.
                (folder / TARGETS).chmod(0o644)
                written = content
            except OSError:
                pass  # A full disk: the next look tries again.
        time.sleep(_CHECK_EVERY_S)
