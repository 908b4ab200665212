"""The interface of an L3 backend: pages in and out of a store that outlives the process, named by their page hash.

The rule every backend keeps: whatever breaks, the answer is a miss. No method raises because a page is missing,
broken or unreachable, no wait is longer than `StorageConfig.timeout`, and a page that comes back has the bytes that
were stored.

A host pool's memory as its parts: the runs of a page, the whole as one span of addresses.

The checksum that goes with a page into a store that keeps none itself.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import xxhash

if TYPE_CHECKING:
    from hicache_ray.hashing import ModelIdentity


Bytes = npt.NDArray[np.uint8]
Slots = npt.NDArray[np.int64]

DEFAULT_TIMEOUT_SECONDS = 5.0
"""Bound of one storage call when the configuration names none."""


@runtime_checkable
class HostPages(Protocol):
    """What a backend sees of the host pool (L2). `pools.HostPool` is one; any object with these members will do."""

    @property
    def page_size(self) -> int:
        """Tokens a page."""

    @property
    def pages(self) -> int:
        """Pages in the pool."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, over all its segments."""

    @property
    def segments(self) -> Bytes:
        """The pool's memory as a view [pages, ..., segment_bytes]: `segments[p]` is page p, its segments in the order
        of `get_page_buffer_meta`. Only the last axis has to be contiguous. Writing to it writes the pool."""

    def get_page_buffer_meta(self, slots: Slots) -> tuple[list[int], list[int]]:
        """Addresses and sizes (bytes) of the segments of the pages that hold `slots` (case 54); ValueError when
        `slots` is not whole pages."""


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
    timeout: float = DEFAULT_TIMEOUT_SECONDS
    is_writer: bool = True


@dataclass(frozen=True)
class StorageExtra:
    """What a call may know about its pages beyond their hashes.

    Attributes:
        prefix_hashes: hashes of the pages before the first one of the call, from the root (for path-like backends).
        namespace: label under which quotas and TTL are counted; it is not part of the key, the hash chain is already
            seeded by the namespace.
    """

    prefix_hashes: Sequence[str] = ()
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


