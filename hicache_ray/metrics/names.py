"""Every metric there is: name, kind, meaning, labels. Names are hicache_<what>_<unit>; Ray puts `ray_` before them."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Metric(NamedTuple):
    """One metric.

    Attributes:
        name: as it is exported; that of a counter ends in _total.
        kind: how its values go together, in Prometheus' words.
        help: what it counts, and where.
        labels: beside those that a registry gives to all its metrics.
        boundaries: upper bounds of a histogram's buckets.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    boundaries: tuple[float, ...] = ()


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, "counter", help, labels)


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, "gauge", help, labels)


def _histogram(name: str, help: str, boundaries: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name, "histogram", help, labels, boundaries)


STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
REQUEST_TOKENS = (1.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)
HEAL_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0)

RANK = (
    _counter("hicache_requests_total", "Prompts scheduled; counted on rank 0."),
    _counter("hicache_prompt_tokens_total", "Their tokens by source: l1, l2, l3, computed.", "source"),
    _histogram(
        "hicache_request_tokens", "Tokens of one prompt by source; counted on rank 0.", REQUEST_TOKENS, "source"
    ),
    _counter("hicache_schedule_refusals_total", "Times a prompt had to wait for room in L1; counted on rank 0."),
    _counter("hicache_steps_total", "Steps carried out by the rank."),
    _counter("hicache_step_time_seconds_total", "Time in steps by part: reduction, work, engine, total.", "part"),
    _histogram("hicache_step_seconds", "Time of one step by part, on the rank.", STEP_SECONDS, "part"),
    _counter("hicache_transfer_bytes_total", "Bytes moved by path: l1_to_l2, l2_to_l1, l2_to_l3, l3_to_l2.", "path"),
    _counter("hicache_evicted_pages_total", "Pages that left a tier: l1, l2.", "tier"),
    _counter("hicache_dropped_pages_total", "Of those that left L1, those without the copy in L2 they were owed."),
    _counter("hicache_refused_writes_total", "Nodes that were not written to L2 for want of room."),
    _counter("hicache_prefetches_total", "Prefetches by what became of them: started, or why not; revoked.", "result"),
    _counter("hicache_prefetched_pages_total", "Pages that prefetches brought into the tree."),
    _counter("hicache_storage_calls_total", "Calls to L3 by operation: exists, get, set.", "operation"),
    _counter(
        "hicache_storage_pages_total",
        "Pages in calls to L3 by result: asked, hit, stored, existing.",
        "operation",
        "result",
    ),
    _counter("hicache_storage_bytes_total", "Bytes read from and written to L3, by operation.", "operation"),
    _counter("hicache_storage_seconds_total", "Time in reads from and writes to L3, by operation.", "operation"),
    _counter(
        "hicache_storage_failures_total",
        "Calls to L3 that failed: errors, timeouts, refused by the breaker; and pages that were corrupt.",
        "kind",
    ),
    _counter("hicache_backup_pages_total", "Pages written to L3 by result: stored, retried, failed.", "result"),
    _counter("hicache_worker_failures_total", "Jobs of background threads that failed, each a miss.", "worker"),
    _counter("hicache_kv_event_batches_total", "Batches of KV events: published, lost.", "result"),
    _gauge("hicache_pool_pages", "Pages of L1 and L2 by where they are: free, in_tree, in_flight.", "tier", "state"),
    _gauge("hicache_page_bytes", "Bytes of a page on this rank, all layers."),
    _gauge("hicache_current_requests", "Requests of the group now: running, waiting.", "state"),
    _gauge("hicache_transfers", "Operations in flight: writes, loads, backups, prefetches, closing.", "kind"),
    _gauge("hicache_storage_attached", "1 while an L3 backend is in use."),
    _gauge("hicache_generation", "Generation of the group."),
)
"""Of every rank, with the labels `service`, `group` and `rank`."""

SUPERVISOR = (
    _counter("hicache_heals_total", "Rebuilds of a group by result: healed, failed.", "group", "result"),
    _histogram("hicache_heal_seconds", "Time from notice of a broken group to its end.", HEAL_SECONDS, "group"),
)
"""Of every supervisor, with the label `service`."""

STORAGE_ACTOR = (
    _gauge("hicache_storage_actor_bytes", "Bytes of a storage actor: used, total.", "state"),
    _gauge("hicache_storage_actor_pages", "Pages of a storage actor: stored, reserved, leased.", "state"),
    _counter(
        "hicache_storage_actor_page_results_total",
        "Pages of a storage actor by what became of them: stored, existing, refused, evicted, expired, corrupt, asked, "
        "hits.",
        "result",
    ),
)
"""Of every storage actor, with the labels `pool` and `member`; counters since its process began."""

METRICS = {metric.name: metric for metric in (*RANK, *SUPERVISOR, *STORAGE_ACTOR)}
