"""Messages between a client of the pool and a storage actor: one small `bytes` each way, cheap for Ray to move.

Pages themselves travel in shared memory, or as one array beside the message.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_ray.storage.shard.shard import GRANT, Flags, Grants

WIRE_VERSION = 2

OK, STALE, FAILED = 0, 1, 2
"""Status of a reply: done; refused, because the client's membership is older than the actor's; can't be done."""

_REQUEST = struct.Struct("<HHIIQQ")
_REPLY = struct.Struct("<HHQQQ")


class WireError(ValueError):
    """A message of another version, or none at all."""


class Request(NamedTuple):
    """What all calls about keys carry.

    Attributes:
        epoch: of the membership the client knows.
        keys: storage keys, all of one length.
        length: bytes a page (0 where it does not matter).
        label: namespace label of pages to be written.
    """

    epoch: int
    keys: Sequence[bytes]
    length: int = 0
    label: bytes = b""

    def pack(self) -> bytes:
        """The message."""
        key_bytes = len(self.keys[0]) if self.keys else 0
        blob = b"".join(self.keys)
        if len(blob) != key_bytes * len(self.keys):
            raise WireError("the keys of a request must have one length")
        head = _REQUEST.pack(WIRE_VERSION, len(self.label), key_bytes, len(self.keys), self.epoch, self.length)
        return head + self.label + blob

    @classmethod
    def unpack(cls, message: bytes) -> Request:
        """The request in a message; WireError when it is none."""
        try:
            version, label_bytes, key_bytes, count, epoch, length = _REQUEST.unpack_from(message)
        except struct.error as error:
            raise WireError(f"a request of {len(message)} bytes can't be read: {error}") from error
        start = _REQUEST.size + label_bytes
        if version != WIRE_VERSION or len(message) != start + key_bytes * count:
            raise WireError(
                f"a request of version {version} and {len(message)} bytes can't be read here (version {WIRE_VERSION})"
            )
        ends = range(start, len(message), key_bytes or 1)
        return cls(epoch, [message[at : at + key_bytes] for at in ends], length, message[_REQUEST.size : start])


class Offer(NamedTuple):
    """Pages that one storage actor wants to bring to another.

    Attributes:
        request: the keys, their length and label, and the membership that says where they belong.
        expires: per key, clock time after which it is a miss.
        displace: whether other pages may be evicted for them.
    """

    request: Request
    expires: npt.NDArray[np.float64]
    displace: bool

    def pack(self) -> bytes:
        """The message."""
        head = struct.pack("<?I", self.displace, len(self.expires))
        return head + self.expires.tobytes() + self.request.pack()

    @classmethod
    def unpack(cls, message: bytes) -> Offer:
        """The offer in a message; WireError when it is none."""
        try:
            displace, count = struct.unpack_from("<?I", message)
            expires = np.frombuffer(message, np.float64, count, offset=5)
        except (struct.error, ValueError) as error:
            raise WireError(f"an offer of {len(message)} bytes can't be read: {error}") from error
        request = Request.unpack(message[5 + 8 * count :])
        if len(request.keys) != count:
            raise WireError(f"an offer of {len(request.keys)} pages with {count} times can't be read")
        return cls(request, expires, displace)


class Reply(NamedTuple):
    """What every call answers.

    Attributes:
        status: OK, STALE (`payload` is the newer membership) or FAILED (`payload` is the reason as text).
        epoch: of the membership the actor knows.
        arena_id: the arena that grants refer to.
        id: of the reservation or lease, 0 for none.
        payload: flags or grants.
    """

    status: int
    epoch: int
    arena_id: int
    id: int = 0
    payload: bytes = b""

    def pack(self) -> bytes:
        """The message."""
        return _REPLY.pack(WIRE_VERSION, self.status, self.epoch, self.arena_id, self.id) + self.payload

    @classmethod
    def unpack(cls, message: bytes) -> Reply:
        """The reply in a message; WireError when it is none."""
        try:
            version, status, epoch, arena_id, identity = _REPLY.unpack_from(message)
        except struct.error as error:
            raise WireError(f"a reply of {len(message)} bytes can't be read: {error}") from error
        if version != WIRE_VERSION:
            raise WireError(f"a reply of version {version} can't be read here (version {WIRE_VERSION})")
        return cls(status, epoch, arena_id, identity, message[_REPLY.size :])

    @property
    def grants(self) -> Grants:
        """The payload as grants, one per key."""
        return np.frombuffer(self.payload, dtype=GRANT)

    @property
    def flags(self) -> Flags:
        """The payload as flags."""
        return np.frombuffer(self.payload, dtype=np.bool_)


class Commit(NamedTuple):
    """The end of a write: checksums of the granted pages, and which of them are good."""

    reservation: int
    checksums: npt.NDArray[np.uint64]
    good: Flags

    def pack(self) -> bytes:
        """The message."""
        return struct.pack("<Q", self.reservation) + self.checksums.tobytes() + self.good.tobytes()

    @classmethod
    def unpack(cls, message: bytes) -> Commit:
        """The commit in a message; WireError when it is none."""
        count, rest = divmod(len(message) - 8, 9)
        if count < 0 or rest:
            raise WireError(f"a commit of {len(message)} bytes can't be read")
        checksums = np.frombuffer(message, np.uint64, count, offset=8)
        return cls(
            struct.unpack_from("<Q", message)[0], checksums, np.frombuffer(message, np.bool_, offset=8 + 8 * count)
        )
