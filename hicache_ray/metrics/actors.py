"""The metrics of the actors beside the ranks: what a supervisor healed, what a storage actor holds."""

from __future__ import annotations

from collections.abc import Callable

from hicache_ray.metrics.registry import Registry
from hicache_ray.storage.shard.grants import ShardStats

PAGE_RESULTS = ("stored", "existing", "refused", "evicted", "expired", "corrupt", "asked", "hits")
"""Counters of a shard, under their own names."""


class HealMetrics:
    """Counts the rebuilds of a service's groups."""

    def __init__(self, service: str) -> None:
        self.registry = Registry(service=service)

    def observe(self, group: str, seconds: float, *, healed: bool) -> None:
        """Counts one rebuild, or one that failed."""
        self.registry.child("hicache_heals_total", group, "healed" if healed else "failed").inc()
        self.registry.child("hicache_heal_seconds", group).observe(seconds)


class ShardMetrics:
    """Counts what a storage actor holds and did.

    Args:
        stats: gives its shard's state now.
        pool, member: labels of its metrics.
    """

    def __init__(self, stats: Callable[[], ShardStats], *, pool: str, member: str) -> None:
        self.registry = Registry(pool=pool, member=member)
        self._stats = stats

    def collect(self) -> None:
        """Brings the numbers up to date."""
        stats, registry = self._stats(), self.registry
        registry.child("hicache_storage_actor_bytes", "used").set(stats.used_bytes)
        registry.child("hicache_storage_actor_bytes", "total").set(stats.total_bytes)
        for state, pages in (("stored", stats.pages), ("reserved", stats.reserved), ("leased", stats.leased)):
            registry.child("hicache_storage_actor_pages", state).set(pages)
        for result in PAGE_RESULTS:
            registry.advance("hicache_storage_actor_page_results_total", getattr(stats, result), result)
