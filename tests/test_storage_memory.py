"""The in-memory L3 that tests and groups without Ray use."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hicache_ray.hashing import ModelIdentity
from hicache_ray.storage.base import StorageConfig
from hicache_ray.storage.memory import BACKEND, MemoryStorage, MemoryStore, drop_store
from hicache_ray.storage.registry import create_backend
from hicache_ray.testing.host_pages import NumpyHostPages
from hicache_ray.testing.suite import storage_suite

TestMemory = storage_suite(MemoryStorage, {"store": "{folder}"})

HASHES = [bytes([number]) * 32 for number in range(4)]


@pytest.fixture(autouse=True)
def _no_store_is_left() -> Iterator[None]:
    yield
    for name in ("mine", "other"):
        drop_store(name)


def backend(store: str = "mine", capacity: int | None = None, **config: object) -> MemoryStorage:
    extra = {"store": store, "capacity_bytes": capacity}
    settings = {"identity": ModelIdentity(), "extra": extra, **config}
    made = create_backend(BACKEND, StorageConfig(**settings))  # type: ignore[arg-type]
    assert isinstance(made, MemoryStorage)
    made.register_host_pool(NumpyHostPages(8))
    return made


def pool_of(storage: MemoryStorage) -> NumpyHostPages:
    assert isinstance(storage.host_pool, NumpyHostPages)
    return storage.host_pool


def test_backends_of_one_store_share_pages() -> None:
    writer, reader, stranger = backend(), backend(), backend("other")
    pool_of(writer).fill(np.arange(4), seed=1)
    assert writer.store(HASHES, np.arange(4)) == 4
    assert reader.lookup(HASHES) == 4
    assert reader.load(HASHES, np.arange(4, 8)) == 4
    for page in range(4):
        assert np.array_equal(pool_of(reader).read(page + 4), pool_of(writer).read(page))
    assert stranger.lookup(HASHES) == 0


def test_the_budget_holds_and_the_least_recent_page_goes() -> None:
    page = np.zeros(10, dtype=np.uint8)
    store = MemoryStore(capacity_bytes=30)
    assert all(store.set(name, page) for name in "abc")
    assert store.get("a") is not None
    assert store.set("d", page)
    assert ["b" in store, "a" in store, store.used_bytes, store.evicted_pages] == [False, True, 30, 1]
    assert not store.set("large", np.zeros(31, dtype=np.uint8))


def test_a_rank_that_does_not_write_stores_nothing() -> None:
    silent = backend(is_writer=False)
    assert silent.store(HASHES[:1], np.arange(1)) == 1
    assert silent.lookup(HASHES[:1]) == 0
    assert len(silent.pages) == 0


def test_clearing_drops_this_models_pages_or_all() -> None:
    one, other = backend(identity=ModelIdentity(model="one")), backend(identity=ModelIdentity(model="other"))
    for storage in (one, other):
        assert storage.store(HASHES, np.arange(4)) == 4
    one.clear()
    assert (one.lookup(HASHES), other.lookup(HASHES)) == (0, 4)
    assert one.pages.used_bytes == 4 * pool_of(other).page_bytes
    one.clear(everything=True)
    assert (other.lookup(HASHES), one.pages.used_bytes) == (0, 0)
