"""One page, one file: a header of 24 bytes, then the page's segments, moved straight between file and host pool.

Header, little endian: magic (8 bytes), page length (uint64), xxh3_64 of the key and the page (uint64). The key is part
of the checksum, so a page under another page's name is broken too. SGLang's files (`framed=False`) have no header:
their length is all that can be checked.
"""

from __future__ import annotations

import enum
import os
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hicache_ray.storage.host_pages import page_checksum

PAGE_MAGIC = b"HICPAGE1"
PAGE_HEADER = struct.Struct("<8sQQ")
MAX_BUFFERS = 1024
"""Buffers one readv or writev takes on Linux (IOV_MAX)."""

Buffers = Sequence[memoryview]
read_buffers: Callable[[int, Buffers], int] = os.readv
write_buffers: Callable[[int, Buffers], int] = os.writev


class PageRead(enum.Enum):
    """What became of reading a page file."""

    OK = "ok"
    MISSING = "missing"
    CORRUPT = "corrupt"


class PageFile(NamedTuple):
    """A page and where it lies.

    Attributes:
        path: file name.
        key: storage key.
        rows: the page's segments in host memory, in file order.
        framed: whether the file has a header.
    """

    path: str
    key: str
    rows: list[memoryview]
    framed: bool = True

    @property
    def page_bytes(self) -> int:
        """Bytes of the page."""
        return sum(row.nbytes for row in self.rows)

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return file_bytes(self.page_bytes, self.framed)


def file_bytes(page_bytes: int, framed: bool) -> int:
    """Bytes of the file of a page of `page_bytes`."""
    return page_bytes + (PAGE_HEADER.size if framed else 0)


def write_page_file(page: PageFile, path: str, *, fsync: bool = False) -> None:
    """Write the page to a new file `path`, whole or with an OSError."""
    buffers = page.rows
    if page.framed:
        header = PAGE_HEADER.pack(PAGE_MAGIC, page.page_bytes, page_checksum(page.key, page.rows))
        buffers = [memoryview(header), *page.rows]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _transfer(write_buffers, descriptor, buffers)
        if fsync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_page_file(page: PageFile, stamp: int) -> PageRead:
    """Read the file into the page's rows and verify it; a page that is whole gets modification time `stamp` (ns).

    Raises:
        OSError: the file is there but can't be read.
    """
    try:
        descriptor = os.open(page.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return PageRead.MISSING
    try:
        if os.fstat(descriptor).st_size != page.file_bytes or not _read_rows(page, descriptor):
            return PageRead.CORRUPT
        _set_time(descriptor, stamp)
        return PageRead.OK
    finally:
        os.close(descriptor)


def _read_rows(page: PageFile, descriptor: int) -> bool:
    if not page.framed:
        return _transfer(read_buffers, descriptor, page.rows) == page.page_bytes
    header = bytearray(PAGE_HEADER.size)
    if _transfer(read_buffers, descriptor, [memoryview(header), *page.rows]) != page.file_bytes:
        return False
    return PAGE_HEADER.unpack(header) == (PAGE_MAGIC, page.page_bytes, page_checksum(page.key, page.rows))


def _set_time(descriptor: int, stamp: int) -> None:
    try:
        os.utime(descriptor, ns=(stamp, stamp))
    except PermissionError:
        return  # A folder of another user can be read; its order of use is then not ours to note.


def _transfer(call: Callable[[int, Buffers], int], descriptor: int, buffers: Buffers) -> int:
    """Repeat readv or writev until every buffer is through or the file ends. Returns the bytes moved."""
    moved, left = 0, list(buffers)
    while left:
        batch = left[:MAX_BUFFERS]
        count = call(descriptor, batch)
        if not count:
            break
        moved += count
        left = _rest(batch, count) + left[MAX_BUFFERS:]
    return moved


def _rest(buffers: Buffers, done: int) -> list[memoryview]:
    for position, buffer in enumerate(buffers):
        if done < buffer.nbytes:
            return [buffer[done:], *buffers[position + 1 :]]
        done -= buffer.nbytes
    return []
