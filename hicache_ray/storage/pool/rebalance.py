"""Re-balancing and repair in the background: each member of a pool brings the pages it holds to where they belong.

A member looks at all its pages when it learns of a new membership, when it is asked to, when the last look left
something undone, and once in a while. It offers each page to the other members that should hold it, and these take the
pages they lack. So the same work handles a join, a leave and a lost page. It can be broken off and begun again at any
point.

While a change of the pool is under way, no page is given up: clients ask the former holders, too. When all members have
nothing left to do, one of them publishes the settled membership. A member that has learned of it gives up the pages
that only other members should hold, and refuses clients with an older membership. Reads never wait for any of this.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Protocol

import numpy as np

from hicache_ray.deadline import Deadline
from hicache_ray.storage.pool.channel import ChannelError
from hicache_ray.storage.pool.member import ActorAnswer, PoolMember
from hicache_ray.storage.pool.membership import Membership
from hicache_ray.storage.pool.page_mover import PageMover
from hicache_ray.storage.pool.ray_channel import DirectoryConflict, bounded
from hicache_ray.storage.pool.rebalance_plan import (
    BalanceReport,
    RebalanceOptions,
    displacing_share,
    keys_of_others,
    plan_of,
)
from hicache_ray.storage.pool.service import ShardService
from hicache_ray.storage.pool.wire import OK
from hicache_ray.storage.shard.grants import HeldPage

logger = logging.getLogger("hicache_ray.storage.pool.rebalance")

RETRY_SECONDS = 1.0
"""Seconds until the next look, after one that a member did not answer or that could not see every page. They double
each time, up to the period."""
SETTLE_POLL_SECONDS = 0.3
"""Seconds between two questions whether the other members are done."""
LONGEST_REST = 1.0
"""Upper limit, in seconds, of the rest that is as long as the work was. The byte rate may ask for more."""


class Directory(Protocol):
    """Where memberships are published; see `PoolDirectory`."""

    def read(self) -> Membership | None:
        """The newest membership."""

    def publish(self, membership: Membership) -> None:
        """Write one down; DirectoryConflict when its epoch exists."""


@dataclass
class _Look:
    """One look at all pages of this member, under one membership.

    Attributes:
        number: of the look; the numbers of a member only grow.
        keys: keys of the pages that other members should hold, hottest first.
        may_displace: for how many keys, from the first, the receiver may evict other pages.
        complete: whether nothing was left undone so far.
        next: place in `keys` where the next step begins.
        left: pages that some member did not take.
        away: members that could not be reached.
    """

    number: int
    membership: Membership
    keys: list[bytes]
    may_displace: int
    complete: bool
    next: int = 0
    left: int = 0
    away: set[str] = field(default_factory=set)


class Rebalancer:
    """The background work of one member. `advance` does one step of it; `start` does that in a thread.

    `report` and `request` may be called by any thread.
    """

    def __init__(
        self,
        name: str,
        service: ShardService,
        connect: Callable[[str], PoolMember],
        directory: Directory,
        options: RebalanceOptions,
        *,
        returned: bool = False,
        on_gone: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        connect: makes the other member of that name; must not wait for it.
        returned: whether this member was away. It may have lost its pages, so it asks the others to look at theirs.
        on_gone: called when this member has left the pool and nobody has ended it.
        """
        self._name = name
        self._service = service
        self._connect = connect
        self._directory = directory
        self._options = options
        self._returned = returned
        self._on_gone = on_gone
        self._clock = clock
        self._mover = PageMover(service.shard, options.call_timeout)
        self._members: dict[str, PoolMember] = {}
        self._wanted = threading.Event()
        service.on_membership = self._wanted.set
        self._stopped = threading.Event()
        self._look: _Look | None = None
        # Start above every number an earlier process used: a driver may wait for such a number without knowing of the
        # restart.
        self._begun = self._finished = time.time_ns() // 1000
        self._clean_epoch = self._looked_epoch = -1
        self._next_look = 0.0
        self._retry = RETRY_SECONDS
        self._moved = self._left = 0
        self._away: tuple[str, ...] = ()
        self._gone_since: float | None = None

    @property
    def report(self) -> BalanceReport:
        """How far this member is."""
        membership, look = self._service.membership, self._look
        return BalanceReport(
            self._name,
            membership.epoch,
            membership.settled,
            self._finished,
            self._clean_epoch == membership.epoch,
            len(look.keys) - look.next + look.left if look is not None else 0,
            self._moved,
            self._left,
            self._away,
        )

    def balance(self) -> bytes:
        """The report as a reply."""
        return self._service.reply(OK, self.report.pack())

    def request(self) -> int:
        """Ask for a look at all pages. It is done when the `finished` of a report has reached the returned number."""
        number = self._begun + 1
        self._wanted.set()
        return number

    def start(self) -> None:
        """Do the work in a thread of its own, until `stop`."""
        threading.Thread(target=self._run, name="l3-rebalance", daemon=True).start()

    def stop(self) -> None:
        """End the thread after its step; does not wait for it."""
        self._stopped.set()
        self._wanted.set()

    def advance(self) -> float:
        """Do one step. Returns how many seconds to rest before the next one, unless a look is asked for meanwhile."""
        membership = self._service.membership
        self._tell_the_others(membership)
        if self._look is not None and self._look.membership is not membership:
            self._look = None
        if self._look is None and self._is_due(membership):
            self._begin()
            return 0.0
        if self._look is not None:
            return self._go_on(self._look)
        self._leave_for_good(membership)
        if not membership.settled and self._clean_epoch == membership.epoch:
            self._settle(membership)
            return SETTLE_POLL_SECONDS
        return max(0.0, min(self._next_look - self._clock(), self._options.period))

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                rest = self.advance()
            except Exception:
                logger.exception("re-balancing of %s failed at a step; it begins again", self._name)
                self._look, self._looked_epoch = None, -1
                self._stopped.wait(RETRY_SECONDS)
                continue
            (self._stopped if self._look is not None else self._wanted).wait(rest)

    def _is_due(self, membership: Membership) -> bool:
        return self._wanted.is_set() or membership.epoch != self._looked_epoch or self._clock() >= self._next_look

    def _begin(self) -> None:
        self._wanted.clear()
        self._begun += 1
        if self._looked_epoch == self._service.membership.epoch:
            self._learn_from_directory()
        membership, service = self._service.membership, self._service
        # Ask first, list the keys second: a page written under an old membership may become visible in between.
        complete = service.stores_by_membership
        keys = keys_of_others(membership, self._name, service.shard.keys_by_use())
        may_displace = round(displacing_share(membership, self._name) * len(keys))
        self._look = _Look(self._begun, membership, keys, may_displace, complete)
        self._connect_to(membership)

    def _go_on(self, look: _Look) -> float:
        if look.next >= len(look.keys):
            self._end(look)
            return 0.0
        started = self._clock()
        displace = look.next < look.may_displace
        end = min(look.next + self._options.batch_pages, look.may_displace if displace else len(look.keys))
        copied_bytes = self._move(look, look.keys[look.next : end], displace=displace)
        look.next = end
        # The rest is as long as the work was, because copies by clients come first.
        return max(copied_bytes / self._options.bytes_per_second, min(self._clock() - started, LONGEST_REST))

    def _move(self, look: _Look, keys: Sequence[bytes], *, displace: bool) -> int:
        """Bring pages to their other owners. Returns the bytes that were copied."""
        pages = self._service.shard.describe(keys)
        plan = plan_of(look.membership, self._name, [page.key for page in pages])
        everywhere = np.ones(len(pages), np.bool_)
        copied_bytes = 0
        for place in np.flatnonzero(plan.targets.any(axis=0)).tolist():
            wanted = plan.targets[:, place]
            held, sent = self._bring(look, look.membership.members[place], list(compress(pages, wanted)), displace)
            copied_bytes += sent
            everywhere &= ~wanted | np.array([page.key in held for page in pages], np.bool_)
        look.left += int((~everywhere).sum())
        if look.membership.settled and self._service.membership is look.membership:
            self._service.shard.discard([page.key for page in compress(pages, everywhere & ~plan.owned)])
        return copied_bytes

    def _bring(self, look: _Look, name: str, pages: Sequence[HeldPage], displace: bool) -> tuple[frozenset[bytes], int]:
        """Offer pages to a member. Returns the keys of the pages it has now, and the bytes that were copied."""
        if name in look.away:
            return frozenset(), 0
        delivery = self._mover.deliver(self._members[name], look.membership.epoch, pages, displace=displace)
        self._moved += delivery.copied
        if delivery.newer:
            self._service.set_membership(delivery.newer)
        elif not delivery.answered:
            look.complete = False
            look.away.add(name)
        return delivery.held, delivery.copied_bytes

    def _end(self, look: _Look) -> None:
        self._look = None
        self._looked_epoch = look.membership.epoch
        self._left, self._away = look.left, tuple(sorted(look.away))
        self._clean_epoch = look.membership.epoch if look.complete else -1
        self._finished = look.number
        self._next_look = self._clock() + (self._options.period if look.complete else self._retry)
        self._retry = RETRY_SECONDS if look.complete else min(2 * self._retry, self._options.period)

    def _settle(self, membership: Membership) -> None:
        """Publish the settled membership when all other members have nothing left to do, too."""
        others = [self._members[name] for name in membership.everyone if name != self._name]
        calls = [(member, member.start("balance")) for member in others]
        deadline = Deadline(self._options.call_timeout)
        answers = [(member, member.finish(call, deadline)) for member, call in calls]
        for member, answer in answers:
            if answer is not None and answer.reply.epoch < membership.epoch:
                member.send("set_membership", membership.pack())
        if all(_is_done(answer, membership) for _, answer in answers):
            self._publish(membership.settle())
        elif any(answer is not None and answer.reply.epoch > membership.epoch for _, answer in answers):
            self._learn_from_directory()

    def _publish(self, membership: Membership) -> None:
        try:
            bounded(lambda: self._directory.publish(membership), self._options.call_timeout)
        except DirectoryConflict:
            # Another member published it first, or the pool was changed again.
            self._learn_from_directory()
            return
        logger.info(
            "storage pool member %s: no member has pages left to bring, epoch %d; of this member's, %d found no room",
            self._name,
            membership.epoch,
            self._left,
        )
        self._service.set_membership(membership.pack())
        for member in self._members.values():
            member.send("set_membership", membership.pack())

    def _learn_from_directory(self) -> None:
        try:
            membership = bounded(self._directory.read, self._options.call_timeout)
        except ChannelError as error:
            logger.info("the directory of storage pools can't be read now: %s", error)
            return
        if membership is not None and membership.token == self._service.membership.token:
            self._service.set_membership(membership.pack())

    def _connect_to(self, membership: Membership) -> None:
        names = [name for name in membership.everyone if name != self._name]
        for name in self._members.keys() - set(names):
            self._members.pop(name).close()
        for name in names:
            if name not in self._members:
                self._members[name] = self._connect(name)

    def _tell_the_others(self, membership: Membership) -> None:
        """Tell the other members, once, that this member is back."""
        if self._returned:
            self._returned = False
            self._connect_to(membership)
            for member in self._members.values():
                member.send("rebalance")

    def _leave_for_good(self, membership: Membership) -> None:
        if self._name in membership.everyone or self._on_gone is None:
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = self._clock()
        elif self._clock() - self._gone_since >= self._options.linger:
            self._on_gone()


def _is_done(answer: ActorAnswer | None, membership: Membership) -> bool:
    if answer is None:
        return False
    report = BalanceReport.unpack(answer.reply.payload)
    return report.clean and report.epoch == membership.epoch
