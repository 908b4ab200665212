"""Kinds of failure of docs/reliability.md: desynchronised ranks, leaks, double frees, transfer races, growing memory.

Ranks in lockstep whose transfers move only when the test says so: every interleaving is played, and played again.
"""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from hicache_ray.faults.injector import injected
from hicache_ray.faults.plan import FaultPlan
from hicache_ray.pools.allocator import PageAllocator, PageError
from hicache_ray.rank.control import DONE, DRAINING, REFUSED
from hicache_ray.rank.group import DivergenceError
from hicache_ray.rank.local_group import LocalGroup
from hicache_ray.rank.progress import DesyncError, Progress
from hicache_ray.rank.step import Admit, Control, Finish
from hicache_ray.replay.driver import ENGINE, settle
from hicache_ray.testing.serving import ask
from tests.kernels_reference import poison
from tests.manual import ManualLane
from tests.ray_service import config
from tests.test_cache_random import Driver, play
from tests.whole_cache import Lockstep, Shape, admit, tokens_of

PROMPT = list(range(12))
Event = Callable[[Lockstep], None]


def group_of(ranks: int = 2, **changes: object) -> Lockstep:
    shape = Shape(ranks=ranks, prefetch_policy="wait_complete")
    for name, value in changes.items():
        setattr(shape, name, value)
    return Lockstep(shape)


def serve(group: Lockstep, rid: str, tokens: list[int]) -> int:
    """Serves a request to its end; tokens of its prompt that came from the cache. Every page was compared."""
    group.step(admits=[admit(rid, tokens)])
    for _ in range(20):
        for worker in group.workers:
            worker.advance(worker.pending)
        if group.step(polls=[rid]).polled[0].ready:
            break
    (row,) = group.step(schedules=[rid]).scheduled
    if not row.ok:  # what is being written to L2 can't leave L1
        advance(group, "l1-write")
        group.step()
        (row,) = group.step(schedules=[rid]).scheduled
    assert row.ok, row
    group.step(finishes=[Finish(rid)])
    group.settle()
    return row.device_tokens + row.host_tokens + row.storage_tokens


# -- ranks desynchronise and hang ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_ranks_desynchronise_and_hang(seed: int) -> None:
    """Whatever the ranks' delays: one reduction a step, equal digests after every step (the group compares them)."""
    driver = Driver(seed)
    driver.group = Lockstep(Shape(ranks=4, fault_chance=0.2, seed=seed))
    per_rank = len(driver.group.lanes) // 4
    for _ in range(60):
        late = driver.rng.randrange(4)
        for at, lane in enumerate(driver.group.lanes):
            if at // per_rank == late:
                lane.advance(-lane.pending)
        driver.step()
    driver.end()
    assert driver.group.reductions == driver.group.steps


@pytest.mark.parametrize("point", ["allocate", "load_back"])
def test_ranks_desynchronise_and_hang_an_allocation_that_fails_on_one_rank_is_noticed(point: str) -> None:
    """In that very step, naming it: never silence, never a wait."""
    options = config(hicache_storage_backend=None, hicache_ratio=8.0).resolve().config
    group = LocalGroup.create(options, engine=ENGINE)
    prompts = [np.arange(24, dtype="<u4") + 100 * number for number in range(9)]
    try:
        for prompt in prompts:
            ask(group, prompt)
        settle(group)  # the first of them has left L1 by now
        setattr(group.caches[1].index, point, lambda *_, **__: None)
        with pytest.raises(DivergenceError, match=r"ranks 0 and 1 differ at step \d+ in .*scheduled"):
            group.step(admits=[Admit("x", prompts[0].tobytes())], schedules=["x"])
    finally:
        group.stop()


def test_ranks_desynchronise_and_hang_no_room_on_all_ranks_alike_is_no_error() -> None:
    group = group_of(storage=False)
    fails = FaultPlan.parse({"faults": [{"kind": "alloc_fail", "who": "rank 0", "times": 2}]})
    with injected(fails):
        answer = group.step(admits=[admit("r", PROMPT)], schedules=["r"])
        assert [row.reason for row in answer.scheduled] == ["no_room"]
        assert group.step(schedules=["r"]).scheduled[0].ok
    group.step(finishes=[Finish("r")])
    group.settle()


