"""A deadline and a breaker around a backend: a call that does not come back is a miss, and what it may still touch
stays its own.

A thread in a foreign library can't be stopped. So a call that passes its deadline is given up: the caller goes on, the
call keeps its thread and the host pages it was given, and `when_returned` tells when these pages are free. After
repeated failures the breaker refuses calls for a while, then lets one through as a probe.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from hicache_ray import faultpoints
from hicache_ray.pages import NO_PAGES, Pages
from hicache_ray.storage.base import PageContext, Storage, StorageStats
from hicache_ray.storage.breaker import Breaker
from hicache_ray.storage.host_pages import HostPages

logger = logging.getLogger("hicache_ray.storage")

MAX_GIVEN_UP = 8
"""Calls given up and not yet returned, beyond which no further call is made: each of them holds a thread."""

ERRORS_IN_A_ROW = 3
"""Failed calls, one after the other, that open the breaker. A call that hangs opens it at once."""

READ, WRITE = "read", "write"


class GuardedStorage(Storage):
    """A backend whose calls end: each within `timeout` seconds (`config.timeout`), whatever the backend does.

    What the backend raises, and answers that are no count of the pages asked for, are misses. Reads (and lookups) and
    writes have a breaker each, so that a store that can't be written is still read. A backend that bounds its calls
    itself is called in the caller's thread, without a deadline or a breaker of ours.
    """

    def __init__(self, backend: Storage, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Guard `backend`; `clock` (seconds) times the breakers' refusals, not the deadlines."""
        super().__init__(backend.config)
        self.backend = backend
        self.timeout = self.config.timeout
        self.host_pool = backend.host_pool
        self.breakers = {READ: Breaker(clock=clock), WRITE: Breaker(clock=clock)}
        self._in_a_row = {READ: 0, WRITE: 0}
        self._threads = CallThreads()
        self._left_behind: dict[Future[CallResult], Pages] = {}
        self._logged: Counter[str] = Counter()

    def register_host_pool(self, pool: HostPages) -> None:
        super().register_host_pool(pool)
        self.backend.register_host_pool(pool)

    def lookup(self, hashes: Sequence[bytes], context: PageContext | None = None) -> int:
        return self._count("storage.lookup", hashes, NO_PAGES, lambda: self.backend.lookup(hashes, context))

    def load(self, hashes: Sequence[bytes], pages: Pages, context: PageContext | None = None) -> int:
        self.pool_for(hashes, pages)
        return self._count("storage.load", hashes, pages, lambda: self.backend.load(hashes, pages, context))

    def store(self, hashes: Sequence[bytes], pages: Pages, context: PageContext | None = None) -> int:
        self.pool_for(hashes, pages)
        return self._count("storage.store", hashes, pages, lambda: self.backend.store(hashes, pages, context), WRITE)

    def when_returned(self, pages: Pages, callback: Callable[[], None]) -> None:
        """Call `callback` once no given-up call may touch these host pages any more: at once, in this thread, where
        none does; else in the thread of the last such call when it returns. It must be quick and must not raise."""
        for call, held in self._left_behind.copy().items():
            if np.isin(held, pages).any() and not call.done():
                call.add_done_callback(lambda _: self.when_returned(pages, callback))
                return
        callback()

    @property
    def held_pages(self) -> Pages:
        """Host pages that given-up calls may still touch, ascending."""
        return np.unique(np.concatenate([NO_PAGES, *self._left_behind.copy().values()]))

    @property
    def given_up(self) -> int:
        """Calls given up that have not returned."""
        return len(self._left_behind)

    def clear(self, everything: bool = False) -> None:
        """As the backend's; TimeoutError when it does not end within the deadline."""
        call = self._threads.submit(lambda: self.backend.clear(everything))
        if not self._ends(call):
            raise TimeoutError(f"clear did not end within {self.timeout} s; it goes on in the background")
        if error := call.result().error:
            raise error

    def get_stats(self) -> StorageStats:
        """The backend's counters, with the calls that failed, were given up or refused here added to its own."""
        own, inner = self.counters.snapshot().as_dict(), self.backend.get_stats().as_dict()
        return StorageStats(**{name: value + own[name] for name, value in inner.items()})  # type: ignore[arg-type]

    def close(self) -> None:
        """Close the backend; a call that never returns is left behind with its pages."""
        call = self._threads.submit(self.backend.close)
        if not self._ends(call):
            logger.warning("closing the storage backend did not end within %s s; left behind", self.timeout)
        elif error := call.result().error:
            self._log("storage.close", error)
        self._threads.close()

    def _count(
        self, point: str, hashes: Sequence[bytes], pages: Pages, function: Callable[[], Any], kind: str = READ
    ) -> int:
        """The leading pages a call answers for: 0 when it fails, or answers with no such number."""
        function = faultpoints.around(point, len(hashes), function)
        count, error = result_of(function) if self.backend.bounded else self._bounded(point, kind, pages, function)
        if error is None and count is not None and not _fits(count, len(hashes)):
            error = TypeError(f"an answer that does not fit the question: {str(count)[:80]}")
        if error is not None:
            self.counters.add(errors=1)
            self._log(point, error)
        return 0 if error is not None or count is None else int(count)

    def _bounded(self, point: str, kind: str, pages: Pages, function: Callable[[], Any]) -> CallResult:
        """Make the call in a thread of its own. Returns an outcome without an answer when it is refused or given up."""
        breaker = self.breakers[kind]
        if self.given_up >= MAX_GIVEN_UP or not breaker.allows():
            self.counters.add(refused=1)
            return CallResult()
        before = self._failures()
        call = self._threads.submit(function)
        if not self._ends(call, pages):
            self.counters.add(timeouts=1)
            breaker.failed()
            self._log(point, TimeoutError(f"no answer within {self.timeout} s"))
            return CallResult()
        outcome = call.result()
        # A backend that answers "nothing" because its store is down says so only in its counters.
        self._judge(kind, outcome.error is not None or (not np.any(outcome.answer) and self._failures() > before))
        return outcome

    def _ends(self, call: Future[CallResult], pages: Pages = NO_PAGES) -> bool:
        """Whether the call ends within the deadline; else it is given up, and holds `pages` until it returns."""
        if futures.wait([call], self.timeout).done:
            return True
        self._left_behind[call] = pages.copy()
        call.add_done_callback(self._left_behind.pop)
        return False

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

    def _log(self, name: str, error: Exception) -> None:
        kind = f"{name}: {type(error).__name__}"
        self._logged[kind] += 1
        if self._logged[kind] == 1:
            logger.warning("%s failed: %s; this is a miss, further ones are only counted", name, error)


