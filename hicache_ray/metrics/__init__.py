"""Metrics under one set of names, with Ray and without it: `names.METRICS` lists them."""

from __future__ import annotations

from hicache_ray.metrics.exporter import RayExporter
from hicache_ray.metrics.names import METRICS, Kind, Metric
from hicache_ray.metrics.rank import HealMetrics, RankMetrics, ShardMetrics
from hicache_ray.metrics.registry import Registry, exposition

__all__ = [
    "METRICS",
    "HealMetrics",
    "Kind",
    "Metric",
    "RankMetrics",
    "RayExporter",
    "Registry",
    "ShardMetrics",
    "exposition",
]
