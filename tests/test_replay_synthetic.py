"""SyntheticEngine on an in-process group: right pages pass, and a wrong byte in any tier is seen."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hicache_ray.config import HiCacheConfig
from hicache_ray.hashing import EMPTY_NAMESPACE, Namespace
from hicache_ray.rank.group import GroupAnswer
from hicache_ray.rank.local_group import LocalGroup
from hicache_ray.rank.step import Scheduled
from hicache_ray.replay.driver import ENGINE, Driver, DriveSettings, RequestSource, settle
from hicache_ray.replay.engine import SyntheticEngine
from hicache_ray.replay.requests import ReplayRequest
from hicache_ray.storage.memory import BACKEND, drop_store, open_store

PAGE = 4
PROMPT = np.arange(50, 91, dtype=np.uint32)
"""41 tokens: 10 whole pages and a token to compute."""


@pytest.fixture
def store() -> Iterator[str]:
    name = uuid.uuid4().hex
    yield name
    drop_store(name)


def group_of(store: str, **options: object) -> LocalGroup:
    """A group of one rank whose L1 holds one such prompt, unless told otherwise."""
    values = {"page_size": PAGE, "layers": 3, "heads": 2, "head_dim": 4, "l1_tokens": 64, "hicache_ratio": 4.0}
    values |= {"hicache_io_backend": "direct", "prefetch_threshold": PAGE, "host_memory_reserve": 0.1}
    values |= {"hicache_storage_backend": BACKEND, "hicache_storage_prefetch_policy": "wait_complete"}
    values |= options
    config = HiCacheConfig.from_mapping(values).resolve().config
    return LocalGroup.create(config, engine=ENGINE, storage_options={"store": store})


def serve(
    group: LocalGroup, rid: str, prompt: np.ndarray = PROMPT, output: int = 9, namespace: Namespace = EMPTY_NAMESPACE
) -> tuple[dict[str, int], Scheduled]:
    """Runs one request to its end, `output` tokens of whose answer have KV: (engine counters of rank 0, its row)."""
    answers: list[GroupAnswer] = []
    request = ReplayRequest(rid, prompt, np.arange(7000, 7001 + output, dtype=np.uint32), namespace)
    driver = Driver(group, RequestSource([request]), DriveSettings(stall_seconds=60.0), answered=answers.append)
    while driver.busy:
        driver.advance()
    (scheduled,) = (answer for answer in answers if answer.scheduled and answer.scheduled[0].ok)
    return scheduled.engine[0], scheduled.scheduled[0]


def evict_l1(group: LocalGroup) -> None:
    """Pushes everything else out of L1."""
    settle(group)
    serve(group, "filler", np.arange(9000, 9050, dtype=np.uint32), output=0)
    settle(group)


@pytest.mark.parametrize("attention", ["mha", "mla"])
def test_pages_from_every_tier_pass(store: str, attention: str) -> None:
    first = group_of(store, attention=attention, kv_lora_rank=8, qk_rope_head_dim=4, tp_size=2)
    second = group_of(store, attention=attention, kv_lora_rank=8, qk_rope_head_dim=4, tp_size=2)
    counters, row = serve(first, "a")
    assert (row.computed_tokens, counters["pages_verified"], counters["pages_computed"]) == (41, 0, 10)
    counters, row = serve(first, "b")
    assert (row.device_tokens, counters["pages_verified"], counters["pages_mismatched"]) == (40, 10, 0)
    evict_l1(first)
    counters, row = serve(first, "c")
    assert (row.host_tokens, counters["pages_verified"], counters["pages_mismatched"]) == (40, 10, 0)
    counters, row = serve(second, "d")
    assert (row.storage_tokens, counters["pages_verified"], counters["pages_mismatched"]) == (40, 10, 0)
    first.stop(), second.stop()


def test_answers_are_part_of_the_next_prompt(store: str) -> None:
    group = group_of(store)
    serve(group, "a", output=7)
    answer = np.arange(7000, 7007, dtype=np.uint32)
    counters, row = serve(group, "b", np.concatenate([PROMPT, answer, PROMPT[:3]]), output=0)
    assert (row.device_tokens, counters["pages_verified"], counters["pages_mismatched"]) == (48, 12, 0)
    group.stop()


def test_a_wrong_byte_in_l1_is_seen(store: str) -> None:
    group = group_of(store)
    serve(group, "a")
    settle(group)
    node = next(group.caches[0].index.tree.nodes())
    values = group.caches[0].mover.device_pool.layer_pages(2)[1]
    values.view(torch.uint8)[int(node.value[3]), 0, 0, 0] ^= 1
    counters, _ = serve(group, "b")
    assert (counters["pages_verified"], counters["pages_mismatched"]) == (10, 1)
    group.stop()


def test_a_wrong_byte_in_l2_is_seen(store: str) -> None:
    group = group_of(store)
    serve(group, "a")
    evict_l1(group)
    node = next(node for node in group.caches[0].index.tree.nodes() if node.value is None)
    group.caches[0].mover.host_pool.segments[node.host_value[0]].flat[5] ^= 1
    counters, row = serve(group, "b")
    assert (row.host_tokens, counters["pages_mismatched"]) == (40, 1)
    group.stop()


def test_a_wrong_page_in_a_store_without_checksums_is_seen(store: str) -> None:
    first, second = group_of(store), group_of(store)
    serve(first, "a")
    settle(first)
    pages = open_store(store)._pages
    one, other = list(pages)[2:4]
    pages[one], pages[other] = pages[other], pages[one]
    counters, row = serve(second, "b")
    assert (row.storage_tokens, counters["pages_mismatched"]) == (40, 2)
    first.stop(), second.stop()


def test_namespaces_share_nothing_and_pass(store: str) -> None:
    group = group_of(store, l1_tokens=256)
    for rid, tenant in (("a", "x"), ("b", "y"), ("c", "x")):
        counters, row = serve(group, rid, namespace=Namespace(tenant=tenant))
        assert row.device_tokens == (40 if rid == "c" else 0)
        assert counters["pages_mismatched"] == 0
    group.stop()


def test_ranks_hold_different_bytes_for_mha_and_equal_ones_for_mla(store: str) -> None:
    for attention, equal in (("mha", False), ("mla", True)):
        group = group_of(store, attention=attention, kv_lora_rank=8, qk_rope_head_dim=4, tp_size=2)
        serve(group, "a")
        held = []
        for cache in group.caches:
            page = next(cache.index.tree.nodes()).value[0]
            held.append(cache.mover.device_pool.layer_pages(0)[0][int(page)].view(torch.uint8).tolist())
        assert (held[0] == held[1]) is equal
        group.stop()


def test_unknown_options_are_refused(store: str) -> None:
    group = group_of(store)
    with pytest.raises(ValueError, match="takes no options, got speed"):
        SyntheticEngine(group.caches[0], {"speed": 1})
    group.stop()