class CallResult(NamedTuple):
    """What a call gave or raised; neither, where it was not made or not waited for."""

    answer: Any = None
    error: Exception | None = None


def result_of(function: Callable[[], Any]) -> CallResult:
    """Make a call in this thread."""
    try:
        return CallResult(answer=function())
    except Exception as error:
        return CallResult(error=error)


def _fits(count: Any, asked: int) -> bool:
    return isinstance(count, int | np.integer) and not isinstance(count, bool) and 0 <= int(count) <= asked


class CallThreads:
    """Daemon threads, one for each call under way; a thread whose call has ended takes the next one. (The interpreter
    waits at its end for the threads of a `ThreadPoolExecutor`, also for one that hangs.)

    There are as many threads as calls ever were under way at once: the caller bounds the calls it gives up.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[CallResult], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, function: Callable[[], Any]) -> Future[CallResult]:
        """Have a call made; RuntimeError after `close`."""
        call: Future[CallResult] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the storage backend is closed: no call may follow")
            self._calls.put((call, function))
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._run, name="hicache-l3-call", daemon=True).start()
        return call

    def close(self) -> None:
        """End the threads without a call; the others end with theirs."""
        with self._lock:
            self._closed = True
            self._calls.put(None)

    def _run(self) -> None:
        while (job := self._calls.get()) is not None:
            call, function = job
            outcome = result_of(function)
            # Before the caller goes on: its next call takes this thread.
            self._idle.release()
            call.set_result(outcome)
            del job, call, function, outcome
        self._calls.put(None)
