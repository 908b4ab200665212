"""Threads that go on whatever their jobs do: a worker runs jobs in order, helpers share a caller's list."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

logger = logging.getLogger("hicache_ray.threads")

Job = Callable[[], None]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Worker:
    """One daemon thread that runs jobs in the order in which they were submitted.

    A job that raises is counted in `failures` under its kind, logged once per kind, and the thread goes on: the job
    itself must leave its operation in the state "did nothing", which is a miss.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.failures: Counter[str] = Counter()
        self._jobs: deque[tuple[str, Job]] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"hicache-{name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs; False only after `close`."""
        return self._thread.is_alive()

    def submit(self, kind: str, job: Job) -> None:
        """Queue a job; RuntimeError after `close`."""
        with self._changed:
            if self._closed:
                raise RuntimeError(f"worker {self.name} is closed: {kind} can't be queued")
            self._jobs.append((kind, job))
            self._changed.notify_all()

    def wait_idle(self, timeout: float) -> bool:
        """Waits until every submitted job has ended. Returns False when `timeout` seconds were not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._busy, timeout)

    def close(self, timeout: float = 5.0) -> bool:
        """Drops jobs not begun and ends the thread. Returns False when the job under way did not end within `timeout`
        seconds.

        May be called twice.
        """
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._jobs) or self._closed)
                if self._closed:
                    return
                kind, job = self._jobs.popleft()
                self._busy = True
            try:
                job()
            except Exception:
                self._count(kind)
            del job

    def _count(self, kind: str) -> None:
        self.failures[kind] += 1
        if self.failures[kind] == 1:
            logger.exception(
                "%s failed on worker %s: counted as a miss; further ones are only counted", kind, self.name
            )


class HelperThreads:
    """Daemon threads that share a caller's list with it. Thread-safe: several callers may have lists at a time.

    A caller works on its own list too, so a call ends even while every thread is stuck in someone else's. The threads
    are daemons: one that hangs, in a store or a disk, does not keep the process from ending.
    """

    def __init__(self, name: str, threads: int) -> None:
        """Start `threads` threads; with 0 each caller works alone."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> int:
        """Threads that run; all of them until `close`."""
        return sum(thread.is_alive() for thread in self._threads)

    def map(self, function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        """`function` of each item, results in order; items begin in order. Returns when no call is under way any more,
        then raises the first error, if there was one."""
        if len(items) < 2:
            return [function(item) for item in items]
        work = _Work(function, items)
        for _ in range(min(len(self._threads), len(items) - 1)):
            self._jobs.put(work.run)
        work.run()
        return work.results()

    def close(self) -> None:
        """End the threads once their calls have ended; does not wait for them. Idempotent."""
        for _ in self._threads:
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                logger.exception("a helper thread failed on a job; it goes on with the next")
            del job


class _Work(Generic[_Item, _Result]):
    """One list: whoever is free takes the next item; ended when every item is."""

    def __init__(self, function: Callable[[_Item], _Result], items: Sequence[_Item]) -> None:
        self._function = function
        self._items = items
        self._next = itertools.count()
        self._results: dict[int, _Result] = {}
        self._errors: dict[int, Exception] = {}
        self._left = len(items)
        self._changed = threading.Condition()

    def run(self) -> None:
        """Take items until none is left."""
        while (index := next(self._next)) < len(self._items):
            try:
                self._results[index] = self._function(self._items[index])
            except Exception as error:
                self._errors[index] = error
            with self._changed:
                self._left -= 1
                if not self._left:
                    self._changed.notify_all()

    def results(self) -> list[_Result]:
        """Wait for the items that others took."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left)
        if self._errors:
            raise self._errors[min(self._errors)]
        return [self._results[index] for index in range(len(self._items))]
