"""The storage suite's fault matrix: whatever breaks is a miss within its deadline, and the store is used again after.

Calls go through `GuardedStorage`, as they do in the cache. No test measures time: a call that hangs must be back while
the fault still holds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache_ray.faults.storage import CALLS, LOAD, LOOKUP, STORE, Fault, FaultyStorage
from hicache_ray.storage.base import Storage
from hicache_ray.storage.guard import ERRORS_IN_A_ROW, MAX_GIVEN_UP, READ, WRITE, GuardedStorage
from hicache_ray.testing.host_pages import NumpyHostPages
from hicache_ray.testing.subject import Damage, StorageSubject, Unsupported
from hicache_ray.testing.suite_base import BIG, MakeStorage, SuiteBase, eventually, page_names

PAGE_COUNT = 4
NAMES = page_names(PAGE_COUNT, seed=21)
UNSTORED = page_names(PAGE_COUNT, seed=22)
MISSES = [fault for fault in Fault if fault not in (Fault.SLOW, Fault.FLIPPED_BYTE)]
SHORT_SECONDS, OUTAGE_SECONDS, LONG_SECONDS = 0.3, 2.0, 60.0
"""Deadlines for calls that hang, for calls to a store that is away, and for those that must not be given up."""


SPARE_FILES = 8
"""Files and sockets by which a pool of connections may still grow."""


class ManualClock:
    """A clock for the breakers that moves when it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Guarded:
    """Four stored pages, behind faults, behind the guard."""

    def __init__(self, storage: Storage, pool: NumpyHostPages) -> None:
        self.pool = pool
        self.clock = ManualClock()
        self.faulty = FaultyStorage(storage)
        self.guard = GuardedStorage(self.faulty, clock=self.clock)
        self.source, self.target = np.arange(PAGE_COUNT), np.arange(PAGE_COUNT, 2 * PAGE_COUNT)
        pool.fill(np.arange(PAGE_COUNT), 1)
        assert self.guard.store(NAMES, self.source) == PAGE_COUNT

    def inject(self, fault: Fault, *names: str, delay: float = 0.0) -> None:
        """Make these calls fail, all when none is named; the deadline is short where they hang."""
        self.guard.timeout = SHORT_SECONDS if fault is Fault.HANG else LONG_SECONDS
        self.faulty.inject(fault, calls=frozenset(names) or CALLS, delay=delay)

    def call(self, name: str) -> bool:
        """Make a call that succeeds where nothing is wrong. Returns whether it did, entirely. A miss must look like
        one."""
        ask: dict[str, Callable[[], int]] = {
            LOOKUP: lambda: self.guard.lookup(NAMES),
            LOAD: lambda: self.guard.load(NAMES, self.target),
            STORE: lambda: self.guard.store(NAMES, self.source),
        }
        count = ask[name]()
        assert isinstance(count, int) and 0 <= count <= PAGE_COUNT
        return count == PAGE_COUNT

    def assert_well(self) -> None:
        """Everything works, and nothing was left behind."""
        self.clock.now += 60
        self.guard.timeout = LONG_SECONDS
        eventually(lambda: self.guard.given_up == 0, "a call that was given up has not returned")
        assert self.guard.held_pages.size == 0
        assert all(self.call(name) for name in (STORE, LOOKUP, LOAD))
        for page in range(PAGE_COUNT):
            assert np.array_equal(self.pool.read(page), self.pool.read(page + PAGE_COUNT))
        assert not any(breaker.is_open for breaker in self.guard.breakers.values())


