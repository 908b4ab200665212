"""Where every page of a rank is, counted as sets: a page that is lost or owned twice has a number here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hicache_ray.index import TieredIndex
from hicache_ray.pools.allocator import PageAllocator
from hicache_ray.radix.node import NO_PAGES, Pages

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
