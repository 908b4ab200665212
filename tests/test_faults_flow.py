"""Kinds of failure of docs/reliability.md: loops that die, prefetches that hang, capacity edges, events that drift, and
loads that do not pay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from hicache_ray.events import EventIndex, EventRecorder
from hicache_ray.faults.injector import injected
from hicache_ray.faults.plan import FaultPlan
from hicache_ray.pools.allocator import PageAllocator
from hicache_ray.rank.l3 import StorageIO
from hicache_ray.rank.lanes import CopyError, ThreadLane
from hicache_ray.rank.local_group import LocalGroup
from hicache_ray.rank.request import RequestError
from hicache_ray.rank.step import Control, Finish
from hicache_ray.replay.driver import ENGINE, settle
from hicache_ray.storage.memory import drop_store
from hicache_ray.testing.serving import ask
from hicache_ray.threads import Worker
from tests.index_kit import evict
from tests.ray_service import config
from tests.test_cache_random import Driver
from tests.test_events_recorder import same
from tests.test_faults_ranks import advance, group_of, serve
from tests.whole_cache import Lockstep, admit

PROMPT = list(range(13))
"""Six whole pages of two tokens, and one token that is always computed."""


def plan(**fault: object) -> FaultPlan:
    return FaultPlan.parse({"faults": [fault]})


# -- background thread or loop dies silently -------------------------------------------------------------------------

PROMPTS = [np.arange(24, dtype="<u4") + 100 * number for number in range(8)]


@pytest.fixture
def group() -> Iterator[LocalGroup]:
    """One rank with real threads over a store in memory."""
    settings = config(tp_size=1, hicache_storage_backend="memory", hicache_ratio=2.0).resolve().config
    group = LocalGroup.create(settings, engine=ENGINE, storage_options={"store": "loops"})
    yield group
    group.stop()
    drop_store("loops")


@pytest.mark.parametrize(("loop", "job"), [("l3-query", "_query"), ("l3-read", "_read"), ("l3-write", "_backup")])
def test_background_thread_or_loop_dies_silently(
    group: LocalGroup, monkeypatch: pytest.MonkeyPatch, loop: str, job: str
) -> None:
    """Each loop of a rank's store raises once: it goes on, a counter shows it, the operation has ended."""
    for prompt in PROMPTS:
        ask(group, prompt)
    settle(group)
    whole, raised = getattr(StorageIO, job), []

    def raises_once(self: StorageIO, *arguments: object) -> None:
        try:
            whole(self, *arguments)
        finally:
            if not raised:
                raised.append(job)
                raise RuntimeError("once")

    monkeypatch.setattr(StorageIO, job, raises_once)
    for _ in range(2):
        for number, prompt in enumerate(PROMPTS):
            ask(group, np.append(prompt, np.arange(8, dtype="<u4") + 1000 + number))
    settle(group)
    (stats,) = group.stats()
    assert raised and sum(stats["worker_failures"].values()) == 1 and stats["worker_failures"][loop] == 1
    io = group.caches[0].mover.storage_io
    assert io is not None and all(worker.alive for worker in io.workers)
    assert sum(ask(group, prompt).storage_tokens for prompt in PROMPTS) > 0