class FaultTests(SuiteBase):
    """The backend itself fails: raises, hangs, answers nonsense."""

    @pytest.fixture
    def guarded(self, make: MakeStorage) -> Iterator[Guarded]:
        """A guarded backend, healed in the end."""
        guarded = Guarded(*make(BIG, pages=2 * PAGE_COUNT))
        yield guarded
        guarded.faulty.heal()

    @pytest.mark.parametrize("name", [LOOKUP, LOAD, STORE])
    @pytest.mark.parametrize("fault", MISSES, ids=lambda fault: fault.name.lower())
    def test_fault_is_a_miss(self, guarded: Guarded, fault: Fault, name: str) -> None:
        guarded.inject(fault, name)
        missed = not guarded.call(name)
        if fault is Fault.LOST:
            assert missed == (name == LOAD)
        else:
            assert missed, f"{fault.value} of {name} went unnoticed"
        guarded.faulty.heal()
        guarded.assert_well()

    @pytest.mark.parametrize("name", [LOOKUP, LOAD, STORE])
    def test_slow_is_no_miss_before_the_deadline(self, guarded: Guarded, name: str) -> None:
        guarded.inject(Fault.SLOW, name, delay=0.05)
        assert guarded.call(name)
        guarded.assert_well()

    @pytest.mark.parametrize("name", [LOAD, STORE])
    def test_a_call_given_up_keeps_its_host_pages(self, guarded: Guarded, name: str) -> None:
        pages = guarded.target if name == LOAD else guarded.source
        free = threading.Event()
        guarded.inject(Fault.HANG, name)
        assert not guarded.call(name)
        guarded.guard.when_returned(pages, free.set)
        assert np.array_equal(guarded.guard.held_pages, pages)
        assert not free.is_set(), "the pages were given back while the call may still touch them"
        others = threading.Event()
        guarded.guard.when_returned(guarded.source if name == LOAD else guarded.target, others.set)
        assert others.is_set(), "pages of no call were held"
        guarded.faulty.heal()
        assert free.wait(LONG_SECONDS)
        guarded.assert_well()

    @pytest.mark.parametrize("kind", [READ, WRITE])
    def test_breaker_opens_and_closes(self, guarded: Guarded, kind: str) -> None:
        """After failures in a row calls are refused unasked; then one asks, and its success ends it. The other kind
        goes on meanwhile."""
        name, other = (LOAD, STORE) if kind == READ else (STORE, LOAD)
        guarded.inject(Fault.ERROR, name)
        assert not any(guarded.call(name) for _ in range(ERRORS_IN_A_ROW))
        reached = guarded.faulty.reached[name]
        assert guarded.guard.breakers[kind].is_open
        assert not any(guarded.call(name) for _ in range(5))
        assert guarded.faulty.reached[name] == reached, "the open breaker let a call through"
        assert guarded.guard.get_stats().refused == 5
        assert guarded.call(other)
        guarded.clock.now += 60
        assert not guarded.call(name)
        assert guarded.faulty.reached[name] == reached + 1, "the probe did not get through"
        guarded.faulty.heal()
        guarded.assert_well()

    def test_nothing_leaks_when_calls_hang_again_and_again(self, guarded: Guarded) -> None:
        """Every probe hangs: threads and held pages stay bounded, all pages come back, and a second time needs no more
        threads and files than the first."""
        threads = threading.active_count()
        self.hang(guarded, 12)
        assert threading.active_count() <= threads + MAX_GIVEN_UP + 3
        guarded.assert_well()
        threads, files = threading.active_count(), open_files()
        self.hang(guarded, 12)
        guarded.assert_well()
        assert threading.active_count() <= threads and open_files() <= files + SPARE_FILES

    def hang(self, guarded: Guarded, times: int) -> None:
        """Calls of all kinds that hang, as often as the breakers let one through; then they go on."""
        guarded.inject(Fault.HANG)
        for _ in range(times):
            assert not any(guarded.call(name) for name in (LOAD, LOOKUP, STORE))
            guarded.clock.now += 60
        guarded.faulty.heal()
        eventually(lambda: guarded.guard.given_up == 0, "a call that was given up has not returned")


class DamageTests(SuiteBase):
    """A stored page is no longer what it was."""

    @pytest.mark.parametrize("damage", list(Damage), ids=lambda damage: damage.name.lower())
    def test_damaged_page_is_a_miss(
        self, make: MakeStorage, subject: StorageSubject, tmp_path: Path, damage: Damage
    ) -> None:
        """The pages before it are read; it can be stored again, and is then right (D6)."""
        storage, pool = make(BIG, pages=2 * PAGE_COUNT)
        guarded = Guarded(storage, pool)
        try:
            subject.damage(damage, storage, NAMES[2], tmp_path)
        except Unsupported as reason:
            pytest.skip(str(reason))
        assert guarded.guard.load(NAMES, guarded.target) == 2, f"a page damaged by {damage.value} was taken for good"
        assert all(np.array_equal(pool.read(page), pool.read(page + PAGE_COUNT)) for page in range(2))
        corrupt = guarded.guard.get_stats().corrupt
        assert corrupt == 1 if damage in (Damage.FLIPPED_BYTE, Damage.ANOTHER_PAGE) else corrupt <= 1
        guarded.assert_well()


class OutageTests(SuiteBase):
    """The store behind the backend goes away, or hangs, and comes back."""

    @pytest.mark.parametrize("outage", ["killed", "frozen"])
    def test_store_goes_and_comes_back(
        self, make: MakeStorage, subject: StorageSubject, tmp_path: Path, outage: str
    ) -> None:
        """Misses while it is away; then pages are stored and read again, by the same backend."""
        storage, pool = make(BIG, pages=2 * PAGE_COUNT, timeout=OUTAGE_SECONDS)
        guarded = Guarded(storage, pool)
        guarded.guard.timeout = OUTAGE_SECONDS
        begin, end = {
            "killed": (subject.take_away, subject.bring_back),
            "frozen": (subject.freeze, subject.thaw),
        }[outage]
        try:
            begin(tmp_path)
        except Unsupported as reason:
            pytest.skip(str(reason))
        try:
            for _ in range(3):
                assert guarded.guard.lookup(UNSTORED) == 0
                assert guarded.guard.load(UNSTORED, guarded.target) == 0
                assert guarded.guard.store(UNSTORED, guarded.source) == 0
                guarded.clock.now += 60
        finally:
            end(tmp_path)
        guarded.guard.timeout = LONG_SECONDS
        self.assert_comes_back(guarded)

    def assert_comes_back(self, guarded: Guarded) -> None:
        """Within a minute pages can be stored and read."""

        def works() -> bool:
            guarded.clock.now += 60
            stored = guarded.guard.store(UNSTORED, guarded.source)
            read = guarded.guard.load(UNSTORED, guarded.target)
            return stored == read == PAGE_COUNT

        eventually(works, "the store came back and is not used again", seconds=LONG_SECONDS)
        for page in range(PAGE_COUNT):
            assert np.array_equal(guarded.pool.read(page), guarded.pool.read(page + PAGE_COUNT))
        eventually(lambda: guarded.guard.given_up == 0, "a call that was given up has not returned")
        assert guarded.guard.held_pages.size == 0


def open_files() -> int:
    """Open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))
