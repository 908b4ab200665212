"""The pool's client without Ray: placement, transports, prefix rule, replicas, faults (docs/design.md 6 and 7)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hicache_ray.deadline import Deadline
from hicache_ray.storage.pool.client import PoolClient
from tests.storage_local import PAGE, LocalPool, in_threads, is_lost, page_key, page_of, times_out


def flags(leading: int, count: int) -> list[bool]:
    """One flag a page, from the number of leading pages."""
    return [True] * leading + [False] * (count - leading)


def put(client: PoolClient, numbers: list[int], pages: list[np.ndarray] | None = None) -> list[bool]:
    pages = pages or [page_of(n) for n in numbers]
    return flags(client.store([page_key(n) for n in numbers], pages, b"", Deadline(5)), len(numbers))


def get(client: PoolClient, numbers: list[int]) -> list[bool]:
    """Reads; every page that is said to have arrived must be right."""
    pages = [np.zeros(PAGE, np.uint8) for _ in numbers]
    done = flags(client.load([page_key(n) for n in numbers], pages, Deadline(5)), len(numbers))
    for number, page, ok in zip(numbers, pages, done, strict=True):
        assert not ok or np.array_equal(page, page_of(number))
    return done


def exists(client: PoolClient, numbers: list[int]) -> list[bool]:
    return flags(client.lookup([page_key(n) for n in numbers], Deadline(5)), len(numbers))


def owner(pool: LocalPool, number: int) -> str:
    return pool.membership.members[pool.membership.owners([page_key(number)[16:]])[0, 0]]


def owned_by(pool: LocalPool, name: str, count: int) -> list[int]:
    return [n for n in range(1000) if owner(pool, n) == name][:count]


@pytest.fixture
def pool(tmp_path: Path) -> LocalPool:
    return LocalPool(tmp_path)


NUMBERS = list(range(40))


@pytest.mark.parametrize("use_shm", [True, False])
def test_pages_come_back_as_they_were_stored(pool: LocalPool, use_shm: bool) -> None:
    client = pool.client(use_shm=use_shm)
    assert put(client, NUMBERS) == exists(client, NUMBERS) == get(client, NUMBERS) == [True] * 40
    assert min(actor.service.shard.stats().pages for actor in pool.actors.values()) > 5, "both members have a share"
    assert get(client, [*NUMBERS, 99]) == [True] * 40 + [False]
    pool.check()
    assert sum(actor.service.shard.stats().leased for actor in pool.actors.values()) == 0


@pytest.mark.parametrize("use_shm", [True, False])
def test_one_call_an_actor_and_round(pool: LocalPool, use_shm: bool) -> None:
    client = pool.client(use_shm=use_shm)
    for actor in pool.actors.values():
        actor.calls.clear()
    put(client, NUMBERS)
    exists(client, NUMBERS)
    get(client, NUMBERS)
    reading = ["acquire", "release"] if use_shm else ["read"]
    for actor in pool.actors.values():
        assert actor.calls == ["reserve", "commit", "exists", *reading]


def test_transports_read_each_others_pages(pool: LocalPool) -> None:
    near, far = pool.client(), pool.client(use_shm=False)
    put(near, NUMBERS[:20])
    put(far, NUMBERS[20:])
    assert get(near, NUMBERS) == get(far, NUMBERS) == [True] * 40


@pytest.mark.parametrize("use_shm", [True, False])
def test_strided_pages_keep_the_order_of_their_segments(pool: LocalPool, use_shm: bool) -> None:
    """layer_first: the K and V of every layer are apart in the pool, and one page in the store."""
    host = np.random.default_rng(0).integers(0, 256, (2, 4, 6, PAGE // 8), dtype=np.uint8)
    views = [host[:, :, page].transpose(1, 0, 2) for page in range(6)]
    client = pool.client(use_shm=use_shm)
    assert put(client, list(range(6)), views) == [True] * 6
    before = host.copy()
    host[:] = 0
    assert client.load([page_key(n) for n in range(6)], views, Deadline(5)) == 6
    assert np.array_equal(host, before)


def test_the_answer_ends_at_the_first_missing_page(pool: LocalPool) -> None:
    client = pool.client()
    put(client, [0, 1, 3, 4])
    assert get(client, [0, 1, 2, 3, 4]) == [True, True, False, False, False]
    assert exists(client, [0, 1, 2, 3]) == [True, True, False, False] and exists(client, [3]) == [True]


def test_storing_again_moves_no_bytes(pool: LocalPool) -> None:
    client = pool.client()
    put(client, NUMBERS)
    moved = client.counters.snapshot().set_bytes
    assert put(client, NUMBERS) == [True] * 40
    stats = client.counters.snapshot()
    assert stats.set_bytes == moved == 40 * PAGE
    assert (stats.set_stored, stats.set_existing) == (40, 40)


def test_nothing_is_stored_behind_a_page_without_a_place(pool: LocalPool) -> None:
    """A stored page's ancestors are stored: when one member is away, the pages behind its first one are not written."""
    client = pool.client()
    pool.actors["a"].kill()
    done = put(client, NUMBERS)
    first_of_a = owned_by(pool, "a", 1)[0]
    assert done == [n < first_of_a for n in NUMBERS]
    assert pool.actors["b"].service.shard.stats().pages == first_of_a
    pool.check()


