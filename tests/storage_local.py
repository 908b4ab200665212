"""A storage pool in one process, without Ray, whose members can be made to fail: for tests of the client."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hicache_ray.deadline import Deadline
from hicache_ray.storage.base import StorageCounters
from hicache_ray.storage.breaker import Breaker
from hicache_ray.storage.pool.channel import ChannelError, ChannelLost, ChannelTimeout
from hicache_ray.storage.pool.client import PoolClient
from hicache_ray.storage.pool.member import PoolMember
from hicache_ray.storage.pool.membership import Membership
from hicache_ray.storage.pool.rebalance import Rebalancer
from hicache_ray.storage.pool.service import ShardService
from hicache_ray.storage.shard.arena import Arena
from hicache_ray.storage.shard.layout import ArenaGeometry
from hicache_ray.storage.shard.shard import Shard

PAGE = 4096


class Clock:
    """A clock that stands still until told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class LocalActor:
    """A shard service that can die, come back with its arena or an empty one, and misbehave once per named method."""

    def __init__(self, name: str, path: Path, membership: Membership, clock: Clock, pages: int) -> None:
        self.name = name
        self.clock = clock
        self._pages = pages
        self._path = path
        self.membership = membership
        self.calls: list[str] = []
        self.faults: dict[str, Callable[[], None]] = {}
        self.alive = True
        self.rebalancer: Rebalancer | None = None
        self.service = self._serve(Arena.create(path, ArenaGeometry(pages, PAGE)))

    def _serve(self, arena: Arena) -> ShardService:
        return ShardService(Shard(arena, clock=self.clock), self.membership)

    def balance(self) -> bytes:
        assert self.rebalancer is not None
        return self.rebalancer.balance()

    def set_membership(self, message: bytes) -> int:
        return self.service.set_membership(message)

    def rebalance(self) -> int:
        assert self.rebalancer is not None
        return self.rebalancer.request()

    def kill(self) -> None:
        self.alive = False
        self.service.shard.arena.close()

    def restart(self, *, empty: bool = False) -> None:
        if empty:
            self._path = self._path.with_suffix(".new")
            arena = Arena.create(self._path, ArenaGeometry(self._pages, PAGE))
        else:
            arena = Arena.open(self._path)
        self.service, self.alive = self._serve(arena), True

    def describe(self) -> tuple[str, int, str]:
        return str(self._path), self.service.shard.arena.arena_id, ""

    def run(self, method: str, args: tuple[Any, ...]) -> Any:
        self.calls.append(method)
        if not self.alive:
            raise ChannelLost(f"{self.name} is dead")
        fault = self.faults.pop(method, None)
        if fault is not None:
            fault()
        return getattr(self if hasattr(self, method) else self.service, method)(*args)


class LocalPending:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def result(self, timeout: float) -> Any:
        if isinstance(self._answer, ChannelError):
            raise self._answer
        return self._answer


class LocalChannel:
    """Runs each call at once, in the caller's thread."""

    def __init__(self, actor: LocalActor) -> None:
        self._actor = actor

    def call(self, method: str, *args: Any) -> LocalPending:
        try:
            return LocalPending(self._actor.run(method, args))
        except ChannelError as error:
            return LocalPending(error)

    def send(self, method: str, *args: Any) -> None:
        self.call(method, *args)


def times_out() -> None:
    raise ChannelTimeout("no answer")


def is_lost() -> None:
    raise ChannelLost("gone")


class LocalPool:
    """Actors and a way to make clients of them."""

    def __init__(self, folder: Path, names: Sequence[str] = ("a", "b"), replicas: int = 1, pages: int = 64) -> None:
        self.clock = Clock()
        self._folder = folder
        self._pages = pages
        self.membership = Membership(1, tuple(names), replicas, "token")
        self.actors = {name: self._actor(name) for name in names}

    def _actor(self, name: str) -> LocalActor:
        return LocalActor(name, self._folder / f"{name}.arena", self.membership, self.clock, self._pages)

    def client(self, *, use_shm: bool = True, copy_threads: int = 1) -> PoolClient:
        counters = StorageCounters()

        def connect(name: str) -> PoolMember:
            return self.member(name, counters, use_shm=use_shm)

        client = PoolClient(self.membership, connect, counters, copy_threads, self.read_directory, self.clock)
        for member in client.members:
            member.attach(Deadline(1.0), wait=True)
        return client

    def read_directory(self) -> Membership | None:
        """What a client finds when it looks for the newest membership."""
        return self.membership

    def member(self, name: str, counters: StorageCounters, *, use_shm: bool = True) -> PoolMember:
        """A connection to an actor."""
        breaker, channel = Breaker(1.0, 4.0, clock=self.clock), LocalChannel(self.actors[name])
        return PoolMember(name, channel, breaker, counters, call_timeout=1.0, use_shm=use_shm, prefault=False)

    def change(self, membership: Membership) -> None:
        """Make it the membership that all members know."""
        self.membership = membership
        for name in membership.everyone:
            if name not in self.actors:
                self.actors[name] = self._actor(name)
        for actor in self.actors.values():
            actor.set_membership(membership.pack())

    def check(self) -> None:
        for actor in self.actors.values():
            if actor.alive:
                actor.service.shard.check_integrity(read_pages=True)

    def stored(self) -> int:
        return sum(actor.service.shard.stats().pages for actor in self.actors.values())


def page_key(number: int) -> bytes:
    """A key as the backend makes it: 16 bytes of identity and a page hash."""
    return b"identity-digest-" + np.random.default_rng(number).bytes(32)


def page_of(number: int, shape: tuple[int, ...] = (PAGE,)) -> np.ndarray:
    return np.random.default_rng(1_000_000 + number).integers(0, 256, shape, dtype=np.uint8)


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Runs `work(0)` ... `work(count - 1)` at the same time; raises what the first of them raised."""
    errors: queue.Queue[BaseException] = queue.Queue()

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.put(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not errors.empty():
        raise errors.get()
