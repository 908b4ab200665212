"""The "ray" backend: a rank's client of a pool of storage actors (docs/design.md 6).

Ray is imported when a backend is made.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import ClassVar

from hicache_ray.deadline import Deadline
from hicache_ray.pages import Bytes, Pages
from hicache_ray.storage.base import PageContext, Storage, StorageConfig
from hicache_ray.storage.breaker import Breaker
from hicache_ray.storage.pool.channel import ChannelError
from hicache_ray.storage.pool.client import PoolClient
from hicache_ray.storage.pool.member import PoolMember
from hicache_ray.storage.pool.membership import Membership
from hicache_ray.storage.pool.options import RayPoolOptions, actor_name
from hicache_ray.storage.pool.ray_channel import PoolDirectory, RayChannel, bounded
from hicache_ray.storage.registry import BackendError
from hicache_ray.storage.shard.grants import namespace_label

logger = logging.getLogger("hicache_ray.storage.pool.storage")


class RayPoolStorage(Storage):
    """Pages in the storage actors of a pool: one round of calls, at most one call an actor, for the pages of a call.

    Its calls are bounded: each member has a deadline and a breaker of its own, and none of them raises.
    """

    bounded: ClassVar[bool] = True

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
        # A write makes two rounds of calls, a read one a holder: each round must have its share of the time.
        rounds = membership.holders + 1
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

    def lookup(self, hashes: Sequence[bytes], context: PageContext | None = None) -> int:
        hits = self._client.lookup(self._keys(hashes), Deadline(self.config.timeout))
        self.counters.add(exists_calls=1, exists_asked=len(hashes), exists_hits=hits)
        return hits

    def load(self, hashes: Sequence[bytes], pages: Pages, context: PageContext | None = None) -> int:
        started = time.perf_counter()
        views = self._views(hashes, pages)
        hits = self._client.load(self._keys(hashes), views, Deadline(self.config.timeout))
        size, seconds = sum(view.nbytes for view in views[:hits]), time.perf_counter() - started
        self.counters.add(get_calls=1, get_asked=len(hashes), get_hits=hits, get_bytes=size, get_seconds=seconds)
        return hits

    def store(self, hashes: Sequence[bytes], pages: Pages, context: PageContext | None = None) -> int:
        started = time.perf_counter()
        views = self._views(hashes, pages)
        if not self.config.is_writer:
            return len(hashes)
        label = namespace_label(context.namespace if context is not None else "")
        stored = self._client.store(self._keys(hashes), views, label, Deadline(self.config.timeout))
        self.counters.add(set_calls=1, set_asked=len(hashes), set_seconds=time.perf_counter() - started)
        return stored

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
    def members(self) -> list[PoolMember]:
        """The members as this client sees them: their breakers and arenas."""
        return self._client.members

    def _connect(self, name: str) -> PoolMember:
        return PoolMember(
            name,
            RayChannel(actor_name(name), self._namespace, self._call_timeout),
            Breaker(self._options.refusal_seconds, max(5.0, self._options.refusal_seconds)),
            self.counters,
            call_timeout=self._call_timeout,
            use_shm=self._options.transport == "auto",
            prefault=self._options.prefault,
        )

    def _keys(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Storage keys as they travel: the identity's digest and the page hash, both as raw bytes."""
        return [self._prefix + page_hash for page_hash in hashes]

    def _views(self, hashes: Sequence[bytes], pages: Pages) -> list[Bytes]:
        segments = self.pool_for(hashes, pages).segments
        return [segments[page] for page in pages.tolist()]

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
