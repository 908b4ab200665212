"""The metrics of the actors beside the ranks: what a supervisor healed, what a storage actor holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hicache_ray.metrics.registry import Registry

if TYPE_CHECKING:
    from hicache_ray.storage.shard import ShardStats

COUNTED = ("stored", "existing", "refused", "evicted", "expired", "corrupt", "asked", "hits")
"""Counters of a shard, under their own names."""


class HealMetrics:
    """Counts the rebuilds of a service's groups."""

    def __init__(self, service: str) -> None:
        self.registry = Registry(service=service)

    def observe(self, group: str, seconds: float, *, healed: bool) -> None:
        """Counts one rebuild, or one that failed."""
        self.registry.add("hicache_heals_total", 1, group, "healed" if healed else "failed")
        self.registry.observe("hicache_heal_seconds", seconds, group)


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
        registry.set("hicache_storage_actor_bytes", stats.used_bytes, "used")
        registry.set("hicache_storage_actor_bytes", stats.total_bytes, "total")
        for state, pages in (("stored", stats.pages), ("reserved", stats.reserved), ("leased", stats.leased)):
            registry.set("hicache_storage_actor_pages", pages, state)
        for result in COUNTED:
            registry.advance("hicache_storage_actor_page_results_total", getattr(stats, result), result)
