"""Lanes for copies between L1 and L2, off the serving thread and in order (docs/design.md 5).

There is one lane each way: a stream on CUDA, a thread on the CPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import torch

from hicache_ray import faultpoints
from hicache_ray.threads import Worker

Copy = Callable[[], None]
"""A job that copies between L1 and L2."""


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
        """Blocks until every submitted copy has ended. Returns False when `timeout` seconds were too few. Raises as
        `done`."""

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
