"""A point in time that all waits of one operation share, and a wait for a condition."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Deadline:
    """The end of an operation: whatever it waits for, it waits no longer than until then.

    Args:
        seconds: from now.
        clock: seconds; monotonic, so that a clock that is set neither shortens nor lengthens a wait.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self._clock() >= self._end

    def remaining(self) -> float:
        """Seconds left, not below 0."""
        return max(0.0, self._end - self._clock())

    def at_most(self, seconds: float) -> float:
        """Seconds a single wait may take: what is left, but not more than `seconds`."""
        return min(self.remaining(), seconds)


def wait_until(condition: Callable[[], bool], seconds: float, pause: float = 0.01) -> bool:
    """Waits until a condition holds, looking every `pause` seconds. Returns False when it does not within `seconds`."""
    deadline, idle = Deadline(seconds), threading.Event()
    while not condition():
        if deadline.passed:
            return False
        idle.wait(pause)
    return True
