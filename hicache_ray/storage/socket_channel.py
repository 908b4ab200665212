"""A client's end of the near channel to a storage actor on its node."""

from __future__ import annotations

import logging
import socket
import threading
from typing import Any

from hicache_ray.storage.channel import ChannelLost, ChannelTimeout
from hicache_ray.storage.socket_frames import ANSWER_HEAD, LONGEST_FRAME, FrameReader, pack_call

logger = logging.getLogger("hicache_ray.storage.socket_channel")


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
