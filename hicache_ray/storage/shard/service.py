"""What a storage actor answers, without Ray: messages in, messages out, on top of a shard."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from hicache_ray import faultpoints
from hicache_ray.storage.base import Bytes
from hicache_ray.storage.pool.membership import Membership
from hicache_ray.storage.pool.wire import FAILED, OK, STALE, Commit, Offer, Reply, Request, WireError
from hicache_ray.storage.shard.page_copy import load_page, store_page
from hicache_ray.storage.shard.shard import GRANTED, Flags, Grants, Shard


class ShardService:
    """The calls of one storage actor. Thread-safe. No call raises for what a client sent: it answers FAILED with the
    reason, so that a client can tell a bad request from a dead actor."""

    def __init__(self, shard: Shard, membership: Membership) -> None:
        self.shard = shard
        self._membership = membership
        self._mark = 0
        self._lock = threading.Lock()

    @property
    def membership(self) -> Membership:
        """The newest membership this actor was told of."""
        return self._membership

    def set_membership(self, message: bytes) -> int:
        """Learn a membership unless a newer one is known; returns the epoch known then."""
        membership = Membership.unpack(message)
        with self._lock:
            if membership.epoch > self._membership.epoch:
                self._membership = membership
                self._mark = self.shard.mark()
            return self._membership.epoch

    @property
    def stores_by_membership(self) -> bool:
        """Whether every page that was stored under an older membership is visible by now."""
        return self.shard.written_since(self._mark)

    def exists(self, message: bytes) -> bytes:
        """Request -> flags, one per key."""
        faultpoints.reach("actor.exists")
        return self._answer(message, lambda request: (0, self.shard.exists(request.keys).tobytes()))

    def reserve(self, message: bytes) -> bytes:
        """Request -> reservation id and grants; see `Shard.reserve`."""
        faultpoints.reach("actor.reserve")

        def reserve(request: Request) -> tuple[int, bytes]:
            reservation = self.shard.reserve(request.keys, request.length, request.label)
            return reservation.id, reservation.grants.tobytes()

        return self._answer(message, reserve)

    def offer(self, message: bytes) -> bytes:
        """Offer -> reservation id and grants, for another actor that brings pages; see `Shard.offer`."""
        faultpoints.reach("actor.offer")
        try:
            offer = Offer.unpack(message)
        except WireError as error:
            return self._reply(FAILED, 0, str(error).encode())

        def receive(request: Request) -> tuple[int, bytes]:
            reservation = self.shard.offer(request.keys, request.length, request.label, offer.expires, offer.displace)
            return reservation.id, reservation.grants.tobytes()

        return self._answer(offer.request, receive)

    def commit(self, message: bytes, data: Bytes | None = None) -> bytes:
        """Commit -> flags, one per granted page.

        Args:
            data: the granted pages [n, page_bytes], of a client that can't write to the arena itself.
        """
        faultpoints.reach("actor.commit")
        try:
            commit = Commit.unpack(message)
            good = commit.good if data is None else commit.good & self._write(commit, data)
            return self._reply(OK, 0, self.shard.commit(commit.reservation, commit.checksums, good).tobytes())
        except ValueError as error:
            return self._reply(FAILED, 0, str(error).encode())

    def abort(self, reservation: int) -> None:
        """See `Shard.abort`."""
        self.shard.abort(reservation)

    def acquire(self, message: bytes) -> bytes:
        """Request -> lease id and grants; see `Shard.acquire`."""
        faultpoints.reach("actor.acquire")

        def acquire(request: Request) -> tuple[int, bytes]:
            lease = self.shard.acquire(request.keys, request.length)
            faultpoints.damage("page.arena", lambda: self._granted(lease.grants, request.length))
            return lease.id, lease.grants.tobytes()

        return self._answer(message, acquire)

    def read(self, message: bytes) -> tuple[bytes, Bytes]:
        """As `acquire`, and the granted pages [granted, page_bytes]; the lease has ended at return."""
        faultpoints.reach("actor.read")
        pages = np.empty((0, 0), np.uint8)

        def read(request: Request) -> tuple[int, bytes]:
            nonlocal pages
            lease = self.shard.acquire(request.keys, request.length)
            granted = lease.grants[lease.grants["status"] == GRANTED]
            faultpoints.damage("page.arena", lambda: self._granted(lease.grants, request.length))
            pages = np.empty((len(granted), request.length), np.uint8)
            suspects = [
                int(grant["slot"])
                for page, grant in zip(pages, granted, strict=True)
                if load_page(page, self.shard.arena.data(int(grant["offset"]), request.length)) != grant["checksum"]
            ]
            self.shard.release(lease.id, suspects)
            faultpoints.damage("page.answered", lambda: list(pages))
            return 0, lease.grants.tobytes()

        return self._answer(message, read), pages

    def clear(self, label: bytes | None = None, prefix: bytes = b"") -> bytes:
        """See `Shard.clear` -> the number of dropped pages, 8 bytes little endian."""
        return self._reply(OK, 0, self.shard.clear(label, prefix).to_bytes(8, "little"))

    def release(self, lease: int) -> None:
        """See `Shard.release`."""
        self.shard.release(lease)

    def report(self, message: bytes) -> bytes:
        """End a lease and name the slots whose bytes were wrong, both as int64 -> nothing, when they are dropped."""
        if not message or len(message) % 8:
            return self._reply(FAILED, 0, b"a report is a lease and slots, of 8 bytes each")
        lease, *suspects = np.frombuffer(message, np.int64).tolist()
        self.shard.release(lease, suspects)
        return self._reply(OK, 0, b"")

    def _granted(self, grants: Grants, length: int) -> list[Bytes]:
        """Views of the granted pages in the arena."""
        offsets = grants["offset"][grants["status"] == GRANTED].tolist()
        return [self.shard.arena.data(offset, length) for offset in offsets]

    def _write(self, commit: Commit, data: Bytes) -> Flags:
        """Copy pages to their reserved slots; True for those that arrived as they were sent."""
        offsets, length = self.shard.reserved(commit.reservation)
        if not length:
            return np.zeros(len(commit.checksums), np.bool_)
        if data.shape != (len(offsets), length) or len(commit.checksums) != len(offsets):
            raise WireError(f"pages of shape {data.shape} for a reservation of {len(offsets)} pages of {length} bytes")
        arena = self.shard.arena
        written = [
            store_page(arena.data(offset, length), page) == checksum
            for page, offset, checksum in zip(data, offsets, commit.checksums.tolist(), strict=True)
        ]
        return np.array(written, np.bool_)

    def _answer(self, message: bytes | Request, answer: Callable[[Request], tuple[int, bytes]]) -> bytes:
        try:
            request = message if isinstance(message, Request) else Request.unpack(message)
            if request.epoch < self._membership.epoch:
                return self._reply(STALE, 0, self._membership.pack())
            identity, payload = answer(request)
            if request.epoch < self._membership.epoch:
                # It changed meanwhile. What was missed may have been moved before, and what was reserved should be
                # written elsewhere.
                self.shard.abort(identity)
                self.shard.release(identity)
                return self._reply(STALE, 0, self._membership.pack())
            return self._reply(OK, identity, payload)
        except ValueError as error:
            return self._reply(FAILED, 0, str(error).encode())

    def _reply(self, status: int, identity: int, payload: bytes) -> bytes:
        return Reply(status, self._membership.epoch, self.shard.arena.arena_id, identity, payload).pack()
