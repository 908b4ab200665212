"""How a pool's client reaches one storage actor: calls that return at once and are waited for with a deadline."""

from __future__ import annotations

from typing import Any, Protocol


class ChannelError(Exception):
    """The call was not answered. It may have run all the same."""


class ChannelTimeout(ChannelError):
    """No answer before the deadline; the call may still be under way."""


class ChannelLost(ChannelError):
    """The actor is away: dead, restarting, or never there."""


class Pending(Protocol):
    """A call under way."""

    def result(self, timeout: float) -> Any:
        """The answer; ChannelError when there is none within `timeout` seconds."""


class Channel(Protocol):
    """Calls to one storage actor; the methods are those of `ShardService`, and `describe`. Thread-safe."""

    def call(self, method: str, *args: Any) -> Pending:
        """Start a call; ChannelLost when the actor can't be found. Never waits for the answer."""

    def send(self, method: str, *args: Any) -> None:
        """Start a call whose answer nobody waits for. Never raises: a lease that stays open expires at the actor."""