@pytest.mark.parametrize("field", ["generation", "step", "digest"])
def test_ranks_desynchronise_and_hang_a_rank_that_is_elsewhere_is_seen_in_the_reduction(field: str) -> None:
    one = Progress(1, 7, 99, 0, 0, 0, 0, ())
    other = one._replace(**{field: getattr(one, field) + 1})
    with pytest.raises(DesyncError, match=r"ranks differ in their .* at step \d"):
        Progress.agreed(np.minimum(one.vector(), other.vector()))


# -- host or device slots leak ---------------------------------------------------------------------------------------


def life(rid: str) -> list[Event]:
    """One request from admission to its end, cut at every point where it waits for something."""
    return [
        lambda group: group.step(admits=[admit(rid, PROMPT, new=4)]) and None,
        lambda group: advance(group, "l3-query"),
        lambda group: group.step(polls=[rid]) and None,
        lambda group: advance(group, "l3-read"),
        lambda group: group.step(polls=[rid]) and None,
        lambda group: group.step(schedules=[rid]) and None,
        lambda group: advance(group, "l1-load"),
        lambda group: group.step() and None,
        lambda group: group.step(finishes=[Finish(rid, tokens_of([1, 2, 3]))]) and None,
        lambda group: advance(group, "l1-write"),
        lambda group: group.step() and None,
        lambda group: advance(group, "l3-write"),
    ]


def advance(group: Lockstep, name: str) -> None:
    for moving in (*group.lanes, *group.workers):
        if moving.name == name:
            moving.advance(moving.pending)


def abort(group: Lockstep) -> None:
    group.step(aborts=["r"] if "r" in group.caches[0].requests else [])


def preempt(group: Lockstep) -> None:
    """Retracted and admitted again in one step (D8)."""
    if "r" in group.caches[0].requests:
        group.step(aborts=["r"], admits=[admit("r", PROMPT)])
        group.step(aborts=["r"])


def squeeze(group: Lockstep) -> None:
    """Everybody else wants all of L1 and L2."""
    other = admit("other", [50 + n for n in range(20)])
    if group.step(admits=[other], schedules=["other"]).scheduled[0].ok:
        group.step(finishes=[Finish("other")])
    abort(group)


def flush(group: Lockstep) -> None:
    control(group, Control("flush"))
    abort(group)


def detach(group: Lockstep) -> None:
    control(group, Control("detach"))
    abort(group)


def control(group: Lockstep, command: Control) -> None:
    for _ in range(3):
        ((state, _),) = group.step(controls=[command]).controlled[0]
        assert state in (DONE, DRAINING, REFUSED)
        if state != DRAINING:
            return


EVENTS = [abort, preempt, squeeze, flush, detach]


@pytest.mark.parametrize("stored", ["stored", "new"])
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
@pytest.mark.parametrize("point", range(13))
def test_host_or_device_slots_leak(event: Event, point: int, stored: str) -> None:
    """An abort, a preemption, an eviction, a flush, a detach at every point where a request waits: `Lockstep.step`
    checks the ledger as multisets after each step; at the end every slot is free or in the tree."""
    group = group_of()
    if stored == "stored":
        serve(group, "before", PROMPT)
        control(group, Control("flush"))
    for play_on in life("r")[:point]:
        play_on(group)
    event(group)
    group.settle()
    for cache in group.caches:
        assert not cache.requests and cache.prefetcher.occupied_pages == 0
        for pool in cache.ledger().values():
            assert pool.balanced and pool.in_flight == 0
        assert cache.index.tree.protections == cache.index.tree.protected_pages == 0


# -- double free, use after free -------------------------------------------------------------------------------------


