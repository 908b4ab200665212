"""The index alone on whole traces: the known answers of the conversation trace, and small cases worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hicache_ray.config import ConfigError
from hicache_ray.replay.index_only import IndexReplayError, IndexSettings, replay_index
from hicache_ray.replay.requests import Workload
from hicache_ray.replay.settings import ReplaySettings, index_settings
from hicache_ray.replay.traces import load_workload


@pytest.fixture(scope="module")
def conversation(shared: Path) -> Workload:
    return load_workload(str(shared / "traces" / "conversation_trace.jsonl.gz"))


def test_an_index_of_all_blocks_finds_every_repeated_one(conversation: Workload) -> None:
    report = replay_index(conversation, IndexSettings())
    counts = report.counts
    assert (counts.requests, counts.blocks, counts.tokens) == (12_031, 288_500, 144_793_823)
    assert report.block_hit_rate == pytest.approx(0.3664, abs=0.00005)
    assert report.token_hit_rate == pytest.approx(0.3736, abs=0.00005)
    assert report.ledger["l1"] == {"total": 182_790, "free": 0, "in_tree": 182_790, "in_flight": 0}
    assert report.faults == ()


@pytest.mark.parametrize(
    ("blocks", "hits"), [(1_000, 0.0445), (10_000, 0.2112), (30_000, 0.3257), (50_000, 0.3546), (100_000, 0.3637)]
)
def test_lru_hits_what_independent_simulators_found(conversation: Workload, blocks: int, hits: float) -> None:
    report = replay_index(conversation, IndexSettings(l1_pages=blocks))
    assert report.block_hit_rate == pytest.approx(hits, abs=0.001)
    ledger = report.ledger["l1"]
    assert ledger["free"] + ledger["in_tree"] == ledger["total"] == blocks
    assert report.evictions["l1_evicted"] > 0


@pytest.mark.parametrize(("blocks", "hits"), [(1_000, 0.0481), (10_000, 0.1320), (30_000, 0.2760), (50_000, 0.3438)])
def test_lfu_hits_what_independent_simulators_found(conversation: Workload, blocks: int, hits: float) -> None:
    report = replay_index(conversation, IndexSettings(l1_pages=blocks, policy="lfu"))
    assert report.block_hit_rate == pytest.approx(hits, abs=0.002)


def test_ten_small_caches_find_less_than_a_pooled_one(conversation: Workload) -> None:
    local = replay_index(conversation, IndexSettings(l1_pages=3_000_000 // 512, instances=10))
    pooled = replay_index(conversation, IndexSettings(l1_pages=30_000_000 // 512))
    assert local.token_hit_rate == pytest.approx(0.106, abs=0.001)
    assert pooled.token_hit_rate == pytest.approx(0.366, abs=0.001)


def trace(folder: Path, *requests: tuple[int, list[int]]) -> Workload:
    """A workload from rows of input_length and hash_ids."""
    path = folder / "trace.jsonl"
    rows = [{"timestamp": 0, "input_length": i, "output_length": 1, "hash_ids": ids} for i, ids in requests]
    path.write_text("\n".join(map(json.dumps, rows)))
    return load_workload(str(path))


def test_a_partial_last_block_counts_its_own_tokens(tmp_path: Path) -> None:
    workload = trace(tmp_path, (1034, [1, 2, 3]), (1034, [1, 2, 3]), (1034, [1, 2, 4]))
    counts = replay_index(workload, IndexSettings()).counts
    assert (counts.blocks, counts.hit_blocks) == (9, 5)
    assert (counts.tokens, counts.tokens_l1, counts.tokens_computed) == (3102, 1034 + 1024, 1034 + 10)


def test_what_left_l1_is_found_in_l2(tmp_path: Path) -> None:
    workload = trace(tmp_path, (1024, [1, 2]), (1024, [3, 4]), (1024, [1, 2]), (1024, [3, 4]))
    one_tier = replay_index(workload, IndexSettings(l1_pages=2))
    assert one_tier.counts.hit_blocks == 0
    two_tiers = replay_index(workload, IndexSettings(l1_pages=2, l2_pages=4))
    assert (two_tiers.counts.tokens_l1, two_tiers.counts.tokens_l2) == (0, 2048)
    assert two_tiers.evictions["l1_evicted"] == 6
    assert two_tiers.ledger["l2"]["in_tree"] == 4


def test_a_chat_is_replayed_in_pages_of_tokens() -> None:
    workload = load_workload("chat:sessions=5,turns=4,system=128,turn=16,answer=16")
    report = replay_index(workload, IndexSettings(page_size=16))
    counts = report.counts
    assert counts.requests == 20
    assert counts.tokens_l1 % 16 == 0 and counts.tokens_l1 >= 19 * 128
    assert counts.tokens_l1 + counts.tokens_computed == counts.tokens


def test_tenants_share_nothing() -> None:
    shared = replay_index(load_workload("chat:sessions=4,turns=1,system=128,turn=1"), IndexSettings(page_size=16))
    apart = replay_index(
        load_workload("chat:sessions=4,turns=1,system=128,turn=1,tenants=4"), IndexSettings(page_size=16)
    )
    assert (shared.counts.tokens_l1, apart.counts.tokens_l1) == (3 * 128, 0)


def test_progress_is_told_to_the_end(tmp_path: Path) -> None:
    told: list[int] = []
    replay_index(trace(tmp_path, (512, [1]), (512, [2])), IndexSettings(), told.append)
    assert told == [1, 2]


def test_sizes_that_can_not_work_are_refused(tmp_path: Path) -> None:
    workload = trace(tmp_path, (1024, [1, 2]))
    with pytest.raises(IndexReplayError, match="a request has 2 pages and L1 1: give L1 at least 2"):
        replay_index(workload, IndexSettings(l1_pages=1))
    with pytest.raises(ConfigError, match="the largest request needs 2"):
        index_settings(ReplaySettings.of(l1_tokens=1), workload)
    with pytest.raises(ConfigError, match="radix_eviction_policy is 'best'"):
        index_settings(ReplaySettings.of(policy="best"), workload)


def test_capacities_count_blocks_of_a_trace_and_tokens_of_a_chat(tmp_path: Path) -> None:
    settings = ReplaySettings.of(l1_tokens=640, l2_tokens=1280, page_size=64)
    assert index_settings(settings, trace(tmp_path, (512, [1]))).l1_pages == 640
    chat = load_workload("chat:sessions=1,turns=1,system=64,turn=64")
    assert (index_settings(settings, chat).l1_pages, index_settings(settings, chat).l2_pages) == (10, 20)
