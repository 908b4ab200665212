"""The Mooncake backend on a real master: the storage suite, SGLang's keys, processes that die, threads that hold."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_ray.hashing import ModelIdentity
from hicache_ray.storage.guard import GuardedStorage
from hicache_ray.storage.mooncake.storage import MooncakeStorage
from hicache_ray.storage.registry import BackendError, parse_storage_url
from hicache_ray.testing.host_pages import NumpyHostPages, PageShape
from hicache_ray.testing.subject import StorageSubject
from hicache_ray.testing.suite import storage_suite
from hicache_ray.testing.suite_base import BIG, eventually, identity_of, page_names
from tests.mooncake_cluster import unavailable
from tests.mooncake_subject import MooncakeSubject

TestMooncake = storage_suite(MooncakeSubject())


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeSubject]:
    if unavailable():
        pytest.skip(unavailable())
    subject = MooncakeSubject()
    subject.start(tmp_path_factory.mktemp("store"))
    yield subject
    subject.stop()


def open_storage(
    subject: MooncakeSubject, identity: ModelIdentity, pool: NumpyHostPages, **options: Any
) -> MooncakeStorage:
    storage = subject.make(Path(), identity, **options)
    assert isinstance(storage, MooncakeStorage)
    storage.register_mem_pool_host(pool)
    return storage


@pytest.mark.parametrize(
    ("attention", "changes", "suffixes"),
    [
        ("mha", {"tp_rank": 1, "pp_size": 1}, ["_1_k", "_1_v"]),
        ("mha", {"tp_rank": 1, "pp_size": 2, "pp_rank": 1}, ["_1_1_k", "_1_1_v"]),
        ("mla", {"tp_rank": 1, "pp_size": 1}, ["_k"]),
        ("mla", {"pp_size": 2, "pp_rank": 1}, ["_1_k"]),
    ],
)
@pytest.mark.parametrize("tag", ["", "t"])
def test_case_10_sglang_objects(
    subject: MooncakeSubject, attention: str, changes: dict[str, int], suffixes: list[str], tag: str
) -> None:
    """What we store is what SGLang looks for, and the other way round; half a page is none (case 11)."""
    shape = PageShape(attention, "page_first")
    pool = NumpyHostPages(4, shape)
    pool.fill([0, 1], 1)
    identity = identity_of(shape, **changes)
    storage = open_storage(subject, identity, pool, key_style="sglang", extra_backend_tag=tag)
    mine, theirs = page_names(2, seed=31)
    prefix = f"{tag}_" if tag else ""
    size = shape.page_bytes // len(suffixes)
    assert storage.batch_set_v1([mine], pool.slots([0])) == [True]
    with storage.connection.use() as store:
        for number, suffix in enumerate(suffixes):
            assert bytes(store.get(f"{prefix}{mine}{suffix}")) == pool.read(0)[number * size :][:size].tobytes()
            assert storage.batch_exists([theirs]) == 0
            assert store.put(f"{prefix}{theirs}{suffix}", pool.read(1)[number * size :][:size].tobytes()) == 0
    assert storage.batch_exists([mine, theirs]) == 2
    assert storage.batch_get_v1([mine, theirs], pool.slots([2, 3])) == [True, True]
    assert np.array_equal(pool.read(0), pool.read(2)) and np.array_equal(pool.read(1), pool.read(3))
    storage.clear()
    assert storage.batch_exists([mine]) == storage.batch_exists([theirs]) == 0
    storage.close()


def test_sglang_objects_need_whole_components(subject: MooncakeSubject) -> None:
    shape = PageShape("mha", "layer_first")
    storage = subject.make(Path(), identity_of(shape), key_style="sglang")
    with pytest.raises(BackendError, match="a layout that begins with page_"):
        storage.register_mem_pool_host(NumpyHostPages(4, shape))
    storage.close()


def test_a_tag_keeps_users_of_a_store_apart(subject: MooncakeSubject) -> None:
    pool = NumpyHostPages(4, BIG)
    names = page_names(1, seed=32)
    one, two = (open_storage(subject, identity_of(BIG), pool, extra_backend_tag=tag) for tag in ("a.b", "axb"))
    assert one.batch_set_v1(names, pool.slots([0])) == two.batch_set_v1(names, pool.slots([0])) == [True]
    one.clear()
    assert (one.batch_exists(names), two.batch_exists(names)) == (0, 1)
    one.close()
    two.close()


def test_pages_lent_by_a_dead_process_are_misses(subject: MooncakeSubject, tmp_path: Path) -> None:
    """The store goes on saying they are there until it notices (lookup yes, read no); a new lender serves again."""
    cluster = subject.start_cluster(tmp_path)
    pool = NumpyHostPages(4, BIG)
    storage = open_storage(subject, identity_of(BIG), pool, **cluster.options())
    names = page_names(2, seed=33)
    pool.fill([0, 1], 1)
    assert storage.batch_set_v1(names, pool.slots([0, 1])) == [True, True]
    cluster.kill_holder()
    assert storage.batch_get_v1(names, pool.slots([2, 3])) == [False, False]
    cluster.start_holder()

    def serves() -> bool:
        stored = storage.batch_set_v1(names, pool.slots([0, 1]))
        return all(stored) and all(storage.batch_get_v1(names, pool.slots([2, 3])))

    eventually(serves, "the new lender's memory is not used", seconds=60)
    assert np.array_equal(pool.read(0), pool.read(2))
    storage.close()
    subject.clusters.remove(cluster)
    cluster.stop()


def test_a_client_may_come_before_its_store(subject: MooncakeSubject, tmp_path: Path) -> None:
    """All misses, without waiting; used as soon as the store is there."""
    cluster = subject.start_cluster(tmp_path)
    cluster.kill_master()
    pool = NumpyHostPages(4, BIG)
    guarded = GuardedStorage(open_storage(subject, identity_of(BIG), pool, **cluster.options()))
    guarded.register_mem_pool_host(pool)
    names = page_names(1, seed=34)
    assert guarded.batch_exists(names) == 0
    assert guarded.batch_set_v1(names, pool.slots([0])) == [False]
    cluster.start_master()
    eventually(lambda: guarded.batch_set_v1(names, pool.slots([0])) == [True], "the store is not used", seconds=60)
    assert guarded.batch_get_v1(names, pool.slots([1])) == [True]
    guarded.close()
    subject.clusters.remove(cluster)
    cluster.stop()


def test_check_server_refuses_to_start_without_a_store(subject: MooncakeSubject) -> None:
    extra = {"master_server_address": "127.0.0.1:1", "check_server": True, "setup_timeout": 1}
    with pytest.raises(BackendError, match=r"no Mooncake server answers at 127.0.0.1:1 .* waited 1 s"):
        StorageSubject("mooncake", extra).make(Path(), ModelIdentity())


def test_check_server_finds_the_store(subject: MooncakeSubject) -> None:
    storage = subject.make(Path(), identity_of(BIG), check_server=True)
    assert storage.batch_exists(page_names(1, seed=35)) == 0
    storage.close()


def test_memory_that_a_client_lends_itself(subject: MooncakeSubject, tmp_path: Path) -> None:
    """Without any other lender; half of the segment for each of the two ranks."""
    cluster = subject.start_cluster(tmp_path)
    cluster.kill_holder()
    pool = NumpyHostPages(4, BIG)
    pool.fill([0], 1)
    options = {**cluster.options(), "global_segment_size": "64MB"}
    storage = open_storage(subject, identity_of(BIG), pool, **options)
    names = page_names(1, seed=36)
    eventually(lambda: storage.batch_set_v1(names, pool.slots([0])) == [True], "nothing can be stored")
    assert storage.batch_get_v1(names, pool.slots([1])) == [True]
    assert np.array_equal(pool.read(0), pool.read(1))
    storage.close()
    subject.clusters.remove(cluster)
    cluster.stop()


def test_closing_and_opening_again_connects_anew(subject: MooncakeSubject) -> None:
    """With a rank of its own, so that no other backend keeps the client open; a call after the close is a miss."""
    identity = identity_of(BIG, tp_rank=1)
    pool = NumpyHostPages(4, BIG)
    names = page_names(1, seed=37)
    for attempt in range(2):
        storage = open_storage(subject, identity, pool)
        assert storage.batch_exists(names) == attempt
        assert storage.batch_set_v1(names, pool.slots([0])) == [True]
        storage.close()
        storage.close()
        assert storage.batch_exists(names) == 0
        assert storage.batch_get_v1(names, pool.slots([0])) == [False]


def test_other_threads_run_while_a_call_waits(subject: MooncakeSubject) -> None:
    """The library gives up the interpreter's lock: a store that hangs does not stop the process."""
    pool = NumpyHostPages(4, BIG)
    storage = open_storage(subject, identity_of(BIG), pool)
    subject.cluster.freeze_master()
    call = threading.Thread(target=storage.batch_exists, args=(page_names(1, seed=38),))
    try:
        call.start()
        assert sum(range(100_000)) > 0
        assert call.is_alive()
    finally:
        subject.cluster.thaw_master()
    call.join(60)
    assert not call.is_alive()
    storage.close()


def test_the_url_names_the_store(subject: MooncakeSubject) -> None:
    target = parse_storage_url(subject.cluster.url)
    storage = StorageSubject(target.backend, target.extra).make(Path(), identity_of(BIG))
    pool = NumpyHostPages(2, BIG)
    storage.register_mem_pool_host(pool)
    assert storage.batch_set_v1(page_names(1, seed=39), pool.slots([0])) == [True]
    storage.close()
