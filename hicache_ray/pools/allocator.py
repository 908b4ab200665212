"""Who owns which page of a pool: metadata only, no memory behind it."""

from __future__ import annotations

import numpy as np

from hicache_ray.radix.node import NO_PAGES, Pages

_HELD = 0
"""Code of a page that was handed out; every other code means free."""
_CODE_BYTES = 4


class PageError(ValueError):
    """A page was given back that is not handed out: a double free, or a page of another pool (case 57)."""


class PageAllocator:
    """Hands out the pages of a pool and takes them back, oldest free page first (case 57).

    Pages are int64 arrays of shape [n]; what is handed out is the caller's own array.

    Args:
        pages: pages of the pool.
        page_size: tokens a page.

    Attributes:
        total: pages of the pool.
        free_pages: pages that can be handed out now.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        if pages < 0 or page_size < 1:
            raise ValueError(f"a pool of {pages} pages of {page_size} tokens: give 0 or more pages of 1 or more tokens")
        self.page_size = page_size
        self.total = pages
        self.free_pages = pages
        self._ring: Pages = np.arange(pages, dtype=np.int64)
        self._head = 0
        # Twice as long as the pool: negative and too large numbers meet codes there that say free, not somebody's page.
        self._code = np.ones(2 * pages, dtype=np.int32)
        self._order = np.arange(1, pages + 1, dtype=np.int32)

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
        self._code[pages] = _HELD
        return pages

    def alloc_tokens(self, tokens: int) -> Pages | None:
        """As `alloc`, for a number of tokens.

        Raises:
            ValueError: the tokens fill no whole number of pages (case 57).
        """
        pages, rest = divmod(tokens, self.page_size)
        if rest:
            raise ValueError(f"{tokens} tokens are no whole number of pages of {self.page_size} tokens")
        return self.alloc(pages)

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
        order, code = self._order[:n], self._code
        try:
            if code[pages].tobytes() != bytes(n * _CODE_BYTES):
                raise self._error(pages)
        except IndexError:
            raise self._error(pages) from None
        # Marked with its place in the call, which means free, a page named twice keeps only one of its two marks.
        code[pages] = order if len(order) == n else _HELD
        if code[pages].tobytes() != order.tobytes():
            code[pages] = _HELD
            raise self._error(pages)
        self._to_ring((self._head + self.free_pages) % self.total, pages)
        self.free_pages += n

    def _free_one(self, page: int, pages: Pages) -> None:
        # The last page of a request seldom is full, so it comes back alone: worth a third of the time.
        if not 0 <= page < self.total or self._code[page] != _HELD:
            raise self._error(pages)
        self._code[page] = 1
        self._ring[(self._head + self.free_pages) % self.total] = page
        self.free_pages += 1

    def is_held(self, pages: Pages) -> bool:
        """Whether every one of `pages` is handed out."""
        return bool((self._code[pages] == _HELD).all())

    def free_list(self) -> Pages:
        """The free pages in the order in which they will be handed out. For audits."""
        return self._from_ring(self._head, self.free_pages)

    def check_integrity(self) -> None:
        """Raises AssertionError when the free list and the state of the pages disagree. For tests and audits."""
        free = np.sort(self.free_list())
        marked = np.flatnonzero(self._code[: self.total])
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
        free = [int(page) for page in pages if self._code[page] != _HELD]
        if free:
            return PageError(f"page {free[0]} is free already: it was given back before")
        numbers, counts = np.unique(pages, return_counts=True)
        return PageError(f"page {int(numbers[counts > 1][0])} is named more than once in one call")
