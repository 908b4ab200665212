"""The radix tree over the pages of L1 and L2: structure, locks, eviction candidates. Metadata only (docs/design.md 3).

A deterministic state machine: order and recency come from a logical clock, ties from a unique sequence number, so the
same calls give the same tree on every rank. It never frees or copies; it returns what its caller has to free.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hicache_ray.pages import NO_PAGES, Pages
from hicache_ray.radix.digest import MASK, Digest, clock_digest
from hicache_ray.radix.eviction import CandidateQueue, EvictionStrategy, eviction_policy
from hicache_ray.radix.key import Key
from hicache_ray.radix.node import Node


class LockError(ValueError):
    """A lock or a host protection was given back that is not held (case 36)."""


class KeyKindError(ValueError):
    """A key of another page size or kind than the tree's."""


def is_device_candidate(node: Node) -> bool:
    """Whether a node may be evicted from the device: on it, unlocked, and nothing below it on the device."""
    return node.value is not None and not (node.lock_ref or node.locked_children or node.device_children)


def is_host_candidate(node: Node) -> bool:
    """Whether a node may be evicted from the host: only there, a leaf, unlocked and unprotected (case 36)."""
    if node.value is not None or node.host_value is None or node.only_child is not None:
        return False
    return not (node.branches or node.lock_ref or node.host_ref_counter)


