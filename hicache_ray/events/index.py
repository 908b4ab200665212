"""The index a log of KV events leads to: per tier, the blocks it holds now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hicache_ray.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Token
from hicache_ray.hashing import EMPTY_NAMESPACE, Namespace


class ReplayError(ValueError):
    """An event that does not fit what came before: a block was stored twice, or removed from where it is not."""


class Block(NamedTuple):
    """One page of a tier.

    Attributes:
        parent: hash of the page before it; None at the root.
        tokens: its tokens.
        namespace: of its path.
    """

    parent: int | None
    tokens: tuple[Token, ...]
    namespace: Namespace = EMPTY_NAMESPACE


class EventIndex:
    """The blocks of every tier by hash, kept up to date with events. The parent of a block may be in another tier.

    Attributes:
        tiers: medium -> block hash -> block.
        whole: the log is known from its beginning. Otherwise blocks may be removed that were never seen stored.
    """

    def __init__(self, *, whole: bool = True) -> None:
        self.tiers: dict[str | None, dict[int, Block]] = {}
        self.whole = whole

    @classmethod
    def after(cls, log: Iterable[EventBatch]) -> EventIndex:
        """The index that a whole log leads to. ReplayError when the log contradicts itself."""
        index = cls()
        for batch in log:
            index.apply(batch)
        return index

    def apply(self, batch: EventBatch) -> None:
        """Applies the events of a batch in order.

        Raises:
            ReplayError: an event does not fit; those before it were applied.
        """
        for event in batch.events:
            if isinstance(event, AllBlocksCleared) and event.medium is None:
                self.tiers.clear()
            elif isinstance(event, AllBlocksCleared):
                self.tiers.pop(event.medium, None)
            elif isinstance(event, BlockStored):
                _store(self.tiers.setdefault(event.medium, {}), event)
            else:
                _remove(self.tiers.setdefault(event.medium, {}), event, self.whole)

    def clear(self) -> None:
        """Forgets everything, as after a gap in the log."""
        self.tiers.clear()

    def blocks(self, medium: str | None) -> dict[int, Block]:
        """The blocks of one tier by hash."""
        return self.tiers.get(medium, {})

    def leading(self, medium: str | None, block_hashes: Sequence[int]) -> int:
        """How many of a prompt's blocks the tier holds, counted from the first up to the first that is missing."""
        held = self.blocks(medium)
        for count, block_hash in enumerate(block_hashes):
            if block_hash not in held:
                return count
        return len(block_hashes)


def _store(held: dict[int, Block], event: BlockStored) -> None:
    parent, size = event.parent_block_hash, event.block_size
    for number, block_hash in enumerate(event.block_hashes):
        if block_hash in held:
            raise ReplayError(f"block {block_hash} is stored a second time in {event.medium}")
        held[block_hash] = Block(parent, event.token_ids[number * size : (number + 1) * size], event.namespace)
        parent = block_hash


def _remove(held: dict[int, Block], event: BlockRemoved, whole: bool) -> None:
    for block_hash in event.block_hashes:
        if held.pop(block_hash, None) is None and whole:
            raise ReplayError(f"block {block_hash} is removed from {event.medium}, which does not hold it")