class HiCacheStorage(ABC):
    """An L3 backend of one rank. Methods named as in SGLang (article 5.8).

    Thread-safe: one query, one read and one write thread call it at the same time. `hashes` are bare page hashes
    (64 hex digits); the backend makes its storage keys from them with `storage_key`. `host_slots` are token slots of
    the registered host pool, whole pages, one page per hash, in order.
    """

    def __init__(self, config: StorageConfig) -> None:
        self.config = config
        self.counters = StorageCounters()
        self.host_pool: HostPages | None = None

    def register_mem_pool_host(self, pool: HostPages) -> None:
        """Attach the host pool that the `_v1` calls read and write. Called once, before any of them; a second call
        replaces the pool and is only allowed while no call is under way."""
        self.host_pool = pool

    def storage_key(self, page_hash: str) -> str:
        """The key of a page in this store: the identity's digest joined with the page hash (DESIGN 8)."""
        from hicache_ray.hashing import storage_key

        return storage_key(self.config.identity.digest, page_hash)

    @abstractmethod
    def batch_exists(self, hashes: Sequence[str], extra: StorageExtra | None = None) -> int:
        """Number of leading pages that are stored: the answer ends at the first one missing (case 11). A page counts
        only when all of its parts are there. An answer is no promise: the page may be gone when it is read."""

    @abstractmethod
    def batch_get_v1(self, hashes: Sequence[str], host_slots: Slots, extra: StorageExtra | None = None) -> list[bool]:
        """Read pages into the host pool; one flag per page, True when the page holds exactly what was stored. After
        the first False the rest may be False unread (case 12); a page with False has undefined contents.

        Raises:
            RuntimeError: no host pool is registered.
            ValueError: `host_slots` is not one whole page per hash.
        """

    @abstractmethod
    def batch_set_v1(self, hashes: Sequence[str], host_slots: Slots, extra: StorageExtra | None = None) -> list[bool]:
        """Store pages of the host pool; one flag per page, True when the page is stored, whole, at return. A page whose
        key exists is a success that moves no bytes. A failed page ends the batch: those after it are False (case 12).
        The host pages must not change until the call returns. Calling it twice is harmless.

        Raises: as `batch_get_v1`.
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

    def host_page_numbers(self, hashes: Sequence[str], host_slots: Slots) -> Slots:
        """Page numbers in the host pool, one per hash, from token slots; raises as `batch_get_v1` says."""
        pool = self.host_pool
        if pool is None:
            raise RuntimeError(
                "no host pool is registered: call register_mem_pool_host before reading or writing pages"
            )
        size = pool.page_size
        slots = np.asarray(host_slots, dtype=np.int64)
        if slots.size != len(hashes) * size:
            raise ValueError(
                f"{slots.size} host slots for {len(hashes)} pages of {size} tokens: need {len(hashes) * size}"
            )
        first = slots[::size]
        if np.any(first % size) or np.any(slots.reshape(-1, size) != first[:, None] + np.arange(size)):
            raise ValueError(
                f"host slots must be whole pages of {size} consecutive slots that start at a multiple of {size}"
            )
        return first // size


class PageStorage(HiCacheStorage):
    """Base of backends that move one page a call: write `exists`, `get`, `set` and `clear`, the batches follow.

    `key` is a storage key. A page is passed as one contiguous uint8 array, so each page is copied once more than a
    backend with its own `_v1` methods would.
    """

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Whether the page is stored whole. Never raises for a missing page."""

    @abstractmethod
    def get(self, key: str, out: Bytes) -> bool:
        """Fill `out` ([page_bytes] uint8) with the page; False when it is missing, short or broken."""

    @abstractmethod
    def set(self, key: str, data: Bytes) -> bool:
        """Store `data` ([page_bytes] uint8), visible whole or not at all; an existing key is a success."""

    def batch_get(self, keys: Sequence[str], outs: Sequence[Bytes]) -> list[bool]:
        """`get` in order up to the first failure; the rest is False."""
        return _until_first_failure(len(keys), lambda i: self.get(keys[i], outs[i]))

    def batch_set(self, keys: Sequence[str], pages: Sequence[Bytes]) -> list[bool]:
        """`set` in order up to the first failure; the rest is False."""
        return _until_first_failure(len(keys), lambda i: self.set(keys[i], pages[i]))

    def batch_exists(self, hashes: Sequence[str], extra: StorageExtra | None = None) -> int:
        hits = 0
        for page_hash in hashes:
            if not self.exists(self.storage_key(page_hash)):
                break
            hits += 1
        self.counters.add(exists_calls=1, exists_asked=len(hashes), exists_hits=hits)
        return hits

    def batch_get_v1(self, hashes: Sequence[str], host_slots: Slots, extra: StorageExtra | None = None) -> list[bool]:
        pages = self.host_page_numbers(hashes, host_slots)
        assert self.host_pool is not None
        segments, size = self.host_pool.segments, self.host_pool.page_bytes
        outs = [np.empty(size, dtype=np.uint8) for _ in pages]
        done = self.batch_get([self.storage_key(page_hash) for page_hash in hashes], outs)
        for page, out, ok in zip(pages, outs, done, strict=True):
            if ok:
                np.copyto(segments[page], out.reshape(segments.shape[1:]))
        self.counters.add(get_calls=1, get_asked=len(hashes), get_hits=sum(done), get_bytes=size * sum(done))
        return done

    def batch_set_v1(self, hashes: Sequence[str], host_slots: Slots, extra: StorageExtra | None = None) -> list[bool]:
        pages = self.host_page_numbers(hashes, host_slots)
        if not self.config.is_writer:
            return [True] * len(hashes)
        assert self.host_pool is not None
        segments, size = self.host_pool.segments, self.host_pool.page_bytes
        data = [np.ascontiguousarray(segments[page]).reshape(-1) for page in pages]
        done = self.batch_set([self.storage_key(page_hash) for page_hash in hashes], data)
        self.counters.add(set_calls=1, set_asked=len(hashes), set_stored=sum(done), set_bytes=size * sum(done))
        return done


def _until_first_failure(count: int, step: Callable[[int], bool]) -> list[bool]:
    done = [False] * count
    for i in range(count):
        if not step(i):
            break
        done[i] = True
    return done


class Span(NamedTuple):
    """A range of addresses of this process."""

    address: int
    nbytes: int


def page_rows(segments: Bytes, page: int) -> list[memoryview]:
    """The contiguous runs of a page in segment order; writing to them writes the pool."""
    view = segments[page]
    if view.flags.c_contiguous:
        return [memoryview(view.reshape(-1))]
    return [memoryview(view[index]) for index in np.ndindex(view.shape[:-1])]


def memory_span(segments: Bytes) -> Span:
    """The smallest span that holds all pages: the pool's buffer, for registering it with a transport."""
    last = sum((count - 1) * stride for count, stride in zip(segments.shape, segments.strides, strict=True))
    if segments.size == 0 or any(stride < 0 for stride in segments.strides):
        raise ValueError(f"segments of shape {segments.shape} and strides {segments.strides} are no memory to register")
    return Span(segments.ctypes.data, last + segments.itemsize)


CHECKSUM_BYTES = 8


def page_checksum(key: str, rows: Iterable[memoryview]) -> int:
    """xxh3_64 over the storage key, then the page's segments in order: a page under another key does not fit."""
    digest = xxhash.xxh3_64(key.encode())
    for row in rows:
        digest.update(row)
    return digest.intdigest()
