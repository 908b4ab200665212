"""How a page becomes objects of a Mooncake store, in two styles, ours and SGLang's, and what the store's answers
(mooncake-store's ErrorCode) mean for it."""

from __future__ import annotations

import contextlib
import enum
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hicache_ray.hashing import ModelIdentity, sglang_mooncake_keys, storage_key
from hicache_ray.pages import Pages
from hicache_ray.storage.host_pages import (
    CHECKSUM_BYTES,
    HostPages,
    Span,
    memory_span,
    page_addresses,
    page_checksum,
    page_runs,
)
from hicache_ray.storage.registry import BackendError

NO_SPACE = -200
TOO_SMALL = -600
NOT_READY = -703
NOT_FOUND = -704
EXISTS = -705
LEASE_EXPIRED = -707
GONE = -712


class Outcome(enum.Enum):
    """What became of a page."""

    OK = "ok"
    MISSING = "missing"
    """The page is not there, or not yet, or no more."""
    CORRUPT = "corrupt"
    """There is something else under its key."""
    AGAIN = "again"
    """The lease ran out while the bytes came: they may be another page's. Asking once more gets a new lease."""
    FULL = "full"
    """No room: the store frees some by itself as leases run out."""
    FAILED = "failed"
    """The store or the way to it failed."""


_READS = {
    NOT_FOUND: Outcome.MISSING,
    NOT_READY: Outcome.MISSING,
    GONE: Outcome.MISSING,
    TOO_SMALL: Outcome.CORRUPT,
    LEASE_EXPIRED: Outcome.AGAIN,
}
_WRITES = {0: Outcome.OK, EXISTS: Outcome.OK, NO_SPACE: Outcome.FULL}


def read_outcome(code: int, expected: int) -> Outcome:
    """Meaning of `batch_get_into`'s number for an object: its bytes (`expected` of them are wanted) or an error."""
    if code == expected:
        return Outcome.OK
    return Outcome.CORRUPT if code >= 0 else _READS.get(code, Outcome.FAILED)


def write_outcome(code: int) -> Outcome:
    """Meaning of `batch_put_from`'s number for an object. OK is said too when another client is just writing it."""
    return _WRITES.get(code, Outcome.FAILED)


MAX_PIECES = 1024
"""Runs of memory in one call: the TCP transport refuses more than 2,048 under way."""

MAX_CALLS = 32
"""Calls under way at once, those given up included, that checksums have room for."""


