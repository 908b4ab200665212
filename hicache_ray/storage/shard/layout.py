"""Where things are in an arena file: the file header, the segment table, the cell headers, the segments, in order.

A cell is the room of one page. A segment holds cells of one size; the size is decided when the first page of a new size
needs room, so one arena takes pages of several models.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from hicache_ray.pages import Bytes

ARENA_MAGIC = b"HICARENA"
ARENA_VERSION = 1
FILE_HEADER_BYTES = 4096
OWNER_START = 2048
ALIGNMENT = 4096
MIN_CELL_BYTES = 1024
"""Smallest cell: bounds the number of cell headers that are laid out (not: touched) a segment."""
CELL_ALIGNMENT = 64
MAX_KEY_BYTES = 80
MAX_LABEL_BYTES = 56

EMPTY, WRITING, VALID = 0, 1, 2

FILE_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("owner_bytes", "<u4"),
        ("arena_id", "<u8"),
        ("segments", "<u8"),
        ("segment_bytes", "<u8"),
        ("incarnation", "<u8"),
    ]
)
CELL_HEADER = np.dtype(
    [
        ("state", "<u4"),
        ("reserved", "<u4"),
        ("key_bytes", "<u4"),
        ("label_bytes", "<u4"),
        ("generation", "<u8"),
        ("length", "<u8"),
        ("checksum", "<u8"),
        ("expires", "<f8"),
        ("key", "u1", (MAX_KEY_BYTES,)),
        ("label", "u1", (MAX_LABEL_BYTES,)),
        ("seal", "<u8"),
    ]
)
_SEALED = slice(8, CELL_HEADER.itemsize - 8)
"""The bytes of a cell header that its seal covers: all but the state, which is written last, and the seal itself."""


class ArenaError(RuntimeError):
    """The file is no arena of this version, is damaged, or does not fit the machine's shared memory."""


class ArenaLocked(ArenaError):
    """Another process owns the arena."""


class ArenaGeometry(NamedTuple):
    """Size of an arena: `segments` of `segment_bytes` each. A page must fit a segment."""

    segments: int
    segment_bytes: int

    @classmethod
    def of(cls, budget_bytes: int, segment_bytes: int | None = None) -> ArenaGeometry:
        """Split a budget into segments; by default at least 8 of them, of 64 MiB or of a 64th of a large budget.

        Raises:
            ValueError: the budget or the segment is smaller than the smallest cell.
        """
        if segment_bytes is None:
            wanted = max(budget_bytes // 64, min(64 << 20, budget_bytes // 8))
            segment_bytes = max(MIN_CELL_BYTES, wanted - wanted % MIN_CELL_BYTES)
        if segment_bytes < MIN_CELL_BYTES or budget_bytes < segment_bytes:
            raise ValueError(
                f"an arena of {budget_bytes} bytes in segments of {segment_bytes}: "
                f"both must be at least {MIN_CELL_BYTES} and the budget must hold one segment"
            )
        return cls(budget_bytes // segment_bytes, segment_bytes)

    @property
    def headers_per_segment(self) -> int:
        """Cell headers laid out for each segment."""
        return self.segment_bytes // MIN_CELL_BYTES

    @property
    def headers_start(self) -> int:
        """Offset of the cell headers in the file."""
        return FILE_HEADER_BYTES + round_up(self.segments * 8, ALIGNMENT)

    @property
    def data_start(self) -> int:
        """Offset of the first segment in the file."""
        return self.headers_start + round_up(self.segments * self.headers_per_segment * CELL_HEADER.itemsize, ALIGNMENT)

    @property
    def file_bytes(self) -> int:
        """Length of the file. Memory is used for the segments and for the headers of cells in use."""
        return self.data_start + self.segments * self.segment_bytes


def cell_bytes_for(length: int) -> int:
    """Cell size of a page of `length` bytes."""
    return max(MIN_CELL_BYTES, round_up(length, CELL_ALIGNMENT))


def round_up(value: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not below `value`."""
    return -(-value // unit) * unit


def new_file_header(geometry: ArenaGeometry, owner: Mapping[str, str | int]) -> bytes:
    """The first FILE_HEADER_BYTES of a new arena; ValueError when the owner's facts don't fit."""
    facts = json.dumps(dict(owner)).encode()
    room = FILE_HEADER_BYTES - OWNER_START
    if len(facts) > room:
        raise ValueError(f"the owner's facts take {len(facts)} bytes, at most {room} fit")
    fields = (ARENA_MAGIC, ARENA_VERSION, len(facts), secrets.randbits(64), *geometry, 0)
    header = np.array([fields], FILE_HEADER)
    return header.tobytes().ljust(OWNER_START, b"\0") + facts.ljust(room, b"\0")


def owner_of(head: Bytes) -> dict[str, Any]:
    """The owner's facts in the first FILE_HEADER_BYTES of an arena; ArenaError when they can't be read."""
    length = int(head[: FILE_HEADER.itemsize].view(FILE_HEADER)[0]["owner_bytes"])
    try:
        facts = json.loads(head[OWNER_START : OWNER_START + length].tobytes())
    except (ValueError, RecursionError) as error:
        raise ArenaError(f"the arena's owner can't be read: {error}") from error
    # Every user of the machine can put files into shared memory, and a process id becomes part of a path.
    if not isinstance(facts, dict) or not all(isinstance(fact, str | int) for fact in facts.values()):
        raise ArenaError(f"the arena's owner is {facts!r:.80}, not names with texts and numbers")
    return facts


def seals_of(rows: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """What the seals of cell headers must be for the headers to be believed."""
    raw = np.ascontiguousarray(rows).view(np.uint8).reshape(-1, CELL_HEADER.itemsize)[:, _SEALED]
    return np.array([xxhash.xxh3_64_intdigest(row.tobytes()) for row in raw], dtype=np.uint64)
