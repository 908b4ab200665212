"""Where the index tells what became of a node's pages (cases 62, 63)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from hicache_ray.radix.node import Node

EventKind = Literal["stored", "removed", "cleared"]
Tier = Literal["device", "host"]

EventSink = Callable[[EventKind, Tier, Node, str], None]
"""Called as sink(kind, tier, node, reason), while the node still is where the event finds it: before a removal, after a
store. `cleared` comes once per tier, with the root. A node is told apart by its path, not by identity: it may split.
"""


class Events:
    """The index's hook for events; without a sink it costs nothing."""

    __slots__ = ("sink",)

    def __init__(self) -> None:
        self.sink: EventSink | None = None

    def emit(self, kind: EventKind, tier: Tier, node: Node, reason: str) -> None:
        """Tells the sink, if there is one."""
        if self.sink is not None:
            self.sink(kind, tier, node, reason)
