"""Making room: evictions from L1 and L2, and the writes to L2 that go with them."""

from __future__ import annotations

from hicache_ray.index.transfers import Transfers, concatenated
from hicache_ray.index.types import Events, IndexStats
from hicache_ray.pages import Pages
from hicache_ray.pools.allocator import PageAllocator
from hicache_ray.radix.node import Node
from hicache_ray.radix.tree import RadixTree, is_device_candidate


class Evictor:
    """Takes nodes off the tiers in the order of the strategy, whole nodes only (case 33).

    Attributes:
        write_back: nodes without a host copy are written to the host when they are evicted.
    """

    def __init__(
        self,
        tree: RadixTree,
        device: PageAllocator,
        host: PageAllocator,
        transfers: Transfers,
        stats: IndexStats,
        events: Events,
    ) -> None:
        self._tree = tree
        self._device = device
        self._host = host
        self._transfers = transfers
        self._stats = stats
        self._events = events
        self.write_back = False

    def evict_device(self, pages: int) -> int:
        """Frees at least `pages` L1 pages if there are so many in unlocked nodes; returns how many were freed."""
        tree, write_back, sink = self._tree, self.write_back, self._events.sink
        freed: list[Pages] = []
        kept: list[Node] = []
        promoted: Node | None = None
        count = 0
        while count < pages:
            node = tree.device_candidates.pop(promoted)
            promoted = None
            if node is None:
                break
            reason = "evicted"
            if node.host_value is None and (write_back or node.only_child is not None or node.branches):
                reason = self._secure(node)
                if not reason:
                    kept.append(node)
                    continue
            if sink is not None:
                sink("removed", "device", node, reason)
            count += node.pages
            parent = node.parent
            freed.append(tree.clear_device(node))
            if node.host_value is None:
                tree.remove(node)
            if parent is not None and parent is not tree.root and is_device_candidate(parent):
                promoted = parent  # case 35
        for node in kept if promoted is None else (promoted, *kept):
            tree.offer_device(node)
        if freed:
            self._device.free(concatenated(freed))
            self._stats.evicted_device_pages += count
        return count

    def evict_host(self, pages: int) -> int:
        """Frees at least `pages` L2 pages if so many are in host-only nodes that nothing needs; returns how many."""
        tree = self._tree
        freed: list[Pages] = []
        count = 0
        while count < pages:
            node = tree.host_candidates.pop()
            if node is None:
                break
            if self._events.sink is not None:
                self._events.emit("removed", "host", node, "evicted")
            count += node.pages
            freed.append(tree.clear_host(node))
            tree.remove(node)
        if freed:
            self._host.free(concatenated(freed))
            self._stats.evicted_host_pages += count
        return count

    def write(self, node: Node, *, blocking: bool = False) -> bool:
        """Begins to copy a node to the host. Returns False when the host has no room for it."""
        host_pages = self._host.alloc(node.pages)
        if host_pages is None:
            # The whole size, not the shortfall: what SGLang does, which the recorded traces show.
            self.evict_host(node.pages)
            host_pages = self._host.alloc(node.pages)
        if host_pages is None:
            self._stats.refused_writes += 1
            return False
        self._transfers.issue_write(node, host_pages, blocking)
        self._stats.written_pages += node.pages
        return True

    def _secure(self, node: Node) -> str:
        """Writes a node back to the host: why it may leave the device now, or "" when it may not.

        Without write_back that is for a node over host-only ones, left by an earlier write policy.
        """
        if self.write(node, blocking=True):
            return "evicted"
        if node.children:
            return ""
        self._stats.dropped_pages += node.pages
        return "dropped"
