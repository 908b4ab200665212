"""A client of a storage pool, without Ray: which member holds which page, calls to all members at once, copies.

An operation makes one call to each member concerned, and all calls are under way together. To read, the client calls
`acquire` and copies; it does not wait for the release. To write, it calls `reserve`, copies, and calls `commit`. When
the first holder of a page does not have it, the next holder is asked in another round, and, while pages move, the
members that held it before.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Concatenate, NamedTuple, ParamSpec

import numpy as np
import numpy.typing as npt

from hicache_ray.deadline import Deadline
from hicache_ray.pages import Bytes
from hicache_ray.storage.base import StorageCounters
from hicache_ray.storage.pool.channel import ChannelError, Pending
from hicache_ray.storage.pool.member import ActorAnswer, PoolMember
from hicache_ray.storage.pool.membership import PAGE_HASH_BYTES, Membership
from hicache_ray.storage.pool.transport import ReadGrant, WriteGrant
from hicache_ray.storage.pool.wire import STALE, KeyCall, Release
from hicache_ray.storage.shard.grants import EXISTING, GRANTED, Flags
from hicache_ray.storage.shard.page_copy import Copier, load_page, store_page

logger = logging.getLogger("hicache_ray.storage.pool.client")

_Rest = ParamSpec("_Rest")

MEMBERSHIP_RETRIES = 3
"""How often one operation is tried when the membership changes under it."""
DIRECTORY_SECONDS = 1.0
"""Seconds between two looks into the directory, while members are away."""
DIRECTORY_AWAY_SECONDS = 30.0
"""Seconds until the next look after one that failed."""


class _MembershipChanged(Exception):
    """A member refused a call because it knows a newer membership. This client has learned that membership by now."""


class _View(NamedTuple):
    """The membership and its members at one moment."""

    membership: Membership
    members: list[PoolMember]


def _begun_again(
    operation: Callable[Concatenate[PoolClient, _View, _Rest], int],
) -> Callable[Concatenate[PoolClient, _Rest], int]:
    """Runs an operation under the newest membership; starts it again if the membership changes meanwhile."""

    @functools.wraps(operation)
    def run(client: PoolClient, *args: _Rest.args, **kwargs: _Rest.kwargs) -> int:
        for _ in range(MEMBERSHIP_RETRIES):
            with suppress(_MembershipChanged):
                return operation(client, client._view, *args, **kwargs)
        return 0

    return run


class PoolClient:
    """Pages in and out of the members of a pool. Thread-safe. No method raises for what a member does.

    Keys are an identity's digest and a page hash. The answers count leading pages. A page may lie in any array of
    [..., segment_bytes]; all pages of a call have the same size.
    """

    def __init__(
        self,
        membership: Membership,
        connect: Callable[[str], PoolMember],
        counters: StorageCounters,
        copy_threads: int = 1,
        directory: Callable[[], Membership | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        connect: makes the member of that name. It is called once per name and must not wait for the member.
        copy_threads: threads that copy the pages of one operation.
        directory: reads the newest membership, in bounded time, or raises ChannelError. It is read while members are
            away: otherwise, if every member that knows the new membership is gone, nobody tells this client.
        """
        self._directory = directory
        self._clock = clock
        self._next_read = 0.0
        self._copier = Copier(copy_threads)
        self._connect = connect
        self.counters = counters
        self._lock = threading.Lock()
        self._known: dict[str, PoolMember] = {}
        self._view = self._view_of(membership)

    @property
    def membership(self) -> Membership:
        """The newest membership this client knows."""
        return self._view.membership

    @property
    def members(self) -> list[PoolMember]:
        """The members, in the membership's order, and those that are leaving."""
        return self._view.members

    def adopt(self, membership: Membership) -> None:
        """Use a membership from now on, unless a newer one is known."""
        with self._lock:
            if membership.epoch > self._view.membership.epoch:
                self._view = self._view_of(membership)

    def close(self) -> None:
        """End the copying threads and the connections. Idempotent."""
        self._copier.close()
        for member in self._view.members:
            member.close()

    @_begun_again
    def lookup(self, view: _View, keys: Sequence[bytes], deadline: Deadline) -> int:
        """Returns how many pages are stored, counted from the first without a gap."""
        found = np.zeros(len(keys), np.bool_)
        search = _Search(view.membership, keys)
        for choice in range(search.rounds):
            groups = search.groups(choice, np.flatnonzero(~found))
            for member, answer in self._ask(view, lambda _: "exists", groups, keys, deadline).items():
                found[groups[member]] |= answer.reply.flags
        return _count(found)

    @_begun_again
    def load(self, view: _View, keys: Sequence[bytes], pages: Sequence[Bytes], deadline: Deadline) -> int:
        """Fill `pages`, one for each key. Returns how many hold exactly the bytes that were stored, counted from the
        first without a gap."""
        done = np.zeros(len(keys), np.bool_)
        length = pages[0].nbytes if len(pages) else 0
        search = _Search(view.membership, keys)
        for choice in range(search.rounds):
            groups = search.groups(choice, np.flatnonzero(~done))
            grants = []
            for member, answer in self._ask(view, PoolMember.read_method, groups, keys, deadline, length).items():
                granted = groups[member][answer.reply.grants["status"] == GRANTED]
                grants.append(ReadGrant(view.members[member], answer, length, granted.tolist()))
            located = done.copy()
            for grant in grants:
                located[grant.pages] = True
            # A page behind a missing one is of no use, unless the next round may still find the missing one.
            wanted = _leading(located) if choice + 1 == search.rounds else located
            self._read(grants, wanted, pages, done)
            for grant in grants:
                grant.finish(deadline)
                self.counters.add(corrupt=len(grant.suspects))
            if done.all():
                break
        return _count(done)

    def _read(self, grants: Sequence[ReadGrant], wanted: Flags, pages: Sequence[Bytes], done: Flags) -> None:
        """Copy those of the granted pages that are wanted; a page that arrived as it was stored is done."""
        chosen = [(grant, k, page) for grant in grants for k, page in enumerate(grant.pages) if wanted[page]]
        targets, cells = [pages[page] for _, _, page in chosen], [grant.cells[k] for grant, k, _ in chosen]
        for (grant, k, page), checksum in zip(chosen, self._copier.run(load_page, targets, cells), strict=True):
            done[page] = grant.accept(k, checksum)

    @_begun_again
    def store(
        self, view: _View, keys: Sequence[bytes], pages: Sequence[Bytes], label: bytes, deadline: Deadline
    ) -> int:
        """Store `pages`. Returns how many are stored, counted from the first without a gap. A page is stored when one
        of its holders has it."""
        length = pages[0].nbytes if len(pages) else 0
        existing, grants = self._reserve(view, keys, length, label, deadline)
        placed = existing.copy()
        for grant in grants:
            placed[grant.pages] = True
        # A page must not be stored without the pages before it, so writing stops at the first page that got no cell.
        writable = _leading(placed)
        chosen = [(grant, k, page) for grant in grants for k, page in enumerate(grant.pages) if writable[page]]
        cells, sources = [grant.cells[k] for grant, k, _ in chosen], [pages[page] for _, _, page in chosen]
        for (grant, k, _), checksum in zip(chosen, self._copier.run(store_page, cells, sources), strict=True):
            grant.checksums[k] = checksum
        stored = self._commit(grants, writable, deadline)
        done = _count(existing | stored)
        new = int(stored[:done].sum())
        self.counters.add(set_stored=new, set_existing=done - new, set_bytes=len(chosen) * length)
        return done

    def _reserve(
        self, view: _View, keys: Sequence[bytes], length: int, label: bytes, deadline: Deadline
    ) -> tuple[Flags, list[WriteGrant]]:
        """Which pages are stored already, and cells for the other pages, at each of their holders that has room."""
        owners = view.membership.owners(_hashes(keys))
        everything = np.arange(len(keys))
        groups = {member: everything[(owners == member).any(axis=1)] for member in np.unique(owners).tolist()}
        existing, grants = np.zeros(len(keys), np.bool_), []
        for member, answer in self._ask(view, lambda _: "reserve", groups, keys, deadline, length, label).items():
            status = answer.reply.grants["status"]
            existing[groups[member][status == EXISTING]] = True
            granted = groups[member][status == GRANTED]
            if len(granted):
                grants.append(WriteGrant(view.members[member], answer.reply, length, granted.tolist()))
        return existing, grants

    def _commit(self, grants: Sequence[WriteGrant], writable: Flags, deadline: Deadline) -> Flags:
        """Which pages have become visible at one holder at least."""
        stored = np.zeros(len(writable), np.bool_)
        pending: list[tuple[WriteGrant, Pending | None]] = []
        for grant in grants:
            good = writable[grant.pages]
            if good.any():
                pending.append((grant, grant.commit(good)))
            else:
                grant.give_up()
        for grant, call in pending:
            stored[np.array(grant.pages)[grant.finish(call, deadline)]] = True
        return stored

    def _ask(
        self,
        view: _View,
        method_of: Callable[[PoolMember], str],
        groups: dict[int, npt.NDArray[np.int64]],
        keys: Sequence[bytes],
        deadline: Deadline,
        length: int = 0,
        label: bytes = b"",
    ) -> dict[int, ActorAnswer]:
        """Call each member about its keys, all at once. Returns the answers of the members that answered.

        Args:
            method_of: the call to make to a member.
            groups: by place of the member, which of the keys to ask it for.

        Raises:
            _MembershipChanged: there is a newer membership. What members granted is given back.
        """
        calls = {}
        for member, group in groups.items():
            call = KeyCall(view.membership.epoch, [keys[i] for i in group.tolist()], length, label).pack()
            calls[member] = view.members[member].start(method_of(view.members[member]), call)
        answers = {member: view.members[member].finish(call, deadline) for member, call in calls.items()}
        given = {member: answer for member, answer in answers.items() if answer is not None}
        newer = [answer.reply.payload for answer in given.values() if answer.reply.status == STALE]
        if newer:
            self._give_back(view, given)
            self.adopt(max(map(Membership.unpack, newer), key=lambda membership: membership.epoch))
            raise _MembershipChanged
        if len(given) < len(groups) and self._learn() > view.membership.epoch:
            self._give_back(view, given)
            raise _MembershipChanged
        return given

    def _learn(self) -> int:
        """Look for a newer membership in the directory, unless that was done just now. Returns the epoch known
        afterwards."""
        with self._lock:
            due = self._clock() >= self._next_read
            if due:
                self._next_read = self._clock() + DIRECTORY_SECONDS
        if due:
            try:
                membership = self._directory()
            except ChannelError as error:
                logger.info("the directory of storage pools can't be read now: %s", error)
                self._next_read = self._clock() + DIRECTORY_AWAY_SECONDS
            else:
                if membership is not None and membership.token == self._view.membership.token:
                    self.adopt(membership)
        return self._view.membership.epoch

    def _give_back(self, view: _View, answers: dict[int, ActorAnswer]) -> None:
        for member, answer in answers.items():
            if answer.reply.id:
                view.members[member].send("release", Release(answer.reply.id).pack())

    def _view_of(self, membership: Membership) -> _View:
        members = {name: self._known.get(name) or self._connect(name) for name in membership.everyone}
        self._known = members
        return _View(membership, list(members.values()))


