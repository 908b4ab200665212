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
    parent = node.parent
    return xxhash.xxh3_64_intdigest(
        _NODE.pack(
            node.seq,
            0 if parent is None else parent.seq,
            xxhash.xxh3_64_intdigest(node.key),
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

    Every operation of the tree changes nodes along one path, and notes only the deepest of them; the sum is brought up
    to date from those notes when it is asked for. Until the first `value` nothing is noted.

    Attributes:
        notes: deepest nodes of the paths that changed, or None before the first `value`.
    """

    __slots__ = ("_root", "_sum", "notes")

    MAX_NOTES = 1 << 16
    """Notes kept before they are worked off unasked, so that they take bounded memory."""

    def __init__(self, root: Node) -> None:
        self._root = root
        self._sum = 0
        self.notes: list[Node] | None = None

    def value(self) -> int:
        """The sum over the tree, the root included."""
        if self.notes is None:
            self.notes = list(_subtree(self._root))
        self.work_off()
        return self._sum

    def drop(self, node: Node, parent: Node) -> None:
        """A node left the tree."""
        if self.notes is not None:
            self._sum = (self._sum - node.contribution) & MASK
            node.contribution = 0
            self.notes.append(parent)

    def work_off(self) -> None:
        """Takes the noted changes into the sum. Only between operations: one under way may change what it noted."""
        root, total = self._root, self._sum
        seen = {root.seq}
        for node in self.notes or ():
            if node.parent is None:
                continue  # the root, or a node that left the tree: `drop` took it out and noted its parent
            while node.seq not in seen:
                seen.add(node.seq)
                now = node_digest(node)
                total += now - node.contribution
                node.contribution = now
                node = node.parent
        now = node_digest(root)
        self._sum = (total + now - root.contribution) & MASK
        root.contribution = now
        if self.notes:
            self.notes = []


def _subtree(root: Node) -> Iterator[Node]:
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children)
