"""The slow and obvious TieredIndex: lists, scans and recomputation, to compare the fast one with (D11).

A lock or protection is a remembered node; how often a node is locked is counted when asked. Candidates are found by
looking at every node. Pages are Python integers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from hicache_ray.hashing import page_hashes

Page = tuple[bytes, bytes]
"""One page of a key as it distinguishes nodes: (namespace seed, units)."""

ORDER: dict[str, Callable[[NaiveNode], Any]] = {
    "lru": lambda node: (node.last_access, node.seq),
    "lfu": lambda node: (node.hit_count, node.last_access, node.seq),
    "fifo": lambda node: (node.creation, node.seq),
    "mru": lambda node: (-node.last_access, -node.seq),
    "filo": lambda node: (-node.creation, -node.seq),
    "priority": lambda node: (node.priority, node.last_access, node.seq),
    "slru": lambda node: (node.hit_count >= 2, node.last_access, node.seq),
}


class NaiveNode:
    """A node: pages, and a list of page numbers for each tier it is on."""

    def __init__(self, seq: int, parent: NaiveNode | None, pages: list[Page], tick: int, priority: int) -> None:
        self.seq = seq
        self.parent = parent
        self.pages = pages
        self.children: list[NaiveNode] = []
        self.device: list[int] | None = None
        self.host: list[int] | None = None
        self.hit_count = 0
        self.priority = priority
        self.creation = self.last_access = tick

    def path(self) -> list[NaiveNode]:
        """The nodes from below the root down to this one."""
        return [] if self.parent is None else [*self.parent.path(), self]

    @property
    def depth(self) -> int:
        """Pages from the root to the end of this node."""
        return sum(len(node.pages) for node in self.path())


class NaiveMatch(NamedTuple):
    """As Match."""

    node: NaiveNode
    device_node: NaiveNode
    host_node: NaiveNode
    device_pages: int
    host_pages: int


class NaiveIndex:
    """The same operations as TieredIndex, with the same meaning."""

    def __init__(
        self,
        device_pages: int,
        host_pages: int,
        policy: str,
        write_policy: str,
        load_pages: int,
        page_size: int,
        refresh_remainder: bool,
    ) -> None:
        self.order = ORDER[policy]
        self.refresh_remainder = refresh_remainder
        self.write_policy = write_policy
        self.load_pages = load_pages
        self.page_size = page_size
        self.tiered = host_pages > 0
        self.free_device = deque(range(device_pages))
        self.free_host = deque(range(host_pages))
        self.tick = self.seqs = 0
        self.locks: list[NaiveNode] = []
        self.protections: list[NaiveNode] = []
        self.writes: deque[tuple[NaiveNode, int, bool]] = deque()
        self.loads: deque[NaiveNode] = deque()
        self.backups: deque[NaiveNode] = deque()
        self.dropped = 0
        self.root = self._root()

    def _root(self) -> NaiveNode:
        root = NaiveNode(self._seq(), None, [], self.tick, 0)
        root.device, root.host = [], []
        return root

    def _seq(self) -> int:
        self.seqs += 1
        return self.seqs - 1

    # -- what can be seen --------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[NaiveNode]:
        """All nodes but the root."""

        def below(node: NaiveNode) -> Iterator[NaiveNode]:
            for child in node.children:
                yield child
                yield from below(child)

        return below(self.root)

    def lock_ref(self, node: NaiveNode) -> int:
        """Locks held on the node or below it."""
        return sum(node in bottom.path() for bottom in self.locks)

    def evictable(self) -> int:
        """Pages on the device in unlocked nodes."""
        return sum(len(node.device) for node in self.nodes() if node.device is not None and not self.lock_ref(node))

    def hashes(self, node: NaiveNode, bigram: bool) -> list[bytes]:
        """Page hashes of the node, computed from the root."""
        units = b"".join(page[1] for step in node.path() for page in step.pages)
        seed = node.path()[0].pages[0][0]
        return page_hashes(units, self.page_size, prior=seed, bigram=bigram)[node.depth - len(node.pages) :]

    # -- lookup and insert -------------------------------------------------------------------------------------------

    def _descend(self, key: list[Page]) -> NaiveNode:
        self.tick += 1
        node, rest = self.root, key
        while rest:
            child = next((child for child in node.children if child.pages[0] == rest[0]), None)
            if child is None:
                break
            shared = 0
            while shared < min(len(child.pages), len(rest)) and child.pages[shared] == rest[shared]:
                shared += 1
            if shared == len(child.pages) or self.refresh_remainder:
                child.last_access = self.tick
            if shared < len(child.pages):
                return self._split(child, shared)
            node, rest = child, rest[shared:]
        return node

    def _split(self, node: NaiveNode, at: int) -> NaiveNode:
        assert node.parent is not None
        upper = NaiveNode(self._seq(), node.parent, node.pages[:at], self.tick, node.priority)
        upper.hit_count = node.hit_count
        if node.device is not None:
            upper.device, node.device = node.device[:at], node.device[at:]
        if node.host is not None:
            upper.host, node.host = node.host[:at], node.host[at:]
        node.parent.children[node.parent.children.index(node)] = upper
        upper.children, node.parent, node.pages = [node], upper, node.pages[at:]
        return upper

    def match(self, key: list[Page]) -> NaiveMatch:
        node = device = host = self._descend(key)
        while device.device is None:
            assert device.parent is not None
            device = device.parent
        while self.tiered and host.host is None:
            assert host.parent is not None
            host = host.parent
        return NaiveMatch(node, device, host if self.tiered else self.root, device.depth, node.depth - device.depth)

    def insert(self, key: list[Page], pages: list[int], priority: int, chunked: bool) -> int:
        node = self._descend(key)
        path = node.path()
        prefix = sum(len(step.pages) for step in path if step.device is not None)
        first = len(key) - len(pages)
        counts = not chunked and not (self.tiered and self.write_policy == "write_back")
        due: list[NaiveNode] = []
        for step in path:
            step.last_access = self.tick
            step.priority = max(step.priority, priority)
            if step.device is None:
                step.device = pages[step.depth - len(step.pages) - first : step.depth - first]
            elif counts:
                step.hit_count += 1
                due.append(step)
        if node.depth < len(key):
            leaf = NaiveNode(self._seq(), node, key[node.depth :], self.tick, priority)
            leaf.device = pages[node.depth - first :]
            leaf.hit_count = int(counts)
            node.children.append(leaf)
            due.append(leaf)
        threshold = {"write_through": 1, "write_through_selective": 2, "write_back": 1 << 30}[self.write_policy]
        for step in due:
            assert step.parent is not None
            if self.tiered and step.host is None and step.hit_count >= threshold and step.parent.host is not None:
                self._write(step, False)
        return prefix

    # -- room --------------------------------------------------------------------------------------------------------

    def alloc(self, free: deque[int], pages: int) -> list[int] | None:
        """Pages off a free list, or None."""
        return [free.popleft() for _ in range(pages)] if pages <= len(free) else None

    def allocate(self, pages: int) -> list[int] | None:
        if pages > len(self.free_device) + self.evictable():
            return None
        self.evict(pages - len(self.free_device))
        return self.alloc(self.free_device, pages)

    def allocate_host(self, pages: int) -> list[int] | None:
        self.evict_host(pages - len(self.free_host))
        return self.alloc(self.free_host, pages)

    def evict(self, pages: int) -> int:
        freed: list[int] = []
        kept: list[NaiveNode] = []
        while len(freed) < pages:
            leaves = [node for node in self.nodes() if self._is_device_leaf(node) and node not in kept]
            if not leaves:
                break
            node = min(leaves, key=self.order)
            assert node.device is not None and node.parent is not None
            needs_copy = node.host is None and (self.write_back or node.children)
            if needs_copy and not self._write(node, True):
                if node.children:
                    kept.append(node)
                    continue
                self.dropped += len(node.pages)
            freed += node.device
            node.device = None
            if node.host is None:
                node.parent.children.remove(node)
        self.free_device.extend(freed)
        return len(freed)

    @property
    def write_back(self) -> bool:
        return self.tiered and self.write_policy == "write_back"

    def _is_device_leaf(self, node: NaiveNode) -> bool:
        below = any(child.device is not None for child in node.children)
        return node.device is not None and not below and not self.lock_ref(node)

    def evict_host(self, pages: int) -> int:
        freed: list[int] = []
        while len(freed) < pages:
            leaves = [node for node in self.nodes() if self._is_host_leaf(node)]
            if not leaves:
                break
            node = min(leaves, key=self.order)
            assert node.host is not None and node.parent is not None
            freed += node.host
            node.parent.children.remove(node)
        self.free_host.extend(freed)
        return len(freed)

    def _is_host_leaf(self, node: NaiveNode) -> bool:
        free = not node.children and not self.lock_ref(node) and node not in self.protections
        return free and node.device is None

    def _write(self, node: NaiveNode, blocking: bool) -> bool:
        pages = self.alloc(self.free_host, len(node.pages))
        if pages is None:
            self.evict_host(len(node.pages))
            pages = self.alloc(self.free_host, len(node.pages))
        if pages is None:
            return False
        node.host = pages
        (self.protections if blocking else self.locks).append(node)
        self.writes.append((node, node.depth - len(node.pages), blocking))
        return True

    # -- transfers ---------------------------------------------------------------------------------------------------

    def load_back(self, bottom: NaiveNode, quota: int | None) -> list[int] | None:
        evicted = [node for node in bottom.path() if node.device is None]
        count = sum(len(node.pages) for node in evicted)
        if not count or count < self.load_pages or (quota is not None and count > quota):
            return None
        anchor = evicted[0].parent
        assert anchor is not None
        pages = self.alloc(self.free_device, count)
        if pages is None:
            self.locks.append(anchor)
            self.protections.append(bottom)
            if count <= len(self.free_device) + self.evictable():
                self.evict(count)
                pages = self.alloc(self.free_device, count)
            self.locks.remove(anchor)
            self.protections.remove(bottom)
        if pages is None:
            return None
        at = 0
        for node in evicted:
            node.device = pages[at : at + len(node.pages)]
            at += len(node.pages)
        self.locks.append(bottom)
        self.loads.append(bottom)
        return pages

    def acknowledge_write(self) -> tuple[NaiveNode, int, bool]:
        write = self.writes.popleft()
        (self.protections if write[2] else self.locks).remove(write[0])
        return write

    def acknowledge_load(self) -> None:
        self.locks.remove(self.loads.popleft())

    def begin_backup(self, node: NaiveNode) -> None:
        self.protections.append(node)
        self.backups.append(node)

    def acknowledge_backup(self) -> None:
        self.protections.remove(self.backups.popleft())

    def attach_host(self, key: list[Page], anchor_pages: int, pages: list[int]) -> list[int]:
        node = self._descend(key)
        taken = node.depth - anchor_pages
        if taken < 0 or taken == len(pages) or node.host is None:
            return pages
        leaf = NaiveNode(self._seq(), node, key[node.depth :], self.tick, node.priority)
        leaf.host = pages[taken:]
        node.children.append(leaf)
        return pages[:taken]

    def flush(self) -> None:
        for node in self.nodes():
            self.free_device.extend(node.device or ())
            self.free_host.extend(node.host or ())
        self.root = self._root()
