"""Copies pages, and takes their checksum on the way, while the bytes are in the processor's cache.

All checksums are xxh3_64 of a page's bytes in the order of its segments, whatever its strides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from hicache_ray.pages import Bytes
from hicache_ray.threads import HelperThreads

COPY_CHUNK_BYTES = 256 << 10
"""Bytes copied before they are hashed: a part of a processor's second-level cache."""
LEAST_BYTES_A_THREAD = 2 << 20
"""Below that, waking another thread costs more than it copies."""


def checksum_of(page: Bytes) -> int:
    """The checksum of a page given as [..., segment_bytes], the last axis contiguous."""
    if page.flags.c_contiguous:
        return xxh3_64_intdigest(cast(Any, page))
    state = xxh3_64()
    for row in _rows(page):
        state.update(row)
    return state.intdigest()


def store_page(cell: Bytes, page: Bytes) -> int:
    """Copy a host page [..., segment_bytes] to a cell [page_bytes]; returns the checksum of what was read.

    The source is hashed, not the copy: should another process scribble over the cell meanwhile, the checksum is still
    that of the right bytes and readers see the difference.
    """
    if not page.flags.c_contiguous or page.nbytes <= COPY_CHUNK_BYTES:
        checksum = checksum_of(page)
        np.copyto(cell.reshape(page.shape), page)
        return checksum
    source, state = page.reshape(-1), xxh3_64()
    for start in range(0, source.size, COPY_CHUNK_BYTES):
        part = source[start : start + COPY_CHUNK_BYTES]
        state.update(cast(Any, part))
        np.copyto(cell[start : start + COPY_CHUNK_BYTES], part)
    return state.intdigest()


def load_page(page: Bytes, cell: Bytes) -> int:
    """Copy a cell [page_bytes] to a host page [..., segment_bytes]; returns the checksum of what arrived.

    The copy is hashed, not the source: what counts is what the reader ends up with.
    """
    if not page.flags.c_contiguous or page.nbytes <= COPY_CHUNK_BYTES:
        np.copyto(page, cell.reshape(page.shape))
        return checksum_of(page)
    target, state = page.reshape(-1), xxh3_64()
    for start in range(0, target.size, COPY_CHUNK_BYTES):
        part = target[start : start + COPY_CHUNK_BYTES]
        np.copyto(part, cell[start : start + COPY_CHUNK_BYTES])
        state.update(cast(Any, part))
    return state.intdigest()


class Copier:
    """Copies the pages of one operation in up to `threads` threads, of which the caller is one. Thread-safe."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._helpers = HelperThreads("l3-copy", threads - 1)

    def run(self, copy: Callable[[Bytes, Bytes], int], targets: Sequence[Bytes], sources: Sequence[Bytes]) -> list[int]:
        """The checksums of all copies, in order; raises what a copy raises.

        Args:
            copy: `store_page` or `load_page`.
        """
        total = sum(page.nbytes for page in targets[:1]) * len(targets)
        parts = max(1, min(self._threads, total // LEAST_BYTES_A_THREAD))
        size = max(1, -(-len(targets) // parts))
        shares = [slice(start, start + size) for start in range(0, len(targets), size)]

        def copied(share: slice) -> list[int]:
            return [copy(target, source) for target, source in zip(targets[share], sources[share], strict=True)]

        return [checksum for checksums in self._helpers.map(copied, shares) for checksum in checksums]

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._helpers.close()


def _rows(page: Bytes) -> Iterator[Any]:
    """The contiguous rows of a strided page, in order."""
    if page.flags.c_contiguous:
        yield page
        return
    for part in page:
        yield from _rows(part)
