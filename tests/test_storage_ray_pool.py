"""The storage pool on a real Ray cluster: both transports, members that come and go, starting and stopping."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache_ray.actors.storage_pool import StoragePool, StoragePoolConfig, StoragePoolError
from hicache_ray.hashing import ModelIdentity
from hicache_ray.storage.base import PageContext, StorageConfig
from hicache_ray.storage.registry import BackendError, create_backend
from hicache_ray.storage.shard.arena import Arena
from hicache_ray.storage.shard.files import ProcessId, arena_path
from hicache_ray.storage.shard.grants import NamespaceLimit
from hicache_ray.storage.shard.layout import ArenaGeometry
from tests.cluster import shared_cluster
from tests.storage_ray import (
    PAGE_BYTES,
    SEGMENT_BYTES,
    ArrayHostPool,
    Client,
    arena_files,
    content,
    hashes,
    wait_until,
)

pytestmark = [pytest.mark.ray]

CONFIG = StoragePoolConfig(name="main", actors=2, bytes_per_actor=8 << 20, segment_bytes=SEGMENT_BYTES)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with shared_cluster():
        yield


@pytest.fixture(scope="module")
def pool(cluster: None) -> Iterator[StoragePool]:
    with StoragePool.start(CONFIG) as running:
        yield running


@pytest.mark.parametrize("transport", ["auto", "object_store"])
def test_pages_through_two_actors(pool: StoragePool, transport: str) -> None:
    client = Client(pool.handle.options(transport=transport), model=transport)
    assert all(member.mapping is None for member in client.storage.members) == (transport == "object_store")
    assert client.put(range(64)) == client.get(range(64)) == [True] * 64
    assert client.exists(range(64)) == client.exists(range(70)) == 64
    stats = pool.stats()
    assert all(stats[member] and stats[member].stored > 10 for member in pool.membership.members)
    counted = client.storage.get_stats()
    assert (counted.get_hits, counted.set_stored, counted.exists_hits) == (64, 64, 128)
    assert counted.get_bytes == counted.set_bytes == 64 * PAGE_BYTES
    wait_until(lambda: all(entry is not None and entry.leased == 0 for entry in pool.stats().values()))
    assert set(pool.audit(read_pages=True).values()) == {""}


def test_models_do_not_share_pages(pool: StoragePool) -> None:
    assert Client(pool.handle.options(), model="one").put(range(4)) == [True] * 4
    assert Client(pool.handle.options(), model="two").exists(range(4)) == 0


def test_a_client_in_another_process_reads_the_pages(pool: StoragePool) -> None:
    import ray

    @ray.remote(num_cpus=0)
    class Reader:
        def read(self, extra: dict) -> tuple[list[bool], bool]:
            client = Client(extra, model="shared")
            return client.get(range(30)), client.storage.members[0].mapping is not None

    Client(pool.handle.options(), model="shared").put(range(30))
    reader = Reader.remote()
    assert ray.get(reader.read.remote(pool.handle.options()), timeout=60) == ([True] * 30, True)
    ray.kill(reader)


def test_backend_by_name_batches_of_more_than_128_pages(pool: StoragePool) -> None:
    storage = create_backend("ray", StorageConfig(ModelIdentity(model="many"), pool.handle.options(), 20.0))
    host = ArrayHostPool(300)
    for place in range(300):
        host.segments[place] = content(place)
    storage.register_host_pool(host)
    pages = np.arange(300)
    assert storage.store(hashes(range(300)), pages) == 300
    assert storage.lookup(hashes(range(1500))) == 300
    host.segments[:] = 0
    assert storage.load(hashes(range(300)), pages) == 300
    assert all(np.array_equal(host.segments[place], content(place)) for place in range(300))
    storage.close()
    storage.close()


def test_a_rank_that_is_no_writer_stores_nothing(pool: StoragePool) -> None:
    config = StorageConfig(ModelIdentity(model="mla", attention="mla"), pool.handle.options(), is_writer=False)
    storage = create_backend("ray", config)
    storage.register_host_pool(ArrayHostPool(4))
    assert storage.store(hashes(range(4)), np.arange(4)) == 4
    assert storage.lookup(hashes(range(4))) == 0


def test_wrong_pages_and_no_host_pool_are_told(pool: StoragePool) -> None:
    storage = create_backend("ray", StorageConfig(ModelIdentity(), pool.handle.options()))
    with pytest.raises(RuntimeError, match="register_host_pool"):
        storage.load(hashes(range(1)), np.arange(1))
    storage.register_host_pool(ArrayHostPool(4))
    with pytest.raises(ValueError, match="3 host pages for 1 page hashes"):
        storage.load(hashes(range(1)), np.arange(3))


def test_namespaces_have_quotas_and_can_be_cleared(cluster: None) -> None:
    limits = {"tenant": NamespaceLimit(quota_bytes=4 * PAGE_BYTES)}
    config = dataclasses.replace(CONFIG, name="limited", actors=1, limits=limits)
    with StoragePool.start(config) as running:
        client = Client(running.handle.options())
        tenant = PageContext(namespace="tenant")
        assert client.storage.store(hashes(range(10)), np.arange(10), tenant) == 4
        assert client.put(range(20, 30)) == [True] * 10
        assert running.clear("tenant") == 4 and client.exists(range(20, 30)) == 10
        client.storage.clear()
        assert client.exists(range(20, 30)) == 0 and running.clear() == 0


def test_members_join_and_leave(cluster: None) -> None:
    with StoragePool.start(dataclasses.replace(CONFIG, name="growing", actors=1)) as running:
        client = Client(running.handle.options())
        client.put(range(40))
        joined = running.add_member()
        assert client.put(range(40)) == client.get(range(40)) == [True] * 40
        stats = running.stats()[joined]
        assert stats is not None and stats.pages > 5
        running.remove_member("growing-0")
        assert client.put(range(40)) == client.get(range(40)) == [True] * 40
        assert client.storage.membership.members == (joined,)
        with pytest.raises(ValueError, match="no member"):
            running.remove_member("growing-0")
        assert len(arena_files_of(running)) == 1
    assert arena_files_of(running) == set()


def arena_files_of(running: StoragePool) -> set[Path]:
    return arena_files(running.membership.token)


def test_stopping_leaves_nothing_and_the_name_is_free_again(cluster: None) -> None:
    config = dataclasses.replace(CONFIG, name="again")
    first = StoragePool.start(config)
    with pytest.raises(StoragePoolError, match="runs in the namespace 'storage-test' already"):
        StoragePool.start(config)
    assert Client(first.handle.options()).put(range(4)) == [True] * 4
    assert len(arena_files_of(first)) == 2
    first.stop()
    first.stop()
    assert arena_files_of(first) == set()
    with StoragePool.start(config) as second:
        assert Client(second.handle.options()).exists(range(4)) == 0, "a new pool starts empty"


def test_what_can_not_start_says_why_and_leaves_nothing(cluster: None) -> None:
    with pytest.raises(StoragePoolError, match="does not fit /dev/shm"):
        StoragePool.start(dataclasses.replace(CONFIG, name="huge", bytes_per_actor=1 << 50, segment_bytes=None))
    with pytest.raises(StoragePoolError, match="unknown storage eviction policy 'best'"):
        StoragePool.start(dataclasses.replace(CONFIG, name="odd", policy="best"))
    assert not arena_files("-huge-") and not arena_files("-odd-")
    with pytest.raises(StoragePoolError, match="there is no storage pool 'odd'"):
        StoragePool.connect("odd")
    for bad in ({"name": "a/b"}, {"actors": 0}, {"replicas": 3}):
        with pytest.raises(ValueError, match=r"no name|at least 1|need as many"):
            dataclasses.replace(CONFIG, **bad)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"pool": "none"}, "there is no storage pool 'none'"),
        ({"pol": "main"}, "no option 'pol'"),
        ({"transport": "tcp"}, "use one of auto, object_store"),
        ({"call_timeout": 0}, "above 0"),
        ({"copy_threads": 0}, "at least 1"),
    ],
)
def test_options_that_can_not_work_are_refused(cluster: None, extra: dict, text: str) -> None:
    with pytest.raises(BackendError, match=text):
        create_backend("ray", StorageConfig(ModelIdentity(), extra))


def test_stale_arenas_are_swept_and_living_ones_are_not(cluster: None, pool: StoragePool) -> None:
    """At the start of an actor; a dead node's Ray and a pool that is no more make an arena stale, its lock keeps it."""
    geometry = ArenaGeometry(1, 4096)
    info = pool.info()["main-0"]
    assert info is not None
    raylet = ProcessId.running(int(Path(f"/proc/{info.pid}/stat").read_text().rpartition(")")[2].split()[1]))
    assert raylet is not None
    here = {"raylet_pid": raylet.pid, "raylet_started": raylet.started, "namespace": "storage-test", "member": "x-0"}
    owners = {
        "dead": {"raylet_pid": 2**22, "raylet_started": 1},
        "gone": {**here, "service": "gone", "token": "t"},
        "older": {**here, "service": "main", "token": "t", "member": "main-0"},
        "held": {"raylet_pid": 2**22, "raylet_started": 1},
    }
    arenas = {
        name: Arena.create(arena_path(Path("/dev/shm"), f"sweep-{name}", "testtest"), geometry, owner)
        for name, owner in owners.items()
    }
    for name in ("dead", "gone", "older"):
        arenas[name].close()
    try:
        StoragePool.start(dataclasses.replace(CONFIG, name="sweeper", actors=1)).stop()
        assert [name for name, arena in arenas.items() if arena.path.exists()] == ["held"]
        assert len(arena_files_of(pool)) == 2
    finally:
        for arena in arenas.values():
            arena.remove()
            arena.close()
