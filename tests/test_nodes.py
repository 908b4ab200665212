"""A service over three nodes of which some die (docs/design.md 7): storage spread over them, a group on one of them.

The nodes are raylets on this machine; pages travel through Ray's object store, as between machines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

import hicache_ray
from hicache_ray.actors.group import GroupOptions, TPGroup
from hicache_ray.rank.group import GroupError
from hicache_ray.replay.driver import ENGINE, settle
from hicache_ray.service import Service
from hicache_ray.testing.serving import ask, wait_for
from tests.cluster import NODE, simulated_nodes
from tests.ray_service import config

pytestmark = [pytest.mark.ray]

PROMPTS = [np.arange(24, dtype="<u4") + 100 * number for number in range(12)]
SECONDS = 150.0


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head without CPUs, so that ranks are elsewhere, and two nodes for them."""
    with simulated_nodes(2) as running:
        yield running


@pytest.fixture
def service(cluster: Cluster) -> Iterator[Service]:
    """Three storage actors that hold each page twice; nobody shares memory with them."""
    options = config(
        storage_actors=3,
        storage_replicas=2,
        hicache_storage_backend_extra_config='{"transport": "object_store"}',
    )
    placed = GroupOptions(step_timeout=6.0, strategy="STRICT_PACK")
    with hicache_ray.start(options, name="nodes", options=placed) as started:
        yield started


def homes(service: Service) -> dict[str, str]:
    """Node of each storage actor that is there."""
    assert service.storage is not None
    return {member: info.node_id for member, info in service.storage.info().items() if info is not None}


def node_of(group: TPGroup) -> str:
    (node,) = {info.node_id for info in ray.get([actor.ping.remote() for actor in group.actors])}
    return str(node)


def node_with_id(cluster: Cluster, node_id: str) -> Any:
    return next(node for node in cluster.list_all_nodes() if node.node_id == node_id)


def filled(service: Service) -> TPGroup:
    group = service.group("a", engine=ENGINE)
    for prompt in PROMPTS:
        assert ask(group, prompt).computed_tokens == 24
    settle(group)
    return group


def all_hits(group: TPGroup) -> bool:
    return all(ask(group, prompt).computed_tokens == 4 for prompt in PROMPTS)


def test_a_node_with_storage_goes_and_another_comes(cluster: Cluster, service: Service) -> None:
    """STRICT_SPREAD in effect: one storage actor a node. With two copies nothing is lost, and the copies are made
    again; the group, which is on another node, does not notice."""
    group = filled(service)
    before, generation = homes(service), group.generation
    assert len(set(before.values())) == 3
    assert service.storage is not None
    pages = sum(stats.pages for stats in service.storage.stats().values() if stats is not None)
    assert pages == 2 * 2 * 6 * len(PROMPTS), "two ranks, two copies, six pages a prompt"
    lost = next(node for node in before.values() if node not in (node_of(group), before["nodes.storage-0"]))
    cluster.remove_node(node_with_id(cluster, lost), allow_graceful=False)
    assert all_hits(group)
    cluster.add_node(**NODE)
    wait_for(lambda: len(homes(service)) == 3, "the storage actor to come back", SECONDS)
    assert lost not in homes(service).values()

    def copied() -> bool:
        counted = service.storage.stats().values()  # type: ignore[union-attr]
        return all_hits(group) and sum(stats.pages for stats in counted if stats is not None) >= pages

    wait_for(copied, "every page to have two copies again", SECONDS)
    assert group.generation == generation
    settle(group)
    group.check_integrity()


def test_the_node_of_a_group_goes_and_the_group_comes_back_elsewhere(cluster: Cluster, service: Service) -> None:
    """Its ranks lose L1 and L2; what L3 holds is hits again, from the copies that are left."""
    group = filled(service)
    old = node_of(group)
    assert old != ray.get_runtime_context().get_node_id()
    cluster.remove_node(node_with_id(cluster, old), allow_graceful=False)

    def served() -> bool:
        try:
            return all_hits(group)
        except GroupError:
            return False

    wait_for(served, "the group to serve", SECONDS)
    assert node_of(group) != old
    settle(group)
    group.check_integrity()
    cluster.add_node(**NODE)
    wait_for(lambda: len(homes(service)) == 3, "all storage actors", SECONDS)
    assert all_hits(group)
