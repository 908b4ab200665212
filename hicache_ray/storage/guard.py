"""A deadline and a breaker around a backend: a call that does not come back is a miss, and what it may still touch
stays its own.

A thread in a foreign library can't be stopped. So a call that passes its deadline is given up: the caller goes on, the
call keeps its thread and the host pages it was given, and `when_returned` tells when these pages are free. After
repeated failures the breaker refuses calls for a while, then lets one through as a probe.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

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
        self._threads.when_returned(pages, callback)

    @property
    def held_pages(self) -> Pages:
        """Host pages that given-up calls may still touch, ascending."""
        return self._threads.held_pages()

    @property
    def given_up(self) -> int:
        """Calls given up that have not returned."""
        return self._threads.given_up

    def clear(self, everything: bool = False) -> None:
        """As the backend's; TimeoutError when it does not end within the deadline."""
        call = self._threads.start(lambda: self.backend.clear(everything))
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
        call = self._threads.start(self.backend.close)
        if not self._threads.wait(call, self.timeout):
            logger.warning("closing the storage backend did not end within %s s; left behind", self.timeout)
        elif call.error is not None:
            self._log("storage.close", call.error)
        self._threads.close()

    def _count(
        self, point: str, hashes: Sequence[bytes], pages: Pages, function: Callable[[], Any], kind: str = READ
    ) -> int:
        """The leading pages a call answers for: 0 when it fails, or answers with no such number."""
        call = Call(faultpoints.around(point, len(hashes), function), pages)
        if self.backend.bounded:
            call.run()
        elif not self._carried_out(point, kind, call):
            return 0
        if call.error is not None:
            self._failed(point, call.error)
            return 0
        count = call.answer
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or not 0 <= count <= len(hashes):
            if count is not None:
                self._failed(point, TypeError(f"an answer that does not fit the question: {str(count)[:80]}"))
            return 0
        return int(count)

    def _carried_out(self, point: str, kind: str, call: Call) -> bool:
        """Make the call in a thread of its own; False when it is refused or given up."""
        breaker = self.breakers[kind]
        if self._threads.given_up >= MAX_GIVEN_UP or not breaker.allows():
            self.counters.add(refused=1)
            return False
        before = self._failures()
        self._threads.begin(call)
        if not self._threads.wait(call, self.timeout):
            self.counters.add(timeouts=1)
            breaker.failed()
            self._log(point, TimeoutError(f"no answer within {self.timeout} s"))
            return False
        # A backend that answers "nothing" because its store is down says so only in its counters.
        self._judge(kind, call.error is not None or (not np.any(call.answer) and self._failures() > before))
        return True

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

    def _failed(self, name: str, error: Exception) -> None:
        self.counters.add(errors=1)
        self._log(name, error)

    def _log(self, name: str, error: Exception) -> None:
        kind = f"{name}: {type(error).__name__}"
        self._logged[kind] += 1
        if self._logged[kind] == 1:
            logger.warning("%s failed: %s; this is a miss, further ones are only counted", name, error)


class Call:
    """One call under way, and the host pages it touches. `answer` or `error` is set when `ended`."""

    def __init__(self, function: Callable[[], Any], pages: Pages = NO_PAGES) -> None:
        self.pages = pages.copy()
        self.answer: Any = None
        self.error: Exception | None = None
        self.ended = False
        self.given_up = False
        self._function: Callable[[], Any] | None = function

    def run(self) -> None:
        """Make the call; keeps what it gives or raises."""
        assert self._function is not None
        try:
            self.answer = self._function()
        except Exception as error:
            self.error = error
        finally:
            self._function = None


class _Waiting:
    """A callback and the number of given-up calls it waits for."""

    def __init__(self, callback: Callable[[], None], calls: int) -> None:
        self.callback = callback
        self.calls = calls


class CallThreads:
    """Daemon threads, one for each call under way; a thread whose call has ended takes the next one.

    There are as many threads as calls ever were under way at once: the caller bounds the calls it gives up.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next: list[Call] = []
        self._idle = 0
        self._closed = False
        self._left_behind: dict[Call, list[_Waiting]] = {}

    @property
    def given_up(self) -> int:
        """Calls given up that have not returned."""
        return len(self._left_behind)

    def start(self, function: Callable[[], Any]) -> Call:
        """Begin a call that touches no host pages; RuntimeError after `close`."""
        call = Call(function)
        self.begin(call)
        return call

    def begin(self, call: Call) -> None:
        """Have a call made; RuntimeError after `close`."""
        with self._changed:
            if self._closed:
                raise RuntimeError("the storage backend is closed: no call may follow")
            self._next.append(call)
            if self._idle < len(self._next):
                threading.Thread(target=self._run, name="hicache-l3-call", daemon=True).start()
            self._changed.notify_all()

    def wait(self, call: Call, timeout: float) -> bool:
        """True when the call ended within `timeout` seconds; else it is given up."""
        with self._changed:
            if not self._changed.wait_for(lambda: call.ended, timeout):
                call.given_up = True
                self._left_behind[call] = []
        return not call.given_up

    def when_returned(self, pages: Pages, callback: Callable[[], None]) -> None:
        """Run `callback` when no given-up call holds any of `pages`."""
        with self._changed:
            holders = [call for call in self._left_behind if np.isin(call.pages, pages).any()]
            waiting = _Waiting(callback, len(holders))
            for call in holders:
                self._left_behind[call].append(waiting)
        if not holders:
            callback()

    def held_pages(self) -> Pages:
        """Pages of the given-up calls, each once, ascending."""
        with self._changed:
            held = [call.pages for call in self._left_behind]
        return np.unique(np.concatenate(held)) if held else NO_PAGES

    def close(self) -> None:
        """End the threads without a call; the others end with theirs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: bool(self._next) or self._closed)
                self._idle -= 1
                if not self._next:
                    return
                call = self._next.pop(0)
            call.run()
            for waiting in self._end(call):
                waiting.callback()
            del call

    def _end(self, call: Call) -> list[_Waiting]:
        with self._changed:
            call.ended = True
            self._changed.notify_all()
            waiting = self._left_behind.pop(call, [])
            for entry in waiting:
                entry.calls -= 1
        return [entry for entry in waiting if not entry.calls]
