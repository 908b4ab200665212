"""Turns what an index tells of its pages into KV events (cases 62, 63).

On the way of a step only references are noted; the events are made of them by whoever publishes them.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from hicache_ray.events.wire import MEDIA, AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, Token
from hicache_ray.hashing import EMPTY_NAMESPACE, Namespace, event_id
from hicache_ray.index import TieredIndex
from hicache_ray.index.types import EventKind, Tier
from hicache_ray.radix.node import Node

RESTARTED, PRESENT = "restarted", "present"
"""Reasons of the events with which a log begins anew."""


class Noted(NamedTuple):
    """One call of the index's event sink, with what a node may lose later: it splits and moves."""

    kind: EventKind
    tier: Tier
    reason: str
    hashes: tuple[bytes, ...] = ()
    parent: bytes | None = None
    units: bytes = b""
    namespace: Namespace = EMPTY_NAMESPACE


class RecordedBatch(NamedTuple):
    """What was noted in one step; `batch` makes events of it."""

    timestamp: float
    noted: tuple[Noted, ...]
    page_size: int
    bigram: bool

    def batch(self) -> EventBatch:
        """The events, in order."""
        return EventBatch(self.timestamp, tuple(self._event(noted) for noted in self.noted))

    def _event(self, noted: Noted) -> Event:
        medium = MEDIA[noted.tier]
        if noted.kind == "cleared":
            return AllBlocksCleared(medium, noted.reason)
        hashes = tuple(event_id(page_hash) for page_hash in noted.hashes)
        if noted.kind == "removed":
            return BlockRemoved(hashes, medium, noted.reason)
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if noted.parent is None else event_id(noted.parent),
            token_ids=self._tokens(noted.units),
            block_size=self.page_size,
            medium=medium,
            namespace=noted.namespace,
            reason=noted.reason,
        )

    def _tokens(self, units: bytes) -> tuple[Token, ...]:
        numbers = np.frombuffer(units, dtype="<u4")
        if self.bigram:
            return tuple((first, second) for first, second in numbers.reshape(-1, 2).tolist())
        return tuple(numbers.tolist())


class EventRecorder:
    """Notes the events of one index from now on. One recorder an index; the index carries page hashes from then on.

    The log begins with the clearing of every tier and what the index holds already, so that it alone gives the tree.
    """

    def __init__(self, index: TieredIndex) -> None:
        self._noted: list[Noted] = []
        self.begin(index)

    def begin(self, index: TieredIndex) -> None:
        """Begins the log anew with another index, or the same; what was noted and not taken is dropped."""
        self._index = index
        index.enable_hashes()
        index.events.sink = self._note
        self._noted = [Noted("cleared", "device", RESTARTED), Noted("cleared", "host", RESTARTED)]
        unwritten = index.transfers.unwritten()
        for node in index.tree.nodes():
            if node.value is not None:
                self._note("stored", "device", node, PRESENT)
            if node.host_value is not None and node not in unwritten:
                self._note("stored", "host", node, PRESENT)

    def take(self) -> RecordedBatch | None:
        """What was noted since the last call, with the time; None when that is nothing."""
        if not self._noted:
            return None
        noted, self._noted = tuple(self._noted), []
        return RecordedBatch(time.time(), noted, self._index.page_size, self._index.bigram)

    def close(self) -> None:
        """Notes nothing any more."""
        self._index.events.sink = None

    def _note(self, kind: EventKind, tier: Tier, node: Node, reason: str) -> None:
        if kind == "cleared":
            self._noted.append(Noted(kind, tier, reason))
            return
        assert node.hash_value is not None and node.parent is not None
        hashes = tuple(node.hash_value)
        if kind == "removed":
            self._noted.append(Noted(kind, tier, reason, hashes))
            return
        above = node.parent.hash_value
        parent = above[-1] if above else None
        self._noted.append(Noted(kind, tier, reason, hashes, parent, node.key, node.namespace))
