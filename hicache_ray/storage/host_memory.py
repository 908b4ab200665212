"""A host pool's memory as its parts: the runs of a page, the whole as one span of addresses."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hicache_ray.storage.base import Bytes


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
