"""The memory of a storage actor: a file in shared memory that outlives the process and that every client maps.

A cell's header says what page the cell holds, and everything an actor needs to go on after a crash can be read from the
headers: the arena has no other index. No Ray and no torch here.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_ray.pages import Bytes
from hicache_ray.storage.shard.files import lock_file, new_locked_file, remove_if_unlocked
from hicache_ray.storage.shard.layout import (
    ARENA_MAGIC,
    ARENA_VERSION,
    CELL_ALIGNMENT,
    CELL_HEADER,
    EMPTY,
    FILE_HEADER,
    FILE_HEADER_BYTES,
    MAX_KEY_BYTES,
    MAX_LABEL_BYTES,
    MIN_CELL_BYTES,
    VALID,
    WRITING,
    ArenaError,
    ArenaGeometry,
    new_file_header,
    owner_of,
    seals_of,
)


class Survivor(NamedTuple):
    """A valid cell found when an arena is opened again."""

    cell: int
    key: bytes
    label: bytes
    length: int
    generation: int
    expires: float


class ArenaMapping:
    """The arena file mapped into this process. Clients use it as it is; the owner through `Arena`.

    Attributes:
        path, geometry, arena_id: which arena; the id is new for every file.
        headers: structured array [segments * headers_per_segment] of CELL_HEADER, writing through.
        memory: the whole file as uint8.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        length = os.fstat(descriptor).st_size
        if length < FILE_HEADER_BYTES:
            raise ArenaError(f"{path} is no arena: {length} bytes are less than its header")
        self._mapping = mmap.mmap(descriptor, length)
        self.memory: Bytes = np.frombuffer(self._mapping, dtype=np.uint8)
        self._file_header = self.memory[: FILE_HEADER.itemsize].view(FILE_HEADER)
        header = self._file_header[0]
        if header["magic"] != ARENA_MAGIC or header["version"] != ARENA_VERSION:
            raise ArenaError(f"{path} is no arena of version {ARENA_VERSION}")
        self.geometry = ArenaGeometry(int(header["segments"]), int(header["segment_bytes"]))
        if self.geometry.file_bytes != length:
            raise ArenaError(f"{path} has {length} bytes, its header says {self.geometry.file_bytes}")
        self.arena_id = int(header["arena_id"])
        segments, count = self.geometry.segments, self.geometry.segments * self.geometry.headers_per_segment
        table = self.memory[self.geometry.headers_start :][: count * CELL_HEADER.itemsize]
        self.headers: npt.NDArray[Any] = table.view(CELL_HEADER)
        sizes = self.memory[FILE_HEADER_BYTES:][: segments * 8]
        self.segment_cell_bytes: npt.NDArray[np.uint64] = sizes.view("<u8")

    @classmethod
    def attach(cls, path: Path, arena_id: int) -> ArenaMapping:
        """Map another process's arena for reading and writing cells.

        Raises:
            ArenaError: the file at that path is another arena or none.
            OSError: there is no such file, or it may not be opened.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            mapping = cls(path, descriptor)
        finally:
            os.close(descriptor)
        if mapping.arena_id != arena_id:
            raise ArenaError(f"{path} is arena {mapping.arena_id:016x}, not {arena_id:016x}")
        return mapping

    @property
    def owner(self) -> dict[str, Any]:
        """Who made the arena, as given to `Arena.create`."""
        return owner_of(self.memory)

    def offsets(self, cells: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Offsets in the file of the data of cells."""
        geometry = self.geometry
        segment, index = np.divmod(cells, geometry.headers_per_segment)
        size = self.segment_cell_bytes[segment].astype(np.int64)
        return geometry.data_start + segment * geometry.segment_bytes + index * size

    def data(self, offset: int, length: int) -> Bytes:
        """`length` bytes at a file offset, as a view."""
        return self.memory[offset : offset + length]

    def prefault(self) -> None:
        """Map every page of the segments into this process now, so that no copy pays for it later."""
        try:
            populate(self.memory[self.geometry.data_start :])
        except OSError as error:
            raise ArenaError(f"the arena {self.path} can't be mapped as a whole: {error}") from error


