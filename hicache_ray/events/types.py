"""What a KV event says: which pages came to a tier, which left it, or that a tier was emptied (cases 62, 63).

Field names and media are vLLM's, so that routers made for vLLM or SGLang understand them. A block is one page.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from hicache_ray.hashing import EMPTY_NAMESPACE, Namespace

GPU, CPU = "GPU", "CPU"
MEDIA = {"device": GPU, "host": CPU}
"""Name of each tier in events."""

Token: TypeAlias = "int | tuple[int, int]"
"""A token id, or a pair of them where the cache is keyed by pairs (EAGLE)."""


class BlockStored(NamedTuple):
    """Blocks that follow one another came to a tier.

    Attributes:
        block_hashes: `hashing.event_id` of each page, in order; signed 64 bit.
        parent_block_hash: of the page before the first one; None at the root.
        token_ids: of all blocks, `block_size` a block.
        block_size: tokens a block.
        medium: tier, "GPU" or "CPU".
        namespace: of the path; adapter, cache salt and tenant.
        reason: "computed", "loaded" (from the host), "written" (to the host), "fetched" (from L3), or "present" (was
            there when the log began anew).
    """

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[Token, ...]
    block_size: int
    medium: str | None = None
    namespace: Namespace = EMPTY_NAMESPACE
    reason: str = ""


class BlockRemoved(NamedTuple):
    """Blocks left a tier.

    Attributes:
        block_hashes: as in `BlockStored`.
        medium: tier, "GPU" or "CPU".
        reason: "evicted", or "dropped" (without the host copy that `write_back` owed them).
    """

    block_hashes: tuple[int, ...]
    medium: str | None = None
    reason: str = ""


class AllBlocksCleared(NamedTuple):
    """A tier was emptied; without a medium, every tier.

    Attributes:
        medium: tier, "GPU" or "CPU", or None.
        reason: "flushed", or "restarted" where a log begins anew.
    """

    medium: str | None = None
    reason: str = ""


Event: TypeAlias = "BlockStored | BlockRemoved | AllBlocksCleared"


class EventBatch(NamedTuple):
    """Events of one step, in the order in which they took effect.

    Attributes:
        timestamp: seconds since the epoch.
        events: at least one.
        data_parallel_rank: of the publisher; 0 where there is only one.
    """

    timestamp: float
    events: tuple[Event, ...]
    data_parallel_rank: int | None = 0

    @property
    def begins_anew(self) -> bool:
        """Whether it first clears every tier: nothing that came before matters then."""
        cleared: set[str] = set()
        for event in self.events:
            if not isinstance(event, AllBlocksCleared):
                break
            cleared.update(MEDIA.values() if event.medium is None else (event.medium,))
        return cleared.issuperset(MEDIA.values())
