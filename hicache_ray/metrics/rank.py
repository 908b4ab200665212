"""The metrics of one rank: a few observations a step, and the rest from counters that the rank has anyway."""

from __future__ import annotations

import threading

from hicache_ray.events.rank import KVEvents
from hicache_ray.index import TieredIndex
from hicache_ray.metrics.registry import Registry
from hicache_ray.rank.audit import in_flight
from hicache_ray.rank.cache import HiRadixCache
from hicache_ray.rank.l3 import StorageIO
from hicache_ray.rank.step import Scheduled, StepAnswer

_TIERS = {"device": "l1", "host": "l2"}
_SOURCES = ("l1", "l2", "l3", "computed")
TIMED_PARTS = ("reduction", "work", "engine", "total")
_OPERATIONS = {
    "exists": {"asked": "exists_asked", "hit": "exists_hits"},
    "get": {"asked": "get_asked", "hit": "get_hits"},
    "set": {"asked": "set_asked", "stored": "set_stored", "existing": "set_existing"},
}
"""Page counters of a backend by operation and result."""

_BACKUPS = {"stored": "l2_to_l3", "retried": "l3_backup_retried", "failed": "l3_backup_failed"}

_OF_STORAGE = (
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
        self._io = cache.mover.storage_io
        self.registry = Registry(**labels, rank=str(cache.rank))

    def observe(self, answer: StepAnswer) -> None:
        """Counts one step of this rank."""
        child, timings = self.registry.child, answer.timings_us
        child("hicache_steps_total").inc()
        for part in TIMED_PARTS:
            if part in timings:
                child("hicache_step_seconds", part).observe(timings[part] * 1e-6)
        if self.cache.rank == 0:  # what all ranks answer alike is counted once
            for row in answer.scheduled:
                self._count(row)

    def collect(self) -> None:
        """Brings everything else up to date. May run beside a step: it only reads."""
        with self._one_at_a_time:
            self._collect()

    def _collect(self) -> None:
        registry, cache = self.registry, self.cache
        self._collect_sums()
        for path, count in cache.mover.bytes_moved().items():
            registry.advance("hicache_transfer_bytes_total", count, path)
        for result, count in dict(cache.prefetcher.counts).items():
            if result == "loaded_pages":
                registry.advance("hicache_prefetched_pages_total", count)
            else:
                registry.advance("hicache_prefetches_total", count, result)
        self._collect_index(cache.index)
        self._collect_storage(self._io)
        if cache.mover.storage_io is not self._io:  # another backend, which counts from zero
            registry.restart(_OF_STORAGE)
            self._io = cache.mover.storage_io
            self._collect_storage(self._io)
        self._collect_gauges()

    def _count(self, row: Scheduled) -> None:
        child = self.registry.child
        if not row.ok:
            child("hicache_schedule_refusals_total").inc()
            return
        child("hicache_requests_total").inc()
        counts = (row.device_tokens, row.host_tokens, row.storage_tokens, row.computed_tokens)
        for source, tokens in zip(_SOURCES, counts, strict=True):
            child("hicache_request_tokens", source).observe(tokens)

    def _collect_sums(self) -> None:
        """What the histograms of `observe` have added up already."""
        registry = self.registry
        for part in TIMED_PARTS:
            registry.advance("hicache_step_time_seconds_total", registry.total("hicache_step_seconds", part), part)
        if self.cache.rank == 0:
            for source in _SOURCES:
                tokens = registry.total("hicache_request_tokens", source)
                registry.advance("hicache_prompt_tokens_total", tokens, source)

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
        for result, name in _BACKUPS.items():
            registry.advance("hicache_backup_pages_total", pages.get(name, 0), result)
        for worker in io.workers:
            registry.advance("hicache_worker_failures_total", sum(worker.failures.values()), worker.name)
        for operation, results in _OPERATIONS.items():
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
                registry.child("hicache_pool_pages", _TIERS[pool], state).set(getattr(ledger, state))
        registry.child("hicache_storage_attached").set(int(cache.mover.storage_io is not None))
        registry.child("hicache_page_bytes").set(cache.mover.host_pool.page_bytes)
        requests = list(cache.requests.values())
        running = sum(request.running for request in requests)
        registry.child("hicache_current_requests", "running").set(running)
        registry.child("hicache_current_requests", "waiting").set(len(requests) - running)
        for kind, count in in_flight(cache).items():
            registry.child("hicache_transfers", kind).set(count)
        registry.child("hicache_generation").set(cache.generation)
        if self.events is not None:
            status = self.events.status()
            registry.advance("hicache_kv_event_batches_total", status["published"], "published")
            registry.advance("hicache_kv_event_batches_total", status["lost"], "lost")
