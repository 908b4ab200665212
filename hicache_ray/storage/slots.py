"""Which slots of an arena are free: segments are given to size classes, slots to pages."""

from __future__ import annotations

from collections.abc import Iterable

from hicache_ray.storage.arena import Arena
from hicache_ray.storage.arena_layout import ArenaError


class SlotAllocator:
    """Free slots by size class, and the segments that no class has yet. Not thread-safe."""

    def __init__(self, arena: Arena, used: Iterable[int] = ()) -> None:
        """Args:
        used: the slots that hold something (after a restart).
        """
        self._arena = arena
        self._per_segment = arena.geometry.headers_per_segment
        self.used_in_segment = [0] * arena.geometry.segments
        taken = set(used)
        for slot in taken:
            self.used_in_segment[slot // self._per_segment] += 1
        self._free: dict[int, list[int]] = {}
        self._unassigned: list[int] = []
        for segment in reversed(range(arena.geometry.segments)):
            count = arena.slots_in(segment)
            if not self.used_in_segment[segment]:
                self._unassigned.append(segment)
                continue
            first = segment * self._per_segment
            free = self._free.setdefault(self.class_of(segment), [])
            free.extend(slot for slot in reversed(range(first, first + count)) if slot not in taken)

    @property
    def classes(self) -> list[int]:
        """Slot sizes that have, or had, a segment."""
        return list(self._free)

    def class_of(self, segment: int) -> int:
        """Slot size of a segment, 0 when it has none."""
        return int(self._arena.segment_slot_bytes[segment])

    def segment_of(self, slot: int) -> int:
        """The segment a slot lies in."""
        return slot // self._per_segment

    def segments_of(self, slot_bytes: int) -> list[int]:
        """The segments a size class has."""
        unassigned = set(self._unassigned)
        return [
            segment
            for segment in range(self._arena.geometry.segments)
            if segment not in unassigned and self.class_of(segment) == slot_bytes
        ]

    def slots_of(self, slot_bytes: int) -> list[int]:
        """All slots of a size class, free or used."""
        count = self._arena.geometry.segment_bytes // slot_bytes
        starts = [segment * self._per_segment for segment in self.segments_of(slot_bytes)]
        return [slot for start in starts for slot in range(start, start + count)]

    def take(self, slot_bytes: int) -> int | None:
        """A free slot of that size, from the class's segments or a new one; None when there is neither."""
        free = self._free.setdefault(slot_bytes, [])
        if not free and not self._grow(slot_bytes, free):
            return None
        slot = free.pop()
        self.used_in_segment[slot // self._per_segment] += 1
        return slot

    def give(self, slot: int, slot_bytes: int) -> None:
        """A slot is free again."""
        self.used_in_segment[slot // self._per_segment] -= 1
        self._free[slot_bytes].append(slot)

    def release_segment(self, segment: int) -> None:
        """Take a segment without used slots from its size class; ValueError when it has used ones."""
        if self.used_in_segment[segment]:
            raise ValueError(f"segment {segment} has {self.used_in_segment[segment]} used slots and can't be released")
        first, size = segment * self._per_segment, self.class_of(segment)
        end = first + self._per_segment
        self._free[size] = [slot for slot in self._free[size] if not first <= slot < end]
        self._unassigned.append(segment)

    def free_slots(self) -> dict[int, set[int]]:
        """The free slots of each size class."""
        return {size: set(slots) for size, slots in self._free.items()}

    def _grow(self, slot_bytes: int, free: list[int]) -> bool:
        if not self._unassigned or slot_bytes > self._arena.geometry.segment_bytes:
            return False
        try:
            slots = self._arena.divide_segment(self._unassigned[-1], slot_bytes)
        except ArenaError:
            # No memory for the headers: the class has to make do with the segments it has.
            return False
        self._unassigned.pop()
        free.extend(reversed(slots))
        return True
