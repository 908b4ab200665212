"""The connection to a Mooncake store: made when the store is there, kept, used by several threads, closed once."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import urllib.error
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

from hicache_ray.deadline import Deadline
from hicache_ray.hashing import ModelIdentity
from hicache_ray.storage.host_pages import Span
from hicache_ray.storage.mooncake.options import MooncakeOptions
from hicache_ray.storage.registry import BackendError

logger = logging.getLogger("hicache_ray.storage")

CONNECT_SECONDS = 2.0
"""How long a server may take to accept a connection before it counts as away."""

WARM_UP = bytes(4096)
WARM_UP_READS = 5


class StoreAway(ConnectionError):
    """The store is not there now; every page is a miss."""


class MooncakeConnection:
    """What one backend has of a client: its memory is registered for it, its calls end before it is closed.

    Backends of one process and rank with the same options share a client, and with it connections, threads and the
    memory they lend.
    """

    def __init__(self, options: MooncakeOptions, identity: ModelIdentity, timeout: float) -> None:
        """A connection for calls that should take `timeout` seconds at most. ImportError where the library is not."""
        self._client = _borrow_client(options, identity, timeout)
        self._spans: dict[str, Span] = {}
        self._changed = threading.Condition()
        self._users = 0
        self._closed = False

    def connect(self) -> None:
        """Connect if the store is there. BackendError when it is not and `check_server` asks for it."""
        options = self._client.options
        deadline, pause = Deadline(options.setup_timeout), threading.Event()
        while True:
            try:
                with self.use():
                    self._client.check_memory()
                return
            except (StoreAway, RuntimeError) as error:
                if not options.check_server:
                    logger.warning("%s: all its pages are misses until it is there", error)
                    return
                if deadline.passed:
                    raise BackendError(f"{error}; waited {options.setup_timeout} s (setup_timeout)") from error
            pause.wait(0.2)

    @contextlib.contextmanager
    def use(self) -> Iterator[Any]:
        """The store, for one call.

        Raises:
            StoreAway: it is not there, or this connection is closed.
            RuntimeError: the transport refuses the memory.
        """
        with self._changed:
            if self._closed:
                raise StoreAway("the connection to the Mooncake store is closed")
            self._users += 1
        try:
            yield self._client.store()
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def register(self, name: str, span: Span) -> None:
        """Make memory known to the transport, once; it replaces what was registered under `name`. RuntimeError when
        the transport refuses it."""
        before = self._spans.get(name)
        if before != span:
            if before is not None:
                self._client.unregister(before)
            self._spans[name] = span
            self._client.register(span)

    def close(self, timeout: float) -> None:
        """Give the client back when the calls under way have ended; where one hangs for more than `timeout` seconds,
        it keeps the client and its memory. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            if not self._changed.wait_for(lambda: not self._users, timeout):
                logger.warning("a Mooncake call has not ended within %s s: its client is left open", timeout)
                return
        for span in self._spans.values():
            self._client.unregister(span)
        _give_back_client(self._client, timeout)


