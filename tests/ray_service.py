"""A small service on a Ray cluster of its own, for tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from hicache_ray.actors.group import TPGroup
from hicache_ray.config import HiCacheConfig
from hicache_ray.deadline import Deadline
from hicache_ray.rank.group import GroupRestarted
from hicache_ray.rank.step import Scheduled
from hicache_ray.service import Service, start
from hicache_ray.testing.serving import DEADLINE_SECONDS, ask
from tests.cluster import shared_cluster


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


def serve(group: TPGroup, prompt: np.ndarray) -> Scheduled:
    """Serves one request to its end, sent once; every page it used was verified. Raises what a step raises."""
    return ask(group, prompt, times=1)


def serve_until_restarted(group: TPGroup, asked: Iterable[np.ndarray]) -> GroupRestarted:
    """Serves requests until a step reports that the group was rebuilt; fails when none does in time."""
    deadline = Deadline(DEADLINE_SECONDS)
    for prompt in asked:
        try:
            serve(group, prompt)
        except GroupRestarted as restarted:
            return restarted
        assert not deadline.passed, "the group was not rebuilt in time"
    raise AssertionError("no more requests")
