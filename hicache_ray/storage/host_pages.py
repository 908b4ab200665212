"""The host pool (L2) as a backend sees it: the runs of memory that make a page, their addresses, a page's checksum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import xxhash

from hicache_ray.pages import Bytes, Pages

CHECKSUM_BYTES = 8


@runtime_checkable
class HostPages(Protocol):
    """What a backend sees of the host pool. `pools.HostPool` is one; any object with these members will do."""

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
        """The pool's memory as a view [pages, ..., segment_bytes]: `segments[p]` in C order is page p (case 54). Only
        the last axis has to be contiguous. Writing to it writes the pool."""


class Span(NamedTuple):
    """A range of addresses of this process."""

    address: int
    nbytes: int


def memory_span(segments: Bytes) -> Span:
    """The smallest span that holds all pages: the pool's buffer, for registering it with a transport."""
    last = sum((count - 1) * stride for count, stride in zip(segments.shape, segments.strides, strict=True))
    if segments.size == 0 or any(stride < 0 for stride in segments.strides):
        raise ValueError(f"segments of shape {segments.shape} and strides {segments.strides} are no memory to register")
    return Span(segments.ctypes.data, last + segments.itemsize)


def page_addresses(segments: Bytes, pages: Pages) -> npt.NDArray[np.int64]:
    """Addresses of the segments of pages, [len(pages), segments a page]; each has `segments.shape[-1]` bytes."""
    within = np.zeros((), dtype=np.int64)
    for count, stride in zip(segments.shape[1:-1], segments.strides[1:-1], strict=True):
        within = np.add.outer(within, np.arange(count) * stride)
    return np.add.outer(segments.ctypes.data + pages * segments.strides[0], within.reshape(-1))


def page_runs(segments: Bytes, page: int) -> list[memoryview]:
    """The contiguous runs of a page in segment order; writing to them writes the pool."""
    view = segments[page]
    if view.flags.c_contiguous:
        return [memoryview(view.reshape(-1))]
    return [memoryview(view[index]) for index in np.ndindex(view.shape[:-1])]


def page_checksum(key: str, runs: Iterable[memoryview]) -> int:
    """xxh3_64 over the storage key, then the page's runs in order: a page under another key does not fit. For stores
    that keep no checksum themselves."""
    digest = xxhash.xxh3_64(key.encode())
    for run in runs:
        digest.update(run)
    return digest.intdigest()