@pytest.mark.parametrize("method", ["exists", "reserve", "commit", "acquire", "describe"])
@pytest.mark.parametrize("fault", [times_out, is_lost])
def test_a_member_that_fails_is_a_miss_then_left_alone_then_tried(pool: LocalPool, method: str, fault: object) -> None:
    client = pool.client()
    put(client, NUMBERS[:10])
    pool.actors["a"].faults[method] = fault  # type: ignore[assignment]
    mine = owned_by(pool, "a", 30)
    put(client, mine[20:])
    exists(client, mine)
    get(client, mine[:10])
    if method == "describe":
        client.members[0].attach(Deadline(1), wait=True)
    assert client.members[0].breaker.is_open
    calls = len(pool.actors["a"].calls)
    assert get(client, mine[:1]) == put(client, mine[:1]) == exists(client, mine[:1]) == [False]
    assert len(pool.actors["a"].calls) == calls and client.counters.snapshot().refused > 0
    pool.clock.now += 1.1
    assert put(client, mine[:3]) == get(client, mine[:3]) == [True] * 3
    assert not client.members[0].breaker.is_open
    pool.check()


def test_a_killed_member_comes_back_with_its_pages(pool: LocalPool) -> None:
    client = pool.client()
    put(client, NUMBERS)
    pool.actors["a"].kill()
    assert get(client, NUMBERS) != [True] * 40
    pool.actors["a"].restart()
    pool.clock.now += 1.1
    assert get(client, NUMBERS) == [True] * 40
    pool.check()


@pytest.mark.parametrize("use_shm", [True, False])
def test_a_member_that_comes_back_elsewhere(pool: LocalPool, use_shm: bool) -> None:
    """Its arena is another one: what it held is a miss, what is stored from now on is found."""
    client = pool.client(use_shm=use_shm)
    mine = owned_by(pool, "a", 10)
    put(client, mine)
    pool.actors["a"].kill()
    pool.actors["a"].restart(empty=True)
    assert get(client, mine) == [False] * 10
    assert put(client, mine) == get(client, mine) == [True] * 10
    other = pool.client(use_shm=use_shm)
    assert get(other, mine) == [True] * 10


def test_a_flipped_byte_is_a_miss_and_can_be_stored_again(pool: LocalPool) -> None:
    client = pool.client()
    put(client, NUMBERS)
    shard = pool.actors[owner(pool, 5)].service.shard
    offset = int(shard.acquire([page_key(5)], PAGE).grants["offset"][0])
    for use_shm in (True, False):
        shard.arena.data(offset, PAGE)[77] ^= 8
        reader = pool.client(use_shm=use_shm)
        assert get(reader, NUMBERS) == [n < 5 for n in NUMBERS]
        assert reader.counters.snapshot().corrupt == 1
        assert exists(reader, [5]) == [False]
        pool.clock.now += 31
        assert put(client, [5]) == [True]
    pool.check()


def test_evicted_between_lookup_and_read(tmp_path: Path) -> None:
    pool = LocalPool(tmp_path, ("a",), pages=4)
    client = pool.client()
    put(client, [1, 2, 3, 4])
    assert exists(client, [1, 2, 3, 4]) == [True] * 4
    put(client, [5, 6])
    assert get(client, [1, 2, 3, 4]) == [True, True, False, False]


def test_cleared_between_lookup_and_read(pool: LocalPool) -> None:
    client = pool.client()
    put(client, NUMBERS)
    assert all(exists(client, NUMBERS))
    for actor in pool.actors.values():
        actor.service.clear()
    assert get(client, NUMBERS) == [False] * 40


