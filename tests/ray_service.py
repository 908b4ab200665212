"""A small service on a Ray cluster of its own, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from hicache_ray.actors.errors import GroupRestarted
from hicache_ray.actors.group import TPGroup
from hicache_ray.config import HiCacheConfig
from hicache_ray.rank.step import Admit, Finish, GroupAnswer, Scheduled
from hicache_ray.service import Service, start
from tests.cluster import shared_cluster

ENGINE = "hicache_ray.replay.engine:SyntheticEngine"
DEADLINE = 60.0


def config(**changes: Any) -> HiCacheConfig:
    """Two ranks, everything small, so that pages move through all tiers."""
    options: dict[str, Any] = {
        "model_name": "test",
        "layers": 2,
        "heads": 2,
        "head_dim": 8,
        "kv_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "tp_size": 2,
        "page_size": 4,
        "l1_tokens": 64,
        "hicache_ratio": 3.0,
        "hicache_storage_backend": "ray",
        "storage_actors": 2,
        "storage_actor_size": 0.02,
        "hicache_storage_prefetch_policy": "wait_complete",
        "prefetch_threshold": 4,
        "host_memory_reserve": 0.5,
        "device": "cpu",
        "step_timeout": 6.0,
        "collective_timeout": 3.0,
        "storage_timeout": 3.0,
    }
    return HiCacheConfig(**(options | changes))


@contextmanager
def service(name: str = "test", **changes: Any) -> Iterator[Service]:
    """A service on the shared cluster, gone afterwards."""
    with shared_cluster(), start(config(**changes), name=name) as running:
        yield running


def prompts(count: int, tokens: int = 24, seed: int = 0) -> list[np.ndarray]:
    """Random prompts, uint32."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 1000, tokens).astype("<u4") for _ in range(count)]


def serve(group: TPGroup, rid: str, prompt: np.ndarray) -> Scheduled:
    """Serves one request to its end; every page it used was verified. Raises what a step raises."""
    group.step(admits=[Admit(rid, prompt.tobytes())])
    until(lambda: group.step(polls=[rid]).polled[0].ready, f"{rid} ready")
    answer = group.step(schedules=[rid])
    check_bytes(answer)
    (scheduled,) = answer.scheduled
    assert scheduled.ok, scheduled
    check_bytes(group.step(finishes=[Finish(rid)]))
    return scheduled


def serve_until_restarted(group: TPGroup, requests: Iterator[tuple[str, np.ndarray]]) -> GroupRestarted:
    """Serves requests until a step reports that the group was rebuilt; fails when none does in time."""
    deadline = time.monotonic() + DEADLINE
    for rid, prompt in requests:
        try:
            serve(group, rid, prompt)
        except GroupRestarted as restarted:
            return restarted
        assert time.monotonic() < deadline, "the group was not rebuilt in time"
    raise AssertionError("no more requests")


def check_bytes(answer: GroupAnswer) -> None:
    """Raises AssertionError when an engine saw a page with wrong bytes."""
    assert all(counts["pages_mismatched"] == 0 for counts in answer.engine), answer.engine


def settle(group: TPGroup) -> None:
    """Steps until nothing is in flight on any rank."""

    def idle() -> bool:
        group.step()
        return all(stats["idle"] for stats in group.stats())

    until(idle, "transfers to end")


def until(condition: Callable[[], bool], what: str, deadline: float = DEADLINE) -> None:
    """Waits until a condition holds; AssertionError after `deadline` seconds."""
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, f"waited {deadline:g} s in vain for {what}"
