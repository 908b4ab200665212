"""The memory of a storage actor: a file in shared memory that outlives the process and that every client maps.

A slot's header says what the slot holds, and everything an actor needs to go on after a crash can be read from the
headers: the arena has no other index. The layout of the file is in `arena_layout`.

No Ray and no torch here. The owner locks the file (`flock`) while it lives; the kernel unlocks it when it dies.

Arena files in shared memory: their names, and which of them nobody will ever use again.

Touching mapped memory before it is used: the kernel makes its pages at the first access, several times slower than a
copy, and one by one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_ray.storage.base import Bytes
from hicache_ray.storage.shard.layout import (
    EMPTY,
    FILE_HEADER,
    FILE_HEADER_BYTES,
    MAGIC,
    MAX_KEY_BYTES,
    MAX_LABEL_BYTES,
    MIN_SLOT_BYTES,
    SLOT_ALIGNMENT,
    SLOT_HEADER,
    VALID,
    VERSION,
    WRITING,
    ArenaError,
    ArenaGeometry,
    ArenaLocked,
    new_file_header,
    owner_of,
    seals_of,
)


class Survivor(NamedTuple):
    """A valid slot found when an arena is opened again."""

    slot: int
    key: bytes
    label: bytes
    length: int
    generation: int
    expires: float


class ArenaMapping:
    """The arena file mapped into this process. Clients use it as it is; the owner through `Arena`.

    Attributes:
        path, geometry, arena_id: which arena; the id is new for every file.
        headers: structured array [segments * headers_per_segment] of SLOT_HEADER, writing through.
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
        if header["magic"] != MAGIC or header["version"] != VERSION:
            raise ArenaError(f"{path} is no arena of version {VERSION}")
        self.geometry = ArenaGeometry(int(header["segments"]), int(header["segment_bytes"]))
        if self.geometry.file_bytes != length:
            raise ArenaError(f"{path} has {length} bytes, its header says {self.geometry.file_bytes}")
        self.arena_id = int(header["arena_id"])
        geometry = self.geometry
        count = geometry.segments * geometry.headers_per_segment
        table = self.memory[geometry.headers_start :][: count * SLOT_HEADER.itemsize]
        self.headers: npt.NDArray[Any] = table.view(SLOT_HEADER)
        self.segment_slot_bytes: npt.NDArray[np.uint64] = self.memory[FILE_HEADER_BYTES:][: geometry.segments * 8].view(
            "<u8"
        )

    @classmethod
    def attach(cls, path: Path, arena_id: int) -> ArenaMapping:
        """Map another process's arena for reading and writing slots.

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

    def offsets(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Offsets in the file of the data of slots."""
        geometry = self.geometry
        segment, index = np.divmod(slots, geometry.headers_per_segment)
        size = self.segment_slot_bytes[segment].astype(np.int64)
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
        temporary, descriptor = _new_locked_file(path)
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
            _lock(path, descriptor)
            return cls(path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def next_generation(self, count: int) -> npt.NDArray[np.uint64]:
        """`count` generations never used in this arena before, ascending."""
        first = self._generation + 1
        self._generation += count
        return np.arange(first, first + count, dtype=np.uint64)

    def slots_in(self, segment: int) -> int:
        """Slots the segment is divided into; 0 when it has no size class yet."""
        size = int(self.segment_slot_bytes[segment])
        return self.geometry.segment_bytes // size if size else 0

    def divide_segment(self, segment: int, slot_bytes: int) -> range:
        """Give a segment (whose slots are all empty) to a size class; returns its slots.

        Raises:
            ArenaError: shared memory is full, there is no room for the slot headers.
        """
        first = segment * self.geometry.headers_per_segment
        count = self.geometry.segment_bytes // slot_bytes
        start = self.geometry.headers_start + first * SLOT_HEADER.itemsize
        _allocate(self.path, self._descriptor, start, count * SLOT_HEADER.itemsize)
        self.segment_slot_bytes[segment] = 0
        self.headers["state"][first : first + count] = EMPTY
        self.segment_slot_bytes[segment] = slot_bytes
        return range(first, first + count)

    def mark_writing(self, slots: npt.NDArray[np.int64], generations: npt.NDArray[np.uint64], length: int) -> None:
        """Begin to fill slots: whatever they held is gone, their headers carry the new generation."""
        headers = self.headers
        headers["state"][slots] = WRITING
        headers["generation"][slots] = generations
        headers["length"][slots] = length

    def mark_valid(
        self,
        slots: npt.NDArray[np.int64],
        keys: Sequence[bytes],
        checksums: npt.NDArray[np.uint64],
        label: bytes,
        expires: npt.NDArray[np.float64] | float,
    ) -> None:
        """The slots hold whole pages now. The state is written last, so a death before it leaves the slot dropped."""
        headers = self.headers
        rows = headers[slots]
        rows["key_bytes"] = [len(key) for key in keys]
        rows["key"] = np.array(keys, dtype=f"S{MAX_KEY_BYTES}").view(np.uint8).reshape(-1, MAX_KEY_BYTES)
        rows["label_bytes"] = len(label)
        rows["label"] = np.frombuffer(label.ljust(MAX_LABEL_BYTES, b"\0"), np.uint8)
        rows["checksum"] = checksums
        rows["expires"] = expires
        rows["seal"] = seals_of(rows)
        headers[slots] = rows
        headers["state"][slots] = VALID

    def mark_empty(self, slots: npt.NDArray[np.int64] | int) -> None:
        """The slots hold nothing."""
        self.headers["state"][slots] = EMPTY

    def survivors(self) -> Iterator[Survivor]:
        """The whole pages in the arena, oldest first within a segment's order of generations; slots that were being
        written and slots whose header is damaged become empty."""
        found: list[Survivor] = []
        for segment in range(self.geometry.segments):
            found.extend(self._survivors_in(segment))
        found.sort(key=lambda survivor: survivor.generation)
        return iter(found)

    def _survivors_in(self, segment: int) -> Iterator[Survivor]:
        size = int(self.segment_slot_bytes[segment])
        if not MIN_SLOT_BYTES <= size <= self.geometry.segment_bytes or size % SLOT_ALIGNMENT:
            self.segment_slot_bytes[segment] = 0
            return
        first = segment * self.geometry.headers_per_segment
        slots = np.arange(first, first + self.slots_in(segment))
        rows = self.headers[slots]
        good = rows["state"] == VALID
        good[good] = seals_of(rows[good]) == rows["seal"][good]
        good &= (
            (rows["length"] <= size) & (rows["key_bytes"] <= MAX_KEY_BYTES) & (rows["label_bytes"] <= MAX_LABEL_BYTES)
        )
        self.mark_empty(slots[~good & (rows["state"] != EMPTY)])
        for slot, row in zip(slots[good].tolist(), rows[good], strict=True):
            yield Survivor(
                slot,
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


def remove_if_unlocked(path: Path) -> bool:
    """Delete an arena file that no living process owns; False when there is none.

    Raises:
        ArenaLocked: its owner lives.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        _lock(path, descriptor)
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(descriptor)


def read_owner(path: Path) -> dict[str, Any]:
    """Who made the arena at `path`; ArenaError when it is none."""
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
        head = np.frombuffer(file.read(FILE_HEADER_BYTES), dtype=np.uint8)
    if head.size < FILE_HEADER_BYTES or head[: FILE_HEADER.itemsize].view(FILE_HEADER)[0]["magic"] != MAGIC:
        raise ArenaError(f"{path} is no arena")
    return owner_of(head)


def _new_locked_file(path: Path) -> tuple[Path, int]:
    """An empty file beside `path`, and its descriptor.

    A sweep that finds it between its making and its locking takes it for abandoned; then another is made.
    """
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _lock(temporary, descriptor)
        except ArenaLocked:
            os.close(descriptor)
            continue
        if os.fstat(descriptor).st_nlink:
            return temporary, descriptor
        os.close(descriptor)


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


def _lock(path: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ArenaLocked(f"the arena {path} belongs to a living process") from None


logger = logging.getLogger("hicache_ray.storage.shard.arena")

SHARED_MEMORY = Path("/dev/shm")
_PREFIX, _SUFFIX = "hicache-", ".arena"


class Process(NamedTuple):
    """A process, told apart from a later one with the same id by when it started (clock ticks after boot)."""

    pid: int
    started: int

    @classmethod
    def running(cls, pid: int) -> Process | None:
        """The process that has the id now, None when there is none."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        # The name, in parentheses, may hold spaces: the fields are counted from its end.
        return cls(pid, int(stat.rpartition(")")[2].split()[19]))

    @property
    def alive(self) -> bool:
        """Whether this very process still runs."""
        return Process.running(self.pid) == self


def arena_path(folder: Path, member: str, token: str) -> Path:
    """Where the arena of a pool's member is: the token tells a pool from earlier ones of its name."""
    return folder / f"{_PREFIX}{token}-{member}{_SUFFIX}"


def arenas_of(folder: Path, token: str) -> list[Path]:
    """The arenas of one pool, half-made ones included."""
    return [path for path in _arena_files(folder) if path.name.lstrip(".").startswith(f"{_PREFIX}{token}-")]


def sweep(folder: Path, is_stale: Callable[[Mapping[str, Any]], bool]) -> list[Path]:
    """Delete the arenas that no living process owns and whose owner will not come back; returns them.

    Args:
        is_stale: says so from the facts that the owner left in the file.
    """
    removed = []
    for path in _arena_files(folder):
        try:
            half_made = path.name.startswith(".")
            if (half_made or is_stale(read_owner(path))) and remove_if_unlocked(path):
                removed.append(path)
        except ArenaLocked:
            continue
        except (ArenaError, OSError) as error:
            logger.warning("the file %s looks like an arena but can't be read; delete it by hand: %s", path, error)
    return removed


def _arena_files(folder: Path) -> list[Path]:
    whole = folder.glob(f"{_PREFIX}*{_SUFFIX}")
    half_made = folder.glob(f".{_PREFIX}*{_SUFFIX}.*")
    return sorted([*whole, *half_made])


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
