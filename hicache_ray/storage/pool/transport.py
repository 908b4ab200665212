"""What a storage actor granted to its client: the cells to copy to or from, and how the copying is ended.

On the same node the cells lie in the mapped arena. From another node they are rows of an array that travels through
Ray's object store. Whoever copies does not see which.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hicache_ray import faultpoints
from hicache_ray.deadline import Deadline
from hicache_ray.pages import Bytes
from hicache_ray.storage.pool.channel import Pending
from hicache_ray.storage.pool.member import ActorAnswer, PoolMember
from hicache_ray.storage.pool.wire import Commit, Release, Reply
from hicache_ray.storage.shard.grants import GRANTED, Flags


class WriteGrant:
    """Cells of one member, reserved for pages that are not stored yet. Belongs to one thread.

    Attributes:
        pages: number of each granted page, as the caller counts them.
        cells: where each is to be copied to, [page_bytes].
        checksums: xxh3_64 of each copied page, to be filled in by who copies.
    """

    def __init__(self, member: PoolMember, reply: Reply, length: int, pages: Sequence[int]) -> None:
        granted = reply.grants[reply.grants["status"] == GRANTED]
        mapping = member.mapped(reply.arena_id)
        self._member = member
        self._reservation = reply.id
        self._sent: Bytes | None = None
        self.pages = pages
        self.checksums = [0] * len(pages)
        if mapping is not None:
            self.cells: list[Bytes] = [mapping.data(offset, length) for offset in granted["offset"].tolist()]
        else:
            self._sent = member.scratch(len(pages), length)
            self.cells = list(self._sent)

    def commit(self, good: Flags) -> Pending | None:
        """Make the copied pages among `good` (one flag per granted page) visible. The answer is a flag per page."""
        message = Commit(self._reservation, self.checksums, good.tolist()).pack()
        sent = self._sent
        if sent is None:
            return self._member.start("commit", message)
        faultpoints.damage("page.sent", lambda: list(sent))
        return self._member.start("commit", message, sent)

    def give_up(self) -> None:
        """Nothing is written."""
        self._member.send("release", Release(self._reservation).pack())

    def finish(self, call: Pending | None, deadline: Deadline) -> Flags:
        """Which pages the committed call made visible, one flag per granted page."""
        answer = self._member.finish(call, deadline)
        return answer.reply.flags if answer is not None else np.zeros(len(self.pages), np.bool_)


class ReadGrant:
    """Cells of one member that hold pages, leased until `finish`. Belongs to one thread.

    Attributes:
        pages: number of each granted page, as the caller counts them.
        cells: where each is to be copied from, [page_bytes].
        suspects: cells whose bytes were not those that were stored.
    """

    def __init__(self, member: PoolMember, answer: ActorAnswer, length: int, pages: Sequence[int]) -> None:
        granted = answer.reply.grants[answer.reply.grants["status"] == GRANTED]
        self._member = member
        self._lease = answer.reply.id
        self._numbers: list[int] = granted["cell"].tolist()
        self._generations: list[int] = granted["generation"].tolist()
        self._checksums: list[int] = granted["checksum"].tolist()
        self._header_generations: npt.NDArray[np.uint64] | None = None
        self.cells: list[Bytes] = list(answer.pages)
        if self._lease:
            # Another arena than the one that is mapped: nothing can be read, the next call will be made right.
            mapping, offsets = member.mapped(answer.reply.arena_id), granted["offset"].tolist()
            self.cells = [mapping.data(offset, length) for offset in offsets] if mapping is not None else []
            self._header_generations = mapping.headers["generation"] if mapping is not None else None
        self.pages = pages[: len(self.cells)]
        self.suspects: list[int] = []

    def accept(self, k: int, checksum: int) -> bool:
        """Whether the k-th page, whose copy has that checksum, is what was stored."""
        cell, now = self._numbers[k], self._header_generations
        if checksum == self._checksums[k] and (now is None or now[cell] == self._generations[k]):
            return True
        self.suspects.append(cell)
        return False

    def finish(self, deadline: Deadline) -> None:
        """End the lease; when there are suspects, wait until the actor knows. No copy may follow."""
        if not self._lease:
            return
        message = Release(self._lease, self.suspects).pack()
        if self.suspects:
            self._member.finish(self._member.start("release", message), deadline)
        else:
            self._member.send("release", message)
