"""Kinds of faults: what each does to a process, and at which of its points it can happen.

A new kind is one more `FaultKind` in `KINDS`.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from hicache_ray.faultpoints import POINTS

RANK, STORAGE, SUPERVISOR, ANY = "rank", "storage", "supervisor", "any"
ROLES = (RANK, STORAGE, SUPERVISOR)

_HELD_BY = {
    RANK: ("rank.*", "storage.*", "channel.*", "copy.*", "alloc.*", "page.sent", "page.file"),
    STORAGE: ("actor.*", "page.arena", "page.answered"),
    SUPERVISOR: ("supervisor.*",),
}
"""In whose process each point is."""

_USUAL_BY_ROLE = {RANK: "rank.step", STORAGE: "actor.*", SUPERVISOR: "supervisor.*", ANY: "*"}


class Strike(NamedTuple):
    """One time that a fault happens at a point.

    Attributes:
        point, who: where, in which process.
        seconds: how long it lasts, where the plan says so.
        end: ends or stops this process with a signal.
    """

    point: str
    who: str
    seconds: float | None
    end: Callable[[int], None]


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault. Exactly one of `strike`, `answer` and `damage` carries it out.

    Attributes:
        does: its effect, in words.
        points: patterns of the points where it can happen.
        usual: the point where it happens when a plan names none, by role; empty: the usual one of the role.
        strike: called before the action that the point names; True: the action fails.
        answer: called with the number of pages asked for and the answer; gives the answer that the caller gets.
        damage: changes a writable view of one page.
        signal: done to a process from outside with this signal, where a plan gives a time and no point.
        needs_seconds: a plan has to say how long it lasts.
        goes_on: once it has begun, every call fails for its seconds.
    """

    does: str
    points: tuple[str, ...]
    usual: Mapping[str, str] = field(default_factory=dict)
    strike: Callable[[Strike], bool] | None = None
    answer: Callable[[int, Any], Any] | None = None
    damage: Callable[[Any, random.Random], None] | None = None
    signal: signal.Signals | None = None
    needs_seconds: bool = False
    goes_on: bool = False


def _kill(strike: Strike) -> bool:
    strike.end(signal.SIGKILL)
    return False


def _hang(strike: Strike) -> bool:
    if strike.seconds is None:
        strike.end(signal.SIGSTOP)
        return False
    return _wait(strike)


def _wait(strike: Strike) -> bool:
    threading.Event().wait(strike.seconds)
    return False


def _fail(strike: Strike) -> bool:
    return True


def _no_memory(strike: Strike) -> bool:
    raise MemoryError(f"no memory at {strike.point} in {strike.who}: a fault plan wants it")


def _flip_bit(view: Any, rng: random.Random) -> None:
    at = tuple(rng.randrange(length) for length in view.shape)
    view[at] ^= 1 << rng.randrange(8)


def _without_last_page(asked: int, answer: Any) -> Any:
    return min(answer, asked - 1) if answer else answer


def _every_page(asked: int, answer: Any) -> Any:
    return asked


_FAILING = ("rank.*", "storage.*", "channel.*", "actor.*", "copy.*", "supervisor.*")
_WAITING = (*_FAILING, "alloc.*")

KILL, HANG, CORRUPT = "kill", "hang", "corrupt"

KINDS = {
    KILL: FaultKind("the process ends at once (SIGKILL)", _WAITING, strike=_kill, signal=signal.SIGKILL),
    HANG: FaultKind(
        "with seconds: the thread waits that long; without: the process stops (SIGSTOP) until somebody ends it",
        _WAITING,
        strike=_hang,
        signal=signal.SIGSTOP,
    ),
    "slow": FaultKind("what happens there begins so many seconds later", _WAITING, strike=_wait, needs_seconds=True),
    "drop": FaultKind(
        "what happens there fails: a call is not made, an answer is lost, a copy raises", _FAILING, strike=_fail
    ),
    CORRUPT: FaultKind(
        "one bit of a page is flipped: in an arena, in a file, or on its way",
        ("page.*",),
        {RANK: "page.sent", STORAGE: "page.arena"},
        damage=_flip_bit,
    ),
    "short_read": FaultKind(
        "a read brings all of its pages but the last",
        ("storage.load",),
        {RANK: "storage.load"},
        answer=_without_last_page,
    ),
    "stale_exists": FaultKind(
        "a lookup says yes for every page",
        ("storage.lookup",),
        {RANK: "storage.lookup"},
        answer=_every_page,
    ),
    "partition": FaultKind(
        "for so many seconds no call gets through to the peer",
        ("channel.call", "supervisor.ping"),
        {RANK: "channel.call", SUPERVISOR: "supervisor.ping"},
        strike=_fail,
        needs_seconds=True,
        goes_on=True,
    ),
    "alloc_fail": FaultKind(
        "there is no room, whatever the allocator says", ("alloc.*",), {RANK: "alloc.device"}, strike=_fail
    ),
    "oom": FaultKind("there is no memory: MemoryError", _WAITING, strike=_no_memory),
}
"""Every kind by its name in a plan."""


def points_of(kind: str, role: str) -> list[str]:
    """Where a kind can happen in a process of that role ("any": of some role)."""
    held = [pattern for one in (ROLES if role == ANY else (role,)) for pattern in _HELD_BY[one]]
    return [point for point in POINTS if _fits(point, held) and _fits(point, KINDS[kind].points)]


def usual_points(kind: str, role: str) -> str:
    """Pattern of the points where a kind happens when a plan names none."""
    usual = KINDS[kind].usual
    return usual.get(role, "*") if usual else _USUAL_BY_ROLE[role]


def _fits(point: str, patterns: list[str] | tuple[str, ...]) -> bool:
    return any(fnmatchcase(point, pattern) for pattern in patterns)
