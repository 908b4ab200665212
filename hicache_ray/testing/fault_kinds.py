"""Kinds of faults, and at which points of whose process each can happen."""

from __future__ import annotations

from fnmatch import fnmatchcase

from hicache_ray.faultpoints import POINTS

KILL, HANG, SLOW, DROP, CORRUPT = "kill", "hang", "slow", "drop", "corrupt"
SHORT_READ, STALE_EXISTS, PARTITION, ALLOC_FAIL, OOM = "short_read", "stale_exists", "partition", "alloc_fail", "oom"

KINDS = {
    KILL: "the process ends at once (SIGKILL)",
    HANG: "with seconds: the thread waits that long; without: the process stops (SIGSTOP) until somebody ends it",
    SLOW: "what happens there begins so many seconds later",
    DROP: "what happens there fails: a call is not made, an answer is lost, a copy raises",
    CORRUPT: "one bit of a page is flipped: in an arena, in a file, or on its way",
    SHORT_READ: "a read brings all of its pages but the last",
    STALE_EXISTS: "a lookup says yes for every page",
    PARTITION: "for so many seconds no call gets through to the peer",
    ALLOC_FAIL: "there is no room, whatever the allocator says",
    OOM: "there is no memory: MemoryError",
}
"""Every kind, with what it does."""

TIMED = (SLOW, PARTITION)
"""Kinds that need `seconds`."""
OUTSIDE = (KILL, HANG)
"""Kinds that can be done to a process from outside."""

RANK, STORAGE, SUPERVISOR, ANY = "rank", "storage", "supervisor", "any"
ROLES = (RANK, STORAGE, SUPERVISOR)

_HELD_BY = {
    RANK: ("rank.*", "storage.*", "channel.*", "copy.*", "alloc.*", "page.sent", "page.file"),
    STORAGE: ("actor.*", "page.arena", "page.answered"),
    SUPERVISOR: ("supervisor.*",),
}
"""Points in whose process."""

_WAITING = ("rank.*", "storage.*", "channel.*", "actor.*", "copy.*", "alloc.*", "supervisor.*")
_POSSIBLE_AT = {
    KILL: _WAITING,
    HANG: _WAITING,
    SLOW: _WAITING,
    OOM: _WAITING,
    DROP: ("rank.*", "storage.*", "channel.*", "actor.*", "copy.*", "supervisor.*"),
    CORRUPT: ("page.*",),
    SHORT_READ: ("storage.batch_get_v1",),
    STALE_EXISTS: ("storage.batch_exists",),
    PARTITION: ("channel.call", "supervisor.ping"),
    ALLOC_FAIL: ("alloc.*",),
}
_USUAL = {
    CORRUPT: {RANK: "page.sent", STORAGE: "page.arena"},
    PARTITION: {RANK: "channel.call", SUPERVISOR: "supervisor.ping"},
    ALLOC_FAIL: {RANK: "alloc.device"},
}
_USUAL_BY_ROLE = {RANK: "rank.step", STORAGE: "actor.*", SUPERVISOR: "supervisor.*", ANY: "*"}


def points_of(kind: str, role: str) -> list[str]:
    """Where a kind can happen in a process of that role ("any": of some role)."""
    held = [pattern for one in (ROLES if role == ANY else (role,)) for pattern in _HELD_BY[one]]
    return [
        point
        for point in POINTS
        if any(fnmatchcase(point, pattern) for pattern in held)
        and any(fnmatchcase(point, pattern) for pattern in _POSSIBLE_AT[kind])
    ]


def default_point(kind: str, role: str) -> str:
    """Pattern of the points where a kind happens when a plan names none."""
    if kind in (SHORT_READ, STALE_EXISTS):
        return _POSSIBLE_AT[kind][0]
    usual = _USUAL.get(kind)
    return usual.get(role, "*") if usual else _USUAL_BY_ROLE[role]
