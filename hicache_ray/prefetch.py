"""One prefetch, L3 to L2: its life, and when a waiting request may stop waiting for it (CASES 41 to 51).

    queried?  --agreed hits >= threshold-->  reading  --all read, or ended by policy-->  attached
        \\-- fewer: revoked                        (pages not yet read stay owned until the read has really ended)

The control half moves on agreed numbers only; the IO threads write the few fields marked as theirs.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hicache_ray.progress import PrefetchProgress

if TYPE_CHECKING:
    from hicache_ray.radix.key import Key
    from hicache_ray.radix.node import Node

NO_PAGES = np.empty(0, dtype=np.int64)


class Stage(enum.Enum):
    """Where a prefetch is, agreed by all ranks."""

    QUERYING = "querying"
    READING = "reading"
    ENDED = "ended"


@dataclass(eq=False)
class Prefetch:
    """State of one prefetch on one rank."""

    rid: str
    key: Key
    anchor: Node
    """Deepest node with a host copy when it began; its host copy is protected until the end."""
    anchor_pages: int
    """Depth in pages at which the prefetched pages begin."""
    hashes: tuple[bytes, ...]
    """Hashes of the pages asked for, in order."""
    prefix_hashes: tuple[str, ...]
    issued_at: float
    stage: Stage = Stage.QUERYING
    host_pages: np.ndarray = field(default_factory=lambda: NO_PAGES)
    """Reserved L2 pages, one per hit, owned by this prefetch from READING until its read has ended."""
    polled: bool = False
    """The scheduler asks for this request now."""
    attached_pages: int = 0
    # Written by the IO threads:
    query_done: bool = False
    hit_pages: int = 0
    completed_pages: int = 0
    read_ended: bool = False
    # Read by the IO threads:
    cancelled: bool = False

    def end_read(self) -> None:
        """Nothing touches the host pages any more. Called once, by whichever thread was the last to."""
        self.read_ended = True


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
        """This rank's view of whether the request may go on now, with what has been read (3.6 of the article)."""
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
