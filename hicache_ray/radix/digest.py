"""A 64-bit digest of a tree, to compare replicas: kept up to date in proportion to what changed."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import xxhash

from hicache_ray.radix.node import Node

MASK = 2**64 - 1
_NODE = struct.Struct("<QQQqqqqqqqB")
_CLOCK = struct.Struct("<QQ")


def node_digest(node: Node) -> int:
    """What one node adds: its place, its key, the tiers it is on, and everything eviction depends on."""
    if node.key_hash is None:
        node.key_hash = xxhash.xxh3_64_intdigest(node.key)
    parent = node.parent
    return xxhash.xxh3_64_intdigest(
        _NODE.pack(
            node.seq,
            0 if parent is None else parent.seq,
            node.key_hash,
            node.end,
            node.lock_ref,
            node.host_ref_counter,
            node.hit_count,
            node.priority,
            node.last_access,
            node.creation,
            (node.value is not None) + 2 * (node.host_value is not None),
        )
    )


def clock_digest(tick: int, next_seq: int) -> int:
    """What the tree's logical clock and sequence counter add."""
    return xxhash.xxh3_64_intdigest(_CLOCK.pack(tick, next_seq))


class Digest:
    """Sum of the nodes' digests, modulo 2**64, so that their order does not matter.

    Every operation of the tree changes nodes along one path, and notes only the deepest of them; the sum is brought up to
    date from those notes when it is asked for. Until the first `value` nothing is noted.
    """

    __slots__ = ("_stamp", "_sum", "notes")

    MAX_NOTES = 1 << 16
    """Notes kept before they are worked off unasked, so that they take bounded memory."""

    def __init__(self) -> None:
        self._sum = 0
        self._stamp = 0
        self.notes: list[Node] | None = None

    def value(self, root: Node) -> int:
        """The sum over the tree under `root`, the root included."""
        if self.notes is None:
            self.notes = list(_subtree(root))
        self.work_off(root)
        return self._sum

    def bound(self, root: Node) -> None:
        """Works off the notes when there are many. Only between operations: one under way may change what it noted."""
        if self.notes is not None and len(self.notes) > self.MAX_NOTES:
            self.work_off(root)

    def work_off(self, root: Node) -> None:
        """Takes the noted changes into the sum."""
        self._stamp = stamp = self._stamp + 1
        total = self._sum
        for node in self.notes or ():
            if node.parent is None and node is not root:
                continue  # left the tree since; `drop` took it out of the sum and noted its parent
            while node.stamp != stamp:
                node.stamp = stamp
                now = node_digest(node)
                total += now - node.contribution
                node.contribution = now
                if node.parent is None:
                    break
                node = node.parent
        self._sum = total & MASK
        if self.notes:
            self.notes = []

    def drop(self, node: Node, parent: Node) -> None:
        """A node left the tree."""
        if self.notes is not None:
            self._sum = (self._sum - node.contribution) & MASK
            node.contribution = 0
            self.notes.append(parent)

    def reset(self) -> None:
        """The whole tree was dropped; the next `value` begins anew."""
        self._sum = 0
        self.notes = None


def _subtree(root: Node) -> Iterator[Node]:
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
