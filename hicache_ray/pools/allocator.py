"""Who owns which page of a pool: metadata only, no memory behind it."""

from __future__ import annotations

import numpy as np

from hicache_ray.pages import NO_PAGES, Pages

_HELD = 0
"""Mark of a page that was handed out; every other mark means free."""
_MARKS = np.arange(1, 256, dtype=np.uint8)
_MARK_BYTES = _MARKS.tobytes()
_HELD_BYTES = bytes(len(_MARKS))
_CHUNK = len(_MARKS)
"""Most pages that can be told apart by their marks in one go."""


class PageError(ValueError):
    """A page was given back that is not handed out: a double free, or a page of another pool (case 57)."""


class PageAllocator:
    """Hands out the pages of a pool and takes them back, oldest free page first (case 57).

    Pages are int64 arrays of shape [n]; what is handed out is the caller's own array.

    Args:
        pages: pages of the pool.

    Attributes:
        total: pages of the pool.
        free_pages: pages that can be handed out now.
    """

    def __init__(self, pages: int) -> None:
        if pages < 0:
            raise ValueError(f"a pool of {pages} pages: give 0 or more")
        self.total = pages
        self.free_pages = pages
        self._ring: Pages = np.arange(pages, dtype=np.int64)
        self._head = 0
        # Twice as long as the pool: negative and too large numbers meet marks there that say free, never held.
        self._marks = np.ones(2 * pages, dtype=np.uint8)

    def alloc(self, n: int) -> Pages | None:
        """`n` pages, or None when fewer are free; then nothing is taken.

        Raises:
            ValueError: n is negative.
        """
        if n <= 0:
            if n < 0:
                raise ValueError(f"{n} pages asked for; the number can't be negative")
            return NO_PAGES
        if n > self.free_pages:
            return None
        pages = self._from_ring(self._head, n)
        self._head = (self._head + n) % self.total
        self.free_pages -= n
        self._marks[pages] = _HELD
        return pages

    def free(self, pages: Pages) -> None:
        """Takes pages back. They are handed out again after all pages that are free already.

        Raises:
            PageError: a page is free already, named twice, or not of this pool; then none was taken back.
        """
        n = len(pages)
        if n <= 1:
            if n:
                self._free_one(int(pages[0]), pages)
            return
        if n <= _CHUNK:
            if not self._mark_free(pages):
                raise self._error(pages)
        else:
            self._mark_all_free(pages)
        self._to_ring((self._head + self.free_pages) % self.total, pages)
        self.free_pages += n

    def _free_one(self, page: int, pages: Pages) -> None:
        # The last page of a request seldom is full, so it comes back alone: worth half the time.
        if not 0 <= page < self.total or self._marks[page] != _HELD:
            raise self._error(pages)
        self._marks[page] = 1
        self._ring[(self._head + self.free_pages) % self.total] = page
        self.free_pages += 1

    def _mark_free(self, pages: Pages) -> bool:
        """Marks up to `_CHUNK` pages as free. Returns False, and none is marked, when one is not held or named
        twice."""
        n, marks = len(pages), self._marks
        try:
            if marks[pages].tobytes() != _HELD_BYTES[:n]:
                return False
        except IndexError:
            return False
        # Each page is marked with its place in the call; one that is named twice keeps only one of its two marks.
        marks[pages] = _MARKS[:n]
        if marks[pages].tobytes() == _MARK_BYTES[:n]:
            return True
        marks[pages] = _HELD
        return False

    def _mark_all_free(self, pages: Pages) -> None:
        for start in range(0, len(pages), _CHUNK):
            if not self._mark_free(pages[start : start + _CHUNK]):
                self._marks[pages[:start]] = _HELD
                raise self._error(pages)

    def is_held(self, pages: Pages) -> bool:
        """Whether every one of `pages` is handed out."""
        return not self._marks[pages].any()

    def free_list(self) -> Pages:
        """The free pages in the order in which they will be handed out. For audits."""
        return self._from_ring(self._head, self.free_pages)

    def check_integrity(self) -> None:
        """Raises AssertionError when the free list and the state of the pages disagree. For tests and audits."""
        free = np.sort(self.free_list())
        marked = np.flatnonzero(self._marks[: self.total])
        assert np.array_equal(free, marked), f"free list {free} and pages marked free {marked} differ"

    def _from_ring(self, start: int, n: int) -> Pages:
        stop = start + n
        if stop <= self.total:
            return self._ring[start:stop].copy()
        return np.concatenate([self._ring[start:], self._ring[: stop - self.total]])

    def _to_ring(self, start: int, pages: Pages) -> None:
        stop = start + len(pages)
        if stop <= self.total:
            self._ring[start:stop] = pages
        else:
            first = self.total - start
            self._ring[start:] = pages[:first]
            self._ring[: stop - self.total] = pages[first:]

    def _error(self, pages: Pages) -> PageError:
        foreign = [int(page) for page in pages if not 0 <= page < self.total]
        if foreign:
            return PageError(f"page {foreign[0]} is not of this pool, whose pages are 0 to {self.total - 1}")
        free = [int(page) for page in pages if self._marks[page] != _HELD]
        if free:
            return PageError(f"page {free[0]} is free already: it was given back before")
        numbers, counts = np.unique(pages, return_counts=True)
        return PageError(f"page {int(numbers[counts > 1][0])} is named more than once in one call")
