"""The background thread every transfer runs on: jobs in order, and it never dies (DESIGN 5)."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable

logger = logging.getLogger("hicache_ray.worker")

Job = Callable[[], None]


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
        """Waits until every submitted job has ended; False when `timeout` seconds were not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._busy, timeout)

    def close(self, timeout: float = 5.0) -> bool:
        """Drops jobs not begun and ends the thread; False when the job under way did not end within `timeout` seconds.

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
