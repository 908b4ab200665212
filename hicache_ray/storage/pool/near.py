"""The near channel: calls to a storage actor over a Unix socket, for clients on its node.

An actor call costs several hundred microseconds, a round trip here some fifteen: for small batches the call is most of
the work. The messages are those that Ray would carry, behind one byte that names the method. The sockets are of the
kind that keeps messages apart (`SOCK_SEQPACKET`): a message arrives whole or not at all, there is nothing to frame.
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

logger = logging.getLogger("hicache_ray.storage.pool.near")

METHODS = ("exists", "reserve", "commit", "acquire", "release", "offer")
"""The calls that can be made here; a message names one by its place."""
LONGEST_MESSAGE = 128 << 10
"""Below what Linux lets a socket hold by default: 208 KiB. Longer calls, of some 2,700 keys, go over Ray."""
_NOT_ANSWERED = 0x80
"""Beside the method: nobody waits for the answer, none is sent."""
_PEER_CREDENTIALS = struct.Struct("iii")


def fits(method: str, args: tuple[Any, ...]) -> bool:
    """Whether a call can be made over the near channel: one that carries pages or too many keys can't."""
    return method in METHODS and len(args) == 1 and len(args[0]) < LONGEST_MESSAGE


class NearChannel:
    """Calls to one actor over a Unix socket; only those that `fits` allows. Thread-safe.

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

    def call(self, method: str, *args: Any) -> NearPending:
        """See `Channel.call`."""
        return NearPending(self, self._send(METHODS.index(method), args[0]))

    def send(self, method: str, *args: Any) -> None:
        """See `Channel.send`."""
        try:
            self.give_back(self._send(METHODS.index(method) | _NOT_ANSWERED, args[0]))
        except ChannelLost as error:
            logger.debug("%s was not sent: %s", method, error)

    def give_back(self, connection: _Connection) -> None:
        """The connection has no call under way any more."""
        with self._lock:
            if not self.lost:
                self._idle.append(connection)
                return
        connection.socket.close()

    def close(self) -> None:
        """Close the idle connections; no call may follow. Idempotent."""
        with self._lock:
            self.lost = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.socket.close()

    def _send(self, head: int, message: bytes) -> _Connection:
        """The connection that carried the call."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        connection = connection or self._connect()
        try:
            connection.socket.settimeout(self._timeout)
            connection.socket.send(bytes((head,)) + message)
        except OSError as error:
            connection.socket.close()
            self.close()
            raise ChannelLost(f"the storage actor at {self._address} is gone: {error}") from error
        return connection

    def _connect(self) -> _Connection:
        end = _new_socket()
        end.settimeout(self._timeout)
        try:
            end.connect(f"\0{self._address}")
        except OSError as error:
            end.close()
            self.close()
            raise ChannelLost(f"no storage actor listens at {self._address}: {error}") from error
        return _Connection(end)


class NearPending:
    """A call under way."""

    def __init__(self, channel: NearChannel, connection: _Connection) -> None:
        self._channel = channel
        self._connection = connection

    def result(self, timeout: float) -> bytes:
        """See `Pending.result`."""
        connection = self._connection
        try:
            # 0 would mean "don't wait", and take an answer that is there already for one that is not.
            connection.socket.settimeout(max(timeout, 0.001))
            answer = connection.receive()
        except TimeoutError:
            # The answer may still come: this connection must not be taken for another call.
            connection.socket.close()
            raise ChannelTimeout(f"no answer within {timeout:.2f} s") from None
        except (EOFError, OSError) as error:
            connection.socket.close()
            self._channel.close()
            raise ChannelLost(f"the storage actor is gone: {error}") from error
        self._channel.give_back(connection)
        return answer


class NearServer:
    """Serves the `METHODS` of an object, one thread a connection. Only processes of the same user are answered.

    The socket lies in the abstract namespace: there is no file that a killed process could leave.

    Attributes:
        address: where clients connect to; new for every server.
    """

    def __init__(self, service: Any) -> None:
        self.address = f"hicache-{secrets.token_hex(8)}"
        self._methods: list[Callable[[bytes], bytes]] = [getattr(service, name) for name in METHODS]
        self._listener = _new_socket()
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

    def _serve(self, end: socket.socket) -> None:
        with end:
            with self._lock:
                if self._closed:
                    return
                self._connections.add(end)
            try:
                self._answer_all(_Connection(end))
            except (EOFError, ConnectionError):
                return
            except Exception:
                # The client takes the closed connection for a dead actor, and asks over Ray next.
                logger.exception("a client of the near channel is cut off")
            finally:
                with self._lock:
                    self._connections.discard(end)

    def _answer_all(self, connection: _Connection) -> None:
        while True:
            message = connection.receive()
            answer = self._methods[message[0] & ~_NOT_ANSWERED](message[1:])
            if not message[0] & _NOT_ANSWERED:
                connection.socket.send(answer)


class _Connection:
    """One end of a connection, and the memory that messages arrive in."""

    __slots__ = ("_memory", "socket")

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._memory = memoryview(bytearray(LONGEST_MESSAGE + 1))

    def receive(self) -> bytes:
        """The next message; EOFError when the other end closed, OSError as the socket raises."""
        size = self.socket.recv_into(self._memory)
        if not size:
            raise EOFError("the other end closed the connection")
        if size > LONGEST_MESSAGE:
            raise ConnectionError(f"a message is longer than {LONGEST_MESSAGE} bytes")
        return bytes(self._memory[:size])


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _user_of(connection: socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return int(_PEER_CREDENTIALS.unpack(raw)[1])
