"""One node of the radix tree: a run of pages, where their KV is, and what evicting them depends on."""

from __future__ import annotations

from typing import Any

from hicache_ray.hashing import EMPTY_NAMESPACE, Namespace
from hicache_ray.pages import Pages


class Node:
    """A run of pages between two branching points.

    Attributes:
        key: the units of this node's pages.
        parent: None for the root, and for a node that is no longer in the tree.
        only_child: the child, where there is exactly one; most nodes of a conversation have one.
        branches: the children by the bytes of their first page, where there are several, else None. The root always
            has branches; there the namespace's seed stands before the page.
        value: L1 page of each page, or None when the node is not on the device.
        host_value: L2 page of each page, or None. Set when a write begins; the write's lock keeps it whole meanwhile.
        hash_value: page hash of each page, or None in a tree without hashes.
        stored: whether its pages were sent to L3, or came from there.
        lock_ref: locks that were taken on this node. A lock holds the whole path: see `locked`.
        locked_children: children that are locked. So a lock is passed up only as far as nothing was locked yet.
        host_ref_counter: operations that end at this node and need its host copy. The ancestors are safe through
            having a child, so a split has nothing to hand on.
        hit_count: inserts that went through this node (case 17).
        priority: highest priority it was inserted with.
        last_access, creation: logical times of the tree.
        seq: unique, in order of creation.
        pages: number of pages.
        end: depth of its last page, counted in pages from the root.
        namespace: of its whole path.
        device_children: children that are on the device.
        queue_entry: its entry in the queue of the tier it may be evicted from, or None.
        contribution: what the digest last saw of it.
    """

    __slots__ = (
        "branches",
        "contribution",
        "creation",
        "device_children",
        "end",
        "hash_value",
        "hit_count",
        "host_ref_counter",
        "host_value",
        "key",
        "last_access",
        "lock_ref",
        "locked_children",
        "namespace",
        "only_child",
        "pages",
        "parent",
        "priority",
        "queue_entry",
        "seq",
        "stored",
        "value",
    )

    def __init__(self, seq: int, parent: Node | None, key: bytes, pages: int, tick: int, priority: int) -> None:
        self.seq = seq
        self.parent = parent
        self.key = key
        self.pages = pages
        self.creation = self.last_access = tick
        self.priority = priority
        self.only_child: Node | None = None
        self.branches: dict[bytes, Node] | None = None
        self.value: Pages | None = None
        self.host_value: Pages | None = None
        self.hash_value: list[bytes] | None = None
        self.stored = False
        self.lock_ref = self.locked_children = self.host_ref_counter = self.hit_count = self.device_children = 0
        self.queue_entry: tuple[Any, int, Node] | None = None
        self.contribution = 0
        if parent is None:
            self.end = 0
            self.namespace: Namespace = EMPTY_NAMESPACE
        else:
            self.end = parent.end + pages
            self.namespace = parent.namespace

    @property
    def children(self) -> list[Node]:
        """The children in the order in which they came."""
        if self.branches is not None:
            return list(self.branches.values())
        return [] if self.only_child is None else [self.only_child]

    @property
    def start(self) -> int:
        """Depth of its first page, counted in pages from the root."""
        return self.end - self.pages

    @property
    def backuped(self) -> bool:
        """Whether it has a host copy, or one that is being written."""
        return self.host_value is not None

    @property
    def locked(self) -> bool:
        """Whether a lock on it or below keeps it on the device."""
        return self.lock_ref > 0 or self.locked_children > 0

    def __repr__(self) -> str:
        tiers = f"{'D' if self.value is not None else '-'}{'H' if self.host_value is not None else '-'}"
        return f"Node({self.seq}: pages {self.start}..{self.end}, {tiers}{', locked' if self.locked else ''})"
