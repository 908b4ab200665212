"""Which pages a member of a pool has to bring to which other members, and its reports. Nothing moves here.

A page belongs to its owners under the membership. A member that holds a page brings it to each other owner. It gives
the page up when it is no owner itself and no client will ask it any more, which is when the membership is settled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import numpy as np

from hicache_ray.storage.pool.membership import PAGE_HASH_BYTES, Membership
from hicache_ray.storage.pool.options import TRANSPORTS
from hicache_ray.storage.pool.wire import Message
from hicache_ray.storage.shard.grants import Flags

PLANNED_AT_ONCE = 65536


@dataclass(frozen=True)
class RebalanceOptions:
    """How much of a storage actor's time moving pages may take.

    Attributes:
        bytes_per_second: most bytes a second that one actor sends to others.
        period: seconds between looks at all pages, for copies that were lost without anybody noticing.
        batch_pages: pages a step.
        call_timeout: seconds one call to another actor may take.
        linger: seconds an actor that has left the pool waits to be ended before it ends itself.
        transport: "auto" maps the arenas of other actors on the same node, "object_store" never does.
    """

    bytes_per_second: float = 256 << 20
    period: float = 60.0
    batch_pages: int = 64
    call_timeout: float = 10.0
    linger: float = 60.0
    transport: str = "auto"

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport of re-balancing is {self.transport!r}; use one of {', '.join(TRANSPORTS)}")
        for name, value in vars(self).items():
            if name != "transport" and not value > 0:
                raise ValueError(f"{name} of re-balancing is {value}; use a number above 0")


class MovePlan(NamedTuple):
    """Where some pages of one member belong.

    Attributes:
        targets: [pages, members], whether that other member should hold the page.
        owned: [pages], whether this member should hold it.
    """

    targets: Flags
    owned: Flags


class BalanceReport(Message, frozen=True):
    """How far one member is.

    Attributes:
        member: its name.
        epoch: of the membership it works by.
        settled: whether that membership has no change under way.
        finished: number of the last look at all pages that was not broken off; they only grow.
        clean: it left nothing to do, under the membership of that epoch.
        to_move: pages that in the look under way were not brought to all their owners yet.
        moved: pages brought to others, since the actor started; one for each member that took it.
        left: pages of the last look that some owner did not take: it had no room, or was away.
        away: members that could not be reached in it.
    """

    member: str
    epoch: int
    settled: bool
    finished: int
    clean: bool
    to_move: int = 0
    moved: int = 0
    left: int = 0
    away: tuple[str, ...] = ()


def plan_of(membership: Membership, name: str, keys: Sequence[bytes]) -> MovePlan:
    """The plan for pages that the member of that name holds.

    Args:
        keys: storage keys, which end in a page hash.
    """
    members = np.array(membership.members)
    targets = np.zeros((len(keys), len(members)), np.bool_)
    owners = membership.owners([key[-PAGE_HASH_BYTES:] for key in keys])
    targets[np.arange(len(keys))[:, None], owners] = True
    own = members == name
    owned = np.asarray(targets[:, own].any(axis=1))
    targets[:, own] = False
    return MovePlan(targets, owned)


def keys_of_others(membership: Membership, name: str, keys: Sequence[bytes]) -> list[bytes]:
    """The keys that a member of that name has to offer to others, in their order."""
    if membership.members == (name,):
        return []
    chosen: list[bytes] = []
    for start in range(0, len(keys), PLANNED_AT_ONCE):
        part = keys[start : start + PLANNED_AT_ONCE]
        wanted = np.asarray(plan_of(membership, name, part).targets.any(axis=1))
        chosen += compress(part, wanted)
    return chosen


def displacing_share(membership: Membership, name: str) -> float:
    """The share of a member's pages, hottest first, for which other members may evict their coldest pages.

    A member that leaves takes its room along. The pool then loses the coldest of all its pages, not just the pages of
    the leaving member. A member that stays moves pages into free room only, or full pools would never come to rest.
    """
    leaving = name in membership.everyone and name not in membership.members
    return len(membership.members) / len(membership.everyone) if leaving else 0.0
