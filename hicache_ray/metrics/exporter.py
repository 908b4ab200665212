"""Carries a registry into `ray.util.metrics`, and so into Ray's own Prometheus endpoint and dashboard."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from hicache_ray.metrics.names import METRICS, Metric
from hicache_ray.metrics.registry import Registry, Sample

logger = logging.getLogger("hicache_ray.metrics")

PERIOD_SECONDS = 2.0
"""Between two exports. Ray itself reports about every 10 s."""


class RayExporter:
    """Exports a registry from a thread of its own, so that no step waits for it.

    Args:
        registry: of this process. One exporter a metric name and process: Ray knows metrics by name.
        collect: brings the registry up to date before each export.
        period: seconds between two exports.
    """

    def __init__(
        self, registry: Registry, collect: Callable[[], None] = lambda: None, period: float = PERIOD_SECONDS
    ) -> None:
        self.failures = 0
        self._registry = registry
        self._collect = collect
        self._period = period
        self._metrics: dict[str, Any] = {}
        self._exported: dict[tuple[str, ...], Sample] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hicache-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Exports a last time and ends the thread. May be called twice."""
        self._stopped.set()
        self._thread.join(self._period)

    def export(self) -> None:
        """Hands on what changed since the last call."""
        self._collect()
        for name, samples in self._registry.snapshot().items():
            for sample in samples:
                self._hand_on(METRICS[name], sample)

    def _hand_on(self, metric: Metric, sample: Sample) -> None:
        key = (metric.name, *sample["labels"].values())
        before = self._exported.get(key, Sample(labels={}, value=0, sum=0, buckets=(0,) * len(metric.boundaries)))
        self._exported[key] = sample
        ray_metric = self._metric(metric, tuple(sample["labels"]))
        if metric.kind == "gauge":
            ray_metric.set(sample["value"], tags=sample["labels"])
        elif metric.kind == "counter" and sample["value"] > before["value"]:
            ray_metric.inc(sample["value"] - before["value"], tags=sample["labels"])
        elif metric.kind == "histogram":
            for middle, count in zip(_middles(metric.boundaries), _per_bucket(before, sample), strict=True):
                for _ in range(count):
                    ray_metric.observe(middle, tags=sample["labels"])

    def _run(self) -> None:
        going = True
        while going:
            going = not self._stopped.wait(self._period)
            try:
                self.export()
            except Exception:  # the thread goes on, whatever a backend's counters or Ray had
                self.failures += 1
                if self.failures == 1:
                    logger.exception("metrics could not be exported; further failures are only counted")

    def _metric(self, metric: Metric, labels: tuple[str, ...]) -> Any:
        if metric.name not in self._metrics:
            self._metrics[metric.name] = _made(metric, labels)
        return self._metrics[metric.name]


def _middles(boundaries: Sequence[float]) -> list[float]:
    """A value of each bucket. Ray keeps no more of an observation than the bucket it falls in."""
    last = boundaries[-1]
    return [(low + high) / 2 for low, high in zip((0.0, *boundaries), (*boundaries, 3 * last), strict=True)]


def _per_bucket(before: Sample, now: Sample) -> list[int]:
    """New observations of each bucket, the unbounded one last."""
    grown = [
        int(new - old)
        for new, old in zip((*now["buckets"], now["value"]), (*before["buckets"], before["value"]), strict=True)
    ]
    return [count - below for count, below in zip(grown, (0, *grown[:-1]), strict=True)]


def _made(metric: Metric, tag_keys: tuple[str, ...]) -> Any:
    from ray.util import metrics

    if metric.kind == "histogram":
        return metrics.Histogram(
            metric.name, description=metric.help, boundaries=list(metric.boundaries), tag_keys=tag_keys
        )
    kind = metrics.Counter if metric.kind == "counter" else metrics.Gauge
    return kind(metric.name, description=metric.help, tag_keys=tag_keys)
