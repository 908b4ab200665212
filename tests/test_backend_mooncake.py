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
    storage.register_host_pool(pool)
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
    assert storage.store([mine], np.array([0])) == 1
    with storage.connection.use() as store:
        for number, suffix in enumerate(suffixes):
            assert bytes(store.get(f"{prefix}{mine.hex()}{suffix}")) == pool.read(0)[number * size :][:size].tobytes()
            assert storage.lookup([theirs]) == 0
            assert store.put(f"{prefix}{theirs.hex()}{suffix}", pool.read(1)[number * size :][:size].tobytes()) == 0
    assert storage.lookup([mine, theirs]) == 2
    assert storage.load([mine, theirs], np.array([2, 3])) == 2
    assert np.array_equal(pool.read(0), pool.read(2)) and np.array_equal(pool.read(1), pool.read(3))
    storage.clear()
    assert storage.lookup([mine]) == storage.lookup([theirs]) == 0
    storage.close()


def test_sglang_objects_need_whole_components(subject: MooncakeSubject) -> None:
    shape = PageShape("mha", "layer_first")
    storage = subject.make(Path(), identity_of(shape), key_style="sglang")
    with pytest.raises(BackendError, match="a layout that begins with page_"):
        storage.register_host_pool(NumpyHostPages(4, shape))
    storage.close()


def test_a_tag_keeps_users_of_a_store_apart(subject: MooncakeSubject) -> None:
    pool = NumpyHostPages(4, BIG)
    names = page_names(1, seed=32)
    one, two = (open_storage(subject, identity_of(BIG), pool, extra_backend_tag=tag) for tag in ("a.b", "axb"))
    assert one.store(names, np.array([0])) == two.store(names, np.array([0])) == 1
    one.clear()
    assert (one.lookup(names), two.lookup(names)) == (0, 1)
    one.close()
    two.close()


def test_pages_lent_by_a_dead_process_are_misses(subject: MooncakeSubject, tmp_path: Path) -> None:
    """The store goes on saying they are there until it notices (lookup yes, read no); a new lender serves again."""
    cluster = subject.start_cluster(tmp_path)
    pool = NumpyHostPages(4, BIG)
    storage = open_storage(subject, identity_of(BIG), pool, **cluster.options())
    names = page_names(2, seed=33)
    pool.fill([0, 1], 1)
    assert storage.store(names, np.array([0, 1])) == 2
    cluster.kill_holder()
    assert storage.load(names, np.array([2, 3])) == 0
    cluster.start_holder()

    def serves() -> bool:
        stored = storage.store(names, np.array([0, 1]))
        return stored == storage.load(names, np.array([2, 3])) == 2

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
    guarded.register_host_pool(pool)
    names = page_names(1, seed=34)
    assert guarded.lookup(names) == 0
    assert guarded.store(names, np.array([0])) == 0
    cluster.start_master()
    eventually(lambda: guarded.store(names, np.array([0])) == 1, "the store is not used", seconds=60)
    assert guarded.load(names, np.array([1])) == 1
    guarded.close()
    subject.clusters.remove(cluster)
    cluster.stop()


def test_check_server_refuses_to_start_without_a_store(subject: MooncakeSubject) -> None:
    extra = {"master_server_address": "127.0.0.1:1", "check_server": True, "setup_timeout": 1}
    with pytest.raises(BackendError, match=r"no Mooncake server answers at 127.0.0.1:1 .* waited 1 s"):
        StorageSubject("mooncake", extra).make(Path(), ModelIdentity())


def test_check_server_finds_the_store(subject: MooncakeSubject) -> None:
    storage = subject.make(Path(), identity_of(BIG), check_server=True)
    assert storage.lookup(page_names(1, seed=35)) == 0
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
    eventually(lambda: storage.store(names, np.array([0])) == 1, "nothing can be stored")
    assert storage.load(names, np.array([1])) == 1
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
        assert storage.lookup(names) == attempt
        assert storage.store(names, np.array([0])) == 1
        storage.close()
        storage.close()
        assert storage.lookup(names) == 0
        assert storage.load(names, np.array([0])) == 0


def test_other_threads_run_while_a_call_waits(subject: MooncakeSubject) -> None:
    """The library gives up the interpreter's lock: a store that hangs does not stop the process."""
    pool = NumpyHostPages(4, BIG)
    storage = open_storage(subject, identity_of(BIG), pool)
    subject.cluster.freeze_master()
    call = threading.Thread(target=storage.lookup, args=(page_names(1, seed=38),))
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
    storage.register_host_pool(pool)
    assert storage.store(page_names(1, seed=39), np.array([0])) == 1
    storage.close()
