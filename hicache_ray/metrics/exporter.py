"""Carries a registry into `ray.util.metrics`, and so into Ray's own Prometheus endpoint and dashboard."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from hicache_ray.metrics.names import METRICS, Kind, Metric
from hicache_ray.metrics.registry import LabelValues, Registry

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
        self._exported: dict[tuple[str, LabelValues], float] = {}
        self._stopped = threading.Event()
        registry.keep_observations = True
        self._thread = threading.Thread(target=self._run, name="hicache-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Exports a last time and ends the thread. May be called twice."""
        self._stopped.set()
        self._thread.join(self._period)

    def export(self) -> None:
        """Hands on what changed since the last call."""
        self._collect()
        registry = self._registry
        for key, value in list(registry.values.items()):
            name, labels = key
            metric, tags = self._metric(name), self._tags(METRICS[name], labels)
            if METRICS[name].kind is Kind.GAUGE:
                metric.set(value, tags=tags)
            elif value > self._exported.get(key, 0):
                metric.inc(value - self._exported.get(key, 0), tags=tags)
                self._exported[key] = value
        for (name, labels), histogram in list(registry.histograms.items()):
            metric, tags = self._metric(name), self._tags(METRICS[name], labels)
            for _ in range(len(histogram.pending)):
                metric.observe(histogram.pending.popleft(), tags=tags)

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

    def _metric(self, name: str) -> Any:
        if name not in self._metrics:
            self._metrics[name] = _make(METRICS[name], (*self._registry.labels, *METRICS[name].labels))
        return self._metrics[name]

    def _tags(self, metric: Metric, labels: LabelValues) -> dict[str, str]:
        return {**self._registry.labels, **dict(zip(metric.labels, labels, strict=True))}


def _make(metric: Metric, tag_keys: tuple[str, ...]) -> Any:
    from ray.util import metrics

    if metric.kind is Kind.HISTOGRAM:
        return metrics.Histogram(
            metric.name, description=metric.help, boundaries=list(metric.boundaries), tag_keys=tag_keys
        )
    kind = metrics.Counter if metric.kind is Kind.COUNTER else metrics.Gauge
    return kind(metric.name, description=metric.help, tag_keys=tag_keys)
