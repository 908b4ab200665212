"""The checksum that goes with a page into a store that keeps none itself."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

CHECKSUM_BYTES = 8


def page_checksum(key: str, rows: Iterable[memoryview]) -> int:
    """xxh3_64 over the storage key, then the page's segments in order: a page under another key does not fit."""
    digest = xxhash.xxh3_64(key.encode())
    for row in rows:
        digest.update(row)
    return digest.intdigest()
