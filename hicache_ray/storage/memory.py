"""An L3 backend in this process's memory, for tests and for groups that run without Ray.

Backends that name the same store share its pages, as instances share a pool of storage actors:

    config = StorageConfig(identity, extra={"store": "mine", "capacity_bytes": 1 << 20})
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from hicache_ray.pages import Bytes
from hicache_ray.storage.base import PageStorage, StorageConfig
from hicache_ray.storage.registry import register_backend

BACKEND = "memory"
"""Name of this backend in the registry, once this module is imported."""


class MemoryStore:
    """Pages by storage key within a byte budget; the least recently used go first. Thread-safe."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.evicted_pages = 0
        self._pages: OrderedDict[str, Bytes] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._pages

    def get(self, key: str) -> Bytes | None:
        """A page, now the most recently used; None when it is not here. Not to be written to."""
        with self._lock:
            page = self._pages.get(key)
            if page is not None:
                self._pages.move_to_end(key)
            return page

    def set(self, key: str, data: Bytes) -> bool:
        """Keeps a copy of a page. Returns False when it is larger than the whole budget. An existing key is kept as it
        is."""
        with self._lock:
            if key in self._pages:
                self._pages.move_to_end(key)
                return True
            if not self._make_room(data.size):
                return False
            self._pages[key] = np.array(data, copy=True)
            self.used_bytes += data.size
            return True

    def clear(self, prefix: str = "") -> None:
        """Drops the pages whose keys begin so; without a prefix, every page."""
        with self._lock:
            for key in [key for key in self._pages if key.startswith(prefix)]:
                self.used_bytes -= self._pages.pop(key).size

    def _make_room(self, size: int) -> bool:
        if self.capacity_bytes is None:
            return True
        if size > self.capacity_bytes:
            return False
        while self.used_bytes + size > self.capacity_bytes:
            _, page = self._pages.popitem(last=False)
            self.used_bytes -= page.size
            self.evicted_pages += 1
        return True


_stores: dict[str, MemoryStore] = {}


def open_store(name: str, capacity_bytes: int | None = None) -> MemoryStore:
    """The store of that name in this process, made when it is first asked for."""
    return _stores.setdefault(name, MemoryStore(capacity_bytes))


def drop_store(name: str) -> None:
    """Forgets a store and its pages; nothing happens when there is none of that name."""
    _stores.pop(name, None)


class MemoryStorage(PageStorage):
    """Backend over `open_store(extra["store"], extra["capacity_bytes"])`; both options may be left out."""

    def __init__(self, config: StorageConfig) -> None:
        super().__init__(config)
        self.pages = open_store(str(config.extra.get("store", "default")), config.extra.get("capacity_bytes"))

    def exists(self, key: str) -> bool:
        return key in self.pages

    def get(self, key: str, out: Bytes) -> bool:
        page = self.pages.get(key)
        if page is None or page.size != out.size:
            return False
        np.copyto(out, page)
        return True

    def set(self, key: str, data: Bytes) -> bool:
        return self.pages.set(key, data)

    def clear(self, everything: bool = False) -> None:
        self.pages.clear("" if everything else self.storage_key(b""))


register_backend(BACKEND, MemoryStorage)
