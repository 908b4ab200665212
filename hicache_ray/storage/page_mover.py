"""Brings pages from one shard to another member of the pool: offer, copy what it takes, commit.

Everything may be done twice: what the other has by now is not copied again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_ray.storage.channel import Deadline
from hicache_ray.storage.grants import EXISTING, GRANTED, HeldPage
from hicache_ray.storage.member import Answer, Member
from hicache_ray.storage.shard import Shard
from hicache_ray.storage.transport import PageWriter, writer_of
from hicache_ray.storage.wire import STALE, Offer, Request

MOST_BYTES = 8 << 20
"""Most bytes under way at once, unless one page has more."""


class Delivery(NamedTuple):
    """What came of pages that were offered to a member.

    Attributes:
        held: keys of those that it has now; for the others it has no room, unless not `answered`.
        copied, copied_bytes: how many it did not have before.
        answered: False when it is away or gave something up; it should be tried again then.
        newer: a newer membership that it knows (packed), else empty.
    """

    held: frozenset[bytes] = frozenset()
    copied: int = 0
    copied_bytes: int = 0
    answered: bool = True
    newer: bytes = b""

    def plus(self, other: Delivery) -> Delivery:
        """Both together."""
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

    def deliver(self, member: Member, epoch: int, pages: Sequence[HeldPage], *, displace: bool) -> Delivery:
        """Bring pages to a member; see `Shard.offer` for `displace`. Ends at the first call that is not answered."""
        total = Delivery()
        for group in _groups(pages):
            total = total.plus(self._deliver(member, epoch, group, displace))
            if not total.answered:
                break
        return total

    def _deliver(self, member: Member, epoch: int, pages: list[HeldPage], displace: bool) -> Delivery:
        """Of pages with one label and length."""
        length, label = pages[0].length, pages[0].label
        request = Request(epoch, [page.key for page in pages], length, label)
        expires = np.array([page.expires for page in pages], np.float64)
        answer = self._call(member, "offer", Offer(request, expires, displace).pack())
        if answer is None:
            return Delivery(answered=False)
        if answer.reply.status == STALE:
            return Delivery(answered=False, newer=answer.reply.payload)
        status = answer.reply.grants["status"]
        there = Delivery(_keys(pages, status == EXISTING))
        granted = [pages[i] for i in np.flatnonzero(status == GRANTED).tolist()]
        if not granted:
            return there
        return there.plus(self._copy(member, writer_of(member, answer.reply, length), granted))

    def _copy(self, member: Member, writer: PageWriter, pages: list[HeldPage]) -> Delivery:
        lease, lent = self._shard.lend([page.key for page in pages])
        suspects: list[int] = []
        try:
            found = {page.key: page for page in lent}
            good = np.zeros(len(pages), np.bool_)
            for k, page in enumerate(pages):
                source = found.get(page.key)
                # Another page of the key may have come since; its length decides whether it fits the slot.
                if source is None or source.length != page.length:
                    continue
                writer.store(k, self._shard.arena.data(source.offset, source.length))
                good[k] = writer.checksums[k] == source.checksum
                if not good[k]:
                    suspects.append(source.slot)
        finally:
            self._shard.release(lease, suspects)
        if not good.any():
            writer.abort()
            return Delivery()
        answer = member.finish(writer.commit(good), Deadline(self._call_timeout))
        if answer is None:
            return Delivery(answered=False)
        taken = answer.reply.flags & good
        count = int(taken.sum())
        complete = bool((taken == good).all())
        return Delivery(_keys(pages, taken), count, count * pages[0].length, complete)

    def _call(self, member: Member, method: str, message: bytes) -> Answer | None:
        return member.finish(member.start(method, message), Deadline(self._call_timeout))


def _groups(pages: Sequence[HeldPage]) -> Iterator[list[HeldPage]]:
    """The pages in groups of one label and length, each of at most MOST_BYTES."""
    # Stable: within a group the hottest stay first.
    for (_, length), same in groupby(sorted(pages, key=_kind), _kind):
        group, count = list(same), max(1, MOST_BYTES // length)
        for start in range(0, len(group), count):
            yield group[start : start + count]


def _kind(page: HeldPage) -> tuple[bytes, int]:
    return page.label, page.length


def _keys(pages: Sequence[HeldPage], which: npt.NDArray[np.bool_]) -> frozenset[bytes]:
    return frozenset(pages[i].key for i in np.flatnonzero(which).tolist())
