"""Frames of the near channel: calls to a storage actor over a Unix socket, for clients on its node.

An actor call costs several hundred microseconds, a round trip here some ten: for small batches the call is most of the
work. The messages are those that Ray would carry; a frame adds the method and the length.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

METHODS = ("exists", "reserve", "commit", "acquire", "report", "abort", "release", "offer")
"""The calls that can be made here; a frame names one by its place."""
ONE_WAY = frozenset({"abort", "release"})
"""Calls that are not answered."""

HEAD = struct.Struct("<BI")
ANSWER_HEAD = struct.Struct("<I")
IDENTITY = struct.Struct("<Q")
LONGEST_FRAME = 16 << 20
_PIECE = 1 << 16


class FrameError(ValueError):
    """What was received is no frame."""


def fits(method: str, args: tuple[Any, ...]) -> bool:
    """Whether a call can be made over a socket: those that carry pages can't."""
    return method in METHODS and len(args) == 1


def pack_call(method: str, args: tuple[Any, ...]) -> bytes:
    """The frame of a call that `fits`."""
    body = IDENTITY.pack(args[0]) if method in ONE_WAY else args[0]
    return HEAD.pack(METHODS.index(method), len(body)) + body


def unpack_body(method: str, body: bytes) -> tuple[Any, ...]:
    """The arguments in a frame's body."""
    if method not in ONE_WAY:
        return (body,)
    if len(body) != IDENTITY.size:
        raise FrameError(f"a {method} of {len(body)} bytes names nothing")
    return IDENTITY.unpack(body)


class FrameReader:
    """Cuts what comes from a connection into pieces of known lengths."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes; EOFError when the other end closed, OSError as the socket raises."""
        pieces, have = [self._buffer], len(self._buffer)
        while have < size:
            piece = self._connection.recv(max(_PIECE, size - have))
            if not piece:
                raise EOFError("the other end closed the connection")
            pieces.append(piece)
            have += len(piece)
        data = b"".join(pieces) if len(pieces) > 1 else pieces[0]
        self._buffer = data[size:]
        return data[:size]
