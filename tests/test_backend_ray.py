"""The Ray storage pool in the storage suite: both transports, on one cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_ray.actors.storage_pool import StoragePool, StoragePoolConfig
from hicache_ray.hashing import ModelIdentity
from hicache_ray.storage.base import Storage, StorageConfig
from hicache_ray.storage.pool.storage import RayPoolStorage
from hicache_ray.storage.shard.arena import ArenaMapping
from hicache_ray.storage.shard.layout import VALID
from hicache_ray.testing.subject import Damage, StorageSubject, Unsupported
from hicache_ray.testing.suite import storage_suite
from hicache_ray.testing.suite_base import page_names
from tests.cluster import shared_cluster
from tests.processes import stop

pytestmark = [pytest.mark.ray]

CONFIG = StoragePoolConfig(name="suite", actors=2, bytes_per_actor=48 << 20)


class RaySubject(StorageSubject):
    """A pool of two actors on a node of its own."""

    def __init__(self, transport: str) -> None:
        super().__init__("ray", label=f"ray {transport}")
        self.transport = transport

    def start(self, folder: Path) -> None:
        self.resources = contextlib.ExitStack()
        self.resources.enter_context(shared_cluster())
        self.pool = StoragePool.start(CONFIG)
        self.small: list[StoragePool] = []

    def stop(self) -> None:
        for pool in (*self.small, self.pool):
            pool.stop()
        self.resources.close()

    def empty(self, folder: Path) -> None:
        self.pool.clear()

    def extra(self, folder: Path) -> dict[str, Any]:
        return self.pool.handle.options(transport=self.transport, refusal_seconds=0.1)

    def make_small(self, folder: Path, identity: ModelIdentity, page_bytes: int) -> tuple[Storage, int]:
        config = dataclasses.replace(CONFIG, name=f"small-{len(self.small)}", actors=1, bytes_per_actor=16 * page_bytes)
        pool = StoragePool.start(dataclasses.replace(config, segment_bytes=page_bytes))
        self.small.append(pool)
        extra = pool.handle.options(transport=self.transport)
        return RayPoolStorage(StorageConfig(identity, extra)), 16

    def damage(self, damage: Damage, storage: Storage, page_hash: bytes, folder: Path) -> None:
        """In the arena, as a process that scribbles over shared memory would."""
        arena, cell = self.find(storage, page_hash)
        offset = int(arena.offsets(np.array([cell]))[0])
        data = arena.data(offset, int(arena.headers["length"][cell]))
        if damage is Damage.LOST:
            raise Unsupported("a pool gives up single pages only when it needs the room")
        if damage is Damage.TRUNCATED:
            arena.headers["length"][cell] //= 2
        elif damage is Damage.EMPTIED:
            arena.headers["length"][cell] = 0
        elif damage is Damage.FLIPPED_BYTE:
            data[data.size // 2] ^= 1
        else:
            other, other_cell = self.find(storage, page_names(1, seed=21)[0])
            data[:] = other.data(int(other.offsets(np.array([other_cell]))[0]), data.size)

    def find(self, storage: Storage, page_hash: bytes) -> tuple[ArenaMapping, int]:
        """The arena and the cell that hold a page."""
        key = np.frombuffer(bytes.fromhex(storage.config.identity.digest) + page_hash, np.uint8)
        for info in self.pool.info().values():
            assert info is not None
            arena = ArenaMapping.attach(Path(info.path), info.arena_id)
            holds = (arena.headers["state"] == VALID) & np.all(arena.headers["key"][:, : key.size] == key, axis=1)
            if holds.any():
                return arena, int(np.flatnonzero(holds)[0])
        raise AssertionError(f"{page_hash.hex()} is not stored")

    def take_away(self, folder: Path) -> None:
        self.pool.stop()

    def bring_back(self, folder: Path) -> None:
        self.pool = StoragePool.start(CONFIG)

    def freeze(self, folder: Path) -> None:
        self.frozen = [info.pid for info in self.pool.info().values() if info is not None]
        for pid in self.frozen:
            stop(pid)

    def thaw(self, folder: Path) -> None:
        for pid in self.frozen:
            os.kill(pid, signal.SIGCONT)


TestRayMapped = storage_suite(RaySubject("auto"))
TestRayObjectStore = storage_suite(RaySubject("object_store"))
