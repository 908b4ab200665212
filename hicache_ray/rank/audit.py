"""What one rank says about itself: its state at a glance, and an audit of everything that has to add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from hicache_ray.index import Ledger
from hicache_ray.index.integrity import MAX_NAMED, check_index
from hicache_ray.radix.node import Node
from hicache_ray.rank.cache import HiRadixCache

ATTACHED, DRAINING, DETACHED = "attached", "draining", "detached"


def status_of(cache: HiRadixCache) -> dict[str, Any]:
    """State of a rank under stable names; plain values, msgpack-able. Costs nothing that grows with the cache."""
    index, settings = cache.index, cache.control.settings()
    running = sum(request.running for request in cache.requests.values())
    attached = ATTACHED if settings["in_use"] else DRAINING
    return {
        "rank": cache.rank,
        "generation": cache.generation,
        "next_step": cache.next_step,
        "digest": index.tree.digest(),
        "storage": {
            "backend": settings["backend"],
            "state": attached if cache.mover.storage_io else DETACHED,
            "options": settings["options"],
        },
        "policies": settings["policies"],
        "requests": {"running": running, "waiting": len(cache.requests) - running, "ids": list(cache.requests)},
        "in_flight": in_flight(cache),
        "pages": {pool: ledger.as_dict() for pool, ledger in index.ledger().items()},
        "page_size": cache.page_size,
        "idle": cache.is_idle(),
    }


def in_flight(cache: HiRadixCache) -> dict[str, int]:
    """Operations in flight by kind; `closing` are ended prefetches whose read still runs."""
    index, prefetcher = cache.index, cache.prefetcher
    return {
        "writes": len(index.transfers.writes),
        "loads": len(index.transfers.loads),
        "backups": len(index.transfers.backups),
        "prefetches": len(prefetcher.active),
        "closing": len(prefetcher.closing),
    }


@dataclass(frozen=True)
class RankAudit:
    """What was counted on one rank, and a sentence for each thing that does not add up.

    Attributes:
        rank, next_step, digest: whose and when.
        pages: each pool's pages by owner.
        bytes: each pool's bytes: `total`, and `used` by what is not free.
        references: locks and host protections, counted at their holders.
        in_flight: operations by kind.
        faults: empty when everything adds up.
    """

    rank: int
    next_step: int
    digest: int
    pages: dict[str, dict[str, int]]
    bytes: dict[str, dict[str, int]]
    references: dict[str, int]
    in_flight: dict[str, int]
    faults: tuple[str, ...]


def audit_of(cache: HiRadixCache) -> RankAudit:
    """Counts every page, reference and thread of a rank anew and compares. Costs a walk over the whole tree."""
    ledgers = cache.ledger()
    pool = cache.mover.host_pool
    sizes = {name: ledger.total * pool.page_bytes for name, ledger in ledgers.items()}
    return RankAudit(
        rank=cache.rank,
        next_step=cache.next_step,
        digest=cache.index.tree.digest(),
        pages={name: ledger.as_dict() for name, ledger in ledgers.items()},
        bytes={
            name: {"total": sizes[name], "used": sizes[name] - ledger.free * pool.page_bytes}
            for name, ledger in ledgers.items()
        },
        references={"locks": sum(_locks(cache).values()), "protections": sum(_protections(cache).values())},
        in_flight=in_flight(cache),
        faults=tuple(_faults(cache, ledgers)),
    )


def _faults(cache: HiRadixCache, ledgers: Mapping[str, Ledger]) -> Iterator[str]:
    for name, ledger in ledgers.items():
        if ledger.lost:
            yield f"{name}: nobody owns {len(ledger.lost)} pages, {_some(ledger.lost)} among them"
        if ledger.doubled:
            yield f"{name}: {len(ledger.doubled)} pages have two owners, {_some(ledger.doubled)} among them"
    try:
        check_index(cache.index)
    except AssertionError as error:
        yield f"tree: {error}"
    yield from islice(_reference_faults(cache), MAX_NAMED)
    owned, counted = len(cache.prefetcher.in_flight_pages()), cache.prefetcher.occupied_pages
    if owned != counted:
        yield f"prefetches own {owned} host pages and {counted} are counted"
    io = cache.mover.storage_io
    for worker in io.workers if io else ():
        if not worker.alive:
            yield f"the thread {worker.name} has ended"


def _reference_faults(cache: HiRadixCache) -> Iterator[str]:
    """Every lock and protection of the tree has a holder that will give it back."""
    tree = cache.index.tree
    locks, protections = _locks(cache), _protections(cache)
    for node in (tree.root, *tree.nodes()):
        for what, count, held in (
            ("locks", node.lock_ref, locks[node]),
            ("host protections", node.host_ref_counter, protections[node]),
        ):
            if count != held:
                yield f"{node!r} has {count} {what}, of which {held} have a holder"


def _locks(cache: HiRadixCache) -> Counter[Node]:
    """Locks by the node at which they were taken; each holds the whole path. The root needs none."""
    index = cache.index
    locks: Counter[Node] = Counter(request.node for request in cache.requests.values() if request.node is not None)
    locks.update(write.node for write in index.transfers.writes if not write.blocking)
    locks.update(load.node for load in index.transfers.loads)
    del locks[index.tree.root]
    return locks


def _protections(cache: HiRadixCache) -> Counter[Node]:
    index = cache.index
    protections: Counter[Node] = Counter(write.node for write in index.transfers.writes if write.blocking)
    protections.update(backup.node for backup in index.transfers.backups)
    protections.update(prefetch.anchor for prefetch in cache.prefetcher.active.values())
    return protections


def _some(pages: tuple[int, ...]) -> str:
    return ", ".join(map(str, pages[:MAX_NAMED]))
