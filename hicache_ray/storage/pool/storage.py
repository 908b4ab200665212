"""The "ray" backend: a rank's client of a pool of storage actors (DESIGN 6). Ray is imported when a backend is made."""

from __future__ import annotations

import binascii
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hicache_ray.deadline import Deadline
from hicache_ray.storage.base import HiCacheStorage, Slots, StorageConfig, StorageExtra
from hicache_ray.storage.guard import Breaker
from hicache_ray.storage.pool.channel import ChannelError
from hicache_ray.storage.pool.client import PoolClient
from hicache_ray.storage.pool.member import Member
from hicache_ray.storage.pool.membership import Membership
from hicache_ray.storage.pool.options import RayPoolOptions, actor_name
from hicache_ray.storage.pool.ray_channel import PoolDirectory, RayChannel, bounded
from hicache_ray.storage.registry import BackendError
from hicache_ray.storage.shard.shard import namespace_label

logger = logging.getLogger("hicache_ray.storage.pool.storage")

BATCH_PAGES = 128
"""Most pages that one round of calls moves."""
EXISTS_BATCH_PAGES = 1024
"""Most keys that one round of calls asks for: their message stays small enough to travel inside the call."""


class RayPoolStorage(HiCacheStorage):
    """Pages in the storage actors of a pool. One round of calls, at most one call an actor, per batch of pages."""

    def __init__(self, config: StorageConfig) -> None:
        """Connect to a running pool.

        Raises:
            BackendError: a bad option, Ray is not initialised, or there is no such pool.
        """
        super().__init__(config)
        self._options = options = RayPoolOptions.parse(config.extra)
        self._namespace = _join_ray(options)
        self._directory = PoolDirectory(options.pool, self._namespace)
        membership = self._read_directory()
        # Two rounds of calls a write, one a replica for a read: each must have its share of the time.
        rounds = membership.copies + 1
        self._call_timeout = min(options.call_timeout or config.timeout / rounds, config.timeout)
        self._prefix = bytes.fromhex(config.identity.digest)
        self._client = PoolClient(
            membership,
            self._connect,
            self.counters,
            options.copy_threads,
            lambda: bounded(self._directory.read, self._call_timeout),
        )
        for member in self._client.members:
            # A deadline for each: mapping a large arena as a whole takes longer than a call may.
            member.attach(Deadline(config.timeout), wait=True)

    def batch_exists(self, hashes: Sequence[str], extra: StorageExtra | None = None) -> int:
        deadline = Deadline(self.config.timeout)
        keys = self._keys(hashes)
        hits = 0
        for start in range(0, len(keys), EXISTS_BATCH_PAGES):
            batch = keys[start : start + EXISTS_BATCH_PAGES]
            found = _leading_count(self._client.exists(batch, deadline))
            hits += found
            if found < len(batch):
                break
        self.counters.add(exists_calls=1, exists_asked=len(keys), exists_hits=hits)
        return hits

    def batch_get_v1(self, hashes: Sequence[str], host_slots: Slots, extra: StorageExtra | None = None) -> list[bool]:
        started = time.perf_counter()
        deadline = Deadline(self.config.timeout)
        pages, keys = self._host_views(hashes, host_slots), self._keys(hashes)
        done = 0
        for start in range(0, len(keys), BATCH_PAGES):
            batch = slice(start, start + BATCH_PAGES)
            arrived = _leading_count(self._client.get(keys[batch], pages[batch], deadline))
            done += arrived
            if arrived < len(keys[batch]):
                break
        self.counters.add(
            get_calls=1,
            get_asked=len(keys),
            get_hits=done,
            get_bytes=done * self._page_bytes,
            get_seconds=time.perf_counter() - started,
        )
        return [True] * done + [False] * (len(keys) - done)

    def batch_set_v1(self, hashes: Sequence[str], host_slots: Slots, extra: StorageExtra | None = None) -> list[bool]:
        started = time.perf_counter()
        deadline = Deadline(self.config.timeout)
        pages, keys = self._host_views(hashes, host_slots), self._keys(hashes)
        if not self.config.is_writer:
            return [True] * len(keys)
        label = namespace_label(extra.namespace if extra is not None else "")
        done = 0
        for start in range(0, len(keys), BATCH_PAGES):
            batch = slice(start, start + BATCH_PAGES)
            stored = _leading_count(self._client.set(keys[batch], pages[batch], label, deadline))
            done += stored
            if stored < len(keys[batch]):
                break
        self.counters.add(set_calls=1, set_asked=len(keys), set_seconds=time.perf_counter() - started)
        return [True] * done + [False] * (len(keys) - done)

    def clear(self, everything: bool = False) -> None:
        """Drop the pages of this identity, or of the whole pool.

        Raises:
            RuntimeError: members that could not be reached; the others are cleared.
        """
        deadline = Deadline(self.config.timeout)
        prefix = b"" if everything else self._prefix
        calls = [(member, member.start("clear", None, prefix)) for member in self._client.members]
        away = [member.name for member, call in calls if member.finish(call, deadline) is None]
        if away:
            raise RuntimeError(f"storage actors {', '.join(away)} are away and were not cleared")

    def close(self) -> None:
        self._client.close()

    @property
    def membership(self) -> Membership:
        """The membership this client knows."""
        return self._client.membership

    @property
    def members(self) -> list[Member]:
        """The members as this client sees them: their breakers and arenas."""
        return self._client.members

    @property
    def _page_bytes(self) -> int:
        assert self.host_pool is not None
        return self.host_pool.page_bytes

    def _connect(self, name: str) -> Member:
        return Member(
            name,
            RayChannel(actor_name(name), self._namespace, self._call_timeout),
            Breaker(self._options.refusal_seconds, max(5.0, self._options.refusal_seconds)),
            self.counters,
            call_timeout=self._call_timeout,
            use_shm=self._options.transport == "auto",
            prefault=self._options.prefault,
        )

    def _keys(self, hashes: Sequence[str]) -> list[bytes]:
        """Storage keys as they travel: the identity's digest and the page hash, both as raw bytes."""
        raw = binascii.unhexlify("".join(hashes))
        size = len(raw) // len(hashes) if hashes else 0
        return [self._prefix + raw[at : at + size] for at in range(0, len(raw), size or 1)]

    def _host_views(self, hashes: Sequence[str], host_slots: Slots) -> list[Any]:
        numbers = self.host_page_numbers(hashes, host_slots)
        assert self.host_pool is not None
        segments = self.host_pool.segments
        return [segments[number] for number in numbers.tolist()]

    def _read_directory(self) -> Membership:
        try:
            membership = bounded(self._directory.read, self.config.timeout)
        except ChannelError as error:
            raise BackendError(f"the directory of storage pools can't be read: {error}") from error
        if membership is None:
            raise BackendError(
                f"there is no storage pool {self._options.pool!r} in the Ray namespace {self._namespace!r}; start one "
                "with StoragePool.start, or name another with the options pool and namespace"
            )
        return membership


def _join_ray(options: RayPoolOptions) -> str:
    """The namespace of the pool, with Ray initialised."""
    import ray

    if not ray.is_initialized():
        if options.address is None:
            raise BackendError("storage backend 'ray' needs Ray: call ray.init first, or give the option address")
        ray.init(address=options.address, namespace=options.namespace, log_to_driver=False)
    return options.namespace or str(ray.get_runtime_context().namespace)


def _leading_count(flags: np.ndarray) -> int:
    return len(flags) if flags.all() else int(np.argmin(flags))