def test_more_pages_than_fit(tmp_path: Path) -> None:
    pool = LocalPool(tmp_path, ("a",), pages=4)
    client = pool.client()
    assert put(client, list(range(6))) == [True] * 4 + [False] * 2
    pool.check()


def test_a_page_larger_than_a_segment_is_refused_without_opening_the_breaker(pool: LocalPool) -> None:
    client = pool.client()
    assert client.store([page_key(1)], [page_of(1, (PAGE + 1,))], b"", Deadline(5)) == 0
    assert not any(member.breaker.is_open for member in client.members)
    assert client.counters.snapshot().errors == 1


def test_replicas_serve_what_a_dead_member_held(tmp_path: Path) -> None:
    pool = LocalPool(tmp_path, ("a", "b", "c"), replicas=2)
    client = pool.client()
    assert put(client, NUMBERS) == [True] * 40 and pool.stored() == 80
    for name in ("a", "b", "c"):
        pool.actors[name].kill()
        assert get(client, NUMBERS) == exists(client, NUMBERS) == [True] * 40
        pool.actors[name].restart()
        pool.clock.now += 5


def test_replicas_serve_what_an_emptied_member_lost(tmp_path: Path) -> None:
    pool = LocalPool(tmp_path, ("a", "b"), replicas=2)
    client = pool.client()
    put(client, NUMBERS)
    pool.actors["a"].kill()
    pool.actors["a"].restart(empty=True)
    assert get(client, NUMBERS) == exists(client, NUMBERS) == [True] * 40
    assert put(client, NUMBERS) == [True] * 40 and pool.stored() == 80, "storing again fills the lost copies"
    pool.check()


def test_replicas_store_with_one_member_away(tmp_path: Path) -> None:
    pool = LocalPool(tmp_path, ("a", "b"), replicas=2)
    client = pool.client()
    pool.actors["a"].kill()
    assert put(client, NUMBERS) == get(client, NUMBERS) == [True] * 40


def test_a_corrupt_copy_is_read_from_another_holder(tmp_path: Path) -> None:
    pool = LocalPool(tmp_path, ("a", "b"), replicas=2)
    client = pool.client()
    put(client, NUMBERS)
    shard = pool.actors[owner(pool, 5)].service.shard
    shard.arena.data(int(shard.acquire([page_key(5)], PAGE).grants["offset"][0]), PAGE)[0] ^= 1
    assert get(client, NUMBERS) == [True] * 40 and client.counters.snapshot().corrupt == 1


@pytest.mark.parametrize("use_shm", [True, False])
def test_clients_learn_a_new_membership_from_a_refusal(pool: LocalPool, use_shm: bool) -> None:
    client = pool.client(use_shm=use_shm)
    put(client, NUMBERS)
    pool.change(pool.membership.joined_by("c"))
    assert put(client, NUMBERS) == get(client, NUMBERS) == [True] * 40
    assert client.membership.epoch == 2 and len(client.members) == 3
    assert pool.actors["c"].service.shard.stats().pages > 5
    pool.change(pool.membership.without("a"))
    assert put(client, NUMBERS) == exists(client, NUMBERS) == [True] * 40
    assert [member.name for member in client.members] == ["b", "c"]
    pool.check()
    assert all(actor.service.shard.stats().leased == 0 for actor in pool.actors.values())


def test_an_actor_with_an_older_membership_serves(pool: LocalPool) -> None:
    client = pool.client()
    client.adopt(pool.membership.joined_by())
    assert client.membership.epoch == 2
    assert put(client, NUMBERS) == get(client, NUMBERS) == [True] * 40


def test_empty_calls(pool: LocalPool) -> None:
    client = pool.client()
    assert put(client, []) == get(client, []) == exists(client, []) == []


@pytest.mark.parametrize("use_shm", [True, False])
def test_clients_in_threads(tmp_path: Path, use_shm: bool) -> None:
    """Writers and readers of overlapping pages on a pool that is too small: every page that arrives is right."""
    pool = LocalPool(tmp_path, pages=16)
    clients = [pool.client(use_shm=use_shm, copy_threads=2) for _ in range(2)]

    def work(number: int) -> None:
        random = np.random.default_rng(number)
        for _ in range(60):
            chain = random.integers(0, 60, 6).tolist()
            (put if random.integers(2) else get)(clients[number % 2], chain)

    in_threads(work, 4)
    pool.check()
    assert all(actor.service.shard.stats().leased == 0 for actor in pool.actors.values())
