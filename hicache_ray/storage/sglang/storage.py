"""Storage classes written for SGLang (0.5.9 and 0.5.23), used as they are.

Such a class may raise, answer None, and keep no checksums: here each of these is a miss, and each page gets one. A page
goes one of two ways: as a tensor, or straight between the class and the host pool.
"""

from __future__ import annotations

import inspect
import logging
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from hicache_ray.pages import Bytes, Pages, slots_of
from hicache_ray.storage.base import PageContext, Storage, StorageConfig, leading
from hicache_ray.storage.host_pages import CHECKSUM_BYTES, HostPages, page_checksum, page_runs
from hicache_ray.storage.options import KEY_STYLES, read_bool, read_choice
from hicache_ray.storage.registry import BackendError
from hicache_ray.storage.sglang.contract import SGLangExtraInfo, SGLangHostPool, SGLangStorageConfig

logger = logging.getLogger("hicache_ray.storage")

GENERIC_METHODS = ("exists", "get", "set", "batch_get", "batch_set")
V1_METHODS = ("batch_get_v1", "batch_set_v1")

MAX_BROKEN = 1 << 16
"""Most pages that are remembered as having to be stored anew."""


class SGLangClassStorage(Storage):
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
        self._zero_copy = read_bool("interface_v1", extra.get("interface_v1", False))
        self._style = read_choice("key_style", extra.get("key_style", "full"), KEY_STYLES)
        self._checksum = read_bool("checksum", extra.get("checksum", True))
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

    def register_host_pool(self, pool: HostPages) -> None:
        super().register_host_pool(pool)
        path = ZeroCopyPath if self._zero_copy else TensorPath
        self._path = path(self._ask, pool, self._checksum)
        register = getattr(self.target, "register_mem_pool_host", None)
        if callable(register):
            register(SGLangHostPool(pool, self.config.identity.layout))

    def class_key(self, page_hash: bytes) -> str:
        """The key by which the class knows a page."""
        return page_hash.hex() if self._style == "sglang" else self.storage_key(page_hash)

    def lookup(self, hashes: Sequence[bytes], context: PageContext | None = None) -> int:
        hits = self._exists([self.class_key(page_hash) for page_hash in hashes], SGLangExtraInfo.of(context))
        self.counters.add(exists_calls=1, exists_asked=len(hashes), exists_hits=hits)
        return hits

    def load(self, hashes: Sequence[bytes], pages: Pages, context: PageContext | None = None) -> int:
        pool = self.pool_for(hashes, pages)
        if not len(pages):
            return 0
        assert self._path is not None
        began = time.perf_counter()
        keys = [self.class_key(page_hash) for page_hash in hashes]
        answers = self._path.get(keys, pages, SGLangExtraInfo.of(context))
        hits = leading(bool(ok) for ok in answers)
        self._note_broken(keys, answers)
        self.counters.add(get_calls=1, get_asked=len(keys), get_hits=hits, get_bytes=hits * pool.page_bytes)
        self.counters.add(get_seconds=time.perf_counter() - began)
        return hits

    def store(self, hashes: Sequence[bytes], pages: Pages, context: PageContext | None = None) -> int:
        pool = self.pool_for(hashes, pages)
        if not self.config.is_writer or not len(pages):
            return len(hashes)
        assert self._path is not None
        began = time.perf_counter()
        keys, info = [self.class_key(page_hash) for page_hash in hashes], SGLangExtraInfo.of(context)
        known = self._exists(keys, info)
        # The class may overwrite what is there, and what was found broken must be overwritten.
        new = [position for position, key in enumerate(keys) if position >= known or key in self._broken]
        stored = self._path.set([keys[position] for position in new], pages[new], info) if new else 0
        with self._lock:
            self._broken.difference_update(keys[position] for position in new[:stored])
        done = new[stored] if stored < len(new) else len(keys)
        self.counters.add(set_calls=1, set_asked=len(keys), set_stored=stored, set_existing=max(0, done - stored))
        self.counters.add(set_bytes=stored * pool.page_bytes, set_seconds=time.perf_counter() - began)
        return done

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
            return leading(self._ask("exists", key) for key in keys)
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


Ask = Callable[..., Any]
"""Calls a method of the class by name; None when it raises."""

SUM_SUFFIX = ".sum"


