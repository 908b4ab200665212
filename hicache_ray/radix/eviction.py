"""Eviction strategies: in which order candidates go. The smallest key goes first, then the smallest `seq` (case 32)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
