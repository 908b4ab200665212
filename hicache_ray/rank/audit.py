"""Where every page of a rank is, counted as sets: a page that is lost or owned twice has a number here.

What one rank says about itself: its state at a glance, and an audit of everything that has to add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hicache_ray.index import TieredIndex
from hicache_ray.index.integrity import check_index
from hicache_ray.pages import NO_PAGES, Pages
from hicache_ray.pools.allocator import PageAllocator

if TYPE_CHECKING:
    from hicache_ray.radix.node import Node
    from hicache_ray.rank.cache import HiRadixCache


MAX_NAMED = 10
"""Most page numbers that a message names."""


@dataclass(frozen=True)
class PoolLedger:
    """The pages of one tier. `free`, `in_tree` and `in_flight` are what was counted; they add up when nothing is wrong.

    Attributes:
        total, free, in_tree, in_flight: pages of the pool, in the allocator, held by nodes, owned by running requests
            and transfers.
        lost: pages that nobody owns.
        doubled: pages with more than one owner.
    """

    total: int
    free: int
    in_tree: int
    in_flight: int
    lost: tuple[int, ...] = ()
    doubled: tuple[int, ...] = ()

    @property
    def balanced(self) -> bool:
        """Whether every page has exactly one owner."""
        return not self.lost and not self.doubled

    def check(self, pool: str) -> None:
        """Raises AssertionError naming the pages when a page is lost or owned twice."""
        assert self.balanced, f"{pool}: pages lost {self.lost[:MAX_NAMED]}, owned twice {self.doubled[:MAX_NAMED]}"

    def as_dict(self) -> dict[str, int]:
        """The four counts, for reports."""
        return {"total": self.total, "free": self.free, "in_tree": self.in_tree, "in_flight": self.in_flight}


def audit(index: TieredIndex, in_flight: Mapping[str, Pages]) -> dict[str, PoolLedger]:
    """The ledger of both tiers by name ("device", "host"), from the allocators, the tree and what else owns pages."""
    nodes = list(index.tree.nodes())
    in_tree = {
        "device": _together([node.value for node in nodes if node.value is not None]),
        "host": _together([node.host_value for node in nodes if node.host_value is not None]),
    }
    pools = {"device": index.device, "host": index.host}
    return {name: _ledger(pool, in_tree[name], in_flight[name]) for name, pool in pools.items()}


def _together(parts: list[Pages]) -> Pages:
    return np.concatenate(parts) if parts else NO_PAGES


def _ledger(pool: PageAllocator, in_tree: Pages, in_flight: Pages) -> PoolLedger:
    free = pool.free_list()
    owners = np.bincount(np.concatenate([free, in_tree, in_flight]), minlength=pool.total)
    return PoolLedger(
        total=pool.total,
        free=len(free),
        in_tree=len(in_tree),
        in_flight=len(in_flight),
        lost=tuple(np.flatnonzero(owners == 0).tolist()),
        doubled=tuple(np.flatnonzero(owners > 1).tolist()),
    )


ATTACHED, DRAINING, DETACHED = "attached", "draining", "detached"


def status_of(cache: HiRadixCache) -> dict[str, Any]:
    """State of a rank under stable names; plain values, msgpack-able. Costs nothing that grows with the cache."""
    index, settings = cache.index, cache.settings()
    running = sum(request.running for request in cache.requests.values())
    return {
        "rank": cache.rank,
        "generation": cache.generation,
        "next_step": cache.next_step,
        "digest": index.tree.digest(),
        "storage": {"backend": cache.backend_name, "state": _storage_state(cache), "options": settings["options"]},
        "policies": settings["policies"],
        "requests": {"running": running, "waiting": len(cache.requests) - running, "ids": list(cache.requests)},
        "in_flight": in_flight(cache),
        "pages": {pool: ledger._asdict() for pool, ledger in index.ledger().items()},
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
    faults: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """Plain values, msgpack-able."""
        return asdict(self)


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
        faults=(
            *_page_faults(ledgers),
            *_structure_faults(cache),
            *_reference_faults(cache),
            *_prefetch_faults(cache),
            *_thread_faults(cache),
        ),
    )


def _storage_state(cache: HiRadixCache) -> str:
    if cache.mover.storage_io is None:
        return DETACHED
    return ATTACHED if cache.prefetcher.enabled else DRAINING


def _page_faults(ledgers: dict[str, PoolLedger]) -> list[str]:
    found = []
    for name, ledger in ledgers.items():
        if ledger.lost:
            found.append(f"{name}: nobody owns {len(ledger.lost)} pages, {_some(ledger.lost)} among them")
        if ledger.doubled:
            found.append(f"{name}: {len(ledger.doubled)} pages have two owners, {_some(ledger.doubled)} among them")
    return found


def _structure_faults(cache: HiRadixCache) -> list[str]:
    try:
        check_index(cache.index)
    except AssertionError as error:
        return [f"tree: {error}"]
    return []


def _reference_faults(cache: HiRadixCache) -> list[str]:
    """Every lock and protection of the tree has a holder that will give it back."""
    tree = cache.index.tree
    locks, protections = _locks(cache), _protections(cache)
    found = []
    for node in (tree.root, *tree.nodes()):
        for what, count, held in (
            ("locks", node.lock_ref, locks[node]),
            ("host protections", node.host_ref_counter, protections[node]),
        ):
            if count != held:
                found.append(f"{node!r} has {count} {what}, of which {held} have a holder")
    return found[:MAX_NAMED]


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


def _prefetch_faults(cache: HiRadixCache) -> list[str]:
    owned, counted = len(cache.prefetcher.in_flight_pages()), cache.prefetcher.occupied_pages
    return [] if owned == counted else [f"prefetches own {owned} host pages and {counted} are counted"]


def _thread_faults(cache: HiRadixCache) -> list[str]:
    io = cache.mover.storage_io
    return [f"the thread {worker.name} has ended" for worker in io.workers if not worker.alive] if io else []


def _some(pages: tuple[int, ...]) -> str:
    return ", ".join(map(str, pages[:MAX_NAMED]))