class PagePath(ABC):
    """Moves pages between the class and the host pool `pool`, each with a checksum where `checksum` says so."""

    def __init__(self, ask: Ask, pool: HostPages, checksum: bool) -> None:
        self.pool = pool
        self._ask = ask
        self._checksum = checksum

    @abstractmethod
    def get(self, keys: list[str], pages: Pages, extra: SGLangExtraInfo) -> list[bool | None]:
        """Read pages. Returns per page True, False when it is not there, None when it is not what was stored."""

    @abstractmethod
    def set(self, keys: list[str], pages: Pages, extra: SGLangExtraInfo) -> int:
        """Store pages. Returns how many, from the first on, are stored."""


class TensorPath(PagePath):
    """`batch_get` and `batch_set`: one flat tensor a page, its checksum behind its bytes."""

    def get(self, keys: list[str], pages: Pages, extra: SGLangExtraInfo) -> list[bool | None]:
        length = self.pool.page_bytes + (CHECKSUM_BYTES if self._checksum else 0)
        targets = [torch.zeros(length, dtype=torch.uint8) for _ in keys]
        answers = tensors_as_bytes(self._ask("batch_get", keys, targets), len(keys))
        return [
            False if data is None else self._accept(key, data, length, page) or None
            for key, data, page in zip(keys, answers, pages.tolist(), strict=True)
        ]

    def _accept(self, key: str, data: Bytes, length: int, page: int) -> bool:
        if data.size != length:
            return False
        body = data[: self.pool.page_bytes]
        if self._checksum and data[body.size :].tobytes() != packed_sum(key, [body.data]):
            return False
        target = self.pool.segments[page]
        np.copyto(target, body.reshape(target.shape))
        return True

    def set(self, keys: list[str], pages: Pages, extra: SGLangExtraInfo) -> int:
        values = []
        for key, page in zip(keys, pages.tolist(), strict=True):
            body = np.array(self.pool.segments[page]).reshape(-1)
            if self._checksum:
                body = np.concatenate([body, np.frombuffer(packed_sum(key, [body.data]), dtype=np.uint8)])
            values.append(torch.from_numpy(body))
        return len(keys) if self._ask("batch_set", keys, values) is True else 0


class ZeroCopyPath(PagePath):
    """`batch_get_v1` and `batch_set_v1`: the class reads and writes the host pool itself; the checksums go beside the
    pages, under their keys with ".sum", through `batch_get` and `batch_set`."""

    def get(self, keys: list[str], pages: Pages, extra: SGLangExtraInfo) -> list[bool | None]:
        done = leading_of(self._ask("batch_get_v1", keys, self._indices(pages), extra), len(keys))
        if not self._checksum or not done:
            return [position < done for position in range(len(keys))]
        targets = [torch.zeros(CHECKSUM_BYTES, dtype=torch.uint8) for _ in range(done)]
        names = [key + SUM_SUFFIX for key in keys[:done]]
        sums = tensors_as_bytes(self._ask("batch_get", names, targets), done)
        answers: list[bool | None] = [False] * len(keys)
        for position, stored in enumerate(sums):
            expected = packed_sum(keys[position], page_runs(self.pool.segments, int(pages[position])))
            answers[position] = (stored is not None and stored.tobytes() == expected) or None
        return answers

    def set(self, keys: list[str], pages: Pages, extra: SGLangExtraInfo) -> int:
        stored = leading_of(self._ask("batch_set_v1", keys, self._indices(pages), extra), len(keys))
        if not self._checksum or not stored:
            return stored
        names = [key + SUM_SUFFIX for key in keys[:stored]]
        sums = [
            torch.frombuffer(bytearray(packed_sum(key, page_runs(self.pool.segments, page))), dtype=torch.uint8)
            for key, page in zip(keys[:stored], pages[:stored].tolist(), strict=True)
        ]
        return stored if self._ask("batch_set", names, sums) is True else 0

    def _indices(self, pages: Pages) -> torch.Tensor:
        return torch.from_numpy(slots_of(pages, self.pool.page_size))


def packed_sum(key: str, rows: Iterable[memoryview]) -> bytes:
    """A page's checksum as it is stored."""
    return struct.pack("<Q", page_checksum(key, rows))


def leading_of(answer: Any, count: int) -> int:
    """How many pages, from the first on, an answer of flags says yes to; 0 for what is no answer to `count` pages."""
    if not isinstance(answer, Sequence) or len(answer) != count:
        return 0
    return leading(answer)


def tensors_as_bytes(answer: Any, count: int) -> list[Bytes | None]:
    """Tensors as flat bytes, None where there is none; all None for what is no answer to `count` pages."""
    if not isinstance(answer, Sequence) or len(answer) != count:
        return [None] * count
    return [
        entry.contiguous().reshape(-1).view(torch.uint8).numpy() if isinstance(entry, torch.Tensor) else None
        for entry in answer
    ]
