"""The page allocator: who owns which page, and no page twice."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from hicache_ray import pages
from hicache_ray.pools.allocator import PageAllocator, PageError


def pages_of(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def test_whole_pages_only() -> None:
    """Case 57. Three slots at page 2 are refused with both numbers; what is handed out is pages."""
    with pytest.raises(ValueError, match="3 slots are not whole pages of 2"):
        pages.pages_of(range(3), 2)
    taken = PageAllocator(8).alloc(2)
    assert taken is not None and taken.tolist() == [0, 1] and pages.slots_of(taken, 2).tolist() == [0, 1, 2, 3]


def test_over_capacity_takes_nothing() -> None:
    """Case 57."""
    allocator = PageAllocator(4)
    assert allocator.alloc(5) is None
    assert allocator.free_pages == allocator.total == 4
    taken = allocator.alloc(4)
    assert taken is not None and allocator.alloc(1) is None
    empty = allocator.alloc(0)
    assert empty is not None and len(empty) == 0


def test_the_page_free_the_longest_is_used_first() -> None:
    """Case 57. Also across the end of the ring."""
    allocator = PageAllocator(4)
    first = allocator.alloc(3)
    assert first is not None
    allocator.free(first[::-1])
    again = allocator.alloc(4)
    assert again is not None and again.tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([0], "page 0 is free already"),
        ([2, 0], "page 0 is free already"),
        ([2, 3, 2], "page 2 is named more than once"),
        ([2, 3, 4, 5, 2, 3, 4, 5, 2], "page 2 is named more than once"),
        ([8], "page 8 is not of this pool, whose pages are 0 to 7"),
        ([2, -1], "page -1 is not of this pool"),
        ([-1], "page -1 is not of this pool"),
        ([2, 15], "page 15 is not of this pool"),
        ([2, 1_000_000], "page 1000000 is not of this pool"),
        ([2, -1_000_000], "page -1000000 is not of this pool"),
    ],
)
def test_a_page_that_is_not_held_cannot_be_freed(pages: list[int], message: str) -> None:
    """Case 57: a double or a foreign free raises, and no page of the call was taken back."""
    allocator = PageAllocator(8)
    held = allocator.alloc(6)
    assert held is not None
    allocator.free(pages_of(0, 1))
    before = allocator.free_list().tolist()
    with pytest.raises(PageError, match=message):
        allocator.free(pages_of(*pages))
    assert allocator.free_list().tolist() == before
    allocator.check_integrity()
    allocator.free(pages_of(2, 3, 4, 5))
    assert allocator.free_pages == 8


@pytest.mark.parametrize("twice", [0, 254, 255, 700])
def test_a_page_named_twice_in_a_long_call(twice: int) -> None:
    """Case 57. Also where the two are far apart; then none of the call was taken back."""
    allocator = PageAllocator(1_000)
    held = allocator.alloc(800)
    assert held is not None
    with pytest.raises(PageError, match=f"page {twice} is named more than once"):
        allocator.free(np.append(held, twice))
    assert allocator.free_pages == 200 and allocator.is_held(held)
    with pytest.raises(PageError, match="page 900 is free already"):
        allocator.free(np.append(held, 900))
    allocator.check_integrity()
    allocator.free(held)
    assert allocator.free_pages == 1_000


def test_an_empty_pool() -> None:
    allocator = PageAllocator(0)
    assert allocator.alloc(1) is None
    allocator.free(pages_of())
    with pytest.raises(PageError):
        allocator.free(pages_of(0))
    allocator.check_integrity()


def test_senseless_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="-1 pages"):
        PageAllocator(-1)
    with pytest.raises(ValueError, match="-2 pages asked for"):
        PageAllocator(4).alloc(-2)


def test_random_use_equals_a_queue() -> None:
    rng = random.Random(7)
    allocator, queue = PageAllocator(37), deque(range(37))
    held: list[np.ndarray] = []
    for _ in range(5_000):
        if rng.random() < 0.5 or not held:
            n = rng.randint(0, 12)
            pages = allocator.alloc(n)
            expected = [queue.popleft() for _ in range(n)] if n <= len(queue) else None
            assert (None if pages is None else pages.tolist()) == expected
            if pages is not None:
                held.append(pages)
        else:
            pages = held.pop(rng.randrange(len(held)))
            allocator.free(pages)
            queue.extend(pages.tolist())
        allocator.check_integrity()
        assert allocator.free_pages == len(queue)
        assert not held or allocator.is_held(np.concatenate(held))


def test_what_is_handed_out_is_the_callers_own() -> None:
    allocator = PageAllocator(4)
    pages = allocator.alloc(2)
    assert pages is not None
    pages[:] = 99
    rest = allocator.alloc(2)
    assert rest is not None and rest.tolist() == [2, 3]
