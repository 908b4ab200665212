"""The two ways of a page into and out of a class written for SGLang: as tensors, or straight from the host pool."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from hicache_ray.storage.base import Bytes, HostPages, Slots
from hicache_ray.storage.checksum import CHECKSUM_BYTES, page_checksum
from hicache_ray.storage.host_memory import page_rows
from hicache_ray.storage.sglang_contract import SGLangExtraInfo

Ask = Callable[..., Any]
"""Calls a method of the class by name; None when it raises."""

SUM_SUFFIX = ".sum"


class PagePath(Protocol):
    """Moves pages between the class and the host pool `pool`."""

    pool: HostPages

    def get(self, keys: list[str], pages: Slots, extra: SGLangExtraInfo) -> list[bool | None]:
        """Read pages; per page True, False when it is not there, None when it is not what was stored."""

    def set(self, keys: list[str], pages: Slots, extra: SGLangExtraInfo) -> int:
        """Store pages; how many, from the first on, are stored."""


class TensorPath:
    """`batch_get` and `batch_set`: one flat tensor a page, its checksum behind its bytes."""

    def __init__(self, ask: Ask, pool: HostPages, checksum: bool) -> None:
        self.pool = pool
        self._ask = ask
        self._checksum = checksum

    def get(self, keys: list[str], pages: Slots, extra: SGLangExtraInfo) -> list[bool | None]:
        """See PagePath."""
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

    def set(self, keys: list[str], pages: Slots, extra: SGLangExtraInfo) -> int:
        """See PagePath."""
        values = []
        for key, page in zip(keys, pages.tolist(), strict=True):
            body = np.array(self.pool.segments[page]).reshape(-1)
            if self._checksum:
                body = np.concatenate([body, np.frombuffer(packed_sum(key, [body.data]), dtype=np.uint8)])
            values.append(torch.from_numpy(body))
        return len(keys) if self._ask("batch_set", keys, values) is True else 0


class ZeroCopyPath:
    """`batch_get_v1` and `batch_set_v1`: the class reads and writes the host pool itself; the checksums go beside the
    pages, under their keys with ".sum", through `batch_get` and `batch_set`."""

    def __init__(self, ask: Ask, pool: HostPages, checksum: bool) -> None:
        self.pool = pool
        self._ask = ask
        self._checksum = checksum

    def get(self, keys: list[str], pages: Slots, extra: SGLangExtraInfo) -> list[bool | None]:
        """See PagePath."""
        done = leading(self._ask("batch_get_v1", keys, self._indices(pages), extra), len(keys))
        if not self._checksum or not done:
            return [position < done for position in range(len(keys))]
        targets = [torch.zeros(CHECKSUM_BYTES, dtype=torch.uint8) for _ in range(done)]
        names = [key + SUM_SUFFIX for key in keys[:done]]
        sums = tensors_as_bytes(self._ask("batch_get", names, targets), done)
        answers: list[bool | None] = [False] * len(keys)
        for position, stored in enumerate(sums):
            expected = packed_sum(keys[position], page_rows(self.pool.segments, int(pages[position])))
            answers[position] = (stored is not None and stored.tobytes() == expected) or None
        return answers

    def set(self, keys: list[str], pages: Slots, extra: SGLangExtraInfo) -> int:
        """See PagePath."""
        stored = leading(self._ask("batch_set_v1", keys, self._indices(pages), extra), len(keys))
        if not self._checksum or not stored:
            return stored
        names = [key + SUM_SUFFIX for key in keys[:stored]]
        sums = [
            torch.frombuffer(bytearray(packed_sum(key, page_rows(self.pool.segments, page))), dtype=torch.uint8)
            for key, page in zip(keys[:stored], pages[:stored].tolist(), strict=True)
        ]
        return stored if self._ask("batch_set", names, sums) is True else 0

    def _indices(self, pages: Slots) -> torch.Tensor:
        size = self.pool.page_size
        return torch.from_numpy((pages[:, None] * size + np.arange(size)).reshape(-1))


def packed_sum(key: str, rows: Iterable[memoryview]) -> bytes:
    """A page's checksum as it is stored."""
    return struct.pack("<Q", page_checksum(key, rows))


def leading(answer: Any, count: int) -> int:
    """How many pages, from the first on, an answer of flags says yes to; 0 for what is no answer to `count` pages."""
    if not isinstance(answer, Sequence) or len(answer) != count:
        return 0
    return next((position for position, flag in enumerate(answer) if not flag), count)


def tensors_as_bytes(answer: Any, count: int) -> list[Bytes | None]:
    """Tensors as flat bytes, None where there is none; all None for what is no answer to `count` pages."""
    if not isinstance(answer, Sequence) or len(answer) != count:
        return [None] * count
    return [
        entry.contiguous().reshape(-1).view(torch.uint8).numpy() if isinstance(entry, torch.Tensor) else None
        for entry in answer
    ]
