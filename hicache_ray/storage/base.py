"""The contract of L3: pages into and out of a store that outlives the process, named by their page hashes.

The rule every backend keeps: whatever breaks is a miss. A page that is missing, broken or unreachable is never an
exception, and a page that comes back has the bytes that were stored.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

from hicache_ray.hashing import ModelIdentity, storage_key
from hicache_ray.pages import Bytes, Pages
from hicache_ray.storage.host_pages import HostPages


@dataclass(frozen=True)
class StorageConfig:
    """How a rank's backend is made.

    Attributes:
        identity: what the bytes belong to; its digest is part of every storage key.
        extra: options of the backend (`hicache_storage_backend_extra_config`).
        timeout: bound of one call, seconds.
        is_writer: False on a rank whose pages another rank writes (MLA, rank other than 0): such a backend stores
            nothing and answers as if it had (case 29).
    """

    identity: ModelIdentity
    extra: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 5.0
    is_writer: bool = True


@dataclass(frozen=True)
class PageContext:
    """What a call may know about its pages beyond their hashes.

    Attributes:
        prefix_hashes: hashes of the pages before the first one of the call, from the root (for path-like backends).
        namespace: label under which quotas and TTL are counted; it is not part of the key, the hash chain is already
            seeded by the namespace.
    """

    prefix_hashes: Sequence[bytes] = ()
    namespace: str = ""


@dataclass(frozen=True)
class StorageStats:
    """Counters since the backend was made; all of them only grow. Pages unless named otherwise."""

    exists_calls: int = 0
    exists_asked: int = 0
    exists_hits: int = 0
    get_calls: int = 0
    get_asked: int = 0
    get_hits: int = 0
    get_bytes: int = 0
    get_seconds: float = 0.0
    set_calls: int = 0
    set_asked: int = 0
    set_stored: int = 0
    set_existing: int = 0
    set_bytes: int = 0
    set_seconds: float = 0.0
    corrupt: int = 0
    """Pages whose bytes did not match their checksum, length or generation; each was answered as a miss."""
    errors: int = 0
    """Calls to the store that failed (process death, refused, I/O error)."""
    timeouts: int = 0
    """Calls to the store that were given up at their deadline."""
    refused: int = 0
    """Calls not made because the breaker of their target was open."""

    def as_dict(self) -> dict[str, float]:
        """The counters by name, for logs and metrics."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}


class StorageCounters:
    """A thread-safe `StorageStats` under construction."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, Any] = StorageStats().as_dict()

    def add(self, **amounts: float) -> None:
        """Add to the named counters; KeyError for a name that StorageStats has not."""
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] += amount

    def snapshot(self) -> StorageStats:
        """The counters now."""
        with self._lock:
            return StorageStats(**self._values)


class Storage(ABC):
    """An L3 backend of one rank. Thread-safe: one query, one read and one write thread call it at the same time.

    `hashes` are page hashes (32 bytes each); the backend makes its keys from them and `config.identity`. `pages` are
    page numbers of the registered host pool, one per hash. Pages follow each other in a chain, so a page is of use only
    with those before it: each answer counts leading pages, and ends at the first one that failed (cases 11, 12).

    Attributes:
        bounded: whether every call ends within `config.timeout` by itself and no call raises for what the store does.
            Calls of other backends are carried out, and given up, by `GuardedStorage`.
        host_pool: the registered host pool.
    """

    bounded: ClassVar[bool] = False

    def __init__(self, config: StorageConfig) -> None:
        self.config = config
        self.counters = StorageCounters()
        self.host_pool: HostPages | None = None

    def register_host_pool(self, pool: HostPages) -> None:
        """Attach the host pool that `load` and `store` use. Called once, before any of them; a second call replaces
        the pool and is only allowed while no call is under way."""
        self.host_pool = pool

    @abstractmethod
    def lookup(self, hashes: Sequence[bytes], context: PageContext | None = None) -> int:
        """Returns how many pages are stored with all of their parts, counted from the first without a gap. No promise:
        a page may be gone when it is read."""

    @abstractmethod
    def load(self, hashes: Sequence[bytes], pages: Pages, context: PageContext | None = None) -> int:
        """Read pages into the host pool. Returns how many now hold exactly what was stored, counted from the first
        without a gap. What is in the pages behind them is undefined.

        Raises:
            RuntimeError: no host pool is registered.
            ValueError: `pages` is not one page of the pool per hash.
        """

    @abstractmethod
    def store(self, hashes: Sequence[bytes], pages: Pages, context: PageContext | None = None) -> int:
        """Store pages of the host pool. Returns how many are stored, whole, at return, counted from the first without a
        gap. A page whose key exists is stored already and moves no bytes. No page behind a failed one is stored. The
        host pages must not change until the call returns. Calling it twice is harmless. On a rank that is no writer it
        stores nothing and answers for all pages.

        Raises: as `load`.
        """

    @abstractmethod
    def clear(self, everything: bool = False) -> None:
        """Drop the pages of this backend's identity; with `everything` those of all models and ranks. A store that
        can't tell identities apart always drops everything. Errors of the store itself are raised."""

    def get_stats(self) -> StorageStats:
        """The counters since start."""
        return self.counters.snapshot()

    def close(self) -> None:  # noqa: B027 - a backend without resources has nothing to close
        """Give back what the backend holds; the stored pages stay. Idempotent; no call may follow."""

    def storage_key(self, page_hash: bytes) -> str:
        """A page's key as text: the identity's digest joined with the page hash, in hex digits."""
        return storage_key(self.config.identity.digest, page_hash.hex())

    def pool_for(self, hashes: Sequence[bytes], pages: Pages) -> HostPages:
        """The registered host pool, when these are pages of it; raises as `load` says."""
        pool = self.host_pool
        if pool is None:
            raise RuntimeError("no host pool is registered: call register_host_pool before loading or storing pages")
        if len(pages) != len(hashes):
            raise ValueError(f"{len(pages)} host pages for {len(hashes)} page hashes: give one page per hash")
        if len(pages) and not (pages.min() >= 0 and pages.max() < pool.pages):
            raise ValueError(f"host pages {pages.min()} to {pages.max()} of a pool of {pool.pages} pages")
        return pool


