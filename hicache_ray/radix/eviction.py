"""In which order nodes are evicted: the strategies, and the queue of a tier's candidates (docs/design.md 3).

The node with the smallest key goes first, among equal keys the one with the smallest `seq` (case 32).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any

from hicache_ray.radix.node import Node


@dataclass(frozen=True)
class EvictionStrategy:
    """Orders the nodes that may be evicted, on both tiers.

    Attributes:
        key: what to compare; a function of the node's own fields, of one type for all nodes.
        ascending: the key of a node never decreases while it lives, so a queue may notice late that it grew. Leave it
            False when in doubt: then every change is noticed at once.
    """

    key: Callable[[Node], Any]
    ascending: bool = False


def segmented_lru(protected_hits: int = 2) -> EvictionStrategy:
    """Nodes hit fewer than `protected_hits` times first; within each segment the least recently used first.

    Raises:
        ValueError: protected_hits is below 1.
    """
    if protected_hits < 1:
        raise ValueError(f"protected_hits is {protected_hits}; it must be at least 1")
    return EvictionStrategy(lambda node: (node.hit_count >= protected_hits, node.last_access), ascending=True)


# The two that go backwards also go backwards among nodes of one operation, as the recorded traces have it.
_STRATEGIES: dict[str, EvictionStrategy] = {
    "lru": EvictionStrategy(attrgetter("last_access"), ascending=True),
    "lfu": EvictionStrategy(attrgetter("hit_count", "last_access"), ascending=True),
    "fifo": EvictionStrategy(attrgetter("creation"), ascending=True),
    "mru": EvictionStrategy(lambda node: (-node.last_access, -node.seq)),
    "filo": EvictionStrategy(lambda node: (-node.creation, -node.seq)),
    "priority": EvictionStrategy(attrgetter("priority", "last_access"), ascending=True),
    "slru": segmented_lru(),
}


def eviction_policies() -> tuple[str, ...]:
    """Names of the registered policies."""
    return tuple(_STRATEGIES)


def eviction_policy(name: str) -> EvictionStrategy:
    """The strategy registered under `name`.

    Raises:
        ValueError: no such policy.
    """
    try:
        return _STRATEGIES[name]
    except KeyError:
        raise ValueError(f"eviction_policy {name!r} is unknown; registered are {', '.join(_STRATEGIES)}") from None


def register_eviction_policy(name: str, strategy: EvictionStrategy) -> None:
    """Makes a strategy of your own available under `name`.

    Raises:
        ValueError: the name is taken by another strategy.
        TypeError: not an EvictionStrategy.
    """
    if not isinstance(strategy, EvictionStrategy):
        raise TypeError(f"strategy {strategy!r} for policy {name!r} is no EvictionStrategy")
    if _STRATEGIES.get(name, strategy) != strategy:
        raise ValueError(f"eviction_policy {name!r} is taken by another strategy; register under another name")
    _STRATEGIES[name] = strategy


QueueEntry = tuple[Any, int, Node]
"""(strategy key, seq, node)."""

_SLACK = 64
"""Outdated entries a queue may hold whatever its size, so that small queues are not rebuilt all the time."""


class CandidateQueue:
    """The nodes that may be evicted from one tier, updated as nodes change: a priority queue with lazy deletion.

    An entry is outdated once the node refers to another entry or to none; then it is
    dropped when it comes up. Most keys arrive in order (a leaf becomes a candidate right after it was used), so entries
    go to a sorted run and only the others to a heap: taking the next one costs O(1), at worst O(log n).

    Args:
        strategy: orders the nodes.
        is_candidate: whether a node may be evicted from this tier now. What keeps a node from being evicted leaves its
            entry where it is; the node is offered again when that ends.
    """

    def __init__(self, strategy: EvictionStrategy, is_candidate: Callable[[Node], bool]) -> None:
        self._key = strategy.key
        self._ascending = strategy.ascending
        self._is_candidate = is_candidate
        self._run: deque[QueueEntry] = deque()
        self._heap: list[QueueEntry] = []
        self._limit = _SLACK

    def offer(self, node: Node) -> None:
        """Queues a candidate, or moves it to its new place when its key changed."""
        queued = node.queue_entry
        if queued is not None and self._ascending:
            return  # that its key has grown is noticed when it comes up, which is never too late
        key = self._key(node)
        if queued is not None and queued[0] == key:
            return
        node.queue_entry = entry = (key, node.seq, node)
        run, heap = self._run, self._heap
        if not run or run[-1] < entry:
            run.append(entry)
        else:
            heappush(heap, entry)
        if len(run) + len(heap) > self._limit:
            self._drop_outdated()

    def pop(self, newcomer: Node | None = None) -> Node | None:
        """Takes out the candidate that goes first. Returns None when there is none.

        Args:
            newcomer: a candidate that is not queued yet. It is, unless it goes first itself: of an evicted node the
                parent mostly is next.
        """
        run, heap = self._run, self._heap
        if newcomer is not None:
            first = (self._key(newcomer), newcomer.seq)
            if not (run and run[0][:2] < first) and not (heap and heap[0][:2] < first):
                newcomer.queue_entry = None
                return newcomer
            self.offer(newcomer)
        while True:
            if run and (not heap or run[0] < heap[0]):
                entry = run.popleft()
            elif heap:
                entry = heappop(heap)
            else:
                return None
            key, _, node = entry
            if node.queue_entry is entry:
                node.queue_entry = None
                if self._is_candidate(node):
                    if self._key(node) == key:
                        return node
                    self.offer(node)

    def clear(self) -> None:
        """Forgets all entries; for a tree whose nodes are dropped together."""
        self._run.clear()
        self._heap.clear()
        self._limit = _SLACK

    def entries(self) -> Iterator[QueueEntry]:
        """All entries, outdated ones included, in no particular order; for audits."""
        yield from self._run
        yield from self._heap

    def __len__(self) -> int:
        """Entries, outdated ones included."""
        return len(self._run) + len(self._heap)

    def _drop_outdated(self) -> None:
        live = [entry for entry in self.entries() if entry[2].queue_entry is entry]
        self._heap.clear()
        self._run.clear()
        self._run.extend(sorted(live))
        self._limit = 2 * len(live) + _SLACK
