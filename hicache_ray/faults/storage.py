"""A backend that fails on demand, in every way in which stores were seen to fail.

It wraps another backend. `GuardedStorage(FaultyStorage(backend))` must answer every fault but `FLIPPED_BYTE` with a
miss; a flipped byte above a backend's own checks is for tests of what stands above the backends.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hicache_ray.pages import Pages
from hicache_ray.storage.base import PageContext, Storage, StorageStats
from hicache_ray.storage.host_pages import HostPages


class Fault(enum.Enum):
    """What goes wrong with a call."""

    ERROR = "error"
    """It raises."""
    HANG = "hang"
    """It waits until `heal`, then goes through after all."""
    SLOW = "slow"
    """It is held for `delay` seconds, then goes through."""
    SHORT_READ = "short read"
    """It answers for all pages but the last."""
    ZERO_LENGTH = "zero length"
    """It answers with an empty list."""
    NO_ANSWER = "no answer"
    """It answers None."""
    LOST = "lost after exists"
    """Lookups say yes; reads find nothing."""
    FLIPPED_BYTE = "flipped byte"
    """The first page it reads has one byte wrong, and it says all is well."""


LOOKUP, LOAD, STORE = "lookup", "load", "store"
CALLS = frozenset({LOOKUP, LOAD, STORE})


class InjectedError(RuntimeError):
    """What `Fault.ERROR` raises."""


class FaultyStorage(Storage):
    """`backend` with faults. `reached` counts, by method name, the calls that came this far."""

    def __init__(self, backend: Storage) -> None:
        super().__init__(backend.config)
        self.backend = backend
        self.host_pool = backend.host_pool
        self.reached: Counter[str] = Counter()
        self.delay = 0.0
        self._fault: Fault | None = None
        self._calls: frozenset[str] = CALLS
        self._times = 0
        self._lock = threading.Lock()
        self._healed = threading.Event()
        self._healed.set()

    def inject(self, fault: Fault, *, calls: frozenset[str] = CALLS, times: int = -1, delay: float = 0.0) -> None:
        """From now on the next `times` calls of those methods fail (all of them when negative), until `heal`."""
        with self._lock:
            self._fault, self._calls, self._times, self.delay = fault, calls, times, delay
            self._healed.clear()

    def heal(self) -> None:
        """No fault from now on; calls that hang go on."""
        with self._lock:
            self._fault = None
        self._healed.set()

    def register_host_pool(self, pool: HostPages) -> None:
        super().register_host_pool(pool)
        self.backend.register_host_pool(pool)

    def lookup(self, hashes: Sequence[bytes], context: PageContext | None = None) -> int:
        fault = self._enter(LOOKUP)
        if fault is Fault.LOST:
            return len(hashes)
        return self._answer(fault, self.backend.lookup(hashes, context))

    def load(self, hashes: Sequence[bytes], pages: Pages, context: PageContext | None = None) -> int:
        fault = self._enter(LOAD)
        if fault is Fault.LOST:
            return 0
        answer = self.backend.load(hashes, pages, context)
        if fault is Fault.FLIPPED_BYTE and len(pages):
            _flip_first_byte(self.pool_for(hashes, pages), int(pages[0]))
        return self._answer(fault, answer)

    def store(self, hashes: Sequence[bytes], pages: Pages, context: PageContext | None = None) -> int:
        return self._answer(self._enter(STORE), self.backend.store(hashes, pages, context))

    def clear(self, everything: bool = False) -> None:
        self.backend.clear(everything)

    def get_stats(self) -> StorageStats:
        return self.backend.get_stats()

    def close(self) -> None:
        self.backend.close()

    def _enter(self, name: str) -> Fault | None:
        with self._lock:
            self.reached[name] += 1
            fault = self._fault if name in self._calls and self._times else None
            if fault is not None:
                self._times -= 1
        if fault is Fault.ERROR:
            raise InjectedError(f"{name} fails, as asked for")
        if fault is Fault.HANG:
            self._healed.wait()
        if fault is Fault.SLOW:
            self._healed.wait(self.delay)
        return fault

    @staticmethod
    def _answer(fault: Fault | None, answer: int) -> Any:
        if fault is Fault.NO_ANSWER:
            return None
        if fault is Fault.ZERO_LENGTH:
            return []
        return max(0, answer - 1) if fault is Fault.SHORT_READ else answer


def _flip_first_byte(pool: HostPages, page: int) -> None:
    view = pool.segments[page]
    view[(0,) * view.ndim] ^= 0xFF
