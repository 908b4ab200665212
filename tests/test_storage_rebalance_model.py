"""Random joins, leaves, crashes and losses of a storage pool, with reads and writes in between, step by step.

As long as a member that holds a page lives, and there is room, the page is found; in the end each is where it belongs.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from hicache_ray.storage.pool.membership import MOST_CHANGES
from tests.moving_pool import MovingPool, reads, writes
from tests.storage_local import page_key

NAMES = "abcdefgh"
MOST_MEMBERS, PAGES = 5, 40

numbers = st.lists(st.integers(0, PAGES - 1), min_size=1, max_size=8, unique=True)


class MovingPoolModel(RuleBasedStateMachine):
    """The model is the set of pages that were stored. Clients differ in their transport, members in nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.stored: set[int] = set()

    @initialize(replicas=st.integers(1, 3), use_shm=st.booleans())
    def start(self, replicas: int, use_shm: bool) -> None:
        self.pool = MovingPool(self.folder, NAMES[:2], replicas, PAGES, use_shm=use_shm)
        self.clients = [self.pool.client(use_shm=use_shm) for use_shm in (True, False)]

    @property
    def changes_allowed(self) -> bool:
        return len(self.pool.directory.newest.previous) < MOST_CHANGES

    @rule(chosen=numbers, which=st.integers(0, 1))
    def write(self, chosen: list[int], which: int) -> None:
        assert all(writes(self.clients[which], chosen))
        self.stored.update(chosen)

    @rule(chosen=numbers, which=st.integers(0, 1))
    def read(self, chosen: list[int], which: int) -> None:
        assert reads(self.clients[which], chosen) == [n in self.stored for n in chosen]

    @rule(which=st.integers(0, 7), steps=st.integers(1, 6))
    def move(self, which: int, steps: int) -> None:
        names = sorted(self.pool.actors)
        for _ in range(steps):
            self.pool.advance(names[which % len(names)])
        self.pool.clock.now += 0.1

    @precondition(lambda self: self.changes_allowed and len(self.pool.directory.newest.members) < MOST_MEMBERS)
    @rule(which=st.integers(0, 7))
    def join(self, which: int) -> None:
        name = NAMES[which]
        if name not in self.pool.actors:
            self.pool.join(name)

    @precondition(lambda self: self.changes_allowed and len(self.pool.directory.newest.members) > 1)
    @rule(which=st.integers(0, 4))
    def leave(self, which: int) -> None:
        members = self.pool.directory.newest.members
        self.pool.leave(members[which % len(members)])

    @rule()
    def end_those_that_left(self) -> None:
        if self.pool.directory.newest.settled:
            for name in set(self.pool.actors) - set(self.pool.directory.newest.members):
                self.pool.end(name)

    @rule(which=st.integers(0, 7), empty=st.booleans())
    def crash_and_restart(self, which: int, empty: bool) -> None:
        """With an empty arena only where no page is lost by it."""
        names = sorted(self.pool.actors)
        name = names[which % len(names)]
        self.pool.restart(name, empty=empty and not self.only_at(name))

    @precondition(lambda self: len(self.pool.directory.newest.members) > 1)
    @rule(which=st.integers(0, 7))
    def lose(self, which: int) -> None:
        """A member, or one that is leaving, is taken out by force."""
        names = self.pool.directory.newest.everyone
        name = names[which % len(names)]
        if not self.only_at(name):
            self.pool.end(name)

    @rule()
    def balance(self) -> None:
        self.pool.balance()
        for number in self.stored:
            assert self.pool.holders(number) == self.pool.owners(number)

    def only_at(self, name: str) -> bool:
        """Whether there is a page that clients would find at no other member."""
        return any(self.found_at(number) <= {name} for number in self.stored)

    def found_at(self, number: int) -> set[str]:
        """The holders of a page that clients would ask."""
        membership = self.pool.directory.newest
        before = membership.owned_before([page_key(number)[16:]])[0]
        return self.pool.holders(number) & (self.pool.owners(number) | set(np.array(membership.everyone)[before]))

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.balance()
            for client in self.clients:
                assert all(reads(client, sorted(self.stored)))
            self.pool.check()
            for actor in self.pool.actors.values():
                actor.kill()
        shutil.rmtree(self.folder)


TestMovingPool = MovingPoolModel.TestCase
TestMovingPool.settings = settings(max_examples=40, stateful_step_count=30)
