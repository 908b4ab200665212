"""Prefetches of one rank, L3 to L2: begun at admission, moved on by agreed progress, ended once (cases 41 to 53).

    queried?  --agreed hits >= threshold-->  reading  --all read, or ended by policy-->  attached
        `-- fewer: revoked                        (pages not yet read stay owned until the read has really ended)

The control half moves on agreed numbers only; the IO threads write the few fields marked as theirs.
"""

from __future__ import annotations

import enum
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hicache_ray import faultpoints
from hicache_ray.hashing import page_hashes
from hicache_ray.index import Match, TieredIndex
from hicache_ray.pages import NO_PAGES
from hicache_ray.radix.key import Key
from hicache_ray.radix.node import Node
from hicache_ray.rank.l3 import Fetch
from hicache_ray.rank.progress import PrefetchProgress

if TYPE_CHECKING:  # it loads torch, which drivers and supervisors of a group do without
    from hicache_ray.rank.mover import Mover

STARTED = "started"
NO_STORAGE = "no_storage"
NOT_BACKED = "not_backed"
SHORT = "short"
RATE_LIMITED = "rate_limited"
"""Whether a prefetch begins, or why it does not: the `prefetch` of `Admitted`."""


class Stage(enum.Enum):
    """Where a prefetch is, agreed by all ranks."""

    QUERYING = "querying"
    READING = "reading"
    ENDED = "ended"


@dataclass(eq=False, kw_only=True)
class Prefetch(Fetch):
    """State of one prefetch on one rank; its inherited half is shared with the IO threads.

    Attributes:
        rid, key: of the request.
        anchor: deepest node with a host copy when it began; its host copy is protected until the end.
        anchor_pages: depth in pages at which the prefetched pages begin.
        polled: the scheduler asks for this request now.
    """

    rid: str
    key: Key
    anchor: Node
    anchor_pages: int
    issued_at: float
    stage: Stage = Stage.QUERYING
    polled: bool = False
    attached_pages: int = 0


@dataclass(frozen=True)
class PrefetchPolicy:
    """When to begin a prefetch and when to end it.

    Attributes:
        name: "best_effort", "wait_complete" or "timeout".
        threshold: fewest tokens worth asking L3 for, and worth loading once the hits are known.
        page_size: tokens a page.
        timeout_base: seconds.
        timeout_per_page: seconds per hit page (case 46).
        hard_limit: seconds after which even `wait_complete` ends: no wait is without a deadline.
        capacity_pages: most L2 pages that prefetches may hold at once (case 45).
    """

    name: str
    threshold: int
    page_size: int
    timeout_base: float
    timeout_per_page: float
    hard_limit: float
    capacity_pages: int
    clock: Callable[[], float] = time.monotonic

    def is_worth(self, pages: int) -> bool:
        """Whether so many pages reach the threshold; the threshold itself does (case 42)."""
        return pages > 0 and pages * self.page_size >= self.threshold

    def can_terminate(self, prefetch: Prefetch) -> bool:
        """This rank's view of whether the request may go on now, with what has been read (cases 46 to 48)."""
        if prefetch.stage is Stage.READING and prefetch.read_ended:
            return True
        waited = self.clock() - prefetch.issued_at
        if waited >= self.hard_limit:
            return True
        if not prefetch.polled:
            return False
        if self.name == "best_effort":
            return True
        return self.name == "timeout" and waited >= self.timeout(len(prefetch.host_pages))

    def timeout(self, hit_pages: int) -> float:
        """Seconds from issue to release under `timeout`; before the hits are known there are none (case 46)."""
        return self.timeout_base + self.timeout_per_page * hit_pages

    def progress(self, prefetch: Prefetch) -> PrefetchProgress:
        """What this rank reports of a prefetch in the step's reduction."""
        return PrefetchProgress(
            queried=prefetch.query_done,
            hit_pages=prefetch.hit_pages,
            completed_pages=prefetch.completed_pages,
            can_terminate=self.can_terminate(prefetch),
            terminated=prefetch.cancelled,
        )


class Closing(NamedTuple):
    """L2 pages of an ended prefetch that its read may still write: they come back when the read has ended."""

    prefetch: Prefetch
    host_pages: np.ndarray


