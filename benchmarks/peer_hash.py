"""The `hash` suite's part of the side-by-side adapter: `hashers()` as the suite's example describes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hicache_ray.hashing import page_hashes, token_bytes

Hasher = tuple[Callable[[Any], Any], Callable[[Any, int], list[bytes]]]


def hashers() -> dict[str, Hasher]:
    """`array`: the token array as an engine hands it over; `units`: the bytes that a tree key already holds."""
    return {
        "array": (lambda tokens: np.ascontiguousarray(tokens, dtype=np.int64), page_hashes),
        "units": (token_bytes, page_hashes),
    }
