"""Metrics under one set of names, with Ray and without it: `names.METRICS` lists them."""

from __future__ import annotations

from hicache_ray.metrics.actors import HealMetrics, ShardMetrics
from hicache_ray.metrics.exporter import RayExporter
from hicache_ray.metrics.names import METRICS
from hicache_ray.metrics.registry import Registry, Sample, Snapshot, exposition

__all__ = [
    "METRICS",
    "HealMetrics",
    "RayExporter",
    "Registry",
    "Sample",
    "ShardMetrics",
    "Snapshot",
    "exposition",
]