class Prefetcher:
    """Begins, advances and ends the prefetches of one rank.

    Everything here that changes the index happens on agreed numbers, in the same order on every rank. `enabled` is
    False while a store is being detached: then nothing new begins.
    """

    def __init__(self, index: TieredIndex, mover: Mover, policy: PrefetchPolicy) -> None:
        self.index = index
        self.mover = mover
        self.policy = policy
        self.active: dict[str, Prefetch] = {}
        self.closing: deque[Closing] = deque()
        self.occupied_pages = 0
        self.enabled = True
        self.counts: Counter[str] = Counter()
        self._released = 0

    def begin(self, rid: str, key: Key, match: Match) -> str:
        """Asks L3 for the pages of `key` beyond what L1 and L2 hold. Returns "started" or why not.

        A prefetch of the same request that is still in flight is cancelled first (D8).
        """
        self.cancel(rid)
        reason = self._refusal(key, match)
        self.counts[reason] += 1
        if reason == STARTED:
            self._begin(rid, key, match)
        return reason

    def cancel(self, rid: str) -> None:
        """Ends a prefetch, attaching nothing; nothing happens when there is none (case 50)."""
        if rid in self.active:
            self.counts["cancelled"] += 1
            self._end(self.active[rid], 0)

    def cancel_all(self) -> None:
        """Ends every prefetch, attaching nothing."""
        for rid in list(self.active):
            self.cancel(rid)

    def begin_generation(self) -> None:
        """Counts ended reads from zero; nothing may be in flight."""
        assert not self.active and not self.closing, "prefetches are in flight"
        self._released = 0
        self.occupied_pages = 0

    def mark_polled(self, rids: Sequence[str]) -> None:
        """Notes which requests the scheduler wants now: only those end by policy."""
        wanted = set(rids)
        for rid, prefetch in self.active.items():
            prefetch.polled = rid in wanted

    def progress(self) -> tuple[PrefetchProgress, ...]:
        """Local progress of each prefetch in flight, in the order in which they began."""
        return tuple(self.policy.progress(prefetch) for prefetch in self.active.values())

    def is_idle(self) -> bool:
        """Whether no prefetch is in flight, and none that has ended is still being read."""
        return not self.active and not self.closing

    @property
    def releases_done(self) -> int:
        """Closed prefetches whose read has really ended, cumulative, in order."""
        return self._released + sum(1 for _ in takewhile(lambda closing: closing.prefetch.read_ended, self.closing))

    def apply(self, agreed: Sequence[PrefetchProgress], releases: int) -> None:
        """Moves every prefetch on by what all ranks have reached."""
        for prefetch, progress in zip(list(self.active.values()), agreed, strict=True):
            if progress.terminated or progress.can_terminate:
                self._end(prefetch, progress.completed_pages)
            elif prefetch.stage is Stage.QUERYING and progress.queried:
                self._read_or_revoke(prefetch, progress.hit_pages)
        while self._released < releases:
            host_pages = self.closing.popleft().host_pages
            self._released += 1
            self.occupied_pages -= len(host_pages)
            self.index.host.free(host_pages)

    def in_flight_pages(self) -> np.ndarray:
        """L2 pages owned by prefetches, for the ledger."""
        owned = [prefetch.host_pages for prefetch in self.active.values()]
        owned += [closing.host_pages for closing in self.closing]
        return np.concatenate(owned) if owned else NO_PAGES

    def _refusal(self, key: Key, match: Match) -> str:
        if self.mover.storage_io is None or not self.enabled:
            return NO_STORAGE
        if match.device_node.parent is not None and not match.device_node.backuped:
            return NOT_BACKED  # what follows a page that no lower tier has could never be reached (case 53)
        if not self.policy.is_worth(key.pages - match.device_pages - match.host_pages):
            return SHORT
        return RATE_LIMITED if self.occupied_pages >= self.policy.capacity_pages else STARTED

    def _begin(self, rid: str, key: Key, match: Match) -> None:
        matched = match.device_pages + match.host_pages
        io = self.mover.storage_io
        assert io is not None
        hashes = page_hashes(
            key.units[matched * key.page_bytes :],
            self.index.page_size,
            prior=_last_hash(match.host_node),
            namespace=key.namespace,
            bigram=key.bigram,
        )
        prefetch = Prefetch(
            rid=rid,
            key=key,
            anchor=match.host_node,
            anchor_pages=matched,
            hashes=tuple(hashes),
            prefix_hashes=_path_hashes(match.host_node) if io.pass_prefix_hashes else (),
            issued_at=self.policy.clock(),
        )
        self.index.tree.protect(prefetch.anchor)
        self.active[rid] = prefetch
        io.query(prefetch)

    def _read_or_revoke(self, prefetch: Prefetch, hits: int) -> None:
        worth = self.policy.is_worth(hits) and not faultpoints.fails("alloc.host")
        pages = self.index.allocate_host(hits) if worth else None
        if pages is None or self.mover.storage_io is None:
            self.counts["revoked"] += 1
            self._end(prefetch, 0)
            return
        prefetch.host_pages = pages
        prefetch.stage = Stage.READING
        self.occupied_pages += hits
        self.mover.storage_io.read(prefetch)

    def _end(self, prefetch: Prefetch, completed: int) -> None:
        """Attaches the completed pages; the rest comes back when the read has ended."""
        prefetch.cancelled = True
        prefetch.stage = Stage.ENDED
        del self.active[prefetch.rid]
        done, rest = prefetch.host_pages[:completed], prefetch.host_pages[completed:]
        if completed:
            key = prefetch.key.prefix(prefetch.anchor_pages + completed)
            unused = self.index.attach_host(key, prefetch.anchor_pages, done, list(prefetch.hashes[:completed]))
            self.index.host.free(unused)
            prefetch.attached_pages = completed - len(unused)
            self.counts["loaded_pages"] += prefetch.attached_pages
        self.index.tree.release(prefetch.anchor)
        self.occupied_pages -= completed
        if len(rest):
            self.closing.append(Closing(prefetch, rest))


def _last_hash(node: Node) -> bytes:
    if node.parent is None:
        return b""
    assert node.hash_value is not None, "a tree with a store attached carries hashes"
    return node.hash_value[-1]


def _path_hashes(node: Node) -> tuple[bytes, ...]:
    """Hashes of the pages from the root to the end of `node`."""
    parts: list[list[bytes]] = []
    while node.parent is not None:
        assert node.hash_value is not None, "a tree with a store attached carries hashes"
        parts.append(node.hash_value)
        node = node.parent
    return tuple(page_hash for part in reversed(parts) for page_hash in part)
