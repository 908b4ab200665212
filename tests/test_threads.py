"""Helper threads: they never die and never hold up a caller."""

from __future__ import annotations

import threading

import pytest

from hicache_ray.testing.suite_base import eventually
from hicache_ray.threads import HelperThreads


def test_results_are_in_order() -> None:
    helpers = HelperThreads("test", 3)
    assert helpers.map(lambda item: item * item, range(100)) == [item * item for item in range(100)]
    assert helpers.map(str, []) == [] and helpers.map(str, [1]) == ["1"]
    helpers.close()
    eventually(lambda: helpers.alive == 0, "the threads go on after close")


def test_an_error_is_raised_when_all_items_have_ended() -> None:
    helpers = HelperThreads("test", 3)
    ended: list[int] = []

    def item(number: int) -> None:
        if number == 2:
            raise ValueError("item 2")
        ended.append(number)

    for _ in range(5):
        ended.clear()
        with pytest.raises(ValueError, match="item 2"):
            helpers.map(item, range(8))
        assert sorted(ended) == [0, 1, 3, 4, 5, 6, 7]
    assert helpers.alive == 3
    helpers.close()


def test_a_call_ends_while_all_threads_are_stuck_in_another() -> None:
    helpers = HelperThreads("test", 2)
    gate, stuck = threading.Event(), threading.Semaphore(0)

    def hang(item: int) -> bool:
        stuck.release()
        return gate.wait(60)

    other = threading.Thread(target=helpers.map, args=(hang, range(3)))
    other.start()
    for _ in range(3):
        assert stuck.acquire(timeout=60)
    assert helpers.map(lambda item: item, range(10)) == list(range(10))
    gate.set()
    other.join(60)
    assert not other.is_alive()
    helpers.close()
