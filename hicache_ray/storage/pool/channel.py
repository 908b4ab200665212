"""How a pool's client reaches one storage actor: calls that return at once and are waited for with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol


class ChannelError(Exception):
    """The call was not answered. It may have run all the same."""


class ChannelTimeout(ChannelError):
    """No answer before the deadline; the call may still be under way."""


class ChannelLost(ChannelError):
    """The actor is away: dead, restarting, or never there."""


class Deadline:
    """A point in time that all waits of one operation share."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def remaining(self) -> float:
        """Seconds left, not below 0."""
        return max(0.0, self._end - self._clock())

    def at_most(self, seconds: float) -> float:
        """Seconds a single wait may take: what is left, but not more than `seconds`."""
        return min(self.remaining(), seconds)


class Pending(Protocol):
    """A call under way."""

    def result(self, timeout: float) -> Any:
        """The answer; ChannelError when there is none within `timeout` seconds."""


class Channel(Protocol):
    """Calls to one storage actor; the methods are those of `ShardService`, and `describe`. Thread-safe."""

    def call(self, method: str, *args: Any) -> Pending:
        """Start a call; ChannelLost when the actor can't be found. Never waits for the answer."""

    def send(self, method: str, *args: Any) -> None:
        """Start a call nobody waits for. Never raises: what is lost here expires at the actor."""
