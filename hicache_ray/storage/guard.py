"""A deadline around any backend: a call that does not come back is a miss, and what it may still touch stays its own.

A thread in a foreign library can't be stopped. So a call that passes its deadline is given up: the caller goes on, the
call keeps its thread and the host pages it was given, and `when_returned` tells when these pages are free. After
repeated failures the breaker refuses calls for a while, then lets one through as a probe.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hicache_ray import faultpoints
from hicache_ray.storage.base import HiCacheStorage, HostPages, Slots, StorageExtra, StorageStats
from hicache_ray.storage.breaker import Breaker
from hicache_ray.storage.guard_calls import CallThreads

logger = logging.getLogger("hicache_ray.storage")

MAX_GIVEN_UP = 8
"""Calls given up and not yet returned, beyond which no further call is made: each of them holds a thread."""

ERRORS_IN_A_ROW = 3
"""Failed calls, one after the other, that open the breaker. A call that hangs opens it at once."""

READ, WRITE = "read", "write"
EXISTS_POINT, GET_POINT, SET_POINT = "storage.batch_exists", "storage.batch_get_v1", "storage.batch_set_v1"


class GuardedStorage(HiCacheStorage):
    """A backend whose calls end: each within `timeout` seconds (`config.timeout`), whatever the backend does.

    What the backend raises, and answers of the wrong length or kind, are misses. Reads (and lookups) and writes have
    a breaker each, so that a store that can't be written is still read.
    """

    def __init__(self, backend: HiCacheStorage, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Guard `backend`; `clock` (seconds) times the breakers' refusals, not the deadlines."""
        super().__init__(backend.config)
        self.backend = backend
        self.timeout = self.config.timeout
        self.host_pool = backend.host_pool
        self.breakers = {READ: Breaker(clock=clock), WRITE: Breaker(clock=clock)}
        self._in_a_row = {READ: 0, WRITE: 0}
        self._threads = CallThreads()
        self._logged: Counter[str] = Counter()

    def register_mem_pool_host(self, pool: HostPages) -> None:
        super().register_mem_pool_host(pool)
        self.backend.register_mem_pool_host(pool)

    def batch_exists(self, hashes: Sequence[str], extra: StorageExtra | None = None) -> int:
        lookup = faultpoints.around(EXISTS_POINT, len(hashes), lambda: self.backend.batch_exists(hashes, extra))
        hits = self._call(READ, "batch_exists", None, lookup)
        if hits is None:
            return 0
        if not isinstance(hits, int | np.integer) or not 0 <= hits <= len(hashes):
            return self._bad_answer("batch_exists", hits, 0)
        return int(hits)

    def batch_get_v1(self, hashes: Sequence[str], host_slots: Slots, extra: StorageExtra | None = None) -> list[bool]:
        self.host_page_numbers(hashes, host_slots)
        read = faultpoints.around(GET_POINT, len(hashes), lambda: self.backend.batch_get_v1(hashes, host_slots, extra))
        answer = self._call(READ, "batch_get_v1", host_slots, read)
        return self._flags("batch_get_v1", answer, len(hashes))

    def batch_set_v1(self, hashes: Sequence[str], host_slots: Slots, extra: StorageExtra | None = None) -> list[bool]:
        self.host_page_numbers(hashes, host_slots)
        write = faultpoints.around(SET_POINT, len(hashes), lambda: self.backend.batch_set_v1(hashes, host_slots, extra))
        answer = self._call(WRITE, "batch_set_v1", host_slots, write)
        return self._flags("batch_set_v1", answer, len(hashes))

    def when_returned(self, host_slots: Slots, callback: Callable[[], None]) -> None:
        """Call `callback` once no given-up call may touch these slots any more: at once, in this thread, where none
        does; else in the thread of the last such call when it returns. It must be quick and must not raise."""
        self._threads.when_returned(host_slots, callback)

    @property
    def held_slots(self) -> Slots:
        """Host slots that given-up calls may still touch, ascending."""
        return self._threads.held_slots()

    @property
    def given_up(self) -> int:
        """Calls given up that have not returned."""
        return self._threads.given_up

    def clear(self, everything: bool = False) -> None:
        """As the backend's; TimeoutError when it does not end within the deadline."""
        call = self._threads.start(lambda: self.backend.clear(everything), None)
        if not self._threads.wait(call, self.timeout):
            raise TimeoutError(f"clear did not end within {self.timeout} s; it goes on in the background")
        if call.error is not None:
            raise call.error

    def get_stats(self) -> StorageStats:
        """The backend's counters, with the calls that failed, were given up or refused here added to its own."""
        own, inner = self.counters.snapshot().as_dict(), self.backend.get_stats().as_dict()
        return StorageStats(**{name: value + own[name] for name, value in inner.items()})  # type: ignore[arg-type]

    def close(self) -> None:
        """Close the backend; a call that never returns is left behind with its pages."""
        call = self._threads.start(self.backend.close, None)
        if not self._threads.wait(call, self.timeout):
            logger.warning("closing the storage backend did not end within %s s; left behind", self.timeout)
        elif call.error is not None:
            self._log("close", call.error)
        self._threads.close()

    def _call(self, kind: str, name: str, slots: Slots | None, function: Callable[[], Any]) -> Any:
        """The backend's answer, or None when there is none."""
        breaker = self.breakers[kind]
        if self._threads.given_up >= MAX_GIVEN_UP or not breaker.allows():
            self.counters.add(refused=1)
            return None
        before = self._failures()
        call = self._threads.start(function, slots)
        if not self._threads.wait(call, self.timeout):
            self.counters.add(timeouts=1)
            breaker.failed()
            self._log(name, TimeoutError(f"no answer within {self.timeout} s"))
            return None
        if call.error is not None:
            self.counters.add(errors=1)
            self._log(name, call.error)
        # A backend that answers "nothing" because its store is down says so only in its counters.
        self._judge(kind, failed=not np.any(call.answer) and self._failures() > before)
        return call.answer

    def _judge(self, kind: str, failed: bool) -> None:
        breaker = self.breakers[kind]
        self._in_a_row[kind] = self._in_a_row[kind] + 1 if failed else 0
        if not failed:
            breaker.succeeded()
        elif breaker.is_open or self._in_a_row[kind] >= ERRORS_IN_A_ROW:
            breaker.failed()

    def _failures(self) -> int:
        stats = self.get_stats()
        return stats.errors + stats.timeouts

    def _flags(self, name: str, answer: Any, count: int) -> list[bool]:
        if answer is None:
            return [False] * count
        if not isinstance(answer, list | tuple | np.ndarray) or len(answer) != count:
            return self._bad_answer(name, answer, [False] * count)
        return [bool(flag) for flag in answer]

    def _bad_answer(self, name: str, answer: Any, instead: Any) -> Any:
        self.counters.add(errors=1)
        self._log(name, TypeError(f"an answer that does not fit the question: {str(answer)[:80]}"))
        return instead

    def _log(self, name: str, error: BaseException) -> None:
        kind = f"{name}: {type(error).__name__}"
        self._logged[kind] += 1
        if self._logged[kind] == 1:
            logger.warning("storage %s failed: %s; this is a miss, further ones are only counted", name, error)
