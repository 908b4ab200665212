"""In which order a storage actor gives up pages: LRU, FIFO, LFU, S3-FIFO. Each costs O(1) a page.

A policy orders the pages of one size class and one quota group. A leased page is passed over.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, eq=False)
class Page:
    """One stored page of a shard: where it is, who reads it, how it was used.

    Attributes:
        key, cell, cell_bytes, label: what it is and where it lies; `label` is its namespace's.
        order: the policy that ranks it.
        leases: readers that copy it now.
        tick: when it was last used (the shard's logical counter).
        frequency: uses since it came, as far as its policy counts.
        expires: clock time after which it is a miss; infinity without TTL.
        stored: False once it left the index; its cell may still be leased.
    """

    key: bytes
    cell: int
    cell_bytes: int
    label: bytes
    order: EvictionPolicy
    tick: int
    expires: float
    leases: int = 0
    frequency: int = 0
    stored: bool = True


class EvictionPolicy(Protocol):
    """Orders pages for eviction."""

    def add(self, page: Page) -> None:
        """A page was stored."""

    def touch(self, page: Page) -> None:
        """A page was asked for."""

    def remove(self, page: Page, *, evicted: bool) -> None:
        """A page left: by eviction, or for another reason (cleared, expired, corrupt)."""

    def victim(self) -> Page | None:
        """The page to evict next that nobody leases, None when there is none. It stays until `remove`."""

    def __len__(self) -> int: ...


class Fifo:
    """Oldest stored first."""

    def __init__(self) -> None:
        self._order: OrderedDict[Page, None] = OrderedDict()

    def add(self, page: Page) -> None:
        self._order[page] = None

    def touch(self, page: Page) -> None:
        return

    def remove(self, page: Page, *, evicted: bool) -> None:
        del self._order[page]

    def victim(self) -> Page | None:
        return _first_free(self._order)

    def __len__(self) -> int:
        return len(self._order)


class Lru(Fifo):
    """Longest unused first."""

    def touch(self, page: Page) -> None:
        self._order.move_to_end(page)


class Lfu:
    """Least often used first, among equals the longest unused. Counts stop at 255."""

    _MOST = 255

    def __init__(self) -> None:
        self._by_frequency: dict[int, OrderedDict[Page, None]] = {}
        self._pages = 0

    def add(self, page: Page) -> None:
        page.frequency = 0
        self._bucket(0)[page] = None
        self._pages += 1

    def touch(self, page: Page) -> None:
        self._leave(page)
        page.frequency = min(page.frequency + 1, self._MOST)
        self._bucket(page.frequency)[page] = None

    def remove(self, page: Page, *, evicted: bool) -> None:
        self._leave(page)
        self._pages -= 1

    def victim(self) -> Page | None:
        free = (_first_free(self._by_frequency[frequency]) for frequency in sorted(self._by_frequency))
        return next((page for page in free if page is not None), None)

    def __len__(self) -> int:
        return self._pages

    def _bucket(self, frequency: int) -> OrderedDict[Page, None]:
        return self._by_frequency.setdefault(frequency, OrderedDict())

    def _leave(self, page: Page) -> None:
        bucket = self._by_frequency[page.frequency]
        del bucket[page]
        if not bucket:
            del self._by_frequency[page.frequency]


class S3Fifo:
    """S3-FIFO (Yang et al., SOSP 2023): a small queue for newcomers, a main queue for what was used again, and the keys
    of the newcomers that were evicted, which go straight to the main queue when they return."""

    _SMALL_SHARE = 10
    _MOST = 3

    def __init__(self) -> None:
        self._small: OrderedDict[Page, None] = OrderedDict()
        self._main: OrderedDict[Page, None] = OrderedDict()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()

    def add(self, page: Page) -> None:
        page.frequency = 0
        returned = page.key in self._ghosts
        self._ghosts.pop(page.key, None)
        (self._main if returned else self._small)[page] = None

    def touch(self, page: Page) -> None:
        page.frequency = min(page.frequency + 1, self._MOST)

    def remove(self, page: Page, *, evicted: bool) -> None:
        if page in self._main:
            del self._main[page]
            return
        del self._small[page]
        if evicted:
            self._ghosts[page.key] = None
            while len(self._ghosts) > max(len(self), 1):
                self._ghosts.popitem(last=False)

    def victim(self) -> Page | None:
        if len(self._small) * self._SMALL_SHARE >= len(self):
            return self._from_small() or self._from_main()
        return self._from_main() or self._from_small()

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def _from_small(self) -> Page | None:
        for _ in range(len(self._small)):
            page = next(iter(self._small))
            if page.leases:
                self._small.move_to_end(page)
            elif page.frequency <= 1:
                return page
            else:
                del self._small[page]
                page.frequency = 0
                self._main[page] = None
        return None

    def _from_main(self) -> Page | None:
        for _ in range((self._MOST + 1) * len(self._main)):
            page = next(iter(self._main))
            if not page.leases and not page.frequency:
                return page
            page.frequency = max(page.frequency - 1, 0)
            self._main.move_to_end(page)
        return None


SHARD_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": Lru, "fifo": Fifo, "lfu": Lfu, "s3fifo": S3Fifo}


def make_policy(name: str) -> EvictionPolicy:
    """A new, empty policy of that name; ValueError lists the known ones."""
    if name not in SHARD_POLICIES:
        raise ValueError(f"unknown storage eviction policy {name!r}; known are {', '.join(sorted(SHARD_POLICIES))}")
    return SHARD_POLICIES[name]()


def _first_free(order: OrderedDict[Page, None]) -> Page | None:
    return next((page for page in order if not page.leases), None)
