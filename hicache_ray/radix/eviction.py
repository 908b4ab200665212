"""Eviction strategies: in which order candidates go. The smallest key goes first, then the smallest `seq` (case 32)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from hicache_ray.radix.node import Node


class EvictionStrategy(ABC):
    """Orders the nodes that may be evicted, on both tiers.

    Attributes:
        ascending: the key of a node never decreases while it lives, so a queue may notice late that it grew. Leave it
            False when in doubt: then every change is noticed at once.
    """

    ascending = False

    @abstractmethod
    def key(self, node: Node) -> Any:
        """What to compare: a function of the node's fields only, of one type for all nodes."""


class LRU(EvictionStrategy):
    """Least recently used first."""

    ascending = True

    def key(self, node: Node) -> Any:
        return node.last_access


class LFU(EvictionStrategy):
    """Fewest hits first, then least recently used."""

    ascending = True

    def key(self, node: Node) -> Any:
        return (node.hit_count, node.last_access)


class FIFO(EvictionStrategy):
    """Oldest first."""

    ascending = True

    def key(self, node: Node) -> Any:
        return node.creation


class MRU(EvictionStrategy):
    """Most recently used first; of nodes used in one operation the newest, as the recorded traces have it."""

    def key(self, node: Node) -> Any:
        return (-node.last_access, -node.seq)


class FILO(EvictionStrategy):
    """Newest first."""

    def key(self, node: Node) -> Any:
        return (-node.creation, -node.seq)


class Priority(EvictionStrategy):
    """Lowest priority first, then least recently used."""

    ascending = True

    def key(self, node: Node) -> Any:
        return (node.priority, node.last_access)


class SLRU(EvictionStrategy):
    """Segmented LRU: nodes hit fewer than `protected_hits` times first, each segment least recently used first."""

    ascending = True

    def __init__(self, protected_hits: int = 2) -> None:
        if protected_hits < 1:
            raise ValueError(f"protected_hits is {protected_hits}; it must be at least 1")
        self.protected_hits = protected_hits

    def key(self, node: Node) -> Any:
        return (node.hit_count >= self.protected_hits, node.last_access)


_STRATEGIES: dict[str, EvictionStrategy] = {
    "lru": LRU(),
    "lfu": LFU(),
    "fifo": FIFO(),
    "mru": MRU(),
    "filo": FILO(),
    "priority": Priority(),
    "slru": SLRU(),
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
    """Makes a strategy of your own available under `name`. A strategy holds no state of a tree: trees share it.

    Raises:
        ValueError: the name is taken by another strategy.
        TypeError: not an EvictionStrategy.
    """
    if not isinstance(strategy, EvictionStrategy):
        raise TypeError(f"strategy {strategy!r} for policy {name!r} is no EvictionStrategy instance")
    if _STRATEGIES.get(name, strategy) is not strategy:
        raise ValueError(f"eviction_policy {name!r} is taken by {_STRATEGIES[name]!r}; register under another name")
    _STRATEGIES[name] = strategy
