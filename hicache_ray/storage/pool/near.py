"""Frames of the near channel: calls to a storage actor over a Unix socket, for clients on its node.

An actor call costs several hundred microseconds, a round trip here some ten: for small batches the call is most of the
work. The messages are those that Ray would carry; a frame adds the method and the length.

A client's end of the near channel to a storage actor on its node.

A storage actor's end of the near channel: answers calls of clients on its node over a Unix socket.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hicache_ray.storage.pool.channel import ChannelLost, ChannelTimeout

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


logger = logging.getLogger("hicache_ray.storage.pool.near")


class SocketChannel:
    """Calls to one actor over a Unix socket; only those for which `socket_frames.fits`. Thread-safe.

    Connections are kept and used again, one call at a time each. The first that fails makes the channel `lost`: an
    address is never used again after that.
    """

    def __init__(self, address: str, timeout: float) -> None:
        """Connect.

        Args:
            timeout: seconds a connection or the sending of a call may take.

        Raises:
            ChannelLost: nobody listens there (another network namespace, or the actor is dead).
        """
        self._address = address
        self._timeout = timeout
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self.lost = False
        self._idle.append(self._connect())

    def call(self, method: str, *args: Any) -> SocketPending:
        """See `Channel.call`."""
        connection = self._take()
        self._send(connection, pack_call(method, args))
        return SocketPending(self, connection)

    def send(self, method: str, *args: Any) -> None:
        """See `Channel.send`."""
        try:
            connection = self._take()
            self._send(connection, pack_call(method, args))
        except ChannelLost as error:
            logger.debug("%s was not sent: %s", method, error)
            return
        self.give_back(connection)

    def give_back(self, connection: _Connection) -> None:
        """The connection has no call under way any more."""
        with self._lock:
            if not self.lost:
                self._idle.append(connection)
                return
        connection.socket.close()

    def fail(self, connection: _Connection, *, lost: bool) -> None:
        """The connection can't be used again; `lost`: neither can the channel."""
        connection.socket.close()
        if lost:
            self.close()

    def close(self) -> None:
        """Close the idle connections; no call may follow. Idempotent."""
        with self._lock:
            self.lost = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.socket.close()

    def _take(self) -> _Connection:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._connect()

    def _connect(self) -> _Connection:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        end.settimeout(self._timeout)
        try:
            end.connect(f"\0{self._address}")
        except OSError as error:
            end.close()
            self.close()
            raise ChannelLost(f"no storage actor listens at {self._address}: {error}") from error
        return _Connection(end)

    def _send(self, connection: _Connection, frame: bytes) -> None:
        try:
            connection.socket.settimeout(self._timeout)
            connection.socket.sendall(frame)
        except OSError as error:
            self.fail(connection, lost=True)
            raise ChannelLost(f"the storage actor at {self._address} is gone: {error}") from error


class _Connection:
    __slots__ = ("reader", "socket")

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.reader = FrameReader(end)


class SocketPending:
    """A call under way."""

    def __init__(self, channel: SocketChannel, connection: _Connection) -> None:
        self._channel = channel
        self._connection = connection

    def result(self, timeout: float) -> bytes:
        """See `Pending.result`."""
        connection = self._connection
        try:
            # 0 would mean "don't wait", and take an answer that is there already for one that is not.
            connection.socket.settimeout(max(timeout, 0.001))
            (size,) = ANSWER_HEAD.unpack(connection.reader.read(ANSWER_HEAD.size))
            if size > LONGEST_FRAME:
                raise ConnectionError(f"an answer of {size} bytes")
            answer = connection.reader.read(size)
        except TimeoutError:
            # The answer may still come: this connection must not be taken for another call.
            self._channel.fail(connection, lost=False)
            raise ChannelTimeout(f"no answer within {timeout:.2f} s") from None
        except (EOFError, OSError) as error:
            self._channel.fail(connection, lost=True)
            raise ChannelLost(f"the storage actor is gone: {error}") from error
        self._channel.give_back(connection)
        return answer


_PEER_CREDENTIALS = struct.Struct("iii")


class SocketServer:
    """Serves the `METHODS` of an object, one thread a connection. Only processes of the same user are answered.

    The socket lies in the abstract namespace: there is no file that a killed process could leave.

    Attributes:
        address: where clients connect to; new for every server.
    """

    def __init__(self, service: Any) -> None:
        self.address = f"hicache-{secrets.token_hex(8)}"
        self._methods: list[Callable[..., Any]] = [getattr(service, name) for name in METHODS]
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(128)
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, name="l3-near", daemon=True).start()

    def close(self) -> None:
        """Answer nobody any more: clients find their connections lost. Idempotent."""
        with self._lock:
            self._closed = True
            # shutdown wakes the threads that wait in accept and recv, close alone does not.
            for end in (self._listener, *self._connections):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except ConnectionError:
                continue
            except OSError:
                return
            if _user_of(connection) not in (os.getuid(), 0):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="l3-near-client", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            with self._lock:
                if self._closed:
                    return
                self._connections.add(connection)
            try:
                self._answer_all(connection)
            except (EOFError, ConnectionError):
                return
            except Exception:
                # The client takes the closed connection for a dead actor, and asks over Ray next.
                logger.exception("a client of the near channel is cut off")
            finally:
                with self._lock:
                    self._connections.discard(connection)

    def _answer_all(self, connection: socket.socket) -> None:
        reader = FrameReader(connection)
        while True:
            number, size = HEAD.unpack(reader.read(HEAD.size))
            if number >= len(METHODS) or size > LONGEST_FRAME:
                raise FrameError(f"method {number} with {size} bytes is no call")
            method = METHODS[number]
            answer = self._methods[number](*unpack_body(method, reader.read(size)))
            if method not in ONE_WAY:
                connection.sendall(ANSWER_HEAD.pack(len(answer)) + answer)


def _user_of(connection: socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return int(_PEER_CREDENTIALS.unpack(raw)[1])
