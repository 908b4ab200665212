"""How many pages the host pool (L2) gets (case 58)."""

from __future__ import annotations

from hicache_ray.config.options import GIGABYTE
from hicache_ray.pools.memory import check_fits

RESERVE_BYTES = 10 * GIGABYTE
"""Host memory left to everything else unless configured otherwise."""


def host_pages(
    *,
    device_tokens: int,
    page_size: int,
    token_bytes: int,
    ratio: float = 2.0,
    size_gb: float = 0.0,
    reserve: int = RESERVE_BYTES,
    available: int | None = None,
) -> int:
    """Pages of the host pool: `size_gb` (GB of 1e9 bytes) when it is above 0, else `ratio` x the device's tokens.

    One page more than the whole pages of that size, as case 58 has it. Raises PoolMemoryError (a ValueError) with the
    numbers when the pool and `reserve` bytes do not fit `available` (default: what the machine and its cgroups leave).
    L2 may be smaller than L1.
    """
    if size_gb < 0 or (size_gb == 0 and ratio <= 0):
        raise ValueError(f"host size {size_gb} GB and ratio {ratio}: one of them must be above 0")
    tokens = int(size_gb * GIGABYTE // token_bytes) if size_gb > 0 else int(device_tokens * ratio)
    pages = tokens // page_size + 1
    what = f"host pool of {pages * page_size} tokens x {token_bytes} bytes"
    check_fits(pages * page_size * token_bytes, reserve=reserve, what=what, available=available)
    return pages