def test_double_free_use_after_free() -> None:
    """The allocator takes nothing back twice, and nothing that is not its own."""
    allocator = PageAllocator(8)
    pages = allocator.alloc(4)
    assert pages is not None
    allocator.free(pages[:2])
    for wrong in (pages[:1], pages[:2], pages[[2, 2]], np.array([8]), np.array([-1, 3])):
        before = allocator.free_list().tolist()
        with pytest.raises(PageError):
            allocator.free(wrong)
        assert allocator.free_list().tolist() == before
    allocator.check_integrity()


@pytest.mark.parametrize("seed", [3, 4, 7, 8, 12])
def test_double_free_use_after_free_what_is_freed_is_never_read(seed: int) -> None:
    """After each step all free pages of both tiers are overwritten: what still reads one would show wrong bytes."""
    driver = Driver(seed)
    for _ in range(60):
        driver.step()
        for cache in driver.group.caches:
            poison(cache.mover.device_pool, cache.index.device.free_list())
            for page in cache.index.host.free_list().tolist():
                cache.mover.host_pool.segments[page] = 0xEE
    assert driver.group.verified > 0
    driver.end()


# -- transfer races --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_transfer_races(event: Event, write_policy: str) -> None:
    """Copies stay undone for as long as they can while everything else goes on; no page is other than it must be."""
    for point in range(13):
        group = group_of(write_policy=write_policy, device_pages=12, host_pages=20)
        serve(group, "before", PROMPT)
        for play_on in life("r")[:point]:
            play_on(group)
        event(group)
        verified = group.verified
        for number in range(3):
            group.step(aborts=[rid for rid in ("r", f"n{number}") if rid in group.caches[0].requests])
            control(group, Control("attach", {"backend": "faulty"}))
            serve(group, f"n{number}", PROMPT + [90 + number] * 6)
            serve(group, f"m{number}", [70 + number] * 16)
        assert group.verified > verified


@pytest.mark.parametrize("seed", range(40, 44))
def test_transfer_races_lazy_copies(seed: int) -> None:
    """Writes to L2 are made one at a time, and seldom, unless somebody has to wait for them."""
    driver = Driver(seed)
    for lane in driver.group.lanes:
        if lane.name == "l1-write":
            _make_lazy(lane, random.Random(seed))
    for _ in range(80):
        driver.step()
    assert driver.group.verified > 0


def _make_lazy(lane: ManualLane, rng: random.Random) -> None:
    advance = lane.advance

    def wait(timeout: float) -> bool:
        advance(lane.pending)
        return True

    lane.wait = wait  # type: ignore[method-assign]
    lane.advance = lambda copies=1: advance(1) if rng.random() < 0.1 else None  # type: ignore[method-assign]


# -- memory grows outside the pools ----------------------------------------------------------------------------------


def test_memory_grows_outside_the_pools() -> None:
    """With fixed capacities, Python's memory after ten times as many requests is what it was after the first round."""
    group = group_of(ranks=1, device_pages=24, host_pages=40)
    rng = random.Random(1)

    def round_of(count: int) -> int:
        for number in range(count):
            serve(group, f"r{number}", [rng.randrange(50) for _ in range(14)])
        group.store.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        round_of(60)
        settled = [round_of(60) for _ in range(2)]
        later = [round_of(60) for _ in range(8)][-2:]
    finally:
        tracemalloc.stop()
    assert max(later) < max(settled) + 64 * 1024, f"{settled} bytes after two rounds, {later} after ten"


def test_memory_grows_outside_the_pools_metadata_of_a_page() -> None:
    """What the tree and its tables hold for a page of L1 and L2 is measured, and bounded."""
    group = group_of(ranks=1, device_pages=400, host_pages=400, storage=False)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(40):
            serve(group, f"r{number}", [number] * 16)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    pages = sum(node.pages for node in group.caches[0].index.tree.nodes())
    assert pages == 40 * 8
    assert grown / pages < 1024, f"{grown / pages:.0f} bytes of metadata a page"


def test_random_runs_still_balance_with_every_fault_of_the_store() -> None:
    """The store fails three calls of ten, on each rank another time."""
    for seed in (101, 102):
        driver = play(seed)
        assert driver.group.steps > 0
