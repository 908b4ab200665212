"""Touching mapped memory before it is used: the kernel makes its pages at the first access, several times slower than a
copy, and one by one."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

from hicache_ray.storage.base import Bytes

MADV_POPULATE_WRITE = 23
"""Of Linux 5.14: make the pages present and writable without changing them."""
PIECE_BYTES = 64 << 20
MOST_THREADS = 8

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def populate(memory: Bytes) -> None:
    """Make all pages of a shared mapping present, in several threads; `memory` begins at a page.

    Other processes may read and write the memory meanwhile.

    Raises:
        OSError: there is no memory for it.
    """
    pieces = [memory[start : start + PIECE_BYTES] for start in range(0, memory.size, PIECE_BYTES)]
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1, len(pieces) or 1), "l3-prefault") as threads:
        list(threads.map(_populate, pieces))


def _populate(piece: Bytes) -> None:
    if _libc.madvise(piece.ctypes.data, piece.size, MADV_POPULATE_WRITE) == 0:
        return
    error = ctypes.get_errno()
    if error != errno.EINVAL:
        raise OSError(error, os.strerror(error))
    # An older kernel. Reading is enough for memory that exists: a shared mapping is writable at once.
    piece[:: mmap.PAGESIZE].max(initial=0)
