"""Storage classes written for SGLang (0.5.9 and 0.5.23), used as they are.

Such a class may raise, answer None, and keep no checksums: here each of these is a miss, and each page gets one.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hicache_ray.storage.base import HiCacheStorage, HostPages, Slots, StorageConfig, StorageExtra
from hicache_ray.storage.options import KEY_STYLES, parse_bool, parse_choice
from hicache_ray.storage.registry import BackendError
from hicache_ray.storage.sglang_contract import SGLangExtraInfo, SGLangHostPool, SGLangStorageConfig
from hicache_ray.storage.sglang_paths import PagePath, TensorPath, ZeroCopyPath

logger = logging.getLogger("hicache_ray.storage")

GENERIC_METHODS = ("exists", "get", "set", "batch_get", "batch_set")
V1_METHODS = ("batch_get_v1", "batch_set_v1")

MAX_BROKEN = 1 << 16
"""Most pages that are remembered as having to be stored anew."""


class SGLangClassStorage(HiCacheStorage):
    """A backend whose store is a class written for SGLang.

    Options beside the loader's:
        interface_v1: use the zero-copy methods.
        key_style: "full" hands the class keys with the whole identity, so that a class which adds nothing to them is
            safe too; "sglang" hands it the bare page hashes, as SGLang does.
        checksum: keep a checksum with each page (default). Without it pages are stored as SGLang stores them.
    """

    def __init__(self, config: StorageConfig, target: type[Any]) -> None:
        """Make the class; BackendError when it lacks a method. What its constructor raises passes through."""
        super().__init__(config)
        extra = config.extra
        self._zero_copy = parse_bool("interface_v1", extra.get("interface_v1", False))
        self._style = parse_choice("key_style", extra.get("key_style", "full"), KEY_STYLES)
        self._checksum = parse_bool("checksum", extra.get("checksum", True))
        needed = GENERIC_METHODS + (V1_METHODS if self._zero_copy else ())
        missing = [name for name in needed if not callable(getattr(target, name, None))]
        if missing:
            raise BackendError(
                f"{target.__module__}.{target.__name__} is no storage backend: it lacks {', '.join(missing)}"
            )
        self.target = target(SGLangStorageConfig.of(config), {})
        self._exists_takes_extra = _takes_two(getattr(self.target, "batch_exists", None))
        self._path: PagePath | None = None
        self._broken: set[str] = set()
        self._lock = threading.Lock()
        self._logged: set[str] = set()

    def register_mem_pool_host(self, pool: HostPages) -> None:
        super().register_mem_pool_host(pool)
        path = ZeroCopyPath if self._zero_copy else TensorPath
        self._path = path(self._ask, pool, self._checksum)
        register = getattr(self.target, "register_mem_pool_host", None)
        if callable(register):
            register(SGLangHostPool(pool, self.config.identity.layout))

    def class_key(self, page_hash: str) -> str:
        """The key by which the class knows a page."""
        return page_hash if self._style == "sglang" else self.storage_key(page_hash)

    def batch_exists(self, hashes: Sequence[str], extra: StorageExtra | None = None) -> int:
        hits = self._exists([self.class_key(page_hash) for page_hash in hashes], SGLangExtraInfo.of(extra))
        self.counters.add(exists_calls=1, exists_asked=len(hashes), exists_hits=hits)
        return hits

    def batch_get_v1(self, hashes: Sequence[str], host_slots: Slots, extra: StorageExtra | None = None) -> list[bool]:
        pages = self.host_page_numbers(hashes, host_slots)
        if not len(pages):
            return []
        assert self._path is not None
        began = time.perf_counter()
        keys = [self.class_key(page_hash) for page_hash in hashes]
        answers = self._path.get(keys, pages, SGLangExtraInfo.of(extra))
        hits = next((position for position, ok in enumerate(answers) if not ok), len(keys))
        self._note_broken(keys, answers)
        self.counters.add(get_calls=1, get_asked=len(keys), get_hits=hits, get_bytes=hits * self._path.pool.page_bytes)
        self.counters.add(get_seconds=time.perf_counter() - began)
        return [position < hits for position in range(len(keys))]

    def batch_set_v1(self, hashes: Sequence[str], host_slots: Slots, extra: StorageExtra | None = None) -> list[bool]:
        pages = self.host_page_numbers(hashes, host_slots)
        if not self.config.is_writer or not len(pages):
            return [True] * len(hashes)
        assert self._path is not None
        began = time.perf_counter()
        keys, info = [self.class_key(page_hash) for page_hash in hashes], SGLangExtraInfo.of(extra)
        known = self._exists(keys, info)
        # The class may overwrite what is there, and what was found broken must be overwritten.
        new = [position for position, key in enumerate(keys) if position >= known or key in self._broken]
        stored = self._path.set([keys[position] for position in new], pages[new], info) if new else 0
        with self._lock:
            self._broken.difference_update(keys[position] for position in new[:stored])
        done = new[stored] if stored < len(new) else len(keys)
        self.counters.add(set_calls=1, set_asked=len(keys), set_stored=stored, set_existing=max(0, done - stored))
        self.counters.add(set_bytes=stored * self._path.pool.page_bytes, set_seconds=time.perf_counter() - began)
        return [position < done for position in range(len(keys))]

    def clear(self, everything: bool = False) -> None:
        """What the class's `clear` drops; it knows no identities, so that may be the whole store."""
        clear = getattr(self.target, "clear", None)
        if not callable(clear):
            raise NotImplementedError(f"{type(self.target).__name__} has no clear")
        clear()

    def close(self) -> None:
        if callable(getattr(self.target, "close", None)):
            self._ask("close")

    def _exists(self, keys: list[str], info: SGLangExtraInfo) -> int:
        if not keys:
            return 0
        if not hasattr(self.target, "batch_exists"):
            return next((position for position, key in enumerate(keys) if not self._ask("exists", key)), len(keys))
        hits = self._ask("batch_exists", keys, info) if self._exists_takes_extra else self._ask("batch_exists", keys)
        return min(max(int(hits), 0), len(keys)) if isinstance(hits, int | np.integer) else 0

    def _note_broken(self, keys: Sequence[str], answers: Sequence[bool | None]) -> None:
        """Count what was not what was stored. It is stored anew when it comes again, and so is the page that ended the
        read, which the class may otherwise go on to say it has."""
        broken = [key for key, ok in zip(keys, answers, strict=True) if ok is None]
        ended = next((key for key, ok in zip(keys, answers, strict=True) if not ok), None)
        if ended is None:
            return
        self.counters.add(corrupt=len(broken))
        with self._lock:
            if len(self._broken) < MAX_BROKEN:
                self._broken.update(broken, [ended])

    def _ask(self, name: str, *arguments: Any) -> Any:
        """What the class's method answers, None when it raises."""
        try:
            return getattr(self.target, name)(*arguments)
        except Exception as error:
            self.counters.add(errors=1)
            if name not in self._logged:
                self._logged.add(name)
                logger.warning("%s.%s: %s; a miss, further ones are only counted", type(self.target), name, error)
            return None


def _takes_two(method: Any) -> bool:
    """Whether `batch_exists` takes the extra info, which SGLang gives since 0.5.6."""
    if method is None:
        return False
    parameters = inspect.signature(method).parameters.values()
    return len(parameters) > 1 or any(entry.kind is entry.VAR_POSITIONAL for entry in parameters)