class RadixTree:
    """Nodes, locks and candidates. Along a path the nodes that are not on the device form a suffix.

    The root is on both tiers and holds no page, so that every upward walk ends there.

    Args:
        page_bytes: bytes of one page in a key.
        strategy: a registered eviction policy's name, or a strategy.
        refresh_remainder: a walk that ends inside a node makes the rest of that node recent too, as SGLang does and the
            recorded traces show. Without it only what was asked for becomes recent, which keeps more of it.

    Attributes:
        tick: the logical clock; every operation is a new point in time.
        next_seq: sequence number of the next node; the root has 0.
        node_count: nodes without the root.
        device_pages, host_pages: pages the tree holds on each tier.
        evictable_pages, protected_pages: pages on the device in unlocked and in locked nodes.
        protections: host protections held.
        splits: nodes split so far.
        epoch: incremented when the whole tree is dropped.
    """

    def __init__(
        self, page_bytes: int, strategy: str | EvictionStrategy = "lru", *, refresh_remainder: bool = True
    ) -> None:
        self.page_bytes = page_bytes
        self.refresh_remainder = refresh_remainder
        self.strategy = eviction_policy(strategy) if isinstance(strategy, str) else strategy
        self.tick = self.splits = self.epoch = self.protections = 0
        self.device_candidates = CandidateQueue(self.strategy, is_device_candidate)
        self.host_candidates = CandidateQueue(self.strategy, is_host_candidate)
        self.next_seq = 0
        self._plant()

    def _plant(self) -> None:
        self.root = Node(self._new_seq(), None, b"", 0, self.tick, 0)
        self.root.value = self.root.host_value = NO_PAGES
        self.root.hash_value = []
        self.root.branches = {}
        self._digest = Digest(self.root)
        self.node_count = self.device_pages = self.host_pages = self.evictable_pages = self.protected_pages = 0

    # -- walking -----------------------------------------------------------------------------------------------------

    def descend(self, key: Key, start: Node | None = None) -> Node:
        """The deepest node that `key` reaches; a node it reaches only in part is split at the page (cases 14, 15).

        Every node met becomes the most recent, see `refresh_remainder`. With `start`, a node on the key's path, the
        walk begins there and the nodes above it are left alone.
        """
        notes = self._digest.notes
        if notes is not None and len(notes) > Digest.MAX_NOTES:
            self._digest.work_off()
        self.tick = tick = self.tick + 1
        units, step = key.units, self.page_bytes
        node = self.root if start is None else start
        offset, size = node.end * step, len(units)
        while offset < size:
            child = node.only_child
            if child is None:
                if node.branches is None:
                    break
                child = node.branches.get(units[offset : offset + step] if offset else key.seed + units[:step])
                if child is None:
                    break
            if not units.startswith(child.key, offset):
                if units.startswith(child.key[:step], offset):
                    node = self._split_off(child, _shared_bytes(units, offset, child.key) // step)
                break
            child.last_access = tick
            node = child
            offset += len(child.key)
        if self._digest.notes is not None:
            self._digest.notes.append(node)
        if not self.strategy.ascending:
            self.reorder(node)
        return node

    def find(self, key: Key) -> tuple[int, int]:
        """Pages of `key` that are on the device, and pages beyond that only the host has. Changes nothing."""
        units, step = key.units, self.page_bytes
        node, offset, size = self.root, 0, len(key.units)
        device = host = 0
        while offset < size:
            head = units[offset : offset + step]
            child = node.only_child
            if node.branches is not None:
                child = node.branches.get(head if offset else key.seed + head)
            if child is None or not child.key.startswith(head):
                break
            whole = units.startswith(child.key, offset)
            pages = child.pages if whole else _shared_bytes(units, offset, child.key) // step
            if child.value is not None:
                device += pages
            else:
                host += pages
            if not whole:
                break
            node = child
            offset += len(child.key)
        return device, host

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents before children, children in the order in which they came."""
        stack = self.root.children[::-1]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))

    def contains(self, node: Node) -> bool:
        """Whether the node is in the tree (a node that was evicted from both tiers is not)."""
        return node.parent is not None or node is self.root

    def check_key(self, key: Key) -> None:
        """Raises KeyKindError when the key was made for another page size or kind of unit."""
        if key.page_bytes != self.page_bytes:
            raise KeyKindError(f"the key has pages of {key.page_bytes} bytes, the tree pages of {self.page_bytes}")

    # -- structure ---------------------------------------------------------------------------------------------------

    def add_leaf(self, parent: Node, key: Key, *, value: Pages | None, host_value: Pages | None, priority: int) -> Node:
        """A new node for the part of `key` below `parent`, on the tiers whose pages are given."""
        node = Node(
            self._new_seq(),
            parent,
            key.units[parent.end * self.page_bytes :],
            key.pages - parent.end,
            self.tick,
            priority,
        )
        if parent is self.root:
            node.namespace = key.namespace
        self._add_child(parent, node)
        self.node_count += 1
        if host_value is not None:
            self.set_host(node, host_value)
        if value is not None:
            self.set_device(node, value)
        elif host_value is not None:
            self.offer_host(node)
        if self._digest.notes is not None:
            self._digest.notes.append(node)
        return node

    def split(self, node: Node, pages: int) -> Node:
        """Cuts the first `pages` pages of a node off into a new parent, which is returned (case 16).

        The lower half keeps identity and sequence number; the upper half is new and inherits everything else.
        """
        parent, cut = node.parent, pages * self.page_bytes
        assert parent is not None and 0 < pages < node.pages, f"can't split {node!r} at page {pages}"
        upper = Node(self._new_seq(), parent, node.key[:cut], pages, self.tick, node.priority)
        upper.namespace = node.namespace
        upper.locked_children, upper.hit_count = int(node.locked), node.hit_count
        upper.stored = node.stored
        if parent.branches is not None:
            parent.branches[self._head(node)] = upper
        else:
            parent.only_child = upper
        node.parent, node.key = upper, node.key[cut:]
        node.pages -= pages
        upper.only_child = node
        if node.value is not None:
            upper.value, node.value = _cut(node.value, pages)
            upper.device_children = 1
        if node.host_value is not None:
            upper.host_value, node.host_value = _cut(node.host_value, pages)
        if node.hash_value is not None:
            upper.hash_value, node.hash_value = node.hash_value[:pages], node.hash_value[pages:]
        self.node_count += 1
        self.splits += 1
        self.note(node)
        return upper

    def remove(self, node: Node) -> None:
        """Takes a leaf that is on no tier any more out of the tree."""
        parent = node.parent
        assert parent is not None and node.only_child is None and not node.branches, f"{node!r} is no leaf"
        self._remove_child(parent, node)
        node.parent = None
        self.node_count -= 1
        if self._digest.notes is not None:
            self._digest.drop(node, parent)
        if parent.value is None:
            self.offer_host(parent)

    def clear(self) -> None:
        """Drops every node. What they held is the caller's to free, before the call."""
        for node in self.root.children:
            node.parent = None
        self.device_candidates.clear()
        self.host_candidates.clear()
        self.protections = 0
        self.epoch += 1
        self._plant()

    # -- tiers -------------------------------------------------------------------------------------------------------

    def set_device(self, node: Node, value: Pages) -> None:
        """The node's pages are on the device now. Its parent must be there."""
        parent = node.parent
        assert parent is not None and parent.value is not None, f"{node!r} would be below an evicted node"
        node.value = value
        node.queue_entry = None  # of the host's queue, if any
        parent.device_children += 1
        self.device_pages += node.pages
        if node.lock_ref or node.locked_children:
            self.protected_pages += node.pages
        else:
            self.evictable_pages += node.pages
            self.device_candidates.offer(node)

    def clear_device(self, node: Node) -> Pages:
        """The node leaves the device; its L1 pages are returned.

        It may become a candidate on the host. That its parent may become one on the device is left to the caller.
        """
        parent, value, pages = node.parent, node.value, node.pages
        assert parent is not None and value is not None
        node.value = None
        parent.device_children -= 1
        self.device_pages -= pages
        self.evictable_pages -= pages
        if node.host_value is not None and node.only_child is None:
            self.offer_host(node)
        if self._digest.notes is not None:
            self._digest.notes.append(node)
        return value

    def set_host(self, node: Node, host_value: Pages) -> None:
        """The node has a host copy now."""
        node.host_value = host_value
        self.host_pages += node.pages
        if self._digest.notes is not None:
            self._digest.notes.append(node)

    def clear_host(self, node: Node) -> Pages:
        """The node loses its host copy; its L2 pages are returned."""
        host_value = node.host_value
        assert host_value is not None and node.host_ref_counter == 0, f"{node!r} has no host copy to give"
        node.host_value = None
        self.host_pages -= node.pages
        return host_value

    # -- locks -------------------------------------------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Keeps a node and everything above it on the device, until `unlock`."""
        root = self.root
        if node.parent is None:
            self._check_alive(node)
            return  # the root is never evicted
        if self._digest.notes is not None:
            self._digest.notes.append(node)
        node.lock_ref += 1
        if node.lock_ref > 1 or node.locked_children:
            return
        newly, parent = 0, node.parent
        while True:
            if node.value is not None:
                newly += node.pages
            parent.locked_children += 1
            if parent is root or parent.lock_ref or parent.locked_children > 1:
                break
            node, parent = parent, parent.parent  # type: ignore[assignment]
        self.evictable_pages -= newly
        self.protected_pages += newly

    def unlock(self, node: Node) -> None:
        """Gives a lock back. A split in between is no matter: both halves were kept, and both are let go.

        Raises:
            LockError: the node is not locked.
        """
        root, bottom = self.root, node
        if node.parent is None:
            self._check_alive(node)
            return
        if node.lock_ref == 0:
            raise LockError(f"{node!r} has no lock to give back")
        if self._digest.notes is not None:
            self._digest.notes.append(node)
        node.lock_ref -= 1
        if node.lock_ref or node.locked_children:
            return
        newly, parent = 0, node.parent
        while True:
            if node.value is not None:
                newly += node.pages
            parent.locked_children -= 1
            if parent is root or parent.lock_ref or parent.locked_children:
                break
            node, parent = parent, parent.parent  # type: ignore[assignment]
        self.evictable_pages += newly
        self.protected_pages -= newly
        if bottom.value is None:
            self.reorder(bottom)
        elif not bottom.device_children:
            self.device_candidates.offer(bottom)

    def protect(self, node: Node) -> None:
        """Keeps a node's host copy, and so those above it, until `release`."""
        self._check_alive(node)
        node.host_ref_counter += 1
        self.protections += 1
        self.note(node)

    def release(self, node: Node) -> None:
        """Gives a protection back.

        Raises:
            LockError: the node is not protected (case 36).
        """
        if node.host_ref_counter == 0:
            raise LockError(f"the host copy of {node!r} is not protected")
        node.host_ref_counter -= 1
        self.protections -= 1
        self.note(node)
        self.offer_host(node)

    def _check_alive(self, node: Node) -> None:
        if node.parent is None and node is not self.root:
            raise LockError(f"{node!r} is no longer in the tree")

    # -- candidates --------------------------------------------------------------------------------------------------

    def offer_device(self, node: Node) -> None:
        """Queues the node for eviction from the device if it may be evicted."""
        if is_device_candidate(node) and node is not self.root:
            self.device_candidates.offer(node)

    def offer_host(self, node: Node) -> None:
        """Queues the node for eviction from the host if it may be evicted."""
        if node.value is None and is_host_candidate(node):
            self.host_candidates.offer(node)

    def reorder(self, node: Node) -> None:
        """Queues what may be evicted on the path down to `node`, at the place its state asks for now."""
        if node.value is None:
            self.offer_host(node)
            while node.value is None:
                node = node.parent  # type: ignore[assignment]
        self.offer_device(node)

    # -- digest ------------------------------------------------------------------------------------------------------

    def note(self, node: Node) -> None:
        """Something on the path down to `node` changed, which the digest has to see."""
        if self._digest.notes is not None:
            self._digest.notes.append(node)

    def digest(self) -> int:
        """64 bits over structure and state; equal calls give equal digests. Costs what changed since the last call."""
        return (self._digest.value() + clock_digest(self.tick, self.next_seq)) & MASK

    # -- internals ---------------------------------------------------------------------------------------------------

    def _new_seq(self) -> int:
        seq = self.next_seq
        self.next_seq = seq + 1
        return seq

    def _split_off(self, child: Node, pages: int) -> Node:
        if self.refresh_remainder:
            child.last_access = self.tick
        upper = self.split(child, pages)
        self.reorder(child)
        return upper

    def _add_child(self, parent: Node, node: Node) -> None:
        if parent.branches is not None:
            parent.branches[self._head(node)] = node
        elif parent.only_child is None:
            parent.only_child = node
        else:
            parent.branches = {self._head(child): child for child in (parent.only_child, node)}
            parent.only_child = None

    def _remove_child(self, parent: Node, node: Node) -> None:
        branches = parent.branches
        if branches is None:
            parent.only_child = None
            return
        del branches[self._head(node)]
        if len(branches) == 1 and parent is not self.root:
            (parent.only_child,) = branches.values()
            parent.branches = None

    def _head(self, node: Node) -> bytes:
        head = node.key[: self.page_bytes]
        return node.namespace.seed + head if node.parent is self.root else head


def _shared_bytes(units: bytes, offset: int, part: bytes) -> int:
    """Bytes that `units` from `offset` on and `part` share at their beginnings, in whole words of 4 bytes."""
    words = min(len(part), len(units) - offset) // 4
    left = np.frombuffer(units, np.uint32, words, offset)
    differs = left != np.frombuffer(part, np.uint32, words)
    first = int(differs.argmax())
    return 4 * (first if differs[first] else words)


def _cut(pages: Pages, at: int) -> tuple[Pages, Pages]:
    # Copies, so that neither half keeps the other's memory alive.
    return pages[:at].copy(), pages[at:].copy()
