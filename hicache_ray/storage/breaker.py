"""A circuit breaker: a store that failed is left alone for a short while, then tried with one call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


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
