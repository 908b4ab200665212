"""A storage pool over two nodes, one of which dies (docs/design.md 7): its share is gone, or nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

from hicache_ray.actors.storage_pool import Drained, StoragePool, StoragePoolConfig
from hicache_ray.storage.pool.rebalance_plan import RebalanceOptions
from tests.cluster import NODE, simulated_nodes
from tests.storage_ray import SEGMENT_BYTES, Client, arena_files, wait_until

pytestmark = [pytest.mark.ray]

CONFIG = StoragePoolConfig(name="wide", actors=2, replicas=2, bytes_per_actor=8 << 20, segment_bytes=SEGMENT_BYTES)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head node, which runs actors too."""
    with simulated_nodes(0, head_cpus=2) as running:
        yield running


def test_a_node_dies_and_the_actor_moves(cluster: Cluster) -> None:
    other = cluster.add_node(**NODE)
    with StoragePool.start(CONFIG) as pool:
        homes = {info.member: info.node_id for info in pool.info().values() if info is not None}
        assert homes["wide-0"] == ray.get_runtime_context().get_node_id() and len(set(homes.values())) == 2
        clients = [
            Client(pool.handle.options(transport=name, refusal_seconds=0.2)) for name in ("auto", "object_store")
        ]
        assert clients[0].put(range(60)) == [True] * 60
        assert clients[1].get(range(60)) == [True] * 60
        cluster.remove_node(other, allow_graceful=False)
        for client in clients:
            assert client.get(range(60)) == [True] * 60 and client.exists(range(60)) == 60
            assert client.put(range(100, 110)) == [True] * 10
        wait_until(lambda: pool.info()["wide-1"] is not None, 120)
        moved = pool.info()["wide-1"]
        assert moved is not None and moved.node_id == homes["wide-0"] != homes["wide-1"]

        def both_hold_all() -> bool:
            pages = [stats.pages for stats in pool.stats().values() if stats is not None]
            return pages == [70, 70]

        wait_until(both_hold_all)
        assert clients[0].get(range(60)) == clients[1].get(range(60)) == [True] * 60
    assert not arena_files(pool.membership.token)


def test_pages_move_to_another_node(cluster: Cluster) -> None:
    """Through the object store, as between nodes of which none sees the other's arena. Then the first node leaves."""
    other = cluster.add_node(**NODE)
    apart = RebalanceOptions(transport="object_store")
    with StoragePool.start(dataclasses.replace(CONFIG, name="apart", actors=1, replicas=1, rebalance=apart)) as pool:
        client = Client(pool.handle.options(transport="object_store"))
        assert all(client.put(range(60)))
        joined = pool.add_member(node_id=other.node_id)
        assert all(client.get(range(60)))
        pool.wait_balanced()
        infos, stats = pool.info(), pool.stats()
        assert infos[joined].node_id == other.node_id != infos["apart-0"].node_id  # type: ignore[union-attr]
        kept = stats["apart-0"].pages  # type: ignore[union-attr]
        assert stats[joined].received == 60 - kept > 10  # type: ignore[union-attr]
        assert pool.remove_member("apart-0") == Drained(moved=kept, left=0)
        assert all(client.get(range(60))) and len(client.storage.members) == 1
