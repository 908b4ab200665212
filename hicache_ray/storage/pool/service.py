"""What a storage actor answers, without Ray: messages in, messages out, on top of a shard."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from hicache_ray import faultpoints
from hicache_ray.pages import Bytes
from hicache_ray.storage.pool.membership import Membership
from hicache_ray.storage.pool.wire import FAILED, OK, STALE, Commit, KeyCall, Offer, Release, Reply
from hicache_ray.storage.shard.grants import GRANTED, Flags, Granted, Grants
from hicache_ray.storage.shard.page_copy import load_page, store_page
from hicache_ray.storage.shard.shard import Shard


class ShardService:
    """The calls of one storage actor. Thread-safe. No call raises for what a client sent: it answers FAILED with the
    reason, so that a client can tell a bad request from a dead actor.

    Attributes:
        shard: the pages.
        membership: the newest membership this actor was told of.
        on_membership: called after each change of it.
    """

    def __init__(self, shard: Shard, membership: Membership) -> None:
        self.shard = shard
        self.membership = membership
        self.on_membership: Callable[[], None] = lambda: None
        self._mark = 0
        self._lock = threading.Lock()

    def set_membership(self, message: bytes) -> int:
        """Learn a membership unless a newer one is known. Returns the epoch known afterwards."""
        membership = Membership.unpack(message)
        with self._lock:
            is_newer = membership.epoch > self.membership.epoch
            if is_newer:
                self.membership = membership
                self._mark = self.shard.mark()
        if is_newer:
            self.on_membership()
        return self.membership.epoch

    @property
    def stores_by_membership(self) -> bool:
        """Whether every page that was stored under an older membership is visible by now."""
        return self.shard.written_since(self._mark)

    def exists(self, message: bytes) -> bytes:
        """KeyCall -> flags, one per key."""
        faultpoints.reach("actor.exists")
        return self._answer(message, lambda call: (0, self.shard.exists(call.keys)))

    def reserve(self, message: bytes) -> bytes:
        """KeyCall -> reservation id and grants; see `Shard.reserve`."""
        faultpoints.reach("actor.reserve")
        return self._answer(message, lambda call: self.shard.reserve(call.keys, call.length, call.label))

    def offer(self, message: bytes) -> bytes:
        """Offer -> reservation id and grants, for another actor that brings pages; see `Shard.offer`."""
        faultpoints.reach("actor.offer")
        try:
            offer = Offer.unpack(message)
        except ValueError as error:
            return self.reply(FAILED, str(error).encode())
        expires = np.array(offer.expires, np.float64)
        return self._answer(
            offer.call, lambda call: self.shard.offer(call.keys, call.length, call.label, expires, offer.displace)
        )

    def commit(self, message: bytes, data: Bytes | None = None) -> bytes:
        """Commit -> flags, one per granted page.

        Args:
            data: the granted pages [n, page_bytes], of a client that can't write to the arena itself.
        """
        faultpoints.reach("actor.commit")
        try:
            commit = Commit.unpack(message)
            good = np.array(commit.good, np.bool_)
            if data is not None:
                good &= self._write(commit, data)
            flags = self.shard.commit(commit.reservation, np.array(commit.checksums, np.uint64), good)
            return self.reply(OK, flags.tobytes())
        except ValueError as error:
            return self.reply(FAILED, str(error).encode())

    def acquire(self, message: bytes) -> bytes:
        """KeyCall -> lease id and grants; see `Shard.acquire`."""
        faultpoints.reach("actor.acquire")
        return self._answer(message, self._acquire)

    def read(self, message: bytes) -> tuple[bytes, Bytes]:
        """As `acquire`, and the granted pages [granted, page_bytes]; the lease has ended at return."""
        faultpoints.reach("actor.read")
        pages = np.empty((0, 0), np.uint8)

        def read(call: KeyCall) -> tuple[int, Grants]:
            nonlocal pages
            lease = self._acquire(call)
            granted = lease.grants[lease.grants["status"] == GRANTED]
            pages = np.empty((len(granted), call.length), np.uint8)
            suspects = [
                int(grant["cell"])
                for page, grant in zip(pages, granted, strict=True)
                if load_page(page, self.shard.arena.data(int(grant["offset"]), call.length)) != grant["checksum"]
            ]
            self.shard.release(lease.id, suspects)
            faultpoints.damage("page.answered", lambda: list(pages))
            return 0, lease.grants

        return self._answer(message, read), pages

    def release(self, message: bytes) -> bytes:
        """Release -> nothing, when the suspects are dropped; see `Shard.release`."""
        try:
            release = Release.unpack(message)
        except ValueError as error:
            return self.reply(FAILED, str(error).encode())
        self.shard.release(release.id, release.suspects)
        return self.reply(OK, b"")

    def clear(self, label: bytes | None = None, prefix: bytes = b"") -> bytes:
        """See `Shard.clear` -> the number of dropped pages, 8 bytes little endian."""
        return self.reply(OK, self.shard.clear(label, prefix).to_bytes(8, "little"))

    def _acquire(self, call: KeyCall) -> Granted:
        lease = self.shard.acquire(call.keys, call.length)

        def granted_pages() -> list[Bytes]:
            offsets = lease.grants["offset"][lease.grants["status"] == GRANTED].tolist()
            return [self.shard.arena.data(offset, call.length) for offset in offsets]

        faultpoints.damage("page.arena", granted_pages)
        return lease

    def _write(self, commit: Commit, data: Bytes) -> Flags:
        """Copy pages to their reserved cells. Returns True for those that arrived as they were sent."""
        offsets, length = self.shard.reserved(commit.reservation)
        if not length:
            return np.zeros(len(commit.checksums), np.bool_)
        if data.shape != (len(offsets), length) or len(commit.checksums) != len(offsets):
            raise ValueError(f"pages of shape {data.shape} for a reservation of {len(offsets)} pages of {length} bytes")
        arena = self.shard.arena
        written = [
            store_page(arena.data(offset, length), page) == checksum
            for page, offset, checksum in zip(data, offsets, commit.checksums, strict=True)
        ]
        return np.array(written, np.bool_)

    def _answer(self, message: bytes | KeyCall, answer: Callable[[KeyCall], tuple[int, Grants | Flags]]) -> bytes:
        """The answer to a call about keys, unless its client has an old membership."""
        try:
            call = message if isinstance(message, KeyCall) else KeyCall.unpack(message)
            if call.epoch < self.membership.epoch:
                return self.reply(STALE, self.membership.pack())
            identity, payload = answer(call)
            if call.epoch < self.membership.epoch:
                # It changed meanwhile. What was missed may have been moved before, and what was reserved should be
                # written elsewhere.
                self.shard.release(identity)
                return self.reply(STALE, self.membership.pack())
            return self.reply(OK, payload.tobytes(), identity)
        except ValueError as error:
            return self.reply(FAILED, str(error).encode())

    def reply(self, status: int, payload: bytes, identity: int = 0) -> bytes:
        """A `Reply` as it travels, with what this actor knows now."""
        return Reply(status, self.membership.epoch, self.shard.arena.arena_id, identity, payload).pack()
