"""The control half of a rank: one radix tree over the pages of L1 and L2, and the transfers between the tiers."""

from __future__ import annotations

from hicache_ray.index.tiered import TieredIndex
from hicache_ray.index.types import (
    Backup,
    IndexBusyError,
    IndexOptions,
    IndexStats,
    Inserted,
    Ledger,
    Load,
    LoadBack,
    Match,
    Write,
)

__all__ = [
    "Backup",
    "IndexBusyError",
    "IndexOptions",
    "IndexStats",
    "Inserted",
    "Ledger",
    "Load",
    "LoadBack",
    "Match",
    "TieredIndex",
    "Write",
]