def test_background_thread_or_loop_dies_silently_a_worker() -> None:
    worker, done = Worker("test"), []
    worker.submit("bad", lambda: 1 // 0)
    worker.submit("good", lambda: done.append(1))
    assert worker.wait_idle(30) and done == [1] and worker.failures == {"bad": 1} and worker.alive
    assert worker.close()


def test_background_thread_or_loop_dies_silently_a_copy_that_fails_ends_the_rank() -> None:
    """A lost copy between L1 and L2 is no miss: the memory can't be trusted, and the next step says so."""
    lane = ThreadLane("l1-write")
    with injected(plan(kind="drop", who="rank 0", point="copy.l1-write")):
        lane.submit(lambda: None)
        with pytest.raises(CopyError, match="a fault plan wants it"):
            lane.wait(30)
    lane.close()


# -- prefetch stuck, late, useless -----------------------------------------------------------------------------------


def prefetching(policy: str) -> Lockstep:
    """A request whose prefetch knows its hits, and of which nothing is read."""
    before = group_of()
    serve(before, "before", PROMPT)
    fresh = Lockstep(dataclasses.replace(before.shape, prefetch_policy=policy), store=before.store)
    fresh.step(admits=[admit("r", PROMPT)])
    advance(fresh, "l3-query")
    fresh.step()
    return fresh


@pytest.mark.parametrize(
    ("policy", "seconds"), [("best_effort", 0.0), ("timeout", 1.0 + 0.5 * 6), ("wait_complete", 60.0)]
)
def test_prefetch_stuck_late_useless(policy: str, seconds: float) -> None:
    """The store never answers: a request is let go when its policy says so (`wait_complete`: at the hard limit)."""
    group = prefetching(policy)
    if seconds:
        group.clock.now = seconds - 0.01
        assert not group.step(polls=["r"]).polled[0].ready
    group.clock.now = seconds
    group.step(polls=["r"])
    assert group.step(polls=["r"]).polled[0].ready
    assert group.step(schedules=["r"]).scheduled[0].computed_tokens == 13
    group.step(finishes=[Finish("r")])
    group.settle()
    assert all(cache.ledger()["host"].in_flight == 0 for cache in group.caches)


def test_prefetch_stuck_late_useless_a_finished_read_is_noticed_in_the_next_step() -> None:
    group = prefetching("wait_complete")
    assert not group.step(polls=["r"]).polled[0].ready
    advance(group, "l3-read")
    assert group.step(polls=["r"]).polled[0].ready
    assert group.step(schedules=["r"]).scheduled[0].storage_tokens == 12


def test_prefetch_stuck_late_useless_one_rank_is_late() -> None:
    """Nobody goes on before the slowest has the pages, and all go on in the same step."""
    group = prefetching("wait_complete")
    first, *others = [worker for worker in group.workers if worker.name == "l3-read"]
    first.advance(first.pending)
    assert not group.step(polls=["r"]).polled[0].ready
    for worker in others:
        worker.advance(worker.pending)
    assert group.step(polls=["r"]).polled[0].ready
    group.step(aborts=["r"])
    group.settle()


# -- capacity edges --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_pages", [1, 6, 7, 12])
@pytest.mark.parametrize("device_pages", [7, 8, 13])
@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_capacity_edges(device_pages: int, host_pages: int, write_policy: str) -> None:
    """One page of L2, exactly a prompt's pages, one more; L1 that just holds one request: all are served."""
    group = group_of(device_pages=device_pages, host_pages=host_pages, write_policy=write_policy)
    for number in range(4):
        prompt = [100 * (number % 2) + token for token in PROMPT]
        serve(group, f"r{number}", prompt)
    group.settle()
    for cache in group.caches:
        assert all(pool.balanced and pool.in_flight == 0 for pool in cache.ledger().values())


def test_capacity_edges_nothing_at_all() -> None:
    """Capacity 0 is refused at start, with the number."""
    with pytest.raises(ValueError, match="at least one page of one token, not 0 of 2"):
        group_of(host_pages=0)
    with pytest.raises(ValueError, match="l1_tokens is 3: no page of page_size 4 fits"):
        config(l1_tokens=3).resolve()


def test_capacity_edges_exactly_full_and_one_more() -> None:
    """A request as large as L1 runs; one of a page more is refused, with the numbers, and nothing has changed."""
    group = group_of(ranks=1, device_pages=8, host_pages=8)
    assert serve(group, "full", list(range(16))) == 0
    digest = group.caches[0].index.tree.digest()
    with pytest.raises(RequestError, match="'more' needs 17 tokens of L1, which has 16: it can never run"):
        group.step(admits=[admit("more", list(range(17)))])
    assert group.caches[0].index.tree.digest() == digest and not group.caches[0].requests
    assert serve(group, "again", list(range(16))) > 0


@pytest.mark.parametrize("pages", [0, 1, 5])
def test_capacity_edges_of_the_allocator(pages: int) -> None:
    allocator = PageAllocator(pages)
    held = allocator.alloc(pages)
    assert held is not None and len(held) == pages
    assert allocator.alloc(1) is None and allocator.free_pages == 0
    allocator.free(held)
    assert allocator.alloc(pages + 1) is None and allocator.free_pages == pages


# -- events drift from the truth -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 5, 9, 14])
def test_events_drift_from_the_truth(seed: int) -> None:
    """The log of a random run, replayed into an empty index, is the tree, per tier, after every step (a gap in a
    published log: tests/test_events_zmq.py)."""
    driver = Driver(seed)
    recorders = [EventRecorder(cache.index) for cache in driver.group.caches]
    logs = [EventIndex() for _ in recorders]
    for _ in range(60):
        driver.step()
        for recorder, log, cache in zip(recorders, logs, driver.group.caches, strict=True):
            step = recorder.take()
            if step is not None:
                log.apply(step.batch())
            same(log, cache.index)
    assert any(log.tiers for log in logs)


# -- slower than recomputing -----------------------------------------------------------------------------------------


def test_slower_than_recomputing() -> None:
    """What is too short to be worth a load from L2 or a fetch from L3 is computed."""
    group = group_of(device_pages=16, host_pages=40)
    serve(group, "r", PROMPT)
    for cache in group.caches:
        cache.index.options = dataclasses.replace(cache.index.options, load_back_threshold=13)
        evict(cache.index, 26)
    assert serve(group, "short", PROMPT) == 0
    for cache in group.caches:
        evict(cache.index, 26)
        cache.index.options = dataclasses.replace(cache.index.options, load_back_threshold=12)
    assert serve(group, "worth it", PROMPT) == 12
    fresh = Lockstep(group.shape, store=group.store)
    fresh.step(controls=[Control("policies", {"prefetch_threshold": 13})])
    assert fresh.step(admits=[admit("short", PROMPT)]).admitted[0].prefetch == "short"
    fresh.step(controls=[Control("policies", {"prefetch_threshold": 12})])
    assert fresh.step(admits=[admit("worth it", PROMPT)]).admitted[0].prefetch == "started"
    fresh.step(aborts=["short", "worth it"])
    fresh.settle()


def test_slower_than_recomputing_what_only_some_have_is_not_fetched() -> None:
    """Hits below the threshold, once they are known, are left where they are (revoked)."""
    group = group_of()
    serve(group, "r", PROMPT[:5])
    fresh = Lockstep(group.shape, store=group.store)
    fresh.step(controls=[Control("policies", {"prefetch_threshold": 6})])
    fresh.step(admits=[admit("r", PROMPT)])
    advance(fresh, "l3-query")
    fresh.step(polls=["r"])
    assert fresh.step(polls=["r"]).polled[0].ready
    assert fresh.caches[0].prefetcher.counts["revoked"] == 1
    fresh.step(aborts=["r"])
    fresh.settle()
