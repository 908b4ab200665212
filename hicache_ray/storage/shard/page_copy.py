"""Copies of pages that take their checksum on the way, while the bytes are in the processor's cache.

All checksums are xxh3_64 of a page's bytes in the order of its segments, whatever its strides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from hicache_ray.storage.base import Bytes

CHUNK_BYTES = 256 << 10
"""Bytes copied before they are hashed: a part of a processor's second-level cache."""


def checksum_of(page: Bytes) -> int:
    """The checksum of a page given as [..., segment_bytes], the last axis contiguous."""
    if page.flags.c_contiguous:
        return xxh3_64_intdigest(cast(Any, page))
    state = xxh3_64()
    for row in _rows(page):
        state.update(row)
    return state.intdigest()


def store_page(slot: Bytes, page: Bytes) -> int:
    """Copy a host page [..., segment_bytes] to a slot [page_bytes]; returns the checksum of what was read.

    The source is hashed, not the copy: should another process scribble over the slot meanwhile, the checksum is still
    that of the right bytes and readers see the difference.
    """
    if not page.flags.c_contiguous or page.nbytes <= CHUNK_BYTES:
        checksum = checksum_of(page)
        np.copyto(slot.reshape(page.shape), page)
        return checksum
    source, state = page.reshape(-1), xxh3_64()
    for start in range(0, source.size, CHUNK_BYTES):
        part = source[start : start + CHUNK_BYTES]
        state.update(cast(Any, part))
        np.copyto(slot[start : start + CHUNK_BYTES], part)
    return state.intdigest()


def load_page(page: Bytes, slot: Bytes) -> int:
    """Copy a slot [page_bytes] to a host page [..., segment_bytes]; returns the checksum of what arrived.

    The copy is hashed, not the source: what counts is what the reader ends up with.
    """
    if not page.flags.c_contiguous or page.nbytes <= CHUNK_BYTES:
        np.copyto(page, slot.reshape(page.shape))
        return checksum_of(page)
    target, state = page.reshape(-1), xxh3_64()
    for start in range(0, target.size, CHUNK_BYTES):
        part = target[start : start + CHUNK_BYTES]
        np.copyto(part, slot[start : start + CHUNK_BYTES])
        state.update(cast(Any, part))
    return state.intdigest()


def _rows(page: Bytes) -> Iterator[Any]:
    """The contiguous rows of a strided page, in order."""
    if page.flags.c_contiguous:
        yield page
        return
    for part in page:
        yield from _rows(part)
