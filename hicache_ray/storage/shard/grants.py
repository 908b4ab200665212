"""What a shard and its clients tell each other: grants, reservations, leases, limits, counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from hicache_ray.storage.shard.layout import MAX_LABEL_BYTES

MISSING, GRANTED, EXISTING, REFUSED = 0, 1, 2, 3
"""Status of a grant: the page is not here; its cell may be read or written; it is stored already; there is no room."""

GRANT = np.dtype([("cell", "<i8"), ("offset", "<i8"), ("generation", "<u8"), ("checksum", "<u8"), ("status", "<i8")])
"""One page of an answer to a client: the cell, the offset of its data in the arena file, the generation that the cell's
header shows as long as the grant is good, the checksum of the data (reads only), and the status."""

Grants = npt.NDArray[Any]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class NamespaceLimit:
    """What pages of one namespace label may use.

    Attributes:
        quota_bytes: most bytes of cells, None: no limit. Beyond it the namespace's own pages are evicted.
        ttl: seconds a page is served after it was stored, None: for ever.
    """

    quota_bytes: int | None = None
    ttl: float | None = None


class Granted(NamedTuple):
    """Answer to `reserve` and `acquire`: the id to commit or to release with (0: nothing was granted), and a grant per
    key."""

    id: int
    grants: Grants


class HeldPage(NamedTuple):
    """A stored page as it has to be described to another member.

    Attributes:
        length: bytes.
        expires: clock time after which it is a miss.
        checksum: xxh3_64 of its bytes.
        cell, offset: where it is.
    """

    key: bytes
    label: bytes
    length: int
    expires: float
    checksum: int
    cell: int
    offset: int


@dataclass(frozen=True)
class ShardStats:
    """State and counters of a shard; counters since this process opened the arena."""

    pages: int
    used_bytes: int
    total_bytes: int
    reserved: int
    leased: int
    reopened: int
    """Pages found in the arena at start."""
    stored: int = 0
    existing: int = 0
    refused: int = 0
    evicted: int = 0
    expired: int = 0
    corrupt: int = 0
    asked: int = 0
    hits: int = 0
    abandoned: int = 0
    """Reservations and leases that expired: their client died or was too slow."""
    received: int = 0
    """Pages that other members brought."""
    moved: int = 0
    """Pages given up because the members that own them have them."""
    used_bytes_by_namespace: Mapping[str, int] = field(default_factory=dict)


def namespace_label(namespace: str) -> bytes:
    """The label under which a namespace is counted: its name, or a digest of it where the name is too long."""
    label = namespace.encode()
    if len(label) <= MAX_LABEL_BYTES:
        return label
    return f"{xxhash.xxh3_128_hexdigest(label)}".encode()
