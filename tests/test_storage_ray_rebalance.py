"""Pages of a real storage pool move when members join, leave, or lose them (docs/design.md 6 and 7)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from hicache_ray.actors.storage_actor import actor_exists
from hicache_ray.actors.storage_pool import StoragePool, StoragePoolConfig, StoragePoolError
from hicache_ray.storage.pool.rebalance_plan import RebalanceOptions
from hicache_ray.storage.shard.files import ProcessId
from tests.cluster import shared_cluster
from tests.storage_ray import PAGE_BYTES, SEGMENT_BYTES, Client, arena_files, wait_until

pytestmark = [pytest.mark.ray]

CONFIG = StoragePoolConfig(name="moving", actors=2, bytes_per_actor=8 << 20, segment_bytes=SEGMENT_BYTES)
SLOWLY = RebalanceOptions(bytes_per_second=4 * PAGE_BYTES, batch_pages=1)
"""Moving goes on for seconds, so that a test on a busy machine is still in the middle of it when it looks."""
ALL = range(60)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with shared_cluster():
        yield


def client_of(pool: StoragePool, **extra: object) -> Client:
    return Client(pool.handle.options(refusal_seconds=0.2, **extra))


def pages_of(pool: StoragePool) -> dict[str, int]:
    return {member: stats.pages for member, stats in pool.stats().items() if stats is not None}


def kill(pool: StoragePool, member: str, *, arena: bool = False) -> None:
    info = pool.info()[member]
    assert info is not None
    process = ProcessId.running(info.pid)
    assert process is not None
    if arena:
        Path(info.path).unlink()
    with contextlib.suppress(ProcessLookupError):
        os.kill(info.pid, signal.SIGKILL)
    wait_until(lambda: not process.alive)


@pytest.mark.parametrize("transport", ["auto", "object_store"])
def test_a_join_moves_pages_and_loses_none(transport: str) -> None:
    with StoragePool.start(CONFIG) as pool:
        client = client_of(pool, transport=transport)
        assert all(client.put(ALL))
        joined = pool.add_member()
        assert all(client.get(ALL)) and client.exists(ALL) == 60
        pool.wait_balanced()
        pages = pages_of(pool)
        assert sum(pages.values()) == 60 and pages[joined] > 5, pages
        assert all(client.get(ALL)) and client.exists(ALL) == 60
        assert pool.membership.settled and client.storage.membership == pool.membership
        reports = pool.balance()
        assert all(report is not None and report.clean and not report.left for report in reports.values())
        assert sum(report.moved for report in reports.values() if report is not None) == pages[joined]
        assert set(pool.audit(read_pages=True).values()) == {""}


def test_members_replaced_one_after_another_lose_nothing() -> None:
    with StoragePool.start(CONFIG) as pool:
        client, idle = client_of(pool), client_of(pool)
        assert all(client.put(ALL))
        for old in ("moving-1", "moving-0"):
            pool.add_member()
            before = pages_of(pool).get(old, 0)
            drained = pool.remove_member(old)
            assert drained.left == 0 and drained.moved <= before
            assert all(client.get(ALL)) and not actor_exists(old, pool.handle.namespace)
        pool.wait_balanced()
        assert sum(pages_of(pool).values()) == 60
        assert len(arena_files(pool.membership.token)) == 2
        assert all(idle.get(ALL)), "a client that knows none of the members finds the new ones"


def test_a_pool_settles_without_its_driver() -> None:
    """The members publish the settled membership; one that nobody ends after it has left ends itself."""
    config = dataclasses.replace(CONFIG, name="alone", rebalance=RebalanceOptions(linger=1.0, period=2.0))
    with StoragePool.start(config) as pool:
        client = client_of(pool)
        assert all(client.put(ALL))
        pool._change(lambda known: known.left_by("alone-1"))
        wait_until(lambda: not actor_exists("alone-1", pool.handle.namespace))
        assert all(client.get(ALL)) and pages_of(pool) == {"alone-0": 60}
        assert len(arena_files(pool.membership.token)) == 1


def test_a_lost_copy_is_restored() -> None:
    with StoragePool.start(dataclasses.replace(CONFIG, name="twice", replicas=2)) as pool:
        client = client_of(pool)
        assert all(client.put(ALL)) and pages_of(pool) == {"twice-0": 60, "twice-1": 60}
        kill(pool, "twice-0", arena=True)
        assert all(client.get(ALL))
        wait_until(lambda: pages_of(pool) == {"twice-0": 60, "twice-1": 60})
        stats = pool.stats()["twice-0"]
        assert stats is not None and stats.received == 60 and stats.reopened == stats.stored == 0
        kill(pool, "twice-1", arena=True)
        wait_until(lambda: client.exists(ALL) == 60)
        assert all(client.get(ALL))


def test_a_forced_leave_costs_its_pages_at_once() -> None:
    with StoragePool.start(dataclasses.replace(CONFIG, name="forced", actors=3, replicas=2)) as pool:
        client = client_of(pool)
        assert all(client.put(ALL))
        assert pool.remove_member("forced-1", force=True).moved == 0
        assert all(client.get(ALL)), "each page has another holder"
        pool.wait_balanced()
        assert pages_of(pool) == {"forced-0": 60, "forced-2": 60}


@pytest.mark.parametrize("victim", ["slow-0", "slow-2"], ids=["a sender", "the receiver"])
def test_a_kill_while_pages_move_is_harmless(victim: str) -> None:
    with StoragePool.start(dataclasses.replace(CONFIG, name="slow", rebalance=SLOWLY)) as pool:
        client = client_of(pool)
        assert all(client.put(ALL))
        joined = pool.add_member()
        wait_until(lambda: pages_of(pool).get(joined, 0) > 0)
        kill(pool, victim)
        assert not pool.membership.settled
        pool.wait_balanced()
        assert all(client.get(ALL)) and sum(pages_of(pool).values()) == 60
        assert set(pool.audit(read_pages=True).values()) == {""}


def test_no_time_to_leave_and_progress_that_can_be_seen() -> None:
    with StoragePool.start(dataclasses.replace(CONFIG, name="late", rebalance=SLOWLY)) as pool:
        client = client_of(pool)
        assert all(client.put(ALL))
        before = pages_of(pool)["late-1"]
        with pytest.raises(StoragePoolError, match=r"not balanced within 0 s: late-\d"):
            pool.wait_balanced(timeout=0.0)
        drained = pool.remove_member("late-1", timeout=0.5)
        assert drained.left > 0 and drained.moved + drained.left <= before
        assert pages_of(pool).keys() == {"late-0"} and pool.membership.settled
        with pytest.raises(ValueError, match="no member"):
            pool.remove_member("late-1")
        with pytest.raises(ValueError, match="needs members"):
            pool.remove_member("late-0")
        joined = pool.add_member()
        report = pool.balance()["late-0"]
        assert report is not None and not report.settled
        wait_until(lambda: seen_to_move(pool) > 0)
        pool.wait_balanced()
        assert seen_to_move(pool) == 0 and pages_of(pool)[joined] > 0


def seen_to_move(pool: StoragePool) -> int:
    infos = pool.info().values()
    return sum(info.balance.to_move for info in infos if info is not None)


def test_a_pool_that_was_connected_to_changes_it_too() -> None:
    with StoragePool.start(dataclasses.replace(CONFIG, name="shared")) as pool:
        other = StoragePool.connect("shared")
        joined = other.add_member()
        assert joined in pool.info() and pool.membership.members[-1] == joined
        other.wait_balanced()
        pool.remove_member(joined)
        other.wait_balanced()
        assert other.membership.members == ("shared-0", "shared-1")
        assert ray.is_initialized()
