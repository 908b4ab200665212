"""A lost rank comes back into its group: the tree from a survivor, the pages from L3 or a peer (docs/design.md 7)."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hicache_ray.index.catalog import Catalog, CatalogError, catalog_of
from hicache_ray.rank.rejoin import Rejoin
from hicache_ray.rank.step import Finish
from tests.test_cache_random import Driver
from tests.whole_cache import Lockstep, Shape, admit


def recover(group: Lockstep, lost: int, *, peers: bool) -> np.ndarray:
    """Replaces a rank by a new process's and brings the group back; returns the mask of retained catalog pages."""
    for lane in group.lanes:
        lane.advance(lane.pending)
    for worker in group.workers:
        worker.advance(worker.pending)
    group.caches[lost] = group._rank(lost)
    rejoining = [Rejoin(cache) for cache in group.caches]
    for rank in rejoining:
        rank.quiesce(5.0)
    survivor = rejoining[(lost + 1) % len(rejoining)]
    for rank in rejoining:
        if rank is not survivor:
            rank.cache.control.adopt(survivor.cache.control.settings())
    catalog = survivor.catalog()
    sources = [rank.pages for rank in rejoining if rank is not rejoining[lost]] if peers else []
    masks = [
        np.frombuffer(rank.claim(catalog, sources if rank is rejoining[lost] else [], 30.0), dtype=np.uint8)
        for rank in rejoining
    ]
    retained = np.minimum.reduce(masks)
    digests = {rank.restore(catalog, retained.tobytes()) for rank in rejoining}
    assert len(digests) == 1
    for cache in group.caches:
        cache.begin_generation(cache.generation)
        cache.check_integrity()
    group.steps = 0
    return retained


def serve(group: Lockstep, rid: str, tokens: list[int]) -> tuple[int, int, int]:
    """Serves one request to its end; returns its tokens from L1, L2 and L3."""
    group.step(admits=[admit(rid, tokens)])
    for _ in range(20):
        for worker in group.workers:
            worker.advance(worker.pending)
        if group.step(polls=[rid]).polled[0].ready:
            break
    (scheduled,) = group.step(schedules=[rid]).scheduled
    assert scheduled.ok
    group.step(finishes=[Finish(rid)])
    group.settle()
    return scheduled.device_tokens, scheduled.host_tokens, scheduled.storage_tokens


@pytest.mark.parametrize("attention", ["mha", "mla"])
def test_pages_in_l3_come_back_and_are_hits_again(attention: str) -> None:
    """docs/design.md 7: MLA pages come from a survivor, MHA pages from L3."""
    shape = Shape(attention=attention, prefetch_policy="wait_complete", device_pages=60, host_pages=100)
    group = Lockstep(shape)
    prompts = [[n] * 4 + list(range(20)) for n in range(5)]
    for n, prompt in enumerate(prompts):
        serve(group, f"r{n}", prompt)
    if attention == "mla":
        group.store.clear()
    retained = recover(group, 1, peers=attention == "mla")
    assert len(retained) > 50 and retained.all()
    for n, prompt in enumerate(prompts):
        assert sum(serve(group, f"again{n}", prompt)) == 22


def test_pages_that_nobody_has_are_dropped_on_all_ranks_alike() -> None:
    group = Lockstep(Shape(storage=False))
    serve(group, "r", list(range(12)))
    assert not recover(group, 0, peers=False).any()
    assert sum(serve(group, "again", list(range(12)))) == 0


def test_a_rank_one_step_ahead_is_brought_back_to_what_all_have() -> None:
    """An allreduce is not atomic: one rank may have applied a step that the others never saw."""
    group = Lockstep(Shape(prefetch_policy="wait_complete", device_pages=60, host_pages=100))
    serve(group, "r", list(range(12)))
    ahead = group.caches
    group.caches = ahead[:1]
    serve(group, "only here", list(range(50, 70)))
    group.caches = ahead
    recover(group, 1, peers=False)
    assert sum(serve(group, "again", list(range(12)))) == 10


@pytest.mark.parametrize("lost", [0, 1])
def test_a_store_that_was_held_back_stays_so_on_all_ranks(lost: int) -> None:
    """A detach under way, or an attach not yet complete: else one rank begins backups that the others do not."""
    group = Lockstep(Shape(prefetch_policy="wait_complete"))
    for cache in group.caches:
        cache.prefetcher.enabled = False
    recover(group, lost, peers=False)
    assert [cache.prefetcher.enabled for cache in group.caches] == [False] * len(group.caches)
    assert serve(group, "r", list(range(12))) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(12))
def test_random_runs_survive_lost_ranks(seed: int) -> None:
    """Whatever was going on: after a recovery the replicas are equal, the ledger balances and no byte is wrong."""
    driver, rng = Driver(seed), random.Random(seed)
    for _ in range(4):
        for _ in range(30):
            driver.step()
        driver.waiting.clear()
        driver.running.clear()
        driver.ready.clear()
        driver.draining = None
        recover(driver.group, rng.randrange(driver.group.shape.ranks), peers=driver.group.shape.attention == "mla")
        driver.group.reductions = 0
    driver.end()


def test_bytes_that_are_no_catalog_are_refused() -> None:
    group = Lockstep(Shape(ranks=1))
    packed = catalog_of(group.caches[0].index).pack()
    assert Catalog.unpack(packed) == Catalog(())
    for wrong in (b"", b"\xc1", packed[:-1] + b"\x91\x01", b"\x92\x63\x90", b"\x01"):
        with pytest.raises(CatalogError):
            Catalog.unpack(wrong)
