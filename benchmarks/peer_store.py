"""The `store` suite's part of the side-by-side adapter: `stores(case)` as the suite's example describes it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

PAGE_SIZE = 16


class BufferPool:
    """A host pool over one touched array: [pages, segments, page_bytes / segments]."""

    def __init__(self, pages: int, page_bytes: int, segments: int = 2) -> None:
        self.page_size = PAGE_SIZE
        self.pages = pages
        self.page_bytes = page_bytes
        self.segments: npt.NDArray[np.uint8] = np.empty((pages, segments, page_bytes // segments), np.uint8)
        self.segments[:] = 1


def hashes_of(keys: Sequence[str]) -> list[bytes]:
    """The page hashes of SGLang's keys."""
    return [bytes.fromhex(key) for key in keys]


class PoolStore:
    """A pool of one storage actor on a node of its own; pages go from one half of a host pool to the other."""

    def __init__(self, page_bytes: int, pages: int, transport: str) -> None:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        from hicache_ray.actors.storage_pool import StoragePool, StoragePoolConfig
        from hicache_ray.hashing import ModelIdentity
        from hicache_ray.storage.base import StorageConfig
        from hicache_ray.storage.registry import create_backend

        self._ray = ray
        self._folder = tempfile.mkdtemp(prefix="hicache-bench-", dir="/tmp")
        batch = 128 * page_bytes
        store = max(200 << 20, 6 * batch if transport == "object_store" else 0)
        ray.init(
            num_cpus=2, include_dashboard=False, _temp_dir=self._folder, object_store_memory=store, log_to_driver=False
        )
        budget = 2 * pages * page_bytes
        self._pool = StoragePool.start(StoragePoolConfig(name="bench", bytes_per_actor=budget))
        extra = self._pool.handle.options(transport=transport)
        self._storage = create_backend("ray", StorageConfig(ModelIdentity(model="bench"), extra, 60.0))
        self._pages = pages
        self._host = BufferPool(2 * pages, page_bytes)
        self._source, self._target = self._host.segments[:pages], self._host.segments[pages:]
        self._source[:] = np.random.default_rng(1).integers(0, 256, self._source.shape, dtype=np.uint8)
        self._storage.register_host_pool(self._host)

    def put(self, keys: Sequence[str], first: int) -> bool:
        return self._storage.store(hashes_of(keys), np.arange(first, first + len(keys))) == len(keys)

    def exists(self, keys: Sequence[str], first: int) -> bool:
        return self._storage.lookup(hashes_of(keys)) == len(keys)

    def get(self, keys: Sequence[str], first: int) -> bool:
        target = np.arange(self._pages + first, self._pages + first + len(keys))
        return self._storage.load(hashes_of(keys), target) == len(keys)

    def verify(self) -> bool:
        return np.array_equal(self._source, self._target)

    def drop(self, keys: Sequence[str]) -> None:
        self._storage.clear()
        self._target[:] = 0

    def close(self) -> None:
        self._storage.close()
        self._pool.stop()
        self._ray.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


def stores(case: dict[str, Any]) -> dict[str, Callable[[int, int], PoolStore]]:
    """One store per transport: a client on the actor's node, and one that is kept from its shared memory."""
    return {
        "ray-shm": lambda page_bytes, pages: PoolStore(page_bytes, pages, "auto"),
        "ray-object-store": lambda page_bytes, pages: PoolStore(page_bytes, pages, "object_store"),
    }
