"""Arrays of page numbers and of page bytes; page p covers the token slots [p * page_size, (p + 1) * page_size)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int64]
"""Page numbers of one tier, shape [pages]."""

NO_PAGES: Pages = np.empty(0, dtype=np.int64)
NO_PAGES.setflags(write=False)

Bytes = npt.NDArray[np.uint8]
"""Bytes of pages or of a whole pool."""


def slots_of(pages: npt.ArrayLike, page_size: int) -> npt.NDArray[np.int64]:
    """Token slots of pages, in page order: [n] -> [n * page_size]."""
    numbers = np.asarray(pages, dtype=np.int64)
    return np.ascontiguousarray((numbers[:, None] * page_size + np.arange(page_size)).reshape(-1))


def pages_of(slots: npt.ArrayLike, page_size: int) -> Pages:
    """Page numbers of token slots: [n * page_size] -> [n].

    Raises ValueError when the slots are not whole pages (case 54): a count that page_size does not divide, or a page
    whose slots do not start at a page boundary and follow each other.
    """
    numbers = np.asarray(slots, dtype=np.int64)
    if numbers.size % page_size:
        raise ValueError(f"{numbers.size} slots are not whole pages of {page_size}")
    by_page = numbers.reshape(-1, page_size)
    pages = by_page[:, 0] // page_size
    aligned = by_page == pages[:, None] * page_size + np.arange(page_size)
    if not aligned.all():
        first = int(np.argmin(aligned.all(axis=1)))
        raise ValueError(f"slots {by_page[first].tolist()} are not one page of {page_size} consecutive slots")
    return np.ascontiguousarray(pages)
