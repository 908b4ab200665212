"""TieredIndex: what a rank knows of L1 and L2, and what to move next; it moves no bytes (docs/design.md 3)."""

from __future__ import annotations

from dataclasses import replace

from hicache_ray.hashing import page_hashes
from hicache_ray.index.evictor import Evictor
from hicache_ray.index.transfers import Transfers, concatenated
from hicache_ray.index.types import (
    Events,
    IndexBusyError,
    IndexOptions,
    IndexStats,
    Inserted,
    Ledger,
    LoadBack,
    Match,
)
from hicache_ray.pages import Pages
from hicache_ray.pools.allocator import PageAllocator
from hicache_ray.radix.key import Key, page_bytes_of
from hicache_ray.radix.node import Node
from hicache_ray.radix.tree import RadixTree

_WRITE_THRESHOLDS = {"write_through": 1, "write_through_selective": 2, "write_back": 0}
"""Hits after which an insert writes a node to the host; 0: only its eviction does (case 22)."""
_CHANGEABLE = ("write_policy", "load_back_threshold")


class TieredIndex:
    """Radix tree, L1 and L2 allocators and the policies over them: the control half of a rank.

    Pages are page numbers, int64 arrays with one entry per page. Everything is deterministic: replicas that get the
    same calls stay equal, which `tree.digest()` shows.

    Args:
        options: what decides its behaviour.
        stats, events: counters and listener to go on with; new ones by default.

    Attributes:
        page_size, bigram: of its keys.
        tree: the radix tree.
        device, host: allocators of L1 and L2.
        transfers: those in flight, and their ends.
        evictor: makes room on both tiers.
        events: who is told what becomes of the pages (cases 62, 63).
        stats: counters.
    """

    def __init__(self, options: IndexOptions, *, stats: IndexStats | None = None, events: Events | None = None) -> None:
        self.page_size, self.bigram = options.page_size, options.bigram
        self.tree = RadixTree(
            page_bytes_of(self.page_size, self.bigram),
            options.eviction_policy,
            refresh_remainder=options.refresh_remainder,
        )
        self.device = PageAllocator(options.device_pages)
        self.host = PageAllocator(options.host_pages)
        self._tiered = options.host_pages > 0
        self.stats = stats or IndexStats()
        self.events = events or Events()
        self.transfers = Transfers(self.tree, self.events)
        self.evictor = Evictor(self.tree, self.device, self.host, self.transfers, self.stats, self.events)
        self._options = options
        self.options = options

    @property
    def options(self) -> IndexOptions:
        """The options as they are now. When to write and to load may be changed; what is in the tree stays as it is.

        Raises: ValueError for an unknown write policy, and for a change of anything else.
        """
        return self._options

    @options.setter
    def options(self, options: IndexOptions) -> None:
        if options.write_policy not in _WRITE_THRESHOLDS:
            raise ValueError(
                f"write_policy {options.write_policy!r} is unknown; give one of {', '.join(_WRITE_THRESHOLDS)}"
            )
        for name, value in vars(options).items():
            if name not in _CHANGEABLE and value != getattr(self._options, name):
                raise ValueError(f"{name} of an index can't be changed from {getattr(self._options, name)!r}")
        self._options = options
        self._write_threshold = _WRITE_THRESHOLDS[options.write_policy] if self._tiered else 0
        self._counts_hits = not (self._tiered and options.write_policy == "write_back")
        self.evictor.write_back = not self._counts_hits

    def emptied(self) -> TieredIndex:
        """A new index in the place of this one, with nothing in it: the same options, counters and listener."""
        return TieredIndex(self._options, stats=self.stats, events=self.events)

    # -- lookup ------------------------------------------------------------------------------------------------------

    def match(self, key: Key) -> Match:
        """Looks a key up: splits where it leaves the tree, and makes its path the most recent (cases 14 to 19).

        Raises:
            KeyKindError: the key was made for another page size or kind of unit.
        """
        tree = self.tree
        if key.page_bytes != tree.page_bytes:
            tree.check_key(key)
        node = device = host = tree.descend(key)
        while device.value is None:
            device = device.parent  # type: ignore[assignment]
        if self._tiered:
            while host.host_value is None:
                host = host.parent  # type: ignore[assignment]
        else:
            host = tree.root
        depth = device.end
        return Match(node, device, host, depth, node.end - depth, key, tree.epoch)

    def peek(self, key: Key) -> tuple[int, int]:
        """As `match`, without any effect: pages of the key on the device, and beyond those on the host only."""
        self.tree.check_key(key)
        return self.tree.find(key)

    def device_value(self, match: Match) -> Pages:
        """L1 pages of the match's device part, in order.

        Raises:
            ValueError: a part was evicted since the match, which so was not locked.
        """
        parts: list[Pages] = []
        node, root = match.device_node, self.tree.root
        while node is not root:
            if node.value is None or node.parent is None:
                raise ValueError(f"{node!r} was evicted since the match: lock a match before room is made")
            parts.append(node.value)
            node = node.parent
        parts.reverse()
        return concatenated(parts)

    # -- room --------------------------------------------------------------------------------------------------------

    def allocate(self, pages: int) -> Pages | None:
        """L1 pages; evicts only what is short of them. None, and nothing evicted, when locks leave too few."""
        short = pages - self.device.free_pages
        if short > 0:
            if short > self.tree.evictable_pages:
                return None
            self.evictor.evict_device(short)
        return self.device.alloc(pages)

    def allocate_host(self, pages: int) -> Pages | None:
        """L2 pages; evicts only what is short of them (cases 41, 42). None when that is not enough."""
        short = pages - self.host.free_pages
        if short > 0:
            self.evictor.evict_host(short)
        return self.host.alloc(pages)

    # -- insert ------------------------------------------------------------------------------------------------------

    def insert(
        self, key: Key, pages: Pages, *, match: Match | None = None, priority: int = 0, chunked: bool = False
    ) -> Inserted:
        """Enters computed pages, and begins the writes that the write policy asks for (cases 21 to 23).

        Args:
            key: the whole sequence.
            pages: L1 pages of the key's last len(pages) pages; those before must be on the device. All pages of the key
                will do, whatever is there already.
            match: handle from the lookup of a prefix of the key: the walk continues from there.
            priority: of the request; raises that of the shared prefix only (case 38).
            chunked: intermediate result of a chunked prefill: counts no hit and begins no write.

        Raises:
            ValueError: more pages than the key has, or pages missing before the given ones.
            KeyKindError: as `match`.
        """
        tree = self.tree
        if key.page_bytes != tree.page_bytes:
            tree.check_key(key)
        node = tree.descend(key, self._start_of(key, match))
        deepest = node
        while deepest.value is None:
            deepest = deepest.parent  # type: ignore[assignment]
        prefix = deepest.end
        first = key.pages - len(pages)
        if not 0 <= first <= prefix:
            raise ValueError(f"{len(pages)} pages given for a key of {key.pages}, of which {prefix} are on the device")
        counts = self._counts_hits and not chunked
        due = self._visit_path(node, priority, counts)
        if node is not deepest:
            self._recomputed(node, pages, first)
        if node.end < key.pages:
            node = self._add_leaf(node, key, pages[node.end - first :].copy(), priority)
            if counts:
                node.hit_count = 1
                if self._write_threshold == 1:
                    due.append(node)
        if not tree.strategy.ascending:
            tree.reorder(node)
        for written in due:
            # A host copy below a node without one could be left unreachable by the eviction of that node.
            if written.parent.host_value is not None:  # type: ignore[union-attr]
                self.evictor.write(written)
        return Inserted(prefix, node)

    def _start_of(self, key: Key, match: Match | None) -> Node | None:
        """Where the walk may continue: the match's node, if it still is in the tree and on this key's path."""
        if match is None or match.epoch != self.tree.epoch:
            return None
        node = match.node
        return node if node.parent is not None and key.starts_with(match.key, node.end) else None

    def _visit_path(self, node: Node, priority: int, counts: bool) -> list[Node]:
        """Refreshes and counts the nodes from `node` up; returns those whose write is due, from the top."""
        due: list[Node] = []
        root, tick, threshold = self.tree.root, self.tree.tick, self._write_threshold
        while node is not root:
            node.last_access = tick
            if node.priority < priority:
                node.priority = priority
            if counts and node.value is not None:
                node.hit_count += 1
                if threshold and node.host_value is None and node.hit_count >= threshold:
                    due.append(node)
            node = node.parent  # type: ignore[assignment]
        due.reverse()
        return due

    def _recomputed(self, node: Node, pages: Pages, first: int) -> None:
        """Puts the evicted nodes down to `node` on the device again, with the pages computed for them (case 21)."""
        evicted: list[Node] = []
        while node.value is None:
            evicted.append(node)
            node = node.parent  # type: ignore[assignment]
        for node in reversed(evicted):
            self.tree.set_device(node, pages[node.start - first : node.end - first].copy())
            self.events.emit("stored", "device", node, "computed")

    def _add_leaf(self, parent: Node, key: Key, value: Pages, priority: int) -> Node:
        node = self.tree.add_leaf(parent, key, value=value, host_value=None, priority=priority)
        if self._options.hash_pages:
            node.hash_value = self.hashes_of(node, parent.hash_value)
        if self.events.sink is not None:
            self.events.emit("stored", "device", node, "computed")
        return node

    # -- load back ---------------------------------------------------------------------------------------------------

    def load_back(self, match: Match, *, quota_pages: int | None = None) -> LoadBack | None:
        """Begins to load the host part of a match to the device, all of it or nothing (cases 39, 40).

        Returns None, and changes nothing, when there is nothing to load, it is shorter than the threshold or longer
        than the quota, or locks leave too little room on the device.
        """
        tree, bottom = self.tree, match.node
        if match.epoch != tree.epoch or not tree.contains(bottom):
            return None
        chain: list[Node] = []
        anchor = bottom
        while anchor.value is None:
            chain.append(anchor)
            anchor = anchor.parent  # type: ignore[assignment]
        count = bottom.end - anchor.end
        if not chain or count * self.page_size < self._options.load_back_threshold:
            return None
        if quota_pages is not None and count > quota_pages:
            return None
        device_pages = self._room_for_load(bottom, anchor, count)
        if device_pages is None:
            return None
        device_pages.setflags(write=False)  # the nodes keep parts of it
        chain.reverse()
        host_pages = concatenated([node.host_value for node in chain if node.host_value is not None])
        self.transfers.issue_load(bottom, anchor.end, device_pages, host_pages)
        at = 0
        for node in chain:
            tree.set_device(node, device_pages[at : at + node.pages])
            at += node.pages
            if self.events.sink is not None:
                self.events.emit("stored", "device", node, "loaded")
        self.stats.loaded_pages += count
        return LoadBack(device_pages, host_pages, bottom, count * self.page_size)

    def _room_for_load(self, bottom: Node, anchor: Node, count: int) -> Pages | None:
        device_pages = self.device.alloc(count)
        if device_pages is not None or count > self.device.free_pages + self.tree.evictable_pages:
            return device_pages
        # Neither what the load hangs below nor what it reads may go while room is made for it.
        self.tree.lock(anchor)
        self.tree.protect(bottom)
        if count <= self.device.free_pages + self.tree.evictable_pages:
            # The whole size, not the shortfall: what SGLang does, which the recorded traces show.
            self.evictor.evict_device(count)
            device_pages = self.device.alloc(count)
        self.tree.release(bottom)
        self.tree.unlock(anchor)
        return device_pages

    # -- pages from L3 -----------------------------------------------------------------------------------------------

    def attach_host(self, key: Key, anchor_pages: int, host_pages: Pages, hashes: list[bytes]) -> Pages:
        """Enters pages that came from L3 to the host, as a host-only node.

        Args:
            key: sequence up to the last of the pages.
            anchor_pages: depth in pages at which they begin.
            host_pages: L2 pages, one per page of the key from there on.
            hashes: their page hashes.

        Returns:
            The pages that were not used, for the caller to free: those whose place in the tree is taken, and all of
            them where the node above has no host copy (D2) or is gone.

        Raises:
            ValueError: pages, hashes and key don't agree in number.
            KeyKindError: as `match`.
        """
        self.tree.check_key(key)
        if not len(host_pages) == len(hashes) == key.pages - anchor_pages:
            raise ValueError(
                f"{len(host_pages)} pages and {len(hashes)} hashes for pages {anchor_pages} to {key.pages} of a key"
            )
        node = self.tree.descend(key)
        taken = node.end - anchor_pages
        if taken < 0 or taken == len(host_pages) or node.host_value is None:
            self.stats.refused_attachments += len(host_pages)
            return host_pages
        leaf = self.tree.add_leaf(node, key, value=None, host_value=host_pages[taken:].copy(), priority=node.priority)
        if self._options.hash_pages:
            leaf.hash_value = list(hashes[taken:])
        leaf.stored = True
        self.stats.attached_pages += leaf.pages
        self.stats.refused_attachments += taken
        self.events.emit("stored", "host", leaf, "fetched")
        return host_pages[:taken]

    def enable_hashes(self) -> None:
        """A store is attached: nodes carry page hashes from now on, those in the tree get theirs, chained from the root
        (D5), and none of them was sent to it."""
        self._options = replace(self._options, hash_pages=True)
        for node in self.tree.nodes():
            node.stored = False
            if node.hash_value is None:
                node.hash_value = self.hashes_of(node, node.parent.hash_value)  # type: ignore[union-attr]

    def hashes_of(self, node: Node, above: list[bytes] | None) -> list[bytes]:
        """Page hashes of a node, chained to those of its parent."""
        assert above is not None, f"{node!r} hangs below a node without hashes"
        prior = above[-1] if above else b""
        return page_hashes(node.key, self.page_size, prior=prior, namespace=node.namespace, bigram=self.bigram)

    # -- the whole ---------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Drops the whole tree and frees every page it holds.

        Raises:
            IndexBusyError: transfers, locks or protections are outstanding; nothing was changed.
        """
        tree = self.tree
        counts = {
            "writes": len(self.transfers.writes),
            "loads": len(self.transfers.loads),
            "backups": len(self.transfers.backups),
            "locked pages": tree.protected_pages,
            "host protections": tree.protections,
        }
        busy = [f"{count} {name}" for name, count in counts.items() if count]
        if busy:
            raise IndexBusyError(f"flush while {', '.join(busy)} are outstanding; end them first")
        self.events.emit("cleared", "device", tree.root, "flushed")
        self.events.emit("cleared", "host", tree.root, "flushed")
        nodes = list(tree.nodes())
        self.device.free(concatenated([node.value for node in nodes if node.value is not None]))
        self.host.free(concatenated([node.host_value for node in nodes if node.host_value is not None]))
        tree.clear()

    def ledger(self) -> dict[str, Ledger]:
        """Where the pages of each tier are, by count; `check_index` compares the pages themselves."""
        return {
            "device": _ledger(self.device, self.tree.device_pages),
            "host": _ledger(self.host, self.tree.host_pages),
        }


def _ledger(pool: PageAllocator, in_tree: int) -> Ledger:
    return Ledger(pool.total, pool.free_pages, in_tree, pool.total - pool.free_pages - in_tree)
