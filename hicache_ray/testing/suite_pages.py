"""The storage suite's tests of pages, keys and concurrency: the promises of `storage.base`, one by one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hicache_ray.pages import Pages
from hicache_ray.storage.base import Storage, StorageStats
from hicache_ray.testing.host_pages import NumpyHostPages, PageShape
from hicache_ray.testing.subject import StorageSubject, Unsupported
from hicache_ray.testing.suite_base import (
    BIG,
    SEPARATE,
    SHAPES,
    MakeStorage,
    SuiteBase,
    at_once,
    eventually,
    identity_of,
    page_names,
)


def round_trip(storage: Storage, pool: NumpyHostPages, count: int, seed: int = 1) -> None:
    """Store `count` pages from the pool's lower half, read them into shuffled pages of its upper half, compare; no
    other page of the pool may change."""
    names = page_names(count, seed)
    source = np.arange(count)
    target = np.random.default_rng(seed).permutation(np.arange(count, pool.pages))[:count]
    pool.fill(np.arange(pool.pages), seed)
    before = pool.buffer.copy()
    assert storage.store(names, source) == count
    assert np.array_equal(pool.buffer, before), "storing pages changed the host pool"
    assert storage.lookup(names) == count
    assert storage.load(names, target) == count
    for page, copy in zip(source.tolist(), target.tolist(), strict=True):
        assert np.array_equal(pool.read(page), pool.read(copy)), f"page {page} came back with other bytes"
    others = np.setdiff1d(np.arange(pool.pages), target)
    expected = NumpyHostPages(pool.pages, pool.shape)
    expected.buffer[:] = before
    assert all(np.array_equal(pool.read(page), expected.read(page)) for page in others.tolist())


class PageTests(SuiteBase):
    """Pages in and out."""

    @pytest.mark.parametrize("count", [1, 2, 127, 128, 129, 1000])
    def test_round_trip_of_any_number_of_pages(self, make: MakeStorage, count: int) -> None:
        storage, pool = make(pages=2 * count)
        round_trip(storage, pool, count)

    @pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.attention}-{shape.layout}")
    def test_round_trip_in_any_layout(self, make: MakeStorage, shape: PageShape) -> None:
        storage, pool = make(shape, pages=24)
        round_trip(storage, pool, 9)

    @pytest.mark.parametrize("token_bytes", [2, 3, 64, 4096, 21846])
    def test_round_trip_of_any_page_size(self, make: MakeStorage, token_bytes: int) -> None:
        """12 bytes to 512 KiB a page, odd lengths too."""
        shape = PageShape("mha", "page_first", page_size=4, layers=3, token_bytes=token_bytes, heads=1)
        storage, pool = make(shape, pages=6)
        round_trip(storage, pool, 3)

    def test_no_pages_is_no_work(self, make: MakeStorage) -> None:
        storage, _ = make()
        none: Pages = np.empty(0, dtype=np.int64)
        assert (storage.lookup([]), storage.load([], none), storage.store([], none)) == (0, 0, 0)

    def test_stops_at_the_first_missing_page(self, make: MakeStorage) -> None:
        """Case 11: pages 0, 1, 2 and 4, 5 are stored; 3 is not."""
        storage, pool = make()
        names = page_names(6)
        pool.fill(np.arange(6), 1)
        for page in (0, 1, 2, 4, 5):
            assert storage.store(names[page : page + 1], np.array([page])) == 1
        assert storage.lookup(names) == 3
        assert storage.load(names, np.arange(8, 14)) == 3
        assert all(np.array_equal(pool.read(page), pool.read(page + 8)) for page in range(3))

    def test_unknown_pages_are_misses(self, make: MakeStorage) -> None:
        storage, pool = make()
        names = page_names(4, seed=7)
        assert storage.lookup(names) == 0
        assert storage.load(names, np.arange(4)) == 0

    def test_an_existing_page_is_left_as_it_is(self, make: MakeStorage) -> None:
        storage, pool = make()
        names = page_names(3)
        pool.fill(np.arange(3), 1)
        first = [pool.read(page) for page in range(3)]
        assert storage.store(names, np.arange(3)) == 3
        pool.fill(np.arange(3), 2)
        assert storage.store(names, np.arange(3)) == 3
        assert storage.load(names, np.arange(3)) == 3
        assert all(np.array_equal(pool.read(page), first[page]) for page in range(3))

    def test_pages_that_are_none_of_the_pool_are_refused(self, make: MakeStorage) -> None:
        storage, pool = make()
        names = page_names(2)
        for pages in ([0], [0, 1, 2], [0, pool.pages], [-1, 0]):
            for call in (storage.load, storage.store):
                with pytest.raises(ValueError, match="host pages"):
                    call(names, np.array(pages))

    def test_a_call_without_host_pool_is_refused(self, subject: StorageSubject, tmp_path: Path) -> None:
        storage = subject.make(tmp_path, identity_of(SHAPES[1]))
        try:
            with pytest.raises(RuntimeError, match="register_host_pool"):
                storage.load(page_names(1), np.arange(2))
        finally:
            storage.close()


class KeyTests(SuiteBase):
    """Which pages are the same page."""

    def stored(self, make: MakeStorage, shape: PageShape) -> tuple[list[bytes], Storage]:
        """Three pages of rank 0."""
        storage, pool = make(shape)
        pool.fill(np.arange(3), 1)
        names = page_names(3)
        assert storage.store(names, np.arange(3)) == 3
        return names, storage

    @pytest.mark.parametrize("field", SEPARATE)
    def test_another_identity_is_another_page(self, make: MakeStorage, field: str) -> None:
        shape = SHAPES[1]
        names, _ = self.stored(make, shape)
        other, pool = make(shape, identity=identity_of(shape, **{"pp_size": 2, field: SEPARATE[field]}))
        assert other.lookup(names) == 0
        assert other.load(names, np.arange(3)) == 0

    def test_mla_ranks_share_pages_and_one_writes_them(self, make: MakeStorage) -> None:
        """Cases 10, 29."""
        shape = PageShape("mla", "page_first")
        other, pool = make(shape, identity=identity_of(shape, tp_rank=1), is_writer=False)
        names = page_names(3)
        assert other.store(names, np.arange(3)) == 3
        assert other.lookup(names) == 0, "a rank that is no writer has written"
        self.stored(make, shape)
        assert other.lookup(names) == 3
        assert other.load(names, np.arange(3)) == 3

    def test_clear_drops_the_pages_of_its_own_identity(self, make: MakeStorage, subject: StorageSubject) -> None:
        if subject.clears_all:
            pytest.skip(subject.clears_all)
        shape = SHAPES[1]
        names, storage = self.stored(make, shape)
        other, pool = make(shape, identity=identity_of(shape, model="other"))
        assert other.store(names, np.arange(3)) == 3
        storage.clear()
        assert (storage.lookup(names), other.lookup(names)) == (0, 3)

    def test_clear_of_everything(self, make: MakeStorage) -> None:
        shape = SHAPES[1]
        names, storage = self.stored(make, shape)
        other, pool = make(shape, identity=identity_of(shape, model="other"))
        assert other.store(names, np.arange(3)) == 3
        storage.clear(everything=True)
        assert (storage.lookup(names), other.lookup(names)) == (0, 0)
        self.stored(make, shape)
        assert storage.lookup(names) == 3

    def test_pages_outlive_the_backend(self, make: MakeStorage) -> None:
        names, storage = self.stored(make, SHAPES[1])
        storage.close()
        storage.close()
        again, pool = make(SHAPES[1])
        pool.fill(np.arange(3), 1)
        assert again.lookup(names) == 3
        assert again.load(names, np.arange(8, 11)) == 3
        assert all(np.array_equal(pool.read(page), pool.read(page + 8)) for page in range(3))

    def test_statistics_count_pages_and_bytes(self, make: MakeStorage) -> None:
        names, storage = self.stored(make, SHAPES[1])
        assert storage.host_pool is not None
        size, pages = storage.host_pool.page_bytes, np.arange(3)
        storage.store(names, pages)
        storage.lookup([*names, *page_names(1, seed=9)])
        storage.load(names, pages)
        stats = storage.get_stats()
        assert isinstance(stats, StorageStats)
        assert (stats.exists_asked, stats.exists_hits) == (4, 3)
        assert (stats.get_asked, stats.get_hits, stats.get_bytes) == (3, 3, 3 * size)
        assert (stats.set_asked, stats.set_stored + stats.set_existing) == (6, 6)
        assert stats.set_bytes >= 3 * size
        assert (stats.corrupt, stats.errors, stats.timeouts) == (0, 0, 0)


class ConcurrencyTests(SuiteBase):
    """Several callers, and less room than pages."""

    @pytest.mark.parametrize("contents", [1, 4])
    def test_writers_of_one_key(self, make: MakeStorage, contents: int) -> None:
        """Four writers, two backends, eight keys, the same bytes from all of them, or from each his own: what is read
        is one writer's page, whole."""
        (one, pool), (two, _) = make(BIG, pages=64), make(BIG, pages=1)
        two.register_host_pool(pool)
        pool.fill(np.arange(8 * contents), 3)
        names = page_names(8)
        pages = [np.arange(8) + 8 * (writer % contents) for writer in range(4)]

        def write(writer: int) -> int:
            return (one, two)[writer % 2].store(names, pages[writer])

        answers = at_once([partial(write, writer) for writer in range(4)])
        flags = [one.load([name], np.array([40 + page])) == 1 for page, name in enumerate(names)]
        if contents == 1:
            assert answers == [8] * 4 and all(flags)
        for page in np.flatnonzero(flags).tolist():
            stored = pool.read(40 + page)
            assert any(np.array_equal(stored, pool.read(page + 8 * writer)) for writer in range(contents))

    def test_lookups_reads_and_writes_at_once(self, make: MakeStorage) -> None:
        """Six threads, as many as two ranks have: nobody reads a wrong page."""
        storage, pool = make(BIG, pages=96)
        names = page_names(32)
        pool.fill(np.arange(32), 4)

        def write() -> bool:
            return all(storage.store(names[i : i + 4], np.arange(i, i + 4)) == 4 for i in range(29))

        def read(base: int) -> bool:
            for start in range(0, 29, 4):
                target = np.arange(base, base + 4)
                for position in range(storage.load(names[start : start + 4], target)):
                    if not np.array_equal(pool.read(start + position), pool.read(base + position)):
                        return False
            return True

        def look_up() -> bool:
            return all(0 <= storage.lookup(names) <= 32 for _ in range(20))

        assert all(at_once([write, write, lambda: read(40), lambda: read(50), look_up, look_up]))
        assert storage.lookup(names) == 32

    def test_more_pages_than_room(self, subject: StorageSubject, tmp_path: Path) -> None:
        """A full store gets three times what fits: no error, no wrong page, and it takes new pages afterwards."""
        try:
            storage, capacity = subject.make_small(tmp_path, identity_of(BIG), BIG.page_bytes)
        except Unsupported as reason:
            pytest.skip(str(reason))
        try:
            self.overfill(storage, capacity)
            self.assert_takes_new_pages(storage)
        finally:
            storage.close()

    def overfill(self, storage: Storage, capacity: int) -> None:
        """Store three times what fits, read back what is there."""
        pool = NumpyHostPages(3 * capacity + 8, BIG)
        storage.register_host_pool(pool)
        pool.fill(np.arange(pool.pages), 5)
        names = page_names(3 * capacity)
        for start in range(0, len(names), 8):
            pages = np.arange(start, min(start + 8, len(names)))
            batch = names[start : start + 8]
            stored = storage.store(batch, pages)
            assert 0 <= stored <= len(batch)
        hits = 0
        for page, name in enumerate(names):
            if storage.load([name], np.array([pool.pages - 1])) == 1:
                assert np.array_equal(pool.read(page), pool.read(pool.pages - 1))
                hits += 1
        assert 0 < hits <= capacity, f"{hits} pages in a store for {capacity}"

    def assert_takes_new_pages(self, storage: Storage) -> None:
        """In the end: a store may have to wait for leases on old pages to run out."""
        names = page_names(4, seed=11)
        eventually(lambda: storage.store(names, np.arange(4)) == 4, "the full store takes no new pages")
