"""Where transfers run, off the serving thread and in the order in which they were submitted (docs/design.md 5).

A worker is a thread for jobs of any kind. A lane is for copies between L1 and L2, one lane each way: a stream on CUDA,
a worker on the CPU.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable

import torch

from hicache_ray import faultpoints

logger = logging.getLogger("hicache_ray.rank.lanes")

Job = Callable[[], None]
Copy = Callable[[], None]
"""A job that copies between L1 and L2."""


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


class CopyError(RuntimeError):
    """A copy between L1 and L2 failed. The rank's memory can't be trusted any more, so the rank has to end."""


class CopyLane(ABC):
    """Runs copies in the order in which they were submitted, off the caller's thread or stream."""

    @abstractmethod
    def submit(self, copy: Copy) -> None:
        """Queue a copy behind those submitted before. What the caller's stream did so far happens before it."""

    @property
    @abstractmethod
    def done(self) -> int:
        """How many of the submitted copies have ended, counted from the first; only grows. Never blocks.

        Raises:
            CopyError: a copy failed.
        """

    @abstractmethod
    def wait(self, timeout: float) -> bool:
        """Blocks until every submitted copy has ended; False when `timeout` seconds were too few. Raises as `done`."""

    @abstractmethod
    def close(self) -> None:
        """Gives the thread or stream back; may be called twice."""


class ThreadLane(CopyLane):
    """CPU lane: one worker thread."""

    def __init__(self, name: str) -> None:
        self._point = f"copy.{name}"
        self._worker = Worker(name)
        self._done = 0
        self._error: Exception | None = None

    def submit(self, copy: Copy) -> None:
        def run() -> None:
            try:
                faultpoints.reach(self._point)
                copy()
            except Exception as error:
                self._error = error
                raise
            self._done += 1

        self._worker.submit("copy", run)

    @property
    def done(self) -> int:
        if self._error is not None:
            raise CopyError(f"a copy between L1 and L2 failed: {self._error}") from self._error
        return self._done

    def wait(self, timeout: float) -> bool:
        idle = self._worker.wait_idle(timeout)
        return self.done >= 0 and idle

    def close(self) -> None:
        self._worker.close()


class StreamLane(CopyLane):
    """CUDA lane: a side stream; an event after each copy tells when it has ended."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._device = device
        self._events: deque[torch.cuda.Event] = deque()
        self._done = 0

    @property
    def stream(self) -> torch.cuda.Stream:
        """The side stream the copies run on."""
        return self._stream

    def submit(self, copy: Copy) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy()
            event = torch.cuda.Event()
            event.record(self._stream)
        self._events.append(event)

    @property
    def done(self) -> int:
        try:
            while self._events and self._events[0].query():
                self._events.popleft()
                self._done += 1
        except RuntimeError as error:
            raise CopyError(f"a copy between L1 and L2 failed: {error}") from error
        return self._done

    def wait(self, timeout: float) -> bool:
        # A stream has no wait with a deadline; the copies before it are bounded, and a broken device raises here.
        if self._events:
            self._events[-1].synchronize()
        return self.done >= 0 and not self._events

    def close(self) -> None:
        self._events.clear()


def copy_lane(device: torch.device, name: str) -> CopyLane:
    """The lane for a device: a stream on CUDA, a thread elsewhere."""
    return StreamLane(device) if device.type == "cuda" else ThreadLane(name)
