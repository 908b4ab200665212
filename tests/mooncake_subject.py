"""A real Mooncake store for the storage suite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hicache_ray.hashing import ModelIdentity
from hicache_ray.storage.base import Storage, StorageConfig
from hicache_ray.storage.mooncake.storage import MooncakeStorage
from hicache_ray.storage.registry import create_backend
from hicache_ray.testing.subject import Damage, StorageSubject, Unsupported
from hicache_ray.testing.suite_base import BIG, eventually, identity_of, page_names
from tests.mooncake_cluster import MooncakeCluster, unavailable

SMALLEST_SEGMENT = 16 << 20
"""The least memory that the library lends."""


class MooncakeSubject(StorageSubject):
    """A master, its metadata server and a process that lends memory."""

    def __init__(self) -> None:
        super().__init__("mooncake")
        self.clusters: list[MooncakeCluster] = []

    @property
    def cluster(self) -> MooncakeCluster:
        return self.clusters[0]

    def start(self, folder: Path) -> None:
        if unavailable():
            raise Unsupported(unavailable())
        self.start_cluster(folder)
        # Kept open, so that the tests' backends share its client: the library takes a second to close one.
        self.cleaner = self.make(folder, identity_of(BIG))

    def start_cluster(self, folder: Path, memory_bytes: int = 256 << 20) -> MooncakeCluster:
        cluster = MooncakeCluster(folder, memory_bytes)
        self.clusters.append(cluster)
        cluster.start()
        return cluster

    def stop(self) -> None:
        self.cleaner.close()
        while self.clusters:
            self.clusters.pop().stop()

    def empty(self, folder: Path) -> None:
        eventually(self.cleared, "the store can't be emptied")

    def cleared(self) -> bool:
        """After an outage the first tries may fail."""
        assert isinstance(self.cleaner, MooncakeStorage)
        try:
            self.cleaner.clear(everything=True)
        except RuntimeError:
            return False
        return True

    def extra(self, folder: Path) -> dict[str, Any]:
        return dict(self.cluster.options())

    def make_small(self, folder: Path, identity: ModelIdentity, page_bytes: int) -> tuple[Storage, int]:
        small = self.start_cluster(folder, SMALLEST_SEGMENT)
        return create_backend("mooncake", StorageConfig(identity, small.options())), SMALLEST_SEGMENT // page_bytes

    def damage(self, damage: Damage, storage: Storage, page_hash: bytes, folder: Path) -> None:
        """As another client of the same store could."""
        assert isinstance(storage, MooncakeStorage)
        if damage is Damage.EMPTIED:
            raise Unsupported("Mooncake stores no empty object")
        (key,) = storage.objects.keys(page_hash)
        with storage.connection.use() as store:
            data = bytes(store.get(key))
            another = bytes(store.get(storage.objects.keys(page_names(1, seed=21)[0])[0]))
            assert store.remove(key, True) == 0
            middle = len(data) // 2
            flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
            contents = {Damage.TRUNCATED: data[:middle], Damage.FLIPPED_BYTE: flipped, Damage.ANOTHER_PAGE: another}
            assert damage is Damage.LOST or store.put(key, contents[damage]) == 0

    def take_away(self, folder: Path) -> None:
        self.cluster.kill_master()

    def bring_back(self, folder: Path) -> None:
        self.cluster.start_master()

    def freeze(self, folder: Path) -> None:
        self.cluster.freeze_master()

    def thaw(self, folder: Path) -> None:
        self.cluster.thaw_master()
