"""What the Ray tests of the storage pool share: a host pool, backends, waiting for conditions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hicache_ray import deadline
from hicache_ray.hashing import ModelIdentity
from hicache_ray.storage.base import StorageConfig
from hicache_ray.storage.pool.storage import RayPoolStorage

PAGE_SIZE = 4
PAGE_BYTES = 8192
SEGMENT_BYTES = 1 << 20
"""Small, so that arenas of a few MiB have several."""


class ArrayHostPool:
    """A host pool over one array: [pages, 2, page_bytes / 2]."""

    def __init__(self, pages: int, page_bytes: int = PAGE_BYTES) -> None:
        self.page_size = PAGE_SIZE
        self.pages = pages
        self.page_bytes = page_bytes
        self.segments = np.zeros((pages, 2, page_bytes // 2), np.uint8)


class Client:
    """A backend with a host pool of 2 * `pages` pages: the first half is stored from, the second read into."""

    def __init__(self, extra: dict[str, Any], *, pages: int = 64, timeout: float = 8.0, model: str = "m") -> None:
        self.pages = pages
        self.host = ArrayHostPool(2 * pages)
        self.storage = RayPoolStorage(StorageConfig(ModelIdentity(model=model), extra, timeout))
        self.storage.register_host_pool(self.host)

    def put(self, seeds: range) -> list[bool]:
        for place, seed in enumerate(seeds):
            self.host.segments[place] = content(seed)
        stored = self.storage.store(hashes(seeds), np.arange(len(seeds)))
        return [place < stored for place in range(len(seeds))]

    def get(self, seeds: range) -> list[bool]:
        """Reads; whatever is said to have arrived must be right."""
        self.host.segments[self.pages :] = 0
        arrived = self.storage.load(hashes(seeds), np.arange(self.pages, self.pages + len(seeds)))
        done = [place < arrived for place in range(len(seeds))]
        for place, seed in enumerate(seeds):
            assert not done[place] or np.array_equal(self.host.segments[self.pages + place], content(seed))
        return done

    def exists(self, seeds: range) -> int:
        return self.storage.lookup(hashes(seeds))


def hashes(seeds: range) -> list[bytes]:
    return [hashlib.sha256(b"%d" % seed).digest() for seed in seeds]


def content(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (2, PAGE_BYTES // 2), dtype=np.uint8)


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Returns when the condition holds; AssertionError when it does not within the time."""
    assert deadline.wait_until(condition, seconds), f"{condition} does not hold after {seconds} s"


def arena_files(part: str) -> set[Path]:
    """The arena files with `part` in their name: a pool's token, or a member's name between dashes."""
    return {path for path in Path("/dev/shm").iterdir() if "hicache-" in path.name and part in path.name}
