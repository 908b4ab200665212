"""Pages in a Mooncake store: straight between the host pool and the memory of the cluster, over TCP or RDMA.

A page is one object under its full key: the page's segments, then a checksum. With `key_style="sglang"` the objects
are those of SGLang (case 10: K and V of a page apart, no checksum), to share a store with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hicache_ray.deadline import Deadline
from hicache_ray.pages import Pages
from hicache_ray.storage.base import PageContext, Storage, StorageConfig, leading
from hicache_ray.storage.host_pages import HostPages, memory_span
from hicache_ray.storage.mooncake.client import MooncakeConnection, StoreAway
from hicache_ray.storage.mooncake.objects import FullObjects, ObjectStyle, Outcome, SGLangObjects
from hicache_ray.storage.mooncake.options import MooncakeOptions

logger = logging.getLogger("hicache_ray.storage")


class MooncakeStorage(Storage):
    """L3 in a Mooncake store. A store that is away is all misses, and is used again when it is back.

    Calls of the library last up to 30 s when its master hangs: put `GuardedStorage` around this.

    Raises:
        BackendError: options that do not fit; with `check_server`, no store.
        ImportError: the package, or a library it needs, is not installed.
    """

    def __init__(self, config: StorageConfig) -> None:
        super().__init__(config)
        self.options = MooncakeOptions.parse(config.extra)
        self.options.check(config.identity)
        style = FullObjects if self.options.key_style == "full" else SGLangObjects
        self.objects: ObjectStyle = style(config.identity, self.options.extra_backend_tag)
        self.connection = MooncakeConnection(self.options, config.identity, config.timeout)
        self._logged: set[str] = set()
        self._pause = threading.Event()
        for name, span in self.objects.spans().items():
            self.connection.register(name, span)
        self.connection.connect()

    def register_host_pool(self, pool: HostPages) -> None:
        """As the base's; RuntimeError when the transport can't register the pool's memory, BackendError when the
        pool's layout does not fit the keys."""
        self.objects.pieces(pool)
        super().register_host_pool(pool)
        self.connection.register("host pool", memory_span(pool.segments))

    def lookup(self, hashes: Sequence[bytes], context: PageContext | None = None) -> int:
        hits = self._attempt(lambda store: leading(self._present(store, hashes)))
        self.counters.add(exists_calls=1, exists_asked=len(hashes), exists_hits=hits)
        return hits

    def load(self, hashes: Sequence[bytes], pages: Pages, context: PageContext | None = None) -> int:
        pool = self.pool_for(hashes, pages)
        began = time.perf_counter()
        hits = self._attempt(lambda store: self._get(store, hashes, pages))
        self.counters.add(get_calls=1, get_asked=len(hashes), get_hits=hits, get_bytes=hits * pool.page_bytes)
        self.counters.add(get_seconds=time.perf_counter() - began)
        return hits

    def store(self, hashes: Sequence[bytes], pages: Pages, context: PageContext | None = None) -> int:
        self.pool_for(hashes, pages)
        if not self.config.is_writer:
            return len(hashes)
        began = time.perf_counter()
        done = self._attempt(lambda store: self._set(store, hashes, pages))
        self.counters.add(set_calls=1, set_asked=len(hashes), set_seconds=time.perf_counter() - began)
        return done

    def clear(self, everything: bool = False) -> None:
        """Drop the pages of this backend's identity and tag; with `everything` all objects of the store.

        Raises:
            StoreAway: the store is not there.
            RuntimeError: it refuses.
        """
        with self.connection.use() as store:
            code = store.remove_all(True) if everything else store.remove_by_regex(self.objects.pattern(), True)
        if code < 0:
            raise RuntimeError(f"the Mooncake store could not be cleared (code {code})")

    def close(self) -> None:
        self.connection.close(self.config.timeout)

    def _present(self, store: Any, hashes: Sequence[bytes]) -> list[bool]:
        """Whether each page is stored, whole."""
        if not hashes:
            return []
        keys = [key for page_hash in hashes for key in self.objects.keys(page_hash)]
        codes = store.batch_is_exist(keys)
        failed = [code for code in codes if code < 0]
        if failed:
            self._failed("exists", failed[0])
        step = len(keys) // len(hashes)
        return [all(code == 1 for code in codes[start : start + step]) for start in range(0, len(codes), step)]

    def _get(self, store: Any, hashes: Sequence[bytes], pages: Pages) -> int:
        """Read pages. Returns how many came whole, from the first on."""
        hits = 0
        for batch in self.objects.batches(len(hashes), self.pool_for(hashes, pages)):
            outcomes = self._read(store, hashes[batch], pages[batch])
            for page_hash, outcome in zip(hashes[batch], outcomes, strict=True):
                if outcome is Outcome.CORRUPT:
                    self.counters.add(corrupt=1)
                    self._remove(store, page_hash)
                if outcome is not Outcome.OK:
                    return hits
                hits += 1
        return hits

    def _read(self, store: Any, hashes: Sequence[bytes], pages: Pages) -> list[Outcome]:
        assert self.host_pool is not None
        outcomes = self.objects.read(store, hashes, pages, self.host_pool)
        expired = [position for position, outcome in enumerate(outcomes) if outcome is Outcome.AGAIN]
        if expired:
            again = self.objects.read(store, [hashes[i] for i in expired], pages[expired], self.host_pool)
            for position, outcome in zip(expired, again, strict=True):
                outcomes[position] = outcome
        if Outcome.FAILED in outcomes:
            self._failed("get", self.objects.last_code)
        return outcomes

    def _set(self, store: Any, hashes: Sequence[bytes], pages: Pages) -> int:
        """Store pages. Returns how many are stored, from the first on."""
        assert self.host_pool is not None
        present = self._present(store, hashes)
        new = [position for position, there in enumerate(present) if not there]
        stored: list[int] = []
        for bounds in self.objects.batches(len(new), self.host_pool):
            batch = new[bounds]
            good = self._write(store, [hashes[i] for i in batch], pages[batch])
            stored += batch[:good]
            if good < len(batch):
                break
        done = new[len(stored)] if len(stored) < len(new) else len(hashes)
        size = self.host_pool.page_bytes * len(stored)
        self.counters.add(set_stored=len(stored), set_existing=max(0, done - len(stored)), set_bytes=size)
        return done

    def _write(self, store: Any, hashes: Sequence[bytes], pages: Pages) -> int:
        """Store pages that are not there. Returns how many are, from the first on."""
        assert self.host_pool is not None
        outcomes = self.objects.write(store, hashes, pages, self.host_pool)
        if Outcome.FAILED in outcomes:
            self._failed("put", self.objects.last_code)
        taken = [position for position, outcome in enumerate(outcomes) if outcome is Outcome.OK]
        # The store says yes too to an object that another client is just writing.
        there = self._wait_until_present(store, [hashes[i] for i in taken])
        whole = {position for position, ok in zip(taken, there, strict=True) if ok}
        good = leading(position in whole for position in range(len(hashes)))
        for position in sorted(whole):
            if position > good:
                # Without its parent it could never be found.
                self._remove(store, hashes[position])
        return good

    def _wait_until_present(self, store: Any, hashes: Sequence[bytes]) -> list[bool]:
        deadline = Deadline(self.config.timeout / 2)
        seconds = 0.01
        while True:
            present = self._present(store, hashes)
            if all(present) or deadline.passed:
                return present
            self._pause.wait(seconds)
            seconds = min(2 * seconds, 0.2)

    def _remove(self, store: Any, page_hash: bytes) -> None:
        """Drop a page, so that it can be stored again."""
        for key in self.objects.keys(page_hash):
            store.remove(key, True)

    def _attempt(self, call: Callable[[Any], int]) -> int:
        """What a call on the store counts; 0 when the store is away."""
        try:
            with self.connection.use() as store:
                return call(store)
        except (StoreAway, RuntimeError) as error:
            self.counters.add(errors=1)
            self._log(type(error).__name__, f"{error}")
            return 0

    def _failed(self, name: str, code: int) -> None:
        self.counters.add(errors=1)
        self._log(f"{name} {code}", f"Mooncake {name} failed with code {code}")

    def _log(self, kind: str, text: str) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning("%s; a miss, further ones are only counted", text)