class MooncakeClient:
    """A `MooncakeDistributedStore` that may not be there yet.

    Setting the library's client up without its servers blocks for a minute and a half; so they are asked first whether
    they accept connections. Once set up, the library's client finds a restarted master by itself. Calling it after its
    close crashes the process: it is closed only when nobody borrows it.
    """

    def __init__(self, options: MooncakeOptions, identity: ModelIdentity, timeout: float) -> None:
        self.options = options
        self._identity = identity
        self._store: Any = None
        self._spans: Counter[Span] = Counter()
        self._spans_lock = threading.Lock()
        self._connecting = threading.Lock()
        self._store_class = import_store(timeout)

    def store(self) -> Any:
        """The library's client, set up. StoreAway when its servers are not there."""
        if self._store is None:
            self._set_up()
        return self._store

    def register(self, span: Span) -> None:
        """Make memory known to the transport, now or when it is set up."""
        with self._spans_lock:
            self._spans[span] += 1
            if self._store is not None and self._spans[span] == 1:
                _register(self._store, span)

    def unregister(self, span: Span) -> None:
        """End `register`."""
        with self._spans_lock:
            self._spans[span] -= 1
            if not self._spans[span]:
                del self._spans[span]
                if self._store is not None:
                    self._store.unregister_buffer(span.address)

    def close(self, timeout: float) -> None:
        """Close. With its master away the library takes long for that: after `timeout` seconds it is left to itself."""
        store, self._store = self._store, None
        if store is not None:
            closing = threading.Thread(target=store.close, name="hicache-mooncake-close", daemon=True)
            closing.start()
            closing.join(timeout)

    def _set_up(self) -> None:
        """Connect; one thread at a time, the others have a miss meanwhile."""
        if not self._connecting.acquire(blocking=False):
            raise StoreAway("the Mooncake store is being connected to")
        try:
            if self._store is None:
                self._take(self._new_store())
        finally:
            self._connecting.release()

    def _take(self, store: Any) -> None:
        with self._spans_lock:
            try:
                for span in self._spans:
                    _register(store, span)
            except RuntimeError:
                store.close()
                raise
            self._store = store

    def _new_store(self) -> Any:
        options = self.options
        for host, port in options.servers():
            try:
                socket.create_connection((host, port), CONNECT_SECONDS).close()
            except OSError as error:
                raise StoreAway(f"no Mooncake server answers at {host}:{port} ({error})") from error
        store = self._store_class()
        code = store.setup(
            options.local_hostname,
            options.metadata_server,
            options.segment_of(self._identity),
            options.local_buffer_size,
            options.protocol,
            options.device_of(self._identity.tp_rank),
            options.master_server_address,
        )
        if code:
            raise StoreAway(f"the Mooncake store at {options.master_server_address} refused the client (code {code})")
        _warm_up(store)
        return store

    def check_memory(self) -> None:
        """StoreAway when the master knows of no memory, or does not say; only with `check_server`."""
        servers = self.options.servers()
        if not self.options.check_server or not servers:
            return
        host = servers[0][0]
        url = f"http://{host}:{self.options.master_metrics_port}/get_all_segments"
        try:
            with urllib.request.urlopen(url, timeout=CONNECT_SECONDS) as answer:
                segments = answer.read().strip()
        except (OSError, urllib.error.URLError) as error:
            raise StoreAway(f"the Mooncake master does not answer at {url} (master_metrics_port): {error}") from error
        if not segments:
            raise StoreAway("no process lends memory to the Mooncake store (global_segment_size, or a store service)")


_clients: dict[tuple[Any, ...], tuple[MooncakeClient, int]] = {}
"""The clients of this process and how many backends borrow each."""

_clients_lock = threading.Lock()


def _borrow_client(options: MooncakeOptions, identity: ModelIdentity, timeout: float) -> MooncakeClient:
    # What does not differ between the ranks of an instance is in the options.
    key = (options, identity.tp_rank, identity.tp_size, identity.pp_rank, identity.pp_size)
    with _clients_lock:
        client, borrowers = _clients.get(key) or (MooncakeClient(options, identity, timeout), 0)
        _clients[key] = client, borrowers + 1
    return client


def _give_back_client(client: MooncakeClient, timeout: float) -> None:
    with _clients_lock:
        key = next(key for key, (known, _) in _clients.items() if known is client)
        borrowers = _clients[key][1] - 1
        if borrowers:
            _clients[key] = client, borrowers
            return
        del _clients[key]
    client.close(timeout)


def _register(store: Any, span: Span) -> None:
    code = store.register_buffer(span.address, span.nbytes)
    if code:
        raise RuntimeError(f"Mooncake can't register {span.nbytes} bytes of host memory (code {code})")


def _warm_up(store: Any) -> None:
    """Move a few bytes once, so that the first page need not wait for connections."""
    key = f"hicache_ray_warm_up_{uuid.uuid4().hex}"
    code = store.put(key, WARM_UP)
    if code:
        logger.warning("the Mooncake store takes no pages yet (code %s): does any process lend it memory?", code)
        return
    # Nothing comes back when the lease runs out meanwhile, as on a busy machine the first time.
    if not any(store.get(key) == WARM_UP for _ in range(WARM_UP_READS)):
        logger.warning("the Mooncake store did not give back what it was given at warm-up")
    store.remove(key, True)


def import_store(timeout: float) -> Any:
    """The library's class; ImportError where it, or what it needs, is not installed."""
    # The library reads these when it is loaded or set up: who has set them knows better. Unset, it logs every client's
    # details to stderr, and waits half a minute for a master that hangs.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("MC_RPC_TIMEOUT_MS", str(max(1000, int(timeout * 1000))))
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        if ".so" in str(error):
            raise ImportError(f"{error} (in the Debian packages libibverbs1, librdmacm1 and libnuma1)") from error
        raise
    return MooncakeDistributedStore
