"""A circuit breaker: a store that failed is left alone for a short while, then tried with one call.

Threads that carry one call each and may be left behind with it.

A deadline around any backend: a call that does not come back is a miss, and what it may still touch stays its own.

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
from hicache_ray.storage.base import HiCacheStorage, HostPages, Slots, StorageExtra, StorageStats


class Breaker:
    """Guards the calls to one target. Thread-safe.

    Closed: calls pass. A failure opens it: no call passes for the refusal period, which doubles with every failed
    probe up to a limit. Then one call, the probe, passes: its success closes the breaker, its failure opens it again.
    A probe that reports nothing counts as failed after the longest refusal period.
    """

    def __init__(
        self,
        refusal_seconds: float = 0.5,
        longest_refusal_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first = refusal_seconds
        self._longest = longest_refusal_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._refusal = refusal_seconds
        self._open = False
        self._refuse_until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the target is thought to be away."""
        with self._lock:
            return self._open

    def allows(self) -> bool:
        """Whether a call may be made now. True obliges the caller to report `succeeded` or `failed`."""
        with self._lock:
            if not self._open:
                return True
            now = self._clock()
            if now < self._refuse_until:
                return False
            self._refuse_until = now + self._longest
            return True

    def succeeded(self) -> None:
        """A call was answered."""
        with self._lock:
            self._open = False
            self._refusal = self._first

    def failed(self) -> None:
        """A call was not answered in time, or its target is away."""
        with self._lock:
            if self._open:
                self._refusal = min(self._refusal * 2, self._longest)
            self._open = True
            self._refuse_until = self._clock() + self._refusal


class Call:
    """One call under way. `answer` or `error` is set when `ended`."""

    def __init__(self, function: Callable[[], Any], slots: Slots | None) -> None:
        self.slots = np.empty(0, dtype=np.int64) if slots is None else np.array(slots, dtype=np.int64)
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

    def start(self, function: Callable[[], Any], slots: Slots | None) -> Call:
        """Begin a call that touches the host slots `slots`; RuntimeError after `close`."""
        call = Call(function, slots)
        with self._changed:
            if self._closed:
                raise RuntimeError("the storage backend is closed: no call may follow")
            self._next.append(call)
            if self._idle < len(self._next):
                threading.Thread(target=self._run, name="hicache-l3-call", daemon=True).start()
            self._changed.notify_all()
        return call

    def wait(self, call: Call, timeout: float) -> bool:
        """True when the call ended within `timeout` seconds; else it is given up."""
        with self._changed:
            if not self._changed.wait_for(lambda: call.ended, timeout):
                call.given_up = True
                self._left_behind[call] = []
        return not call.given_up

    def when_returned(self, slots: Slots, callback: Callable[[], None]) -> None:
        """Run `callback` when no given-up call holds any of `slots`."""
        with self._changed:
            holders = [call for call in self._left_behind if np.isin(call.slots, slots).any()]
            waiting = _Waiting(callback, len(holders))
            for call in holders:
                self._left_behind[call].append(waiting)
        if not holders:
            callback()

    def held_slots(self) -> Slots:
        """Slots of the given-up calls, each once, ascending."""
        with self._changed:
            held = [call.slots for call in self._left_behind]
        return np.unique(np.concatenate(held)) if held else np.empty(0, dtype=np.int64)

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