class Arena(ArenaMapping):
    """An arena as its owner sees it: exclusively locked, and the only writer of headers."""

    def __init__(self, path: Path, descriptor: int) -> None:
        super().__init__(path, descriptor)
        self._descriptor = descriptor
        header = self._file_header[0]
        header["incarnation"] += 1
        self._generation = int(header["incarnation"]) << 40

    @classmethod
    def create(cls, path: Path, geometry: ArenaGeometry, owner: Mapping[str, str | int] | None = None) -> Arena:
        """Make a new, empty arena at `path`, mode 0600, in place of an unlocked file of that name.

        Args:
            owner: a few facts about the maker, kept in the file for whoever finds it (at most 2 KiB as JSON).

        Raises:
            ArenaLocked: a living process owns the file at `path`.
            ArenaError: shared memory has not enough room.
        """
        head = new_file_header(geometry, owner or {})
        _check_room(path, geometry)
        temporary, descriptor = new_locked_file(path)
        try:
            os.ftruncate(descriptor, geometry.file_bytes)
            _allocate(path, descriptor, geometry.data_start, geometry.segments * geometry.segment_bytes)
            os.pwrite(descriptor, head, 0)
            remove_if_unlocked(path)
            os.rename(temporary, path)
            return cls(path, descriptor)
        except BaseException:
            os.close(descriptor)
            temporary.unlink(missing_ok=True)
            raise

    @classmethod
    def open(cls, path: Path) -> Arena:
        """Take over the arena a dead process left.

        Raises:
            FileNotFoundError: there is none.
            ArenaLocked: its owner lives.
            ArenaError: the file is no arena of this version.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            lock_file(path, descriptor)
            return cls(path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def next_generation(self, count: int) -> npt.NDArray[np.uint64]:
        """`count` generations never used in this arena before, ascending."""
        first = self._generation + 1
        self._generation += count
        return np.arange(first, first + count, dtype=np.uint64)

    def cells_in(self, segment: int) -> int:
        """Cells the segment is divided into; 0 when it has no size class yet."""
        size = int(self.segment_cell_bytes[segment])
        return self.geometry.segment_bytes // size if size else 0

    def divide_segment(self, segment: int, cell_bytes: int) -> range:
        """Give a segment (whose cells are all empty) to a size class; returns its cells.

        Raises:
            ArenaError: shared memory is full, there is no room for the cell headers.
        """
        first = segment * self.geometry.headers_per_segment
        count = self.geometry.segment_bytes // cell_bytes
        start = self.geometry.headers_start + first * CELL_HEADER.itemsize
        _allocate(self.path, self._descriptor, start, count * CELL_HEADER.itemsize)
        self.segment_cell_bytes[segment] = 0
        self.headers["state"][first : first + count] = EMPTY
        self.segment_cell_bytes[segment] = cell_bytes
        return range(first, first + count)

    def mark_writing(self, cells: npt.NDArray[np.int64], generations: npt.NDArray[np.uint64], length: int) -> None:
        """Begin to fill cells: whatever they held is gone, their headers carry the new generation."""
        headers = self.headers
        headers["state"][cells] = WRITING
        headers["generation"][cells] = generations
        headers["length"][cells] = length

    def mark_valid(
        self,
        cells: npt.NDArray[np.int64],
        keys: Sequence[bytes],
        checksums: npt.NDArray[np.uint64],
        label: bytes,
        expires: npt.NDArray[np.float64] | float,
    ) -> None:
        """The cells hold whole pages now. The state is written last, so a death before it leaves the cell dropped."""
        headers = self.headers
        rows = headers[cells]
        rows["key_bytes"] = [len(key) for key in keys]
        rows["key"] = np.array(keys, dtype=f"S{MAX_KEY_BYTES}").view(np.uint8).reshape(-1, MAX_KEY_BYTES)
        rows["label_bytes"] = len(label)
        rows["label"] = np.frombuffer(label.ljust(MAX_LABEL_BYTES, b"\0"), np.uint8)
        rows["checksum"] = checksums
        rows["expires"] = expires
        rows["seal"] = seals_of(rows)
        headers[cells] = rows
        headers["state"][cells] = VALID

    def mark_empty(self, cells: npt.NDArray[np.int64] | int) -> None:
        """The cells hold nothing."""
        self.headers["state"][cells] = EMPTY

    def survivors(self) -> list[Survivor]:
        """The whole pages in the arena, oldest first; cells that were being written and cells whose header is damaged
        become empty."""
        found = itertools.chain.from_iterable(map(self._survivors_in, range(self.geometry.segments)))
        return sorted(found, key=lambda survivor: survivor.generation)

    def _survivors_in(self, segment: int) -> Iterator[Survivor]:
        size = int(self.segment_cell_bytes[segment])
        if not MIN_CELL_BYTES <= size <= self.geometry.segment_bytes or size % CELL_ALIGNMENT:
            self.segment_cell_bytes[segment] = 0
            return
        first = segment * self.geometry.headers_per_segment
        cells = np.arange(first, first + self.cells_in(segment))
        rows = self.headers[cells]
        good = rows["state"] == VALID
        good[good] = seals_of(rows[good]) == rows["seal"][good]
        good &= (
            (rows["length"] <= size) & (rows["key_bytes"] <= MAX_KEY_BYTES) & (rows["label_bytes"] <= MAX_LABEL_BYTES)
        )
        self.mark_empty(cells[~good & (rows["state"] != EMPTY)])
        for cell, row in zip(cells[good].tolist(), rows[good], strict=True):
            yield Survivor(
                cell,
                row["key"][: row["key_bytes"]].tobytes(),
                row["label"][: row["label_bytes"]].tobytes(),
                int(row["length"]),
                int(row["generation"]),
                float(row["expires"]),
            )

    def remove(self) -> None:
        """Delete the file. Those who have it mapped keep their memory until they let go of it."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give up the lock; the file stays. Idempotent."""
        if self._descriptor >= 0:
            # The mapping has a duplicate of the descriptor, so closing this one does not unlock.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1


def _check_room(path: Path, geometry: ArenaGeometry) -> None:
    try:
        status = os.statvfs(path.parent)
    except FileNotFoundError:
        raise ArenaError(f"the folder {path.parent} for storage arenas does not exist") from None
    free, need = status.f_bavail * status.f_frsize, geometry.segments * geometry.segment_bytes
    if need > free:
        raise ArenaError(f"an arena of {need} bytes does not fit {path.parent}, which has {free} bytes free")


def _allocate(path: Path, descriptor: int, start: int, length: int) -> None:
    """Have the memory of a part of the file now: a store into memory that can't be had later would kill the process."""
    try:
        os.posix_fallocate(descriptor, start, length)
    except OSError as error:
        raise ArenaError(f"no {length} bytes of shared memory for the arena {path}: {error.strerror}") from error


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
