"""Named points at which a test or a drill may break things (`hicache_ray.faults`). Nothing here breaks anything.

While no injector is installed, which is always so in service, a point costs one comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

_Answer = TypeVar("_Answer")
Views = Sequence[npt.NDArray[np.uint8]]

POINTS = {
    "rank.step": "a rank has received a step and done nothing of it yet",
    "rank.reduce": "a rank enters the step's reduction: others may wait in it already",
    "rank.answer": "a rank has applied a step and not answered it yet",
    "rank.quiesce": "a rank ends what it has in flight, the first part of a recovery",
    "rank.claim": "a rank gets lost pages back, during a recovery",
    "rank.restore": "a rank takes the agreed tree, during a recovery",
    "rank.join": "a rank joins a generation of its group",
    "storage.lookup": "a lookup in a storage backend, in the thread that carries it",
    "storage.load": "a read from a storage backend, likewise",
    "storage.store": "a write to a storage backend, likewise",
    "channel.call": "a client calls a storage actor; the peer is the actor",
    "actor.exists": "a storage actor looks pages up",
    "actor.reserve": "a storage actor gives cells to write to",
    "actor.offer": "a storage actor is offered pages by another one",
    "actor.commit": "a storage actor makes written pages visible",
    "actor.acquire": "a storage actor leases pages to a client on its node",
    "actor.read": "a storage actor sends pages to a client on another node",
    "page.arena": "pages in a storage actor's arena that are about to be read",
    "page.sent": "pages that a client has packed up for a storage actor on another node",
    "page.answered": "pages that a storage actor has packed up for a client on another node",
    "page.file": "a page file that has just been written",
    "copy.l1-write": "a copy from L1 to L2, in its lane",
    "copy.l1-load": "a copy from L2 to L1, in its lane",
    "alloc.device": "room in L1 for a request that is scheduled",
    "alloc.load": "room in L1 for pages that come back from L2",
    "alloc.host": "room in L2 for pages that come from L3",
    "supervisor.watch": "the supervisor looks at all ranks",
    "supervisor.ping": "the supervisor asks a rank for a sign of life; the peer is the rank",
    "supervisor.recover": "the supervisor begins to rebuild a group",
}
"""Every point, with what is about to happen there."""


class InjectedFault(RuntimeError):
    """Raised at a point where a fault plan wants the action there to fail."""


class Injector(Protocol):
    """What an installed fault plan does at the points. Called from any thread."""

    def reach(self, point: str, peer: str) -> None:
        """Somebody is at the point. May wait, end the process, or raise (InjectedFault, MemoryError)."""

    def fails(self, point: str, peer: str) -> bool:
        """As `reach`, but True instead of InjectedFault."""

    def answered(self, point: str, asked: int, answer: Any) -> Any:
        """The answer of a call about `asked` pages (how many of them, from the first on), as its caller gets to see
        it."""

    def damage(self, point: str, pages: Callable[[], Views]) -> None:
        """May change bytes of the pages, which are told when asked for."""


_injector: Injector | None = None


def install(injector: Injector | None) -> None:
    """From now on this process's points are that injector's; None: nobody's, as at the start."""
    global _injector
    _injector = injector


def installed() -> Injector | None:
    """Whose the points are."""
    return _injector


def reach(point: str, peer: str = "") -> None:
    """A point where something may be late, or fail with an exception."""
    if _injector is not None:
        _injector.reach(point, peer)


def fails(point: str, peer: str = "") -> bool:
    """A point whose caller has a way of its own to fail; True: it has to fail."""
    return _injector is not None and _injector.fails(point, peer)


def around(point: str, asked: int, call: Callable[[], _Answer]) -> Callable[[], _Answer]:
    """A call about `asked` pages with a point before it and its answer as the plan leaves it."""
    injector = _injector
    if injector is None:
        return call

    def broken() -> _Answer:
        injector.reach(point, "")
        answer: _Answer = injector.answered(point, asked, call())
        return answer

    return broken


def damage(point: str, pages: Callable[[], Views]) -> None:
    """A point where bytes may be changed behind everybody's back; `pages` gives writable views of them."""
    if _injector is not None:
        _injector.damage(point, pages)
