"""Who holds which page: rendezvous hashing of page hashes over a pool's members, and the epoch that orders changes.

Every client computes owners by itself, so members can join and leave without a directory of pages. When one of n
members joins or leaves, one n-th of the pages has to move. Until these pages are moved, a membership remembers the
members before the change: a page that its owners do not hold yet is found there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

PAGE_HASH_BYTES = 32
MOST_CHANGES = 4
"""How many changes of a pool may be under way at the same time."""
_Packed = tuple[int, tuple[str, ...], int, str, tuple[tuple[str, ...], ...]]


@dataclass(frozen=True)
class Membership:
    """The members of a pool at one epoch.

    Attributes:
        epoch: grows with every change.
        members: names, unique; their order does not matter for who owns what.
        replicas: how many members hold each page (all of them, when there are fewer).
        token: tells this pool from an earlier one of the same name.
        previous: the members before each change whose pages are not all moved yet, oldest first.
    """

    epoch: int
    members: tuple[str, ...]
    replicas: int = 1
    token: str = ""
    previous: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.members or len(set(self.members)) != len(self.members):
            raise ValueError(f"a pool needs members with different names, not {self.members}")
        if self.replicas < 1:
            raise ValueError(f"replicas must be at least 1, not {self.replicas}")

    @property
    def holders(self) -> int:
        """Members that hold each page."""
        return min(self.replicas, len(self.members))

    @property
    def settled(self) -> bool:
        """Whether no change of the members is under way."""
        return not self.previous

    @cached_property
    def everyone(self) -> tuple[str, ...]:
        """The members, then those that are leaving: they hold pages until the pool is settled."""
        return tuple(dict.fromkeys([*self.members, *(name for names in self.previous for name in names)]))

    def owners(self, page_hashes: Sequence[bytes]) -> npt.NDArray[np.int64]:
        """Indices into `members` of the holders of each page, best first: [len(page_hashes), holders].

        Args:
            page_hashes: of 32 bytes each.
        """
        count = len(page_hashes)
        if len(self.members) == 1:
            return np.zeros((count, 1), dtype=np.int64)
        words = np.frombuffer(b"".join(page_hashes), dtype="<u8").reshape(count, PAGE_HASH_BYTES // 8)
        folded = words[:, 0].copy()
        for column in range(1, words.shape[1]):
            folded = _mix(folded) ^ words[:, column]
        scores = _mix(_mix(folded)[:, None] ^ self._seeds[None, :])
        return np.argsort(scores, axis=1, kind="stable")[:, : self.holders]

    def owned_before(self, page_hashes: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Who may hold pages that their owners do not hold yet: [len(page_hashes), len(everyone)].

        True for the owners under a previous membership that are no owners now.
        """
        rows = np.arange(len(page_hashes))[:, None]
        before = np.zeros((len(page_hashes), len(self.everyone)), np.bool_)
        for names in self.previous:
            places = np.array([self.everyone.index(name) for name in names], np.int64)
            before[rows, places[Membership(0, names, self.replicas).owners(page_hashes)]] = True
        before[rows, self.owners(page_hashes)] = False
        return before

    def joined_by(self, *names: str) -> Membership:
        """The next epoch, with more members; ValueError for one that is there, or when too much is under way."""
        return self._changed_to((*self.members, *names))

    def left_by(self, name: str) -> Membership:
        """The next epoch, with that member leaving: what it holds is found until it is moved to the others.

        Raises:
            ValueError: it is no member, or the last; or too much is under way.
        """
        if name not in self.members:
            raise ValueError(f"{name!r} is no member of the pool; members are {', '.join(self.members)}")
        return self._changed_to(tuple(other for other in self.members if other != name))

    def without(self, name: str) -> Membership:
        """The next epoch, with that member, or leaving member, and its pages gone; ValueError when it is none, or the
        last."""
        if name not in self.everyone:
            raise ValueError(f"{name!r} is no member of the pool; members are {', '.join(self.members)}")
        members = tuple(other for other in self.members if other != name)
        kept = [tuple(other for other in names if other != name) for names in self.previous]
        previous = tuple(names for names in kept if names and set(names) != set(members))
        return replace(self, epoch=self.epoch + 1, members=members, previous=previous)

    def settle(self) -> Membership:
        """The next epoch, with the same members and all pages moved."""
        return replace(self, epoch=self.epoch + 1, previous=())

    def _changed_to(self, members: tuple[str, ...]) -> Membership:
        if set(members) == set(self.members):
            return replace(self, epoch=self.epoch + 1)
        if len(self.previous) >= MOST_CHANGES:
            raise ValueError(f"{MOST_CHANGES} changes of the pool are under way; wait until it is balanced")
        return replace(self, epoch=self.epoch + 1, members=members, previous=(*self.previous, self.members))

    def pack(self) -> bytes:
        """The membership as a message."""
        return msgspec.json.encode((self.epoch, self.members, self.replicas, self.token, self.previous))

    @classmethod
    def unpack(cls, message: bytes) -> Membership:
        """The membership in a message; ValueError when it is none."""
        return cls(*msgspec.json.decode(message, type=_Packed))

    @cached_property
    def _seeds(self) -> npt.NDArray[np.uint64]:
        return np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in self.members], dtype=np.uint64)


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser, of arrays of any shape."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
