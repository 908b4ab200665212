"""Heavy checks that tree, allocators and transfers of an index agree, page by page; for tests and audits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hicache_ray.index.tiered import TieredIndex
from hicache_ray.index.transfers import concatenated
from hicache_ray.index.types import Backup, Ledger, Load, Write
from hicache_ray.pages import Pages
from hicache_ray.pools.allocator import PageAllocator
from hicache_ray.radix.integrity import check_tree
from hicache_ray.radix.node import Node

MAX_NAMED = 10
"""Most page numbers that a message names."""


def check_index(index: TieredIndex) -> None:
    """Raises AssertionError when anything the index promises does not hold."""
    check_tree(index.tree)
    nodes = list(index.tree.nodes())
    _check_pool("device", index.device, [node.value for node in nodes if node.value is not None])
    _check_pool("host", index.host, [node.host_value for node in nodes if node.host_value is not None])
    for name, ledger in index.ledger().items():
        assert ledger.in_flight >= 0, f"{name}: {-ledger.in_flight} pages are both free and in the tree"
    _check_transfers(index)
    if index.options.hash_pages:
        _check_hashes(index, nodes)


def count_pages(index: TieredIndex, in_flight: Mapping[str, Pages]) -> dict[str, Ledger]:
    """The ledger of both tiers by name ("device", "host"), counted as sets: a page that is lost or owned twice shows.

    Args:
        index: whose allocators and tree own pages.
        in_flight: the pages of each tier that requests and transfers own.
    """
    nodes = list(index.tree.nodes())
    in_tree = {
        "device": concatenated([node.value for node in nodes if node.value is not None]),
        "host": concatenated([node.host_value for node in nodes if node.host_value is not None]),
    }
    pools = {"device": index.device, "host": index.host}
    return {name: _counted(pool, in_tree[name], in_flight[name]) for name, pool in pools.items()}


def check_balance(ledgers: Mapping[str, Ledger]) -> None:
    """Raises AssertionError naming the pages when a page is lost or owned twice."""
    for pool, ledger in ledgers.items():
        lost, doubled = ledger.lost[:MAX_NAMED], ledger.doubled[:MAX_NAMED]
        assert ledger.balanced, f"{pool}: pages lost {lost}, owned twice {doubled}"


def _counted(pool: PageAllocator, in_tree: Pages, in_flight: Pages) -> Ledger:
    free = pool.free_list()
    owners = np.bincount(np.concatenate([free, in_tree, in_flight]), minlength=pool.total)
    return Ledger(
        total=pool.total,
        free=len(free),
        in_tree=len(in_tree),
        in_flight=len(in_flight),
        lost=tuple(np.flatnonzero(owners == 0).tolist()),
        doubled=tuple(np.flatnonzero(owners > 1).tolist()),
    )


def _check_pool(name: str, pool: PageAllocator, values: list[Pages]) -> None:
    pool.check_integrity()
    pages = concatenated(values)
    assert len(np.unique(pages)) == len(pages), f"{name}: a page is in the tree twice"
    assert pool.is_held(pages), f"{name}: a page of the tree is free"


def _check_transfers(index: TieredIndex) -> None:
    transfers = index.transfers
    in_flight: list[Write | Load | Backup] = [*transfers.writes, *transfers.loads, *transfers.backups]
    for transfer in in_flight:
        node = transfer.node
        locked = isinstance(transfer, Load) or (isinstance(transfer, Write) and not transfer.blocking)
        held = node.lock_ref if locked else node.host_ref_counter
        assert held > 0, f"a transfer that ends at {node!r} is in flight and nothing keeps its pages"
        assert index.tree.contains(node), f"a transfer is in flight and {node!r} is gone"


def _check_hashes(index: TieredIndex, nodes: list[Node]) -> None:
    for node in nodes:
        assert node.parent is not None
        hashes = index.hashes_of(node, node.parent.hash_value)
        assert node.hash_value == hashes, f"{node!r} has hashes that are not chained from the root (D5)"
