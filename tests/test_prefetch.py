"""Prefetches, L3 to L2, on ranks in lockstep with a clock and a store that the test drives (cases 41 to 53)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hicache_ray.config import HiCacheConfig
from hicache_ray.hashing import Namespace
from hicache_ray.pools.device import DevicePool
from hicache_ray.pools.host import HostPool
from hicache_ray.pools.layouts import KVSpec
from hicache_ray.rank.build import prefetch_policy
from hicache_ray.rank.step import Finish, Polled
from tests.whole_cache import Lockstep, Shape, admit

PROMPT = list(range(100, 111))
"""11 tokens: 10 of them, 5 pages of 2, may come from the cache."""


def stored(**changes: object) -> Lockstep:
    """A group whose L3 holds PROMPT and whose L1 and L2 are empty."""
    shape = replace(Shape(ranks=1, prefetch_policy="wait_complete", device_pages=60, host_pages=65), **changes)  # type: ignore[arg-type]
    first = Lockstep(replace(shape, prefetch_policy="wait_complete"))
    first.step(admits=[admit("first", PROMPT)], schedules=["first"])
    first.step(finishes=[Finish("first")])
    first.settle()
    group = Lockstep(shape, store=first.store)
    set_threshold(group, 4)
    return group


def set_threshold(group: Lockstep, tokens: int) -> None:
    for cache in group.caches:
        cache.control.set_policies({"prefetch_threshold": tokens})


def run_workers(group: Lockstep, kind: str = "") -> None:
    """Lets the storage threads, or one kind of them, do all they have to do."""
    for worker in group.workers:
        if kind in worker.name:
            worker.advance(worker.pending)


def free(group: Lockstep) -> list[int]:
    return [cache.index.host.free_pages for cache in group.caches]


def fetched(group: Lockstep) -> int:
    return group.caches[0].prefetcher.counts["loaded_pages"]


def at_rest(group: Lockstep) -> bool:
    """No page reserved, nothing protected, nothing in flight."""
    return all(
        cache.is_idle() and not cache.prefetcher.occupied_pages and not cache.index.tree.protections
        for cache in group.caches
    )


def test_case_41_hits_are_reserved_read_attached_and_the_anchor_is_released() -> None:
    """Case 41: slots are taken after the hit is known, for the hit only."""
    group = stored()
    total = free(group)[0]
    assert group.step(admits=[admit("r", [*PROMPT, 7, 8, 9])]).admitted[0].prefetch == "started"
    assert free(group) == [total]
    run_workers(group)
    group.step()
    assert free(group) == [total - 5] and group.caches[0].prefetcher.occupied_pages == 5
    run_workers(group)
    polled = group.step(polls=["r"]).polled[0]
    assert polled.ready and polled.storage_tokens == 10
    assert free(group) == [total - 5] and at_rest(group)


@pytest.mark.parametrize(("threshold", "started"), [(10, True), (11, False)])
def test_case_42_at_the_threshold_it_is_accepted_below_it_is_revoked(threshold: int, started: bool) -> None:
    """Case 42: threshold 11, hit 10: dropped, all slots back, occupancy 0."""
    group = stored()
    set_threshold(group, threshold)
    total = free(group)[0]
    group.step(admits=[admit("r", [*PROMPT, 1, 2, 3, 4])])
    run_workers(group)
    group.step()
    run_workers(group)
    assert group.step(polls=["r"]).polled[0].storage_tokens == (10 if started else 0)
    assert group.caches[0].prefetcher.counts["revoked"] == (not started)
    assert at_rest(group) and free(group) == [total - (5 if started else 0)]


def test_case_43_a_prompt_below_the_threshold_asks_nothing() -> None:
    """Case 43: 9 tokens of pages of 2 are 8, below a threshold of 10; the threshold is at least one page."""
    group = stored()
    set_threshold(group, 10)
    assert group.step(admits=[admit("r", PROMPT[:10])]).admitted[0].prefetch == "short"
    set_threshold(group, 1)
    assert group.caches[0].prefetcher.policy.threshold == 2


def test_case_44_a_hole_ends_the_prefix() -> None:
    """Case 44: page 3 of 5 is missing: only the first 2 are attached."""
    group = stored()
    for key in list(group.store)[2:3]:
        del group.store[key]
    group.step(admits=[admit("r", PROMPT)])
    run_workers(group)
    group.step()
    run_workers(group)
    assert group.step(polls=["r"]).polled[0].storage_tokens == 4 and at_rest(group)


def test_case_45_prefetches_hold_at_most_their_share_of_l2() -> None:
    """Case 45: cap = int(0.8 * (129 - 64)) = 52 tokens; L2 not larger than L1: half of L2."""
    spec, config = KVSpec.mha(1, 1, 2), HiCacheConfig()
    device = DevicePool(spec, 64, 1)
    assert prefetch_policy(config, device, HostPool(spec, 129, 1, "layer_first")).capacity_pages == 52
    assert prefetch_policy(config, device, HostPool(spec, 64, 1, "layer_first")).capacity_pages == 32
    group = stored()
    for cache in group.caches:
        cache.prefetcher.policy = replace(cache.prefetcher.policy, capacity_pages=5)
    group.step(admits=[admit("r", PROMPT)])
    run_workers(group)
    group.step()
    other = [*PROMPT[:2], *range(10)]
    assert group.step(admits=[admit("other", other)]).admitted[0].prefetch == "rate_limited"


@pytest.mark.parametrize(("page_size", "per_page"), [(2, 0.00048828125), (64, 0.015625)])
def test_case_46_the_limit_grows_with_the_hit_pages(page_size: int, per_page: float) -> None:
    """Case 46: base + hit pages * page / 1024 * per_ki_token; 256 pages of 64 tokens: 5 s."""
    config = HiCacheConfig(page_size=page_size)
    assert config.prefetch_timeout_per_page == per_page
    if page_size == 64:
        assert config.prefetch_timeout_base + 256 * per_page == 5.0


def test_case_46_a_slow_query_is_released_at_the_base_and_the_clock_starts_at_the_issue() -> None:
    """Case 46: before the query returns the limit is the base."""
    group = stored(prefetch_policy="timeout")
    group.step(admits=[admit("r", PROMPT)])
    group.clock.now = 0.99
    assert not group.step(polls=["r"]).polled[0].ready
    group.clock.now = 1.0
    assert group.step(polls=["r"]).polled[0].ready
    run_workers(group)
    group.step()
    assert at_rest(group)


def test_case_46_a_slow_read_is_released_after_base_and_pages() -> None:
    group = stored(prefetch_policy="timeout")
    group.step(admits=[admit("r", PROMPT)])
    run_workers(group, "query")
    group.step()
    group.clock.now = 1.0 + 5 * 0.5 - 0.01
    assert not group.step(polls=["r"]).polled[0].ready
    group.clock.now += 0.01
    assert group.step(polls=["r"]).polled[0].ready
    run_workers(group)
    group.step()
    assert at_rest(group) and fetched(group) == 0


def test_case_47_best_effort_before_the_query_returns_is_done_with_nothing() -> None:
    """Case 47: done immediately, 0 loaded, none leaked."""
    group = stored(prefetch_policy="best_effort")
    group.step(admits=[admit("r", PROMPT)])
    assert group.step(polls=["r"]).polled[0] == Polled("r", True, 0)
    run_workers(group)
    group.step()
    assert at_rest(group)


def test_case_48_wait_complete_is_not_done_before_anything_is_known() -> None:
    """Case 48: an empty list of hashes, or none asked yet, is not "complete"."""
    group = stored()
    group.step(admits=[admit("r", PROMPT)])
    for _ in range(5):
        assert not group.step(polls=["r"]).polled[0].ready


def test_case_48_wait_complete_ends_too_when_the_store_never_answers() -> None:
    """No wait is without a deadline ("prefetch stuck, late, useless" in docs/reliability.md)."""
    group = stored()
    group.step(admits=[admit("r", PROMPT)])
    group.clock.now = 60.0
    assert group.step(polls=["r"]).polled[0].ready


def test_case_49_ranks_attach_the_minimum() -> None:
    """Case 49: rank 1 lacks page 5: both attach 8 tokens and end with the same free count."""
    group = stored(ranks=2)
    digest = group.caches[1].mover.storage_io.storage.config.identity.digest  # type: ignore[union-attr]
    lacking = [key for key in group.store if key.startswith(digest)][4]
    del group.store[lacking]
    group.step(admits=[admit("r", PROMPT)])
    run_workers(group)
    group.step()
    run_workers(group)
    assert group.step(polls=["r"]).polled[0].storage_tokens == 8
    run_workers(group)
    group.step()
    assert free(group) == [61, 61] and at_rest(group)


@pytest.mark.parametrize("at", ["query", "query done", "reading", "read"])
def test_case_50_an_abort_at_any_point_gives_everything_back(at: str) -> None:
    """Case 50: slots, occupancy and protection return to baseline, no tree nodes; D7: a read's slots once it has ended.

    A read that had ended before the abort was noticed in that step, before the abort: what it read is cached.
    """
    group = stored()
    total = free(group)
    group.step(admits=[admit("r", PROMPT)])
    if at != "query":
        run_workers(group, "query")
    if at in ("reading", "read"):
        group.step()
    if at == "read":
        run_workers(group, "read")
    group.step(aborts=["r"])
    if at == "reading":
        assert free(group) != total, "a read that may still be writing keeps its pages"
    run_workers(group)
    group.step()
    group.step()
    kept = 5 if at == "read" else 0
    assert at_rest(group) and free(group) == [total[0] - kept]
    assert sum(node.pages for node in group.caches[0].index.tree.nodes()) == kept


def test_d8_a_request_admitted_again_cancels_its_older_prefetch() -> None:
    """D8: retraction and requeue: state is by attempt, nothing leaks."""
    group = stored()
    total = free(group)[0]
    for _ in range(3):
        group.step(admits=[admit("r", PROMPT)])
        run_workers(group, "query")
        group.step()
    run_workers(group)
    group.step()
    assert group.step(polls=["r"]).polled[0].storage_tokens == 10
    run_workers(group)
    group.step()
    assert at_rest(group) and free(group) == [total - 5]


def test_case_53_nothing_is_fetched_below_a_page_that_has_no_host_copy() -> None:
    """Case 53: the deepest device node must be backed; the root counts as backed."""
    group = stored(write_policy="write_through_selective")
    group.step(admits=[admit("short", PROMPT[:5])], schedules=["short"])
    group.step(finishes=[Finish("short")])
    assert group.step(admits=[admit("r", PROMPT)]).admitted[0].prefetch == "not_backed"


def test_d4_another_namespace_finds_nothing_in_l3() -> None:
    """D4: a prompt stored under one adapter is not a hit under another, nor under none."""
    group = stored()
    for n, namespace in enumerate((Namespace(adapter="b"), Namespace(salt="s"), Namespace(tenant="t"))):
        group.step(admits=[admit(f"r{n}", PROMPT, namespace)])
        run_workers(group)
        group.step()
        assert group.step(polls=[f"r{n}"]).polled[0] == Polled(f"r{n}", True, 0)


@pytest.mark.parametrize("attention", ["mha", "mla"])
def test_case_65_a_flushed_prompt_comes_back_from_l3(attention: str) -> None:
    """Case 65: a 768-token prompt, page 64, flush, resend: more than 700 cached tokens (one rank of each kind)."""
    shape = Shape(ranks=2, page_size=64, device_pages=16, host_pages=40, attention=attention)
    shape.prefetch_policy = "wait_complete"
    group, prompt = Lockstep(shape), list(range(768))
    group.step(admits=[admit("r", prompt)], schedules=["r"])
    group.step(finishes=[Finish("r")])
    group.settle()
    for cache in group.caches:
        cache.index.flush()
    group.step(admits=[admit("again", prompt)])
    run_workers(group)
    group.step()
    run_workers(group)
    assert group.step(polls=["again"]).polled[0].ready
    (scheduled,) = group.step(schedules=["again"]).scheduled
    assert scheduled.storage_tokens == 704 and group.verified > 0


def test_d6_a_truncated_page_is_a_miss_and_the_threads_live() -> None:
    """D6: the backend raises on a short page: the prefix ends there, nothing waits for ever, no thread dies."""
    group = stored()
    broken = list(group.store)[3]
    group.store[broken] = group.store[broken][:5]
    group.step(admits=[admit("r", PROMPT)])
    run_workers(group)
    group.step()
    run_workers(group)
    polled = group.step(polls=["r"]).polled[0]
    assert polled.ready and polled.storage_tokens <= 6
    run_workers(group)
    group.step()
    assert at_rest(group) and all(worker.alive for worker in group.workers)


def test_d10_bigram_keys_are_one_kind_from_match_to_l3_and_back() -> None:
    """D10, cases 5 and 6: what EAGLE backed up EAGLE finds; a plain cache of the same tokens does not."""
    group = stored(bigram=True)
    group.step(admits=[admit("r", [*PROMPT, 1, 2])])
    run_workers(group)
    group.step()
    run_workers(group)
    assert group.step(polls=["r"]).polled[0].storage_tokens == 10
    assert group.step(schedules=["r"]).scheduled[0].storage_tokens == 10 and group.verified == 5
    plain = Lockstep(replace(group.shape, bigram=False), store=group.store)
    plain.step(admits=[admit("r", [*PROMPT, 1, 2])])
    run_workers(plain)
    plain.step()
    assert plain.step(polls=["r"]).polled[0] == Polled("r", True, 0)
