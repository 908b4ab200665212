"""A shard against a model of what it may answer: random calls, clock jumps, crashes, all eviction policies."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hicache_ray.storage.shard.arena import Arena
from hicache_ray.storage.shard.grants import EXISTING, GRANTED, REFUSED, Granted, NamespaceLimit
from hicache_ray.storage.shard.layout import ArenaGeometry
from hicache_ray.storage.shard.page_copy import load_page, store_page
from hicache_ray.storage.shard.shard import Shard

LENGTHS = (1024, 2048, 3000)
"""Page sizes; a key's page always has one length."""
SEGMENTS, SEGMENT_BYTES = 3, 6144
LIMITS = {"quota": NamespaceLimit(quota_bytes=4096), "ttl": NamespaceLimit(ttl=20.0)}
LABELS = (b"", b"quota", b"ttl")
LEASE_SECONDS = 10.0

numbers = st.lists(st.integers(0, 11), min_size=1, max_size=5)


def key(number: int) -> bytes:
    return bytes([number]) * 48


def length_of(number: int) -> int:
    return LENGTHS[number % 3]


def content(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, length_of(number), dtype=np.uint8)


class ShardModel(RuleBasedStateMachine):
    """The model is a dict of what was committed; a stored page may go (eviction, TTL), never change or appear."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.now = 1000.0
        self.committed: set[int] = set()
        self.dead: set[int] = set()
        self.writing: list[tuple[Granted, list[int], bytes, float]] = []
        self.reading: list[tuple[Granted, list[int], float]] = []

    @initialize(policy=st.sampled_from(["lru", "lfu", "fifo", "s3fifo"]))
    def start(self, policy: str) -> None:
        self.policy = policy
        self.open(Arena.create(self.folder / "a", ArenaGeometry(SEGMENTS, SEGMENT_BYTES)))

    def open(self, arena: Arena) -> None:
        self.shard = Shard(
            arena, policy=self.policy, limits=LIMITS, lease_seconds=LEASE_SECONDS, clock=lambda: self.now
        )

    @rule(chosen=numbers, label=st.sampled_from(LABELS))
    def reserve(self, chosen: list[int], label: bytes) -> None:
        chosen = [n for n in chosen if length_of(n) == length_of(chosen[0])]
        reservation = self.shard.reserve([key(n) for n in chosen], length_of(chosen[0]), label)
        status = reservation.grants["status"].tolist()
        granted = [n for n, s in zip(chosen, status, strict=True) if s == GRANTED]
        for number, s in zip(chosen, status, strict=True):
            assert s in (GRANTED, EXISTING, REFUSED)
            assert s != EXISTING or number in self.committed
        assert sorted(s for s in status if s != EXISTING) == [s for s in status if s != EXISTING], "refused at the end"
        if not granted:
            assert reservation.id == 0
            return
        for number, grant in zip(chosen, reservation.grants, strict=True):
            if grant["status"] == GRANTED:
                store_page(self.shard.arena.data(int(grant["offset"]), length_of(number)), content(number))
        self.writing.append((reservation, granted, label, self.now + LEASE_SECONDS))

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        if not self.writing:
            return
        reservation, granted, _, deadline = self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))
        checksums = np.array([checksum(n) for n in granted], np.uint64)
        flags = self.shard.commit(reservation.id, checksums)
        assert flags.all() if self.now < deadline else not flags.any()
        assert np.array_equal(self.shard.commit(reservation.id, checksums), flags), "committing twice"
        if flags.all():
            self.committed.update(granted)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.writing:
            self.shard.release(self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))[0].id)

    @rule(chosen=numbers)
    def acquire(self, chosen: list[int]) -> None:
        chosen = [n for n in chosen if length_of(n) == length_of(chosen[0])]
        lease = self.shard.acquire([key(n) for n in chosen], length_of(chosen[0]))
        found = [n for n, s in zip(chosen, lease.grants["status"], strict=True) if s == GRANTED]
        assert set(found) <= self.committed
        if found:
            self.reading.append((lease, chosen, self.now + LEASE_SECONDS))

    @rule(data=st.data())
    def read_and_release(self, data: st.DataObject) -> None:
        """As long as a lease lasts, the pages are those that were stored, whatever happened meanwhile."""
        if not self.reading:
            return
        lease, chosen, deadline = self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1)))
        if self.now < deadline:
            for number, grant in zip(chosen, lease.grants, strict=True):
                if grant["status"] == GRANTED:
                    page = np.empty(length_of(number), np.uint8)
                    checksum = load_page(page, self.shard.arena.data(int(grant["offset"]), page.size))
                    assert checksum == grant["checksum"] and np.array_equal(page, content(number))
        self.shard.release(lease.id)

    @rule(chosen=numbers)
    def exists(self, chosen: list[int]) -> None:
        flags = self.shard.exists([key(n) for n in chosen])
        assert all(not flag or n in self.committed for n, flag in zip(chosen, flags, strict=True))

    @rule(seconds=st.sampled_from([1.0, 6.0, 25.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(label=st.sampled_from([None, b"", b"quota"]))
    def clear(self, label: bytes | None) -> None:
        self.shard.clear(label)
        if label is None:
            self.committed.clear()
            self.writing.clear()
            assert self.shard.stats().pages == 0
        else:
            self.writing = [entry for entry in self.writing if entry[2] != label]

    @rule()
    def crash_and_restart(self) -> None:
        before = {n for n in range(12) if self.shard.exists([key(n)])[0]}
        self.shard.arena.close()
        self.open(Arena.open(self.folder / "a"))
        assert {n for n in range(12) if self.shard.exists([key(n)])[0]} == before, "a crash loses nothing"
        for reservation, granted, _, _ in self.writing:
            assert not self.shard.commit(reservation.id, np.zeros(len(granted), np.uint64)).any()
        self.writing.clear()
        self.reading.clear()

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "shard"):
            self.shard.check_integrity(read_pages=True)
            stats = self.shard.stats()
            assert stats.used_bytes_by_namespace.get("quota", 0) <= 4096
            assert stats.used_bytes <= stats.total_bytes

    def teardown(self) -> None:
        if hasattr(self, "shard"):
            self.shard.arena.close()
        shutil.rmtree(self.folder)


def checksum(number: int) -> int:
    return store_page(np.empty(length_of(number), np.uint8), content(number))


TestShardModel = ShardModel.TestCase
TestShardModel.settings = settings(max_examples=60, stateful_step_count=40)
