"""The deadline guard, beyond what the suite asks of every backend."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hicache_ray.hashing import ModelIdentity
from hicache_ray.pages import Pages
from hicache_ray.storage.base import PageContext, Storage, StorageConfig
from hicache_ray.storage.guard import MAX_GIVEN_UP, GuardedStorage
from hicache_ray.testing.host_pages import NumpyHostPages
from hicache_ray.testing.suite_base import eventually, page_names

NAMES = page_names(2)
PAGES = np.arange(2)


class Answering(Storage):
    """Answers what it is told to; waits at `gate` first."""

    def __init__(self, timeout: float = 30.0) -> None:
        super().__init__(StorageConfig(ModelIdentity(page_size=2), {}, timeout))
        self.answer: Any = None
        self.gate = threading.Event()
        self.gate.set()
        self.closed = 0

    def lookup(self, hashes: Sequence[bytes], context: PageContext | None = None) -> int:
        return self.respond()

    def load(self, hashes: Sequence[bytes], pages: Pages, context: PageContext | None = None) -> int:
        return self.respond()

    def store(self, hashes: Sequence[bytes], pages: Pages, context: PageContext | None = None) -> int:
        return self.respond()

    def clear(self, everything: bool = False) -> None:
        self.respond()

    def close(self) -> None:
        self.closed += 1
        self.respond()

    def respond(self) -> Any:
        assert self.gate.wait(60)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def guarded(timeout: float = 30.0) -> tuple[GuardedStorage, Answering]:
    backend = Answering(timeout)
    guard = GuardedStorage(backend, clock=lambda: 0.0)
    guard.register_host_pool(NumpyHostPages(4))
    assert backend.host_pool is guard.host_pool
    return guard, backend


@pytest.mark.parametrize(
    "answer",
    [None, [], [True], [True] * 2, np.array([True, True]), True, "xx", {"a": 1}, 7, -1, ValueError("no"), "no", 1.5],
)
def test_answers_that_do_not_fit_are_misses(answer: Any) -> None:
    guard, backend = guarded()
    backend.answer = answer
    assert guard.load(NAMES, PAGES) == guard.store(NAMES, PAGES) == 0


@pytest.mark.parametrize("answer", [1, np.int64(1), np.uint8(1)])
def test_answers_that_fit_become_plain_numbers(answer: Any) -> None:
    guard, backend = guarded()
    backend.answer = answer
    for count in (guard.store(NAMES, PAGES), guard.load(NAMES, PAGES), guard.lookup(NAMES)):
        assert count == 1 and type(count) is int


@pytest.mark.parametrize(("answer", "hits"), [(2, 2), (np.int64(1), 1), (0, 0), (3, 0), (-1, 0), (None, 0), ("2", 0)])
def test_lookup_answers(answer: Any, hits: int) -> None:
    guard, backend = guarded()
    backend.answer = answer
    assert guard.lookup(NAMES) == hits


def test_wrong_pages_are_the_callers_error() -> None:
    """They are no failure of the store, so they are raised, and the breaker stays closed."""
    guard, _ = guarded()
    for _ in range(5):
        with pytest.raises(ValueError, match="host pages"):
            guard.load(NAMES, PAGES[:1])
    assert not any(breaker.is_open for breaker in guard.breakers.values())


def test_calls_given_up_are_bounded() -> None:
    guard, backend = guarded()
    now = 0.0
    guard = GuardedStorage(backend, clock=lambda: now)
    guard.register_host_pool(NumpyHostPages(4))
    guard.timeout = 0.02
    backend.gate.clear()
    for _ in range(3 * MAX_GIVEN_UP):
        assert guard.load(NAMES, PAGES) == 0
        now += 60
    assert guard.given_up == MAX_GIVEN_UP
    assert guard.get_stats().timeouts == MAX_GIVEN_UP and guard.get_stats().refused == 2 * MAX_GIVEN_UP
    backend.gate.set()
    eventually(lambda: guard.given_up == 0, "calls did not return")


def test_pages_are_free_when_the_last_call_that_holds_them_returns() -> None:
    guard, backend = guarded()
    guard.timeout = 0.02
    backend.gate.clear()
    guard.load(NAMES, PAGES)
    guard.store(NAMES, PAGES + 1)
    free, other = threading.Event(), threading.Event()
    guard.when_returned(np.array([1]), free.set)
    guard.when_returned(np.array([3]), other.set)
    assert guard.held_pages.tolist() == [0, 1, 2]
    assert other.is_set() and not free.is_set()
    backend.gate.set()
    assert free.wait(60)
    eventually(lambda: guard.held_pages.size == 0, "pages stay held")


def test_clear_and_close_end_too() -> None:
    guard, backend = guarded(timeout=0.05)
    backend.answer = RuntimeError("read only")
    with pytest.raises(RuntimeError, match="read only"):
        guard.clear()
    backend.gate.clear()
    with pytest.raises(TimeoutError, match=r"clear did not end within 0.05 s"):
        guard.clear()
    guard.close()
    assert backend.closed == 1
    backend.gate.set()
    eventually(lambda: guard.given_up == 0, "close did not return")
    with pytest.raises(RuntimeError, match="closed"):
        guard.lookup(NAMES)
