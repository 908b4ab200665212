"""What goes into the index and comes out of it: its options, lookups, transfers, counts, and events (cases 62, 63)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hicache_ray.pages import Pages
from hicache_ray.radix.eviction import EvictionStrategy
from hicache_ray.radix.key import Key
from hicache_ray.radix.node import Node


@dataclass(frozen=True, kw_only=True)
class IndexOptions:
    """Everything that decides how an index behaves: two with equal options and the same calls stay equal.

    Attributes:
        page_size: tokens a page.
        device_pages, host_pages: pages of L1 and L2. Without host pages there is one tier.
        eviction_policy: registered name, or a strategy.
        write_policy: "write_through", "write_through_selective" or "write_back" (case 22).
        load_back_threshold: fewest tokens worth loading from the host (case 39).
        hash_pages: nodes carry page hashes; needed once an L3 is attached, see `TieredIndex.enable_hashes`.
        bigram: keys are made of pairs of tokens (EAGLE).
        refresh_remainder: where a walk ends inside a node, the part of it that was not asked for counts as used too.
            True is SGLang's way and that of the recorded traces. False keeps more of what is asked for again: 2 % more
            hits in a chat trace whose working set is ten times the cache.
    """

    page_size: int
    device_pages: int
    host_pages: int
    eviction_policy: str | EvictionStrategy = "lru"
    write_policy: str = "write_through"
    load_back_threshold: int = 10
    hash_pages: bool = False
    bigram: bool = False
    refresh_remainder: bool = True


class IndexBusyError(RuntimeError):
    """Something is in flight or locked that must end first."""


class Match(NamedTuple):
    """Answer of a lookup, and the handle that the insert of the same prefix continues from.

    Attributes:
        node: deepest node matched.
        device_node: deepest matched node on the device (the root when there is none).
        host_node: deepest matched node with a host copy; the root counts as having one (case 53).
        device_pages: pages on the device.
        host_pages: pages beyond those, on the host only.
        key: what was asked.
        epoch: the tree's, so that a handle from before a flush is recognised.
    """

    node: Node
    device_node: Node
    host_node: Node
    device_pages: int
    host_pages: int
    key: Key
    epoch: int


class Inserted(NamedTuple):
    """Answer of an insert.

    Attributes:
        prefix_pages: pages of the key that were on the device before. The tree kept those; of the pages that were given
            for them, the caller frees the ones it owns.
        node: deepest node of the key.
    """

    prefix_pages: int
    node: Node


class LoadBack(NamedTuple):
    """A load that was begun: L1 pages that follow the match's device pages, in order.

    Attributes:
        device_pages: L1 pages, being written until the load is acknowledged.
        host_pages: L2 pages, read meanwhile.
        node: deepest node loaded; locked until the load is acknowledged.
        tokens: number of tokens loaded.
    """

    device_pages: Pages
    host_pages: Pages
    node: Node
    tokens: int


class Write(NamedTuple):
    """A copy L1 to L2. It names pages, not nodes, so a split meanwhile changes nothing about it (D1).

    Attributes:
        seq: unique among the index's transfers, increasing.
        node: node at whose end the pages end; after a split the pages reach up into its ancestors.
        start: depth in pages at which the pages begin.
        device_pages, host_pages: from and to, one entry per page.
        hashes: page hashes, or None in an index without them.
        blocking: write-back of an eviction. Its L1 pages are free already: the copy has to be finished before anything
            else is written into them. The host copy is protected until the acknowledgement.
    """

    seq: int
    node: Node
    start: int
    device_pages: Pages
    host_pages: Pages
    hashes: list[bytes] | None
    blocking: bool


class Load(NamedTuple):
    """A copy L2 to L1; attributes as in `Write`. `node` is locked until it is acknowledged."""

    seq: int
    node: Node
    start: int
    device_pages: Pages
    host_pages: Pages


class Backup(NamedTuple):
    """A copy L2 to L3, begun when the write to L2 was acknowledged; attributes as in `Write`.

    Attributes:
        hashes: hash of each page.
        prefix_hashes: hashes of all pages before them, from the root.
        prefix_pages: L2 pages of those, which stay there while this backup is in flight.
    """

    seq: int
    node: Node
    start: int
    host_pages: Pages
    hashes: list[bytes]
    prefix_hashes: list[bytes]
    prefix_pages: Pages


class Ledger(NamedTuple):
    """Where the pages of one tier are. Nothing is wrong where they add up: free + in_tree + in_flight == total.

    Attributes:
        total: pages of the pool.
        free: pages in the allocator.
        in_tree: pages held by nodes.
        in_flight: pages handed out and not in the tree: owned by requests and transfers.
        lost, doubled: pages that nobody owns, and those with more than one owner, where owners were counted.
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

    def as_dict(self) -> dict[str, int]:
        """The four counts, for reports."""
        return {"total": self.total, "free": self.free, "in_tree": self.in_tree, "in_flight": self.in_flight}


@dataclass(slots=True)
class IndexStats:
    """Counters since the index was made, in pages unless named otherwise.

    Attributes:
        evicted_device_pages: left the device, with or without a host copy.
        evicted_host_pages: left the host, and so the tree.
        dropped_pages: left the device without the host copy that `write_back` owed them, the host being full (D12).
        written_pages: writes to the host begun.
        loaded_pages: loads from the host begun.
        attached_pages: pages from L3 that became nodes.
        refused_writes: nodes, not pages, that were not written because the host had no room.
        refused_attachments: pages from L3 that were given back, being duplicates or without a host copy above (D2).
    """

    evicted_device_pages: int = 0
    evicted_host_pages: int = 0
    dropped_pages: int = 0
    written_pages: int = 0
    loaded_pages: int = 0
    attached_pages: int = 0
    refused_writes: int = 0
    refused_attachments: int = 0


EventKind = Literal["stored", "removed", "cleared"]
Tier = Literal["device", "host"]

EventSink = Callable[[EventKind, Tier, Node, str], None]
"""Called as sink(kind, tier, node, reason), while the node still is where the event finds it: before a removal, after a
store. `cleared` comes once per tier, with the root. A node is told apart by its path, not by identity: it may split.
"""


class Events:
    """The index's hook for events; without a sink it costs nothing."""

    __slots__ = ("sink",)

    def __init__(self) -> None:
        self.sink: EventSink | None = None

    def emit(self, kind: EventKind, tier: Tier, node: Node, reason: str) -> None:
        """Tells the sink, if there is one."""
        if self.sink is not None:
            self.sink(kind, tier, node, reason)
