"""Messages between a client of the pool and a storage actor: one small `bytes` each way, cheap for Ray to move.

Each is an array in MessagePack that begins with its kind and version. Pages themselves travel in shared memory, or as
one array beside the message.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
import numpy as np

from hicache_ray.storage.shard.grants import GRANT, Flags, Grants

WIRE_VERSION = 3

OK, STALE, FAILED = 0, 1, 2
"""Status of a reply: done; refused, because the client's membership is older than the actor's; can't be done."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Unsigned = Annotated[int, msgspec.Meta(ge=0)]


_Message = TypeVar("_Message", bound="Message")


class WireError(ValueError):
    """A message of another version, or none at all."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=lambda name: f"{name} {WIRE_VERSION}"):
    """What all messages can do."""

    def pack(self) -> bytes:
        """The message as it travels."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls: type[_Message], message: bytes) -> _Message:
        """The message that was packed; WireError when it is none of this kind and version."""
        try:
            return msgspec.msgpack.decode(message, type=cls)
        except ValueError as error:
            raise WireError(f"a {cls.__name__} of {len(message)} bytes can't be read: {error}") from error


class KeyCall(Message, frozen=True):
    """What all calls about keys carry.

    Attributes:
        epoch: of the membership the client knows.
        keys: storage keys.
        length: bytes a page (0 where it does not matter).
        label: namespace label of pages to be written.
    """

    epoch: _Count
    keys: list[bytes]
    length: _Count = 0
    label: bytes = b""


class Offer(Message, frozen=True):
    """Pages that one storage actor wants to bring to another.

    Attributes:
        call: the keys, their length and label, and the membership that says where they belong.
        expires: per key, clock time after which it is a miss.
        displace: whether other pages may be evicted for them.
    """

    call: KeyCall
    expires: list[float]
    displace: bool

    def __post_init__(self) -> None:
        if len(self.expires) != len(self.call.keys):
            raise ValueError(f"{len(self.call.keys)} pages with {len(self.expires)} times")


class Commit(Message, frozen=True):
    """The end of a write.

    Attributes:
        reservation: its id.
        checksums: xxh3_64 of each granted page.
        good: which of the granted pages were written.
    """

    reservation: _Unsigned
    checksums: list[_Unsigned]
    good: list[bool]

    def __post_init__(self) -> None:
        if len(self.checksums) != len(self.good):
            raise ValueError(f"{len(self.checksums)} checksums for {len(self.good)} pages")


class Release(Message, frozen=True):
    """The end of a lease, or of a reservation that is given up.

    Attributes:
        id: of the lease or reservation.
        suspects: cells of the lease whose bytes were not what was stored, for the reader.
    """

    id: _Unsigned
    suspects: list[_Unsigned] = []


class Reply(Message, frozen=True):
    """What every call answers.

    Attributes:
        status: OK, STALE (`payload` is the newer membership) or FAILED (`payload` is the reason as text).
        epoch: of the membership the actor knows.
        arena_id: the arena that grants refer to.
        id: of the reservation or lease, 0 for none.
        payload: flags or grants.
    """

    status: _Count
    epoch: _Count
    arena_id: _Unsigned
    id: _Unsigned = 0
    payload: bytes = b""

    @property
    def grants(self) -> Grants:
        """The payload as grants, one per key."""
        return np.frombuffer(self.payload, dtype=GRANT)

    @property
    def flags(self) -> Flags:
        """The payload as flags."""
        return np.frombuffer(self.payload, dtype=np.bool_)
