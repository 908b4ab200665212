"""Runs the copies of one operation, in several threads where that pays.

How the bytes of a page travel between a client's host pool and a storage actor's arena.

On the same node through the mapped arena, from another node through Ray's object store; the caller does not see which.

A writer stands for one reservation, a reader for one lease; both belong to one thread at a time, except that `store`
and `load` of different pages may run in several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hicache_ray import faultpoints
from hicache_ray.deadline import Deadline
from hicache_ray.storage.base import Bytes
from hicache_ray.storage.pool.channel import Pending
from hicache_ray.storage.pool.member import Answer, Member
from hicache_ray.storage.pool.wire import Commit, Reply
from hicache_ray.storage.shard.arena import ArenaMapping
from hicache_ray.storage.shard.page_copy import load_page, store_page
from hicache_ray.storage.shard.shard import GRANTED, Flags

Job = tuple[Callable[[int, Bytes], bool], int, Bytes]
"""A copying function, the number of the page and the page."""

LEAST_BYTES_A_THREAD = 2 << 20
"""Below that, waking another thread costs more than it copies."""


class Copier:
    """Copies pages in up to `threads` threads, of which the caller is one. Thread-safe."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads - 1, "l3-copy") if threads > 1 else None

    def run(self, jobs: Sequence[Job]) -> list[bool]:
        """The results of the jobs, in order; raises what a job raises."""
        total = sum(page.nbytes for _, _, page in jobs[:1]) * len(jobs)
        parts = max(1, min(self._threads, total // LEAST_BYTES_A_THREAD))
        if self._executor is None or parts == 1:
            return _copy(jobs)
        size = -(-len(jobs) // parts)
        others = [self._executor.submit(_copy, jobs[start : start + size]) for start in range(size, len(jobs), size)]
        done = _copy(jobs[:size])
        for other in others:
            done += other.result()
        return done

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)


def _copy(jobs: Sequence[Job]) -> list[bool]:
    return [copy(k, page) for copy, k, page in jobs]


class PageWriter(Protocol):
    """Writes the granted pages of one reservation; page k is the k-th granted one."""

    @property
    def checksums(self) -> npt.NDArray[np.uint64]:
        """xxh3_64 of each stored page, as it was read."""

    def store(self, k: int, page: Bytes) -> bool:
        """Bring a host page [..., segment_bytes] on its way; True."""

    def commit(self, good: Flags) -> Pending | None:
        """Make the stored pages among `good` (one flag per granted page) visible; the answer is a flag per page."""

    def abort(self) -> None:
        """Give the reservation up."""


class PageReader(Protocol):
    """Reads the granted pages of one lease; page k is the k-th granted one."""

    def load(self, k: int, page: Bytes) -> bool:
        """Fill a host page [..., segment_bytes]; False when its bytes are not those that were stored."""

    def finish(self, deadline: Deadline) -> None:
        """End the lease; when there are suspects, wait until the actor knows. No `load` may follow."""

    @property
    def suspects(self) -> list[int]:
        """Slots whose bytes were not those that were stored."""


def read_method(member: Member) -> str:
    """The call that reads from a member: for grants in its mapped arena, or for the pages themselves."""
    return "acquire" if member.mapping is not None else "read"


def writer_of(member: Member, reply: Reply, length: int) -> PageWriter:
    """The writer for a reservation of pages of `length` bytes."""
    mapping = member.mapped(reply.arena_id)
    return _ArenaWriter(member, reply, length, mapping) if mapping is not None else _ArrayWriter(member, reply, length)


def reader_of(member: Member, answer: Answer, length: int) -> PageReader | None:
    """The reader for the answer to a member's `read_method`.

    None when the answer's arena is not the one that is mapped: its lease is ended, the next call will be made right.
    """
    if not answer.reply.id:
        return _ArrayReader(answer)
    mapping = member.mapped(answer.reply.arena_id)
    if mapping is None:
        member.send("release", answer.reply.id)
        return None
    return _ArenaReader(member, answer.reply, length, mapping)


class _ArenaWriter:
    def __init__(self, member: Member, reply: Reply, length: int, mapping: ArenaMapping) -> None:
        grants = reply.grants
        self._member = member
        self._reservation = reply.id
        self._length = length
        self._mapping = mapping
        self._offsets: list[int] = grants["offset"][grants["status"] == GRANTED].tolist()
        self.checksums = np.zeros(len(self._offsets), np.uint64)

    def store(self, k: int, page: Bytes) -> bool:
        self.checksums[k] = store_page(self._mapping.data(self._offsets[k], self._length), page)
        return True

    def commit(self, good: Flags) -> Pending | None:
        return self._member.start("commit", Commit(self._reservation, self.checksums, good).pack())

    def abort(self) -> None:
        self._member.send("abort", self._reservation)


class _ArrayWriter:
    """Gathers the pages into one array that travels with the commit."""

    def __init__(self, member: Member, reply: Reply, length: int) -> None:
        count = int((reply.grants["status"] == GRANTED).sum())
        self._member = member
        self._reservation = reply.id
        self._pages = member.scratch(count, length)
        self.checksums = np.zeros(count, np.uint64)

    def store(self, k: int, page: Bytes) -> bool:
        self.checksums[k] = store_page(self._pages[k], page)
        return True

    def commit(self, good: Flags) -> Pending | None:
        message = Commit(self._reservation, self.checksums, good).pack()
        faultpoints.damage("page.sent", lambda: list(self._pages))
        return self._member.start("commit", message, self._pages)

    def abort(self) -> None:
        self._member.send("abort", self._reservation)


class _ArenaReader:
    def __init__(self, member: Member, reply: Reply, length: int, mapping: ArenaMapping) -> None:
        granted = reply.grants[reply.grants["status"] == GRANTED]
        self._member = member
        self._lease = reply.id
        self._length = length
        self._mapping = mapping
        self._slots: list[int] = granted["slot"].tolist()
        self._offsets: list[int] = granted["offset"].tolist()
        self._generations: list[int] = granted["generation"].tolist()
        self._checksums: list[int] = granted["checksum"].tolist()
        self._header_generations = mapping.headers["generation"]
        self.suspects: list[int] = []

    def load(self, k: int, page: Bytes) -> bool:
        checksum = load_page(page, self._mapping.data(self._offsets[k], self._length))
        slot = self._slots[k]
        if checksum == self._checksums[k] and self._header_generations[slot] == self._generations[k]:
            return True
        self.suspects.append(slot)
        return False

    def finish(self, deadline: Deadline) -> None:
        if not self.suspects:
            self._member.send("release", self._lease)
            return
        report = np.array([self._lease, *self.suspects], np.int64).tobytes()
        self._member.finish(self._member.start("report", report), deadline)


class _ArrayReader:
    def __init__(self, answer: Answer) -> None:
        granted = answer.reply.grants[answer.reply.grants["status"] == GRANTED]
        self._pages = answer.pages
        self._slots: list[int] = granted["slot"].tolist()
        self._checksums: list[int] = granted["checksum"].tolist()
        self.suspects: list[int] = []

    def load(self, k: int, page: Bytes) -> bool:
        if k < len(self._pages) and load_page(page, self._pages[k]) == self._checksums[k]:
            return True
        self.suspects.append(self._slots[k])
        return False

    def finish(self, deadline: Deadline) -> None:
        return