class _Search:
    """Which members to ask for pages, round after round: the holders, best first, then the members that held pages
    before the change that is under way."""

    def __init__(self, membership: Membership, keys: Sequence[bytes]) -> None:
        self._membership = membership
        self._hashes = _hashes(keys)
        self._owners = membership.owners(self._hashes)
        self._holders = self._owners.shape[1]
        self.rounds = self._holders if membership.settled else self._holders + 1

    def groups(self, choice: int, missing: npt.NDArray[np.int64]) -> dict[int, npt.NDArray[np.int64]]:
        """By place of the member, the missing pages to ask it for in that round; page numbers, ascending."""
        if choice < self._holders:
            owners = self._owners[missing, choice]
            return {member: missing[owners == member] for member in np.unique(owners).tolist()}
        before = self._membership.owned_before([self._hashes[page] for page in missing.tolist()])
        return {member: missing[before[:, member]] for member in np.flatnonzero(before.any(axis=0)).tolist()}


def _hashes(keys: Sequence[bytes]) -> list[bytes]:
    """The page hashes that keys end in."""
    return [key[-PAGE_HASH_BYTES:] for key in keys]


def _leading(flags: Flags) -> Flags:
    """The flags, with each flag behind the first False made False."""
    return np.logical_and.accumulate(flags)


def _count(flags: Flags) -> int:
    """How many flags are set before the first False."""
    return len(flags) if flags.all() else int(np.argmin(flags))
