"""A storage actor's end of the near channel: answers calls of clients on its node over a Unix socket."""

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

from hicache_ray.storage.socket_frames import (
    ANSWER_HEAD,
    HEAD,
    LONGEST_FRAME,
    METHODS,
    ONE_WAY,
    FrameError,
    FrameReader,
    unpack_body,
)

logger = logging.getLogger("hicache_ray.storage.socket_server")

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