class PageStorage(Storage):
    """Base of backends that move one page a call: write `exists`, `get`, `set` and `clear`; the rest follows.

    `key` is a storage key. A page is passed as one contiguous uint8 array, so each page is copied once more than in a
    backend with its own `load` and `store`.
    """

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Whether the page is stored whole. Never raises for a missing page."""

    @abstractmethod
    def get(self, key: str, out: Bytes) -> bool:
        """Fill `out` ([page_bytes] uint8) with the page. Returns False when it is missing, short or broken."""

    @abstractmethod
    def set(self, key: str, data: Bytes) -> bool:
        """Store `data` ([page_bytes] uint8), visible whole or not at all; an existing key is a success."""

    def lookup(self, hashes: Sequence[bytes], context: PageContext | None = None) -> int:
        hits = leading(self.exists(self.storage_key(page_hash)) for page_hash in hashes)
        self.counters.add(exists_calls=1, exists_asked=len(hashes), exists_hits=hits)
        return hits

    def load(self, hashes: Sequence[bytes], pages: Pages, context: PageContext | None = None) -> int:
        pool = self.pool_for(hashes, pages)
        out, hits = np.empty(pool.page_bytes, dtype=np.uint8), 0
        for page_hash, page in zip(hashes, pages.tolist(), strict=True):
            if not self.get(self.storage_key(page_hash), out):
                break
            target = pool.segments[page]
            np.copyto(target, out.reshape(target.shape))
            hits += 1
        self.counters.add(get_calls=1, get_asked=len(hashes), get_hits=hits, get_bytes=hits * pool.page_bytes)
        return hits

    def store(self, hashes: Sequence[bytes], pages: Pages, context: PageContext | None = None) -> int:
        pool = self.pool_for(hashes, pages)
        if not self.config.is_writer:
            return len(hashes)
        stored = 0
        for page_hash, page in zip(hashes, pages.tolist(), strict=True):
            if not self.set(self.storage_key(page_hash), np.ascontiguousarray(pool.segments[page]).reshape(-1)):
                break
            stored += 1
        self.counters.add(set_calls=1, set_asked=len(hashes), set_stored=stored, set_bytes=stored * pool.page_bytes)
        return stored


def leading(flags: Iterable[bool]) -> int:
    """How many flags are set before the first one that is not; what follows is not asked for."""
    count = 0
    for flag in flags:
        if not flag:
            break
        count += 1
    return count
