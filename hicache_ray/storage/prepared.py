"""Backends made ahead of the step that begins to use them, so that a slow start holds no step up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hicache_ray.storage.base import Storage
from hicache_ray.storage.host_pages import HostPages
from hicache_ray.storage.registry import BackendError

logger = logging.getLogger("hicache_ray.storage")

KEPT_SECONDS = 600.0
"""How long a backend waits to be used. Whoever asked for it has long given up by then, or died."""

StorageFactory = Callable[[str, Mapping[str, Any]], Storage]


class _Waiting(NamedTuple):
    storage: Storage
    name: str
    since: float


class PreparedStores:
    """Makes backends by name and options and keeps those that were prepared, by ticket. Thread-safe.

    Args:
        make: makes a backend; None where none can be made.
        host_pool: L2, which a backend may have to register before it can work.
        clock: seconds.
    """

    def __init__(
        self, make: StorageFactory | None, host_pool: HostPages, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._make = make
        self._host_pool = host_pool
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        """Backends that were prepared and neither taken nor discarded."""
        return len(self._waiting)

    def prepare(self, ticket: str, name: str, options: Mapping[str, Any]) -> None:
        """Makes a backend and keeps it for `take`. BackendError, whatever went wrong with it; nothing is kept then."""
        storage = self.make(name, options)
        now = self._clock()
        with self._lock:
            old = [key for key, waiting in self._waiting.items() if now - waiting.since > KEPT_SECONDS]
            dropped = [self._waiting.pop(key).storage for key in old]
            self._waiting[ticket] = _Waiting(storage, name, now)
        for unused in dropped:
            unused.close()

    def take(self, name: str, options: Mapping[str, Any], ticket: str | None = None) -> Storage:
        """The backend of that ticket, or a new one where none was prepared. BackendError when it can't be had."""
        with self._lock:
            waiting = self._waiting.pop(ticket, None) if ticket is not None else None
        return waiting.storage if waiting is not None and waiting.name == name else self.make(name, options)

    def discard(self, ticket: str) -> None:
        """Closes a prepared backend; nothing happens when there is none of that ticket."""
        with self._lock:
            waiting = self._waiting.pop(ticket, None)
        if waiting is not None:
            waiting.storage.close()

    def close(self) -> None:
        """Closes what was prepared and never used. May be called twice."""
        with self._lock:
            unused, self._waiting = list(self._waiting.values()), {}
        for waiting in unused:
            waiting.storage.close()

    def make(self, name: str, options: Mapping[str, Any]) -> Storage:
        """A new backend that has registered the host pool. BackendError, whatever went wrong with it."""
        if self._make is None:
            raise BackendError("this rank was assembled without a way to make storage backends")
        try:
            storage = self._make(name, options)
            storage.register_host_pool(self._host_pool)
        except BackendError:
            raise
        except Exception as error:  # a backend raises what it likes, and the rank has to live on
            logger.warning("storage backend %s can't be started", name, exc_info=True)
            raise BackendError(f"storage backend {name!r} can't be started: {error}") from error
        return storage