class ObjectStyle(ABC):
    """Keys and bytes of pages. `last_code` is the last error the store gave."""

    last_code = 0

    @abstractmethod
    def keys(self, page_hash: bytes) -> list[str]:
        """The objects of a page."""

    @abstractmethod
    def pattern(self) -> str:
        """A regular expression for the keys of all pages of this identity and tag."""

    def spans(self) -> dict[str, Span]:
        """Memory of its own that has to be registered."""
        return {}

    @abstractmethod
    def pieces(self, pool: HostPages) -> int:
        """Runs of memory a page is moved from and to; BackendError when pages of this pool can't be stored so."""

    @abstractmethod
    def read(self, store: Any, hashes: Sequence[bytes], pages: Pages, pool: HostPages) -> list[Outcome]:
        """Read pages into the pool, not more than `batches` says."""

    @abstractmethod
    def write(self, store: Any, hashes: Sequence[bytes], pages: Pages, pool: HostPages) -> list[Outcome]:
        """Store pages of the pool, not more than `batches` says."""

    def batches(self, count: int, pool: HostPages) -> Iterator[slice]:
        """The calls that `count` pages take."""
        step = max(1, MAX_PIECES // self.pieces(pool))
        return (slice(start, start + step) for start in range(0, count, step))

    def note(self, codes: Sequence[int]) -> None:
        """Keep the first error among the numbers of an answer."""
        self.last_code = next((code for code in codes if code < 0), self.last_code)


class FullObjects(ObjectStyle):
    """One object a page under its full key: the page's segments in order, then 8 bytes of checksum."""

    def __init__(self, identity: ModelIdentity, tag: str) -> None:
        self._digest = identity.digest
        self._tag = f"{tag}_" if tag else ""
        self._sums = np.zeros((MAX_CALLS, MAX_PIECES // 2), dtype="<u8")
        self._free = deque(range(MAX_CALLS))

    def keys(self, page_hash: bytes) -> list[str]:
        return [self._tag + storage_key(self._digest, page_hash.hex())]

    def pattern(self) -> str:
        return f"^{re.escape(self._tag)}{self._digest}-[0-9a-f]+$"

    def spans(self) -> dict[str, Span]:
        return {"checksums": memory_span(self._sums.view(np.uint8))}

    def pieces(self, pool: HostPages) -> int:
        return int(np.prod(pool.segments.shape[1:-1])) + 1

    def read(self, store: Any, hashes: Sequence[bytes], pages: Pages, pool: HostPages) -> list[Outcome]:
        """As the base's; a page whose checksum does not fit is CORRUPT."""
        keys = [self.keys(page_hash)[0] for page_hash in hashes]
        with self._row() as row:
            addresses, sizes = self._pieces(pages, pool, row)
            codes = store.batch_get_into_multi_buffers(keys, addresses, sizes)
            self.note(codes)
            outcomes = []
            for position, (key, page) in enumerate(zip(keys, pages.tolist(), strict=True)):
                expected = sum(sizes[position])
                outcome = read_outcome(codes[position], expected)
                if outcome is Outcome.OK:
                    good = page_checksum(key, page_runs(pool.segments, page)) == self._sums[row, position]
                    outcome = Outcome.OK if good else Outcome.CORRUPT
                elif outcome is Outcome.FAILED and self._has_another_length(store, key, expected):
                    outcome = Outcome.CORRUPT
                outcomes.append(outcome)
            return outcomes

    def write(self, store: Any, hashes: Sequence[bytes], pages: Pages, pool: HostPages) -> list[Outcome]:
        keys = [self.keys(page_hash)[0] for page_hash in hashes]
        with self._row() as row:
            for position, (key, page) in enumerate(zip(keys, pages.tolist(), strict=True)):
                self._sums[row, position] = page_checksum(key, page_runs(pool.segments, page))
            codes = store.batch_put_from_multi_buffers(keys, *self._pieces(pages, pool, row))
        self.note(codes)
        return [write_outcome(code) for code in codes]

    def _pieces(self, pages: Pages, pool: HostPages, row: int) -> tuple[list[list[int]], list[list[int]]]:
        """Addresses and sizes of each page's segments, those of its checksum behind them."""
        segments = page_addresses(pool.segments, pages)
        checksums = self._sums[row].ctypes.data + CHECKSUM_BYTES * np.arange(len(pages))
        sizes = [*[pool.segments.shape[-1]] * segments.shape[1], CHECKSUM_BYTES]
        return np.column_stack([segments, checksums]).tolist(), [sizes] * len(pages)

    @staticmethod
    def _has_another_length(store: Any, key: str, expected: int) -> bool:
        """Whether the object can't be the page: the store calls that a failed transfer."""
        size = store.get_size(key)
        return size >= 0 and size != expected

    @contextlib.contextmanager
    def _row(self) -> Iterator[int]:
        """Room for the checksums of one call."""
        try:
            row = self._free.pop()
        except IndexError:
            raise RuntimeError(f"more than {MAX_CALLS} Mooncake calls are under way") from None
        try:
            yield row
        finally:
            self._free.append(row)


class SGLangObjects(ObjectStyle):
    """SGLang's objects (case 10): `{hash}_{rank}_k` and `_v` of a page for MHA, `{hash}_k` for MLA. Their length is all
    that can be checked."""

    def __init__(self, identity: ModelIdentity, tag: str) -> None:
        self._identity = identity
        self._tag = tag
        self._parts = 1 if identity.attention == "mla" else 2

    def keys(self, page_hash: bytes) -> list[str]:
        return sglang_mooncake_keys([page_hash.hex()], self._identity, tag=self._tag)

    def pattern(self) -> str:
        mark = bytes(32)
        suffixes = [re.escape(key).replace(mark.hex(), "[0-9a-f]{64}") for key in self.keys(mark)]
        return f"^({'|'.join(suffixes)})$"

    def pieces(self, pool: HostPages) -> int:
        """As the base's: a page must be one run of bytes for each of its components."""
        runs = int(np.prod(pool.segments.shape[1:-1]))
        if runs != self._parts:
            raise BackendError(
                f"key_style 'sglang' stores a page as {self._parts} objects, but here it is {runs} pieces of memory: "
                "use a layout that begins with page_, or key_style 'full'"
            )
        return runs

    def read(self, store: Any, hashes: Sequence[bytes], pages: Pages, pool: HostPages) -> list[Outcome]:
        keys, pointers, sizes = self._pieces(hashes, pages, pool)
        codes = store.batch_get_into(keys, pointers, sizes)
        return self._folded(codes, [read_outcome(code, size) for code, size in zip(codes, sizes, strict=True)])

    def write(self, store: Any, hashes: Sequence[bytes], pages: Pages, pool: HostPages) -> list[Outcome]:
        codes = store.batch_put_from(*self._pieces(hashes, pages, pool))
        return self._folded(codes, [write_outcome(code) for code in codes])

    def _pieces(self, hashes: Sequence[bytes], pages: Pages, pool: HostPages) -> tuple[list[str], list[int], list[int]]:
        addresses = page_addresses(pool.segments, pages).reshape(-1).tolist()
        keys = [key for page_hash in hashes for key in self.keys(page_hash)]
        return keys, addresses, [pool.segments.shape[-1]] * len(addresses)

    def _folded(self, codes: Sequence[int], outcomes: Sequence[Outcome]) -> list[Outcome]:
        """A page is what the first of its components is that is not OK (case 12)."""
        self.note(codes)
        starts = range(0, len(outcomes), self._parts)
        pages = [outcomes[start : start + self._parts] for start in starts]
        return [next((outcome for outcome in page if outcome is not Outcome.OK), Outcome.OK) for page in pages]
