"""Brings pages from one shard to another member of the pool: offers them, copies the ones that are taken, commits.

All of it may be done twice: pages that the other member has by now are not copied again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress, groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from hicache_ray.deadline import Deadline
from hicache_ray.storage.pool.member import PoolMember
from hicache_ray.storage.pool.transport import WriteGrant
from hicache_ray.storage.pool.wire import STALE, KeyCall, Offer
from hicache_ray.storage.shard.grants import EXISTING, GRANTED, Flags, HeldPage
from hicache_ray.storage.shard.page_copy import store_page
from hicache_ray.storage.shard.shard import Shard

MOST_BYTES = 8 << 20
"""Most bytes under way at once, unless one page has more."""


class Delivery(NamedTuple):
    """The outcome of an offer of pages to a member.

    Attributes:
        held: keys of the offered pages that the member has now. For the other pages it has no room, if it `answered`.
        copied, copied_bytes: the pages among them that the member did not have before.
        answered: False when the member is away or gave something up; it should be tried again then.
        newer: a newer membership that the member knows (packed), else empty.
    """

    held: frozenset[bytes] = frozenset()
    copied: int = 0
    copied_bytes: int = 0
    answered: bool = True
    newer: bytes = b""

    def plus(self, other: Delivery) -> Delivery:
        """The outcome of both offers together."""
        return Delivery(
            self.held | other.held,
            self.copied + other.copied,
            self.copied_bytes + other.copied_bytes,
            self.answered and other.answered,
            self.newer or other.newer,
        )


class PageMover:
    """Moves pages of one shard. To be used by one thread."""

    def __init__(self, shard: Shard, call_timeout: float) -> None:
        self._shard = shard
        self._call_timeout = call_timeout

    def deliver(self, member: PoolMember, epoch: int, pages: Sequence[HeldPage], *, displace: bool) -> Delivery:
        """Bring pages to a member. Ends at the first call that is not answered.

        Args:
            epoch: of the membership that says where the pages belong.
            displace: see `Shard.offer`.
        """
        total = Delivery()
        for group in _groups(pages):
            total = total.plus(self._deliver(member, epoch, group, displace))
            if not total.answered:
                break
        return total

    def _deliver(self, member: PoolMember, epoch: int, pages: list[HeldPage], displace: bool) -> Delivery:
        """`deliver`, for pages of one label and one length."""
        length, label = pages[0].length, pages[0].label
        call = KeyCall(epoch, [page.key for page in pages], length, label)
        offer = Offer(call, [page.expires for page in pages], displace)
        answer = member.finish(member.start("offer", offer.pack()), Deadline(self._call_timeout))
        if answer is None:
            return Delivery(answered=False)
        if answer.reply.status == STALE:
            return Delivery(answered=False, newer=answer.reply.payload)
        status = answer.reply.grants["status"]
        there = Delivery(_keys(pages, status == EXISTING))
        granted = np.flatnonzero(status == GRANTED).tolist()
        if not granted:
            return there
        return there.plus(self._copy(WriteGrant(member, answer.reply, length, granted), [pages[i] for i in granted]))

    def _copy(self, grant: WriteGrant, pages: list[HeldPage]) -> Delivery:
        lease, lent = self._shard.lend([page.key for page in pages])
        suspects: list[int] = []
        try:
            found = {page.key: page for page in lent}
            good = np.zeros(len(pages), np.bool_)
            for k, page in enumerate(pages):
                source = found.get(page.key)
                # The page may have been replaced since it was offered; one of another length does not fit the cell.
                if source is None or source.length != page.length:
                    continue
                grant.checksums[k] = store_page(grant.cells[k], self._shard.arena.data(source.offset, source.length))
                good[k] = grant.checksums[k] == source.checksum
                if not good[k]:
                    suspects.append(source.cell)
        finally:
            self._shard.release(lease, suspects)
        if not good.any():
            grant.give_up()
            return Delivery()
        taken = grant.finish(grant.commit(good), Deadline(self._call_timeout)) & good
        count = int(taken.sum())
        return Delivery(_keys(pages, taken), count, count * pages[0].length, answered=bool((taken == good).all()))


def _groups(pages: Sequence[HeldPage]) -> Iterator[list[HeldPage]]:
    """The pages in groups of one label and length, each of at most MOST_BYTES."""
    kind = attrgetter("label", "length")
    # The sort is stable: within a group the hottest pages stay first.
    for (_, length), same in groupby(sorted(pages, key=kind), kind):
        group, count = list(same), max(1, MOST_BYTES // length)
        for start in range(0, len(group), count):
            yield group[start : start + count]


def _keys(pages: Sequence[HeldPage], which: Flags) -> frozenset[bytes]:
    return frozenset(page.key for page in compress(pages, which))
