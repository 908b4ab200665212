"""Which cells of an arena are free: segments are given to size classes, cells to pages."""

from __future__ import annotations

from collections.abc import Iterable

from hicache_ray.storage.shard.arena import Arena
from hicache_ray.storage.shard.layout import ArenaError


class CellAllocator:
    """Free cells by size class, and the segments that no class has yet. Not thread-safe."""

    def __init__(self, arena: Arena, used: Iterable[int] = ()) -> None:
        """Args:
        used: the cells that hold something (after a restart).
        """
        self._arena = arena
        self._per_segment = arena.geometry.headers_per_segment
        self.used_in_segment = [0] * arena.geometry.segments
        taken = set(used)
        for cell in taken:
            self.used_in_segment[cell // self._per_segment] += 1
        self._free: dict[int, list[int]] = {}
        self._unassigned: list[int] = []
        for segment in reversed(range(arena.geometry.segments)):
            if not self.used_in_segment[segment]:
                self._unassigned.append(segment)
                continue
            first, count = segment * self._per_segment, arena.cells_in(segment)
            free = self._free.setdefault(self.class_of(segment), [])
            free.extend(cell for cell in reversed(range(first, first + count)) if cell not in taken)

    @property
    def classes(self) -> list[int]:
        """Cell sizes that have, or had, a segment."""
        return list(self._free)

    def class_of(self, segment: int) -> int:
        """Cell size of a segment, 0 when it has none."""
        return int(self._arena.segment_cell_bytes[segment])

    def segment_of(self, cell: int) -> int:
        """The segment a cell lies in."""
        return cell // self._per_segment

    def segments_of(self, cell_bytes: int) -> list[int]:
        """The segments a size class has."""
        unassigned = set(self._unassigned)
        return [
            segment
            for segment in range(self._arena.geometry.segments)
            if segment not in unassigned and self.class_of(segment) == cell_bytes
        ]

    def cells_of(self, cell_bytes: int) -> list[int]:
        """All cells of a size class, free or used."""
        count = self._arena.geometry.segment_bytes // cell_bytes
        starts = [segment * self._per_segment for segment in self.segments_of(cell_bytes)]
        return [cell for start in starts for cell in range(start, start + count)]

    def take(self, cell_bytes: int) -> int | None:
        """A free cell of that size, from the class's segments or a new one; None when there is neither."""
        free = self._free.setdefault(cell_bytes, [])
        if not free and not self._grow(cell_bytes, free):
            return None
        cell = free.pop()
        self.used_in_segment[cell // self._per_segment] += 1
        return cell

    def give(self, cell: int, cell_bytes: int) -> None:
        """A cell is free again."""
        self.used_in_segment[cell // self._per_segment] -= 1
        self._free[cell_bytes].append(cell)

    def release_segment(self, segment: int) -> None:
        """Take a segment without used cells from its size class; ValueError when it has used ones."""
        if self.used_in_segment[segment]:
            raise ValueError(f"segment {segment} has {self.used_in_segment[segment]} used cells and can't be released")
        first, size = segment * self._per_segment, self.class_of(segment)
        end = first + self._per_segment
        self._free[size] = [cell for cell in self._free[size] if not first <= cell < end]
        self._unassigned.append(segment)

    def free_cells(self) -> dict[int, set[int]]:
        """The free cells of each size class."""
        return {size: set(cells) for size, cells in self._free.items()}

    def _grow(self, cell_bytes: int, free: list[int]) -> bool:
        if not self._unassigned or cell_bytes > self._arena.geometry.segment_bytes:
            return False
        try:
            cells = self._arena.divide_segment(self._unassigned[-1], cell_bytes)
        except ArenaError:
            # No memory for the headers: the class has to make do with the segments it has.
            return False
        self._unassigned.pop()
        free.extend(reversed(cells))
        return True
