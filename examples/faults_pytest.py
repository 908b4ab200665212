"""Tests of your own, with a small service and faults from the pytest plugin.

pytest -p hicache_ray.testing.plugin examples/faults_pytest.py
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hicache_ray.actors.group import TPGroup
from hicache_ray.actors.storage_pool import StoragePool
from hicache_ray.config import HiCacheConfig
from hicache_ray.faults.service import ServiceFaults
from hicache_ray.replay.driver import settle
from hicache_ray.testing.serving import ask

PROMPTS = [np.arange(24, dtype=np.uint32) + 100 * number for number in range(6)]


@pytest.fixture
def hicache_config(hicache_config: HiCacheConfig) -> HiCacheConfig:
    """The plugin's small service, with what your deployment has otherwise."""
    return dataclasses.replace(hicache_config, hicache_write_policy="write_through")


@pytest.mark.hicache_faults(
    {"kind": "kill", "who": "rank 1", "point": "rank.reduce", "call": 12},
    {"kind": "slow", "who": "storage *", "point": "actor.acquire", "seconds": 0.02, "times": 2},
)
def test_a_killed_rank_costs_only_what_was_not_in_l3_yet(
    hicache_group: TPGroup, hicache_storage_pool: StoragePool, hicache_faults: ServiceFaults
) -> None:
    before = hicache_group.generation
    for prompt in PROMPTS:
        ask(hicache_group, prompt)
    settle(hicache_group)
    assert hicache_group.generation > before
    for prompt in PROMPTS:  # what had not reached L3 when the rank died is computed once more
        ask(hicache_group, prompt)
    assert all(ask(hicache_group, prompt).computed_tokens == 4 for prompt in PROMPTS)
    hicache_group.check_integrity()
    assert "kill" in [firing.kind for firing in hicache_faults.firings()]
    assert set(hicache_storage_pool.audit(read_pages=True).values()) == {""}


def test_the_next_test_has_a_service_of_its_own_and_no_faults(
    hicache_group: TPGroup, hicache_faults: ServiceFaults
) -> None:
    assert ask(hicache_group, PROMPTS[0]).computed_tokens == 24
    assert hicache_group.generation == 0 and hicache_faults.firings() == []
