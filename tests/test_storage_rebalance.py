"""Members of a storage pool join, leave and get lost; pages follow, and reading goes on (docs/design.md 6)."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from hicache_ray.deadline import Deadline
from hicache_ray.storage.pool.membership import MOST_CHANGES, Membership
from hicache_ray.storage.pool.rebalance_plan import (
    BalanceReport,
    RebalanceOptions,
    displacing_share,
    keys_of_others,
    plan_of,
)
from tests.moving_pool import OPTIONS, MovingPool, reads, writes
from tests.storage_local import PAGE, in_threads, is_lost, page_key, page_of
from tests.storage_ray import wait_until

NUMBERS = list(range(40))
KEYS = [page_key(n) for n in NUMBERS]


@pytest.fixture(params=[True, False], ids=["shm", "sent"])
def pool(tmp_path: Path, request: pytest.FixtureRequest) -> MovingPool:
    return MovingPool(tmp_path, use_shm=request.param)


def placed(pool: MovingPool) -> bool:
    return all(pool.holders(n) == pool.owners(n) for n in NUMBERS)


def test_a_join_moves_the_pages_and_reading_goes_on(pool: MovingPool) -> None:
    client = pool.client(use_shm=pool.use_shm)
    assert all(writes(client, NUMBERS))
    pool.join("c")
    moving = [n for n in NUMBERS if pool.owners(n) == {"c"}]
    assert len(moving) > 5
    while not pool.directory.newest.settled:
        for name in ("a", "b", "c"):
            pool.advance(name)
            assert all(reads(client, NUMBERS))
        pool.clock.now += 0.3
    pool.balance()
    assert placed(pool) and all(reads(client, NUMBERS)) and client.membership.epoch == 3
    assert pool.report("a").moved + pool.report("b").moved == len(moving)
    stats = [pool.actors[name].service.shard.stats() for name in "abc"]
    assert stats[2].received == len(moving) == sum(entry.moved for entry in stats[:2])
    pool.check()


def test_a_member_that_leaves_loses_nothing(pool: MovingPool) -> None:
    client = pool.client(use_shm=pool.use_shm)
    writes(client, NUMBERS)
    pool.leave("a")
    assert all(reads(client, NUMBERS)) and [member.name for member in client.members] == ["b", "a"]
    pool.balance()
    pool.end("a")
    assert all(reads(client, NUMBERS)) and placed(pool)
    assert [member.name for member in client.members] == ["b"]


@pytest.mark.parametrize("operation", ["lookup", "load"])
def test_a_page_that_moves_between_two_rounds_of_one_call_is_found(pool: MovingPool, operation: str) -> None:
    """The new owner is asked, then the page arrives there, and the old owner gives it up before it is asked."""
    client = pool.client(use_shm=pool.use_shm)
    writes(client, NUMBERS)
    pool.join("c")
    number = next(n for n in NUMBERS if pool.owners(n) == {"c"})
    (holder,) = pool.holders(number)
    assert reads(client, [number]) == [True] and client.membership.epoch == 2
    pool.actors[holder].faults[{"lookup": "exists", "load": "acquire" if pool.use_shm else "read"}[operation]] = (
        pool.balance
    )
    if operation == "lookup":
        assert client.lookup([page_key(number)], Deadline(5)) == 1
    else:
        page = np.zeros(PAGE, np.uint8)
        assert client.load([page_key(number)], [page], Deadline(5)) == 1 and np.array_equal(page, page_of(number))
    assert pool.holders(number) == {"c"} and not pool.actors[holder].faults and client.membership.epoch == 3


def test_what_is_being_written_when_the_membership_changes_is_moved_too(pool: MovingPool) -> None:
    client = pool.client(use_shm=pool.use_shm)
    future = pool.membership.joined_by("c")
    mine = [n for n in NUMBERS if future.members[future.owners([page_key(n)[16:]])[0, 0]] == "c"]
    holder = pool.membership.members[pool.membership.owners([page_key(mine[0])[16:]])[0, 0]]

    def change() -> None:
        pool.join("c")
        for _ in range(20):
            for name in ("a", "b", "c"):
                pool.advance(name)
            pool.clock.now += 0.3
        assert not pool.directory.newest.settled and not pool.report(holder).clean

    pool.actors[holder].faults["commit"] = change
    assert all(writes(client, mine[:1])) and pool.holders(mine[0]) == {holder}
    pool.balance()
    assert pool.holders(mine[0]) == {"c"} and all(reads(client, mine[:1]))


def test_a_lost_member_is_filled_again_from_the_other_copies(tmp_path: Path) -> None:
    pool = MovingPool(tmp_path, ("a", "b", "c"), replicas=2)
    client = pool.client()
    writes(client, NUMBERS)
    lost = [n for n in NUMBERS if "b" in pool.holders(n)]
    pool.balance()
    pool.restart("b", empty=True)
    assert pool.actors["b"].service.shard.stats().pages == 0 and all(reads(client, NUMBERS))
    for _ in range(200):
        for name in ("a", "b", "c"):
            pool.advance(name)
    assert placed(pool), "the others were asked by the member that came back, long before their next look"
    assert pool.actors["b"].service.shard.stats().received == len(lost)
    assert all(reads(client, NUMBERS)) and pool.membership.epoch == 1


def test_a_copy_lost_unnoticed_is_repaired_at_the_next_look(tmp_path: Path) -> None:
    pool = MovingPool(tmp_path, replicas=2)
    client = pool.client()
    writes(client, NUMBERS)
    pool.balance()
    pool.actors["a"].service.shard.discard(KEYS[:7])
    while pool.advance("b") < OPTIONS.period - 1:
        pass
    assert not placed(pool)
    pool.clock.now += OPTIONS.period
    for _ in range(50):
        pool.advance("b")
    assert placed(pool)


def test_a_forced_leave_gives_lost_copies_another_home(tmp_path: Path) -> None:
    pool = MovingPool(tmp_path, ("a", "b", "c"), replicas=2)
    client = pool.client()
    writes(client, NUMBERS)
    pool.end("c")
    assert all(reads(client, NUMBERS)) and pool.directory.newest.settled
    pool.balance()
    assert placed(pool) and all(len(pool.holders(n)) == 2 for n in NUMBERS)


def test_a_member_that_is_away_is_waited_for(tmp_path: Path) -> None:
    pool = MovingPool(tmp_path)
    client = pool.client()
    writes(client, NUMBERS)
    pool.join("c")
    pool.actors["c"].kill()
    with pytest.raises(AssertionError):
        pool.balance(200)
    assert pool.report("a").away == ("c",) and not pool.report("a").clean and not pool.directory.newest.settled
    pool.clock.now += 5
    assert all(reads(client, NUMBERS)), "served by those who held them before"
    pool.restart("c")
    pool.clock.now += 5
    pool.balance()
    assert placed(pool) and all(reads(client, NUMBERS))


@pytest.mark.parametrize("method", ["offer", "commit", "balance", "set_membership", "describe"])
def test_a_call_that_is_lost_is_made_again(tmp_path: Path, method: str) -> None:
    pool = MovingPool(tmp_path, use_shm=False)
    client = pool.client()
    writes(client, NUMBERS)
    pool.join("c")
    pool.actors["c"].faults[method] = is_lost
    pool.balance()
    assert placed(pool) and all(reads(client, NUMBERS))
    pool.check()


def test_a_member_that_was_not_told_of_the_change_is_told(tmp_path: Path) -> None:
    pool = MovingPool(tmp_path)
    client = pool.client()
    writes(client, NUMBERS)
    pool.membership = pool.directory.newest
    pool.actors["c"] = pool._actor("c")
    pool._equip(pool.actors["c"])
    pool.directory.publish(pool.membership.joined_by("c"))
    pool.actors["a"].service.set_membership(pool.directory.newest.pack())
    pool.balance()
    assert pool.directory.newest.epoch == 3 and placed(pool)


def test_a_restart_goes_on_where_it_was(pool: MovingPool) -> None:
    client = pool.client(use_shm=pool.use_shm)
    writes(client, NUMBERS)
    pool.leave("a")
    for _ in range(4):
        pool.advance("a")
    moved = pool.report("a").moved
    assert 0 < moved < len([n for n in NUMBERS if "a" in pool.holders(n)])
    pool.restart("a")
    assert all(reads(client, NUMBERS))
    pool.balance()
    assert placed_without(pool, "a") and pool.actors["b"].service.shard.stats().pages == len(NUMBERS)


def placed_without(pool: MovingPool, name: str) -> bool:
    return all(pool.holders(n) - {name} == pool.owners(n) for n in NUMBERS)


def test_several_changes_at_once(pool: MovingPool) -> None:
    client = pool.client(use_shm=pool.use_shm)
    writes(client, NUMBERS)
    pool.join("c")
    pool.join("d")
    pool.leave("a")
    pool.join("e")
    assert all(reads(client, NUMBERS))
    with pytest.raises(ValueError, match=f"{MOST_CHANGES} changes of the pool are under way"):
        pool.leave("b")
    for _ in range(6):
        for name in pool.actors:
            pool.advance(name)
        assert all(reads(client, NUMBERS))
    pool.balance()
    assert placed(pool) and all(reads(client, NUMBERS))


def test_a_damaged_page_is_not_moved(tmp_path: Path) -> None:
    pool = MovingPool(tmp_path)
    client = pool.client()
    writes(client, NUMBERS)
    pool.join("c")
    number = next(n for n in NUMBERS if pool.owners(n) == {"c"})
    (holder,) = pool.holders(number)
    shard = pool.actors[holder].service.shard
    shard.arena.data(shard.describe([page_key(number)])[0].offset, PAGE)[5] ^= 1
    pool.balance()
    assert pool.holders(number) == set() and shard.stats().corrupt == 1
    assert reads(client, NUMBERS) == [n != number for n in NUMBERS]


def test_pages_go_into_free_room_only(tmp_path: Path) -> None:
    """Else full pools would never come to rest. What has no room stays where it is, for a later look."""
    pool = MovingPool(tmp_path, pages=8)
    foreign = [n for n in range(200) if pool.owners(n) == {"b"}][:8]
    own = [n for n in range(200, 400) if pool.owners(n) == {"b"}][:6]
    pool.put_at("a", foreign)
    pool.put_at("b", own)
    pool.balance()
    assert all(pool.holders(n) == {"b"} for n in own) and pool.report("a").left == 6
    assert sum(pool.holders(n) == {"b"} for n in foreign) == 2
    pool.actors["b"].service.shard.discard([page_key(n) for n in own])
    pool.balance()
    assert all(pool.holders(n) == {"b"} for n in foreign)


def test_a_leaving_member_of_a_full_pool_saves_its_hottest_pages(tmp_path: Path) -> None:
    pool = MovingPool(tmp_path, ("a", "b"), pages=8)
    mine = [n for n in range(200) if pool.owners(n) == {"a"}][:8]
    others = [n for n in range(200) if pool.owners(n) == {"b"}][:8]
    pool.put_at("a", mine)
    pool.put_at("b", others)
    pool.actors["a"].service.shard.exists([page_key(n) for n in mine[2:6]])
    pool.leave("a")
    pool.balance()
    assert [n for n in mine if "b" in pool.holders(n)] == mine[2:6], "the hotter half, in place of ..."
    assert [n for n in others if pool.holders(n)] == others[4:], "... the colder half of what was there"
    assert pool.report("a").left == 4


def test_namespaces_and_times_to_live_travel_along(tmp_path: Path) -> None:
    pool = MovingPool(tmp_path)
    number = next(n for n in NUMBERS if pool.owners(n) == {"b"})
    pool.put_at("a", [number], label=b"tenant")
    page = pool.actors["a"].service.shard.describe([page_key(number)])[0]
    pool.balance()
    (moved,) = pool.actors["b"].service.shard.describe([page_key(number)])
    assert (moved.label, moved.length, moved.checksum, moved.expires) == (b"tenant", PAGE, page.checksum, page.expires)
    shard = pool.actors["a"].service.shard
    dying = shard.offer([page_key(500)], PAGE, b"", np.array([pool.clock.now + 5]), False)
    shard.commit(dying.id, np.zeros(1, np.uint64))
    assert shard.exists([page_key(500)]).all()
    pool.clock.now += 5
    assert not shard.exists([page_key(500)]).any()


def test_pages_of_many_lengths_and_labels(pool: MovingPool) -> None:
    numbers = [n for n in range(200) if pool.owners(n) == {"b"}][:30]
    for n in numbers:
        pool.put_at("a", [n], length=(512, 1024, PAGE)[n % 3], label=(b"", b"x")[n % 2])
    pool.balance()
    assert all(pool.holders(n) == {"b"} for n in numbers)
    pool.check()


def test_a_member_that_nobody_ends_ends_itself(tmp_path: Path) -> None:
    pool = MovingPool(tmp_path)
    pool.leave("a")
    pool.balance()
    pool.advance("a")
    assert not pool.gone
    pool.clock.now += OPTIONS.linger
    for _ in range(20):
        pool.advance("a")
    assert pool.gone and set(pool.gone) == {"a"}


def test_the_rest_after_a_step_bounds_the_bytes_a_second(tmp_path: Path) -> None:
    options = RebalanceOptions(bytes_per_second=PAGE, batch_pages=4)
    pool = MovingPool(tmp_path, options=options)
    writes(pool.client(), NUMBERS)
    pool.leave("a")
    rests = []
    while not pool.report("a").clean:
        rests.append(pool.advance("a"))
    assert max(rests) == 4 and sum(rests) == pool.report("a").moved


def test_reading_and_moving_in_threads(pool: MovingPool) -> None:
    """Members come and go while clients read and write: everything that was stored is found, always."""
    writes(pool.client(use_shm=pool.use_shm), NUMBERS)
    pool.start()
    ended = threading.Event()

    def change() -> None:
        try:
            for join, leave in (("c", "a"), ("d", "b"), ("a2", "c")):
                pool.join(join)
                pool.leave(leave)
                wait_until(lambda: pool.directory.newest.settled)
        finally:
            ended.set()
            pool.stop()

    def work(number: int) -> None:
        if number == 0:
            change()
            return
        client, new = pool.client(use_shm=number == 1), number * 1000
        while not ended.is_set():
            assert all(reads(client, NUMBERS))
            assert all(writes(client, [new])) and all(reads(client, [new])) and new % 1000 < 200
            new += new % 1000 < 20

    in_threads(work, 3)
    assert pool.directory.newest.members == ("d", "a2")
    pool.check()


def test_a_step_that_fails_is_begun_again(tmp_path: Path) -> None:
    pool = MovingPool(tmp_path)
    client = pool.client()
    writes(client, NUMBERS)
    pool.start()
    broken = pool.directory.read

    def fails() -> Membership | None:
        pool.directory.read = broken  # type: ignore[method-assign]
        raise RuntimeError("broken once")

    pool.join("d")
    pool.directory.read = fails  # type: ignore[method-assign]
    for name in ("a", "b", "d"):
        pool.actors[name].rebalance()
    wait_until(lambda: pool.directory.newest.settled)
    pool.stop()


def test_plans() -> None:
    membership = Membership(1, ("a", "b", "c"), 2)
    plan = plan_of(membership, "a", KEYS)
    owners = membership.owners([key[16:] for key in KEYS])
    for i in range(len(KEYS)):
        assert plan.owned[i] == (0 in owners[i])
        assert set(np.flatnonzero(plan.targets[i]).tolist()) == set(owners[i].tolist()) - {0}
    assert keys_of_others(membership, "a", KEYS) == KEYS
    assert keys_of_others(Membership(1, ("a",)), "a", KEYS) == []
    alone = Membership(1, ("a", "b"))
    assert keys_of_others(alone, "a", KEYS) == [
        key for key, of in zip(KEYS, alone.owners([key[16:] for key in KEYS])[:, 0], strict=True) if of == 1
    ]
    leaving = membership.left_by("c")
    assert displacing_share(leaving, "c") == 2 / 3 and displacing_share(leaving, "a") == 0
    assert displacing_share(leaving.settle(), "c") == 0


def test_reports_survive_the_wire() -> None:
    report = BalanceReport("a", 3, False, 7, True, 1, 2, 3, ("b", "c"))
    assert BalanceReport.unpack(report.pack()) == report
    for message in (b"", b"{}", b"3", b"[1]"):
        with pytest.raises(ValueError):
            BalanceReport.unpack(message)


@pytest.mark.parametrize("name", ["bytes_per_second", "period", "batch_pages", "call_timeout", "linger"])
def test_options_that_can_not_work(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} of re-balancing is 0; use a number above 0"):
        RebalanceOptions(**{name: 0})
    with pytest.raises(ValueError, match="transport of re-balancing is 'tcp'; use one of auto, object_store"):
        RebalanceOptions(transport="tcp")
