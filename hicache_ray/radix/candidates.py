"""The eviction candidates of one tier, in the order of a strategy, updated as nodes change (DESIGN 3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any, Literal

from hicache_ray.radix.eviction import EvictionStrategy
from hicache_ray.radix.node import Node

_SLACK = 64
"""Outdated entries a queue may hold whatever its size, so that small queues are not rebuilt all the time."""

Entry = tuple[Any, int, Node]


class CandidateQueue:
    """A priority queue with lazy deletion.

    An entry is (strategy key, seq, node). It is outdated once the node's slot holds another key; it is dropped when it
    comes up. Most keys arrive in order (a leaf becomes a candidate right after it was used), so entries go to a sorted
    run and only the others to a heap: taking the next one costs O(1), at worst O(log n).

    Args:
        strategy: orders the nodes.
        slot: attribute of a node that holds the key it is queued under.
        is_candidate: whether a node may be evicted from this tier now.
    """

    def __init__(
        self,
        strategy: EvictionStrategy,
        slot: Literal["device_key", "host_key"],
        is_candidate: Callable[[Node], bool],
    ) -> None:
        self.strategy = strategy
        self._key = strategy.key
        self._ascending = strategy.ascending
        self._slot = slot
        self._is_candidate = is_candidate
        self._run: deque[Entry] = deque()
        self._heap: list[Entry] = []
        self._queued = 0

    def offer(self, node: Node) -> None:
        """Queues a candidate, or moves it to its new place when its key changed."""
        queued = getattr(node, self._slot)
        if queued is None:
            self._queued += 1
        elif self._ascending:
            return  # the entry is found outdated when it comes up, never too late
        key = self._key(node)
        if key != queued:
            self._push(key, node)

    def pop(self) -> Node | None:
        """Takes out the candidate that goes first; None when there is none."""
        slot, run, heap = self._slot, self._run, self._heap
        while True:
            if run and (not heap or run[0] < heap[0]):
                key, _, node = run.popleft()
            elif heap:
                key, _, node = heappop(heap)
            else:
                return None
            if getattr(node, slot) != key:
                continue
            if self._is_candidate(node):
                current = self._key(node)
                if current != key:
                    self._push(current, node)
                    continue
                setattr(node, slot, None)
                self._queued -= 1
                return node
            setattr(node, slot, None)
            self._queued -= 1

    def clear(self) -> None:
        """Forgets all entries; for a tree whose nodes are dropped together."""
        self._run.clear()
        self._heap.clear()
        self._queued = 0

    def entries(self) -> Iterator[Entry]:
        """All entries, outdated ones included, in no particular order; for audits."""
        yield from self._run
        yield from self._heap

    def __len__(self) -> int:
        """Nodes that are queued; some of them may no longer be candidates."""
        return self._queued

    def _push(self, key: Any, node: Node) -> None:
        setattr(node, self._slot, key)
        entry = (key, node.seq, node)
        run = self._run
        if not run or run[-1] < entry:
            run.append(entry)
        else:
            heappush(self._heap, entry)
        # With ascending keys a node has one entry at most, so there is nothing to bound.
        if not self._ascending and len(run) + len(self._heap) > 2 * self._queued + _SLACK:
            self._drop_outdated()

    def _drop_outdated(self) -> None:
        slot = self._slot
        live = {entry[1]: entry for entry in (*self._run, *self._heap) if getattr(entry[2], slot) == entry[0]}
        self._run.clear()
        self._run.extend(sorted(live.values()))
        self._heap.clear()
