"""The metrics of one rank: a few additions a step, and the rest from counters that the rank has anyway.

The metrics of the actors beside the ranks: what a supervisor healed, what a storage actor holds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from hicache_ray.metrics.registry import Registry
from hicache_ray.rank.audit import in_flight
from hicache_ray.rank.step import Scheduled, StepAnswer

if TYPE_CHECKING:
    from hicache_ray.events.publisher import KVEvents
    from hicache_ray.index import TieredIndex
    from hicache_ray.rank.cache import HiRadixCache
    from hicache_ray.rank.l3 import StorageIO
    from hicache_ray.storage.shard.shard import ShardStats


TIERS = {"device": "l1", "host": "l2"}
STEP_PARTS = ("reduction", "work", "engine", "total")
OPERATIONS = {
    "exists": {"asked": "exists_asked", "hit": "exists_hits"},
    "get": {"asked": "get_asked", "hit": "get_hits"},
    "set": {"asked": "set_asked", "stored": "set_stored", "existing": "set_existing"},
}
"""Page counters of a backend by operation and result."""

BACKUPS = {"stored": "l2_to_l3", "retried": "l3_backup_retried", "failed": "l3_backup_failed"}

OF_STORAGE = (
    *("hicache_backup_pages_total", "hicache_worker_failures_total", "hicache_storage_calls_total"),
    *("hicache_storage_pages_total", "hicache_storage_bytes_total", "hicache_storage_seconds_total"),
    "hicache_storage_failures_total",
)
"""Counters that follow a backend's own numbers."""


class RankMetrics:
    """Counts what a rank does. `observe` is called after every step, `collect` before the numbers are read.

    Args:
        cache: the rank.
        events: its KV events, if it publishes them.
        labels: of all its metrics, beside the rank's number.
    """

    def __init__(self, cache: HiRadixCache, events: KVEvents | None = None, **labels: str) -> None:
        self.cache = cache
        self.events = events
        self._one_at_a_time = threading.Lock()
        self._io = cache.controller.storage_io
        self.registry = Registry(**labels, rank=str(cache.rank))

    def observe(self, answer: StepAnswer) -> None:
        """Counts one step of this rank."""
        registry = self.registry
        registry.add("hicache_steps_total", 1)
        for part in STEP_PARTS:
            if part in answer.timings_us:
                seconds = answer.timings_us[part] * 1e-6
                registry.add("hicache_step_time_seconds_total", seconds, part)
                registry.observe("hicache_step_seconds", seconds, part)
        if self.cache.rank == 0:  # what all ranks answer alike is counted once
            for row in answer.scheduled:
                self._count(row)

    def collect(self) -> None:
        """Brings everything else up to date. May run beside a step: it only reads."""
        with self._one_at_a_time:
            self._collect()

    def _collect(self) -> None:
        registry, cache = self.registry, self.cache
        for path, count in cache.controller.bytes_moved().items():
            registry.advance("hicache_transfer_bytes_total", count, path)
        for result, count in dict(cache.prefetcher.counts).items():
            if result == "loaded_pages":
                registry.advance("hicache_prefetched_pages_total", count)
            else:
                registry.advance("hicache_prefetches_total", count, result)
        self._collect_index(cache.index)
        self._collect_storage(self._io)
        if cache.controller.storage_io is not self._io:  # another backend, which counts from zero
            registry.restart(OF_STORAGE)
            self._io = cache.controller.storage_io
            self._collect_storage(self._io)
        self._collect_gauges()

    def _count(self, row: Scheduled) -> None:
        registry = self.registry
        if not row.ok:
            registry.add("hicache_schedule_refusals_total", 1)
            return
        registry.add("hicache_requests_total", 1)
        sources = {
            "l1": row.device_tokens,
            "l2": row.host_tokens,
            "l3": row.storage_tokens,
            "computed": row.computed_tokens,
        }
        for source, tokens in sources.items():
            registry.add("hicache_prompt_tokens_total", tokens, source)
            registry.observe("hicache_request_tokens", tokens, source)

    def _collect_index(self, index: TieredIndex) -> None:
        registry, stats = self.registry, index.stats
        registry.advance("hicache_evicted_pages_total", stats.evicted_device_pages, "l1")
        registry.advance("hicache_evicted_pages_total", stats.evicted_host_pages, "l2")
        registry.advance("hicache_dropped_pages_total", stats.dropped_pages)
        registry.advance("hicache_refused_writes_total", stats.refused_writes)

    def _collect_storage(self, io: StorageIO | None) -> None:
        if io is None:
            return
        registry, counts, pages = self.registry, io.storage.get_stats().as_dict(), dict(io.pages)
        for result, name in BACKUPS.items():
            registry.advance("hicache_backup_pages_total", pages.get(name, 0), result)
        for worker in io.workers:
            registry.advance("hicache_worker_failures_total", sum(worker.failures.values()), worker.name)
        for operation, results in OPERATIONS.items():
            registry.advance("hicache_storage_calls_total", counts[f"{operation}_calls"], operation)
            for result, name in results.items():
                registry.advance("hicache_storage_pages_total", counts[name], operation, result)
        for operation in ("get", "set"):
            registry.advance("hicache_storage_bytes_total", counts[f"{operation}_bytes"], operation)
            registry.advance("hicache_storage_seconds_total", counts[f"{operation}_seconds"], operation)
        for kind in ("errors", "timeouts", "refused", "corrupt"):
            registry.advance("hicache_storage_failures_total", counts[kind], kind)

    def _collect_gauges(self) -> None:
        registry, cache = self.registry, self.cache
        for pool, ledger in cache.index.ledger().items():
            for state in ("free", "in_tree", "in_flight"):
                registry.set("hicache_pool_pages", getattr(ledger, state), TIERS[pool], state)
        registry.set("hicache_storage_attached", int(cache.controller.storage_io is not None))
        registry.set("hicache_page_bytes", cache.controller.host_pool.page_bytes)
        requests = list(cache.requests.values())
        running = sum(request.running for request in requests)
        registry.set("hicache_current_requests", running, "running")
        registry.set("hicache_current_requests", len(requests) - running, "waiting")
        for kind, count in in_flight(cache).items():
            registry.set("hicache_transfers", count, kind)
        registry.set("hicache_generation", cache.generation)
        if self.events is not None:
            status = self.events.status()
            registry.advance("hicache_kv_event_batches_total", status["published"], "published")
            registry.advance("hicache_kv_event_batches_total", status["lost"], "lost")


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
