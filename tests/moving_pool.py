"""A storage pool in one process, without Ray, whose members move pages: step by step, in the order a test wants."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hicache_ray.deadline import Deadline
from hicache_ray.storage.base import StorageCounters
from hicache_ray.storage.pool.client import PoolClient
from hicache_ray.storage.pool.membership import Membership
from hicache_ray.storage.pool.ray_channel import DirectoryConflict
from hicache_ray.storage.pool.rebalance import Rebalancer
from hicache_ray.storage.pool.rebalance_plan import BalanceReport, RebalanceOptions
from hicache_ray.storage.shard.page_copy import store_page
from tests.storage_local import PAGE, LocalActor, LocalPool, page_key, page_of

OPTIONS = RebalanceOptions(batch_pages=4)


class LocalDirectory:
    """What `PoolDirectory` is, in memory."""

    def __init__(self, membership: Membership) -> None:
        self.newest = membership

    def read(self) -> Membership | None:
        return self.newest

    def publish(self, membership: Membership) -> None:
        if membership.epoch <= self.newest.epoch:
            raise DirectoryConflict(f"epoch {membership.epoch} exists")
        self.newest = membership


class MovingPool(LocalPool):
    """`advance` does a step of one member's work, `balance` all there is to do."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str] = ("a", "b"),
        replicas: int = 1,
        pages: int = 64,
        use_shm: bool = True,
        options: RebalanceOptions = OPTIONS,
    ) -> None:
        super().__init__(folder, names, replicas, pages)
        self.directory = LocalDirectory(self.membership)
        self.counters = StorageCounters()
        self.use_shm = use_shm
        self.options = options
        self.rest_clock: Callable[[], float] = self.clock
        self.gone: list[str] = []
        for actor in self.actors.values():
            self._equip(actor)

    def read_directory(self) -> Membership | None:
        return self.directory.newest

    def publish(self, membership: Membership) -> None:
        """A driver changes the pool: new actors start with the membership before."""
        self.membership = self.directory.newest
        for name in membership.everyone:
            if name not in self.actors:
                self.actors[name] = self._actor(name)
                self._equip(self.actors[name])
        self.directory.publish(membership)
        self.change(membership)

    def join(self, name: str) -> None:
        self.publish(self.directory.newest.joined_by(name))

    def leave(self, name: str) -> None:
        self.publish(self.directory.newest.left_by(name))

    def end(self, name: str) -> None:
        """A driver ends an actor that has left, or whose pages are to be lost."""
        if name in self.directory.newest.everyone:
            self.publish(self.directory.newest.without(name))
        self.actors.pop(name).kill()

    def restart(self, name: str, *, empty: bool = False) -> None:
        actor = self.actors[name]
        actor.membership = self.directory.newest
        if actor.alive:
            actor.kill()
        actor.restart(empty=empty)
        self._equip(actor, returned=True)

    def advance(self, name: str) -> float:
        rebalancer = self.actors[name].rebalancer
        assert rebalancer is not None
        return rebalancer.advance()

    def balance(self, steps: int = 2000) -> None:
        """Until every living member has looked at all its pages, left nothing to do, and the pool is settled."""
        living = {name: actor for name, actor in self.actors.items() if actor.alive}
        tickets = {name: actor.rebalance() for name, actor in living.items()}
        for step in range(steps):
            for name in living:
                self.advance(name)
            if all(self.done(name, tickets[name]) for name in living):
                return
            self.clock.now += 0.01 if step % 50 else 2.0
        raise AssertionError({name: self.report(name) for name in living})

    def start(self) -> None:
        """From now on the work is done in threads; members that join get their own."""
        self.rest_clock = time.monotonic
        for actor in self.actors.values():
            self._equip(actor)

    def stop(self) -> None:
        for actor in self.actors.values():
            assert actor.rebalancer is not None
            actor.rebalancer.stop()

    def report(self, name: str) -> BalanceReport:
        rebalancer = self.actors[name].rebalancer
        assert rebalancer is not None
        return rebalancer.report

    def done(self, name: str, ticket: int) -> bool:
        report = self.report(name)
        return report.finished >= ticket and report.clean and report.settled

    def holders(self, number: int) -> set[str]:
        key = page_key(number)
        return {name for name, actor in self.actors.items() if actor.alive and actor.service.shard.describe([key])}

    def owners(self, number: int) -> set[str]:
        membership = self.directory.newest
        return {membership.members[i] for i in membership.owners([page_key(number)[16:]])[0].tolist()}

    def put_at(self, name: str, numbers: Sequence[int], length: int = PAGE, label: bytes = b"") -> None:
        """Store pages at a member, whether it owns them or not."""
        shard = self.actors[name].service.shard
        for number in numbers:
            grant = shard.reserve([page_key(number)], length, label)
            offset = int(grant.grants["offset"][0])
            checksum = store_page(shard.arena.data(offset, length), page_of(number, (length,)))
            assert shard.commit(grant.id, np.array([checksum], np.uint64)).all()

    def _equip(self, actor: LocalActor, *, returned: bool = False) -> None:
        actor.rebalancer = Rebalancer(
            actor.name,
            actor.service,
            lambda name: self.member(name, self.counters, use_shm=self.use_shm),
            self.directory,
            self.options,
            returned=returned,
            on_gone=lambda: self.gone.append(actor.name),
            clock=self.rest_clock,
        )
        if self.rest_clock is time.monotonic:
            actor.rebalancer.start()


def reads(client: PoolClient, numbers: Sequence[int]) -> list[bool]:
    """Whether each page is found, one by one and in one batch; what is read must be right."""
    found = [client.lookup([page_key(n)], Deadline(5)) == 1 for n in numbers]
    pages = [np.zeros(PAGE, np.uint8) for _ in numbers]
    got = [client.load([page_key(n)], [page], Deadline(5)) == 1 for n, page in zip(numbers, pages, strict=True)]
    assert all(not ok or np.array_equal(page, page_of(n)) for n, page, ok in zip(numbers, pages, got, strict=True))
    keys, leading = [page_key(n) for n in numbers], int(np.logical_and.accumulate(got).sum())
    assert client.load(keys, pages, Deadline(5)) == client.lookup(keys, Deadline(5)) == leading and found == got
    return got


def writes(client: PoolClient, numbers: Sequence[int]) -> list[bool]:
    stored = client.store([page_key(n) for n in numbers], [page_of(n) for n in numbers], b"", Deadline(5))
    return [True] * stored + [False] * (len(numbers) - stored)
