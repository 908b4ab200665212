"""Which slots of an arena are free: segments are given to size classes, slots to pages.

The pages a shard holds: which there are, which slots are free, who has to go when there is no room.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from hicache_ray.storage.shard.arena import Arena, Survivor
from hicache_ray.storage.shard.eviction import EvictionPolicy, Page, make_policy
from hicache_ray.storage.shard.layout import VALID, ArenaError, seals_of, slot_bytes_for


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


NAMED_PAGES = 10
"""Most pages that an audit names one by one."""


class Residents:
    """Index, eviction order and slot accounting of one arena. Not thread-safe; the shard holds its lock.

    Pages compete for room within their size class; a namespace with a quota has an order of its own within each class.
    When a class needs room and another class has a segment in which every page is colder than the page the class would
    give up, the whole segment changes over.
    """

    def __init__(self, arena: Arena, policy: str, quotas: Mapping[bytes, int]) -> None:
        """Index the pages the arena holds.

        Args:
            policy: name of an eviction policy.
            quotas: bytes by namespace label.
        """
        make_policy(policy)
        self._arena = arena
        self._policy = policy
        self._quotas = dict(quotas)
        self._index: dict[bytes, Page] = {}
        self._order: dict[tuple[int, bytes], EvictionPolicy] = {}
        self._tick = 0
        self._segment_tick = [0] * arena.geometry.segments
        self.used_bytes: Counter[bytes] = Counter()
        self.evicted = 0
        self._pages_in: list[dict[Page, None]] = [{} for _ in range(arena.geometry.segments)]
        survivors: dict[bytes, Survivor] = {}
        for survivor in arena.survivors():
            if survivor.key in survivors:
                arena.mark_empty(survivors[survivor.key].slot)
            survivors[survivor.key] = survivor
        self._slots = SlotAllocator(arena, [survivor.slot for survivor in survivors.values()])
        for survivor in survivors.values():
            slot_bytes = self._slots.class_of(self._slots.segment_of(survivor.slot))
            self.used_bytes[survivor.label] += slot_bytes
            self.add([survivor.key], [survivor.slot], slot_bytes, survivor.label, [survivor.expires])

    def __len__(self) -> int:
        return len(self._index)

    def get(self, key: bytes) -> Page | None:
        """The page stored under `key`."""
        return self._index.get(key)

    def pages(self) -> list[Page]:
        """All pages, oldest first."""
        return list(self._index.values())

    def add(
        self, keys: Sequence[bytes], slots: Sequence[int], slot_bytes: int, label: bytes, expires: Sequence[float]
    ) -> list[Page]:
        """The pages in slots that were taken before are stored now. The last of them is the first to be evicted: of
        pages stored together, the deeper ones go before those they hang under."""
        self._tick = tick = self._tick + 1
        order, segment_of = self._order_for(slot_bytes, label), self._slots.segment_of
        pages = [
            Page(key, slot, slot_bytes, label, order, tick, until)
            for key, slot, until in zip(keys, slots, expires, strict=True)
        ]
        for page in reversed(pages):
            segment = segment_of(page.slot)
            self._segment_tick[segment] = tick
            self._pages_in[segment][page] = None
            self._index[page.key] = page
            order.add(page)
        return pages

    def touch(self, pages: Sequence[Page]) -> None:
        """The pages were used; the last of them is the first to be evicted."""
        self._tick = tick = self._tick + 1
        segment_tick, segment_of = self._segment_tick, self._slots.segment_of
        for page in reversed(pages):
            page.tick = segment_tick[segment_of(page.slot)] = tick
            page.order.touch(page)

    def drop(self, page: Page, *, evicted: bool = False) -> None:
        """The page is no longer stored. Its slot is free now, or when its last lease ends."""
        del self._index[page.key]
        del self._pages_in[self._slots.segment_of(page.slot)][page]
        page.order.remove(page, evicted=evicted)
        page.stored = False
        self._arena.mark_empty(page.slot)
        self.evicted += int(evicted)
        if not page.leases:
            self.give_slot(page.slot, page.slot_bytes, page.label)

    def end_lease(self, page: Page) -> None:
        """One reader of the page is done."""
        page.leases -= 1
        if not page.leases and not page.stored:
            self.give_slot(page.slot, page.slot_bytes, page.label)

    def take_slots(self, slot_bytes: int, count: int, label: bytes, *, evict: bool = True) -> list[int]:
        """Up to `count` slots for new pages of a namespace, evicting where needed (and allowed); fewer when there is no
        more room."""
        slots: list[int] = []
        while len(slots) < count and self._keep_quota(slot_bytes, label, evict):
            slot = self._slots.take(slot_bytes)
            if slot is None and evict:
                slot = self._make_room(slot_bytes)
            if slot is None:
                break
            self.used_bytes[label] += slot_bytes
            slots.append(slot)
        return slots

    def give_slot(self, slot: int, slot_bytes: int, label: bytes) -> None:
        """A slot that was taken holds nothing any more."""
        self.used_bytes[label] -= slot_bytes
        self._slots.give(slot, slot_bytes)

    def check_integrity(self, leases: Sequence[Page], reserved: Iterable[tuple[int, list[int]]]) -> None:
        """AssertionError when index, slots, leases and byte counts do not agree.

        Args:
            leases: one entry per page and lease.
            reserved: slot size and slots of each reservation.
        """
        held = [(size, slot) for size, slots in reserved for slot in slots]
        unstored = {(page.slot_bytes, page.slot) for page in leases if not page.stored}
        stored = [(page.slot_bytes, page.slot) for page in self._index.values()]
        free = [(size, slot) for size, slots in self._slots.free_slots().items() for slot in slots]
        everything = held + list(unstored) + stored + free
        assert len(everything) == len(set(everything)), "a slot is in two places"
        capacity = [(size, slot) for size in self._slots.classes for slot in self._slots.slots_of(size)]
        wrong = sorted({slot for _, slot in set(everything) ^ set(capacity)})
        assert not wrong, f"{len(wrong)} slots are lost or not of their segment's size: {wrong[:NAMED_PAGES]}"
        used = sum(size for size, _ in held + list(unstored) + stored)
        assert sum(self.used_bytes.values()) == used, f"{self.used_bytes} bytes counted, {used} used"
        assert sum(len(order) for order in self._order.values()) == len(self._index), "the eviction order lost a page"
        counted = Counter(map(id, leases))
        for page in [*self._index.values(), *leases]:
            assert page.leases == counted[id(page)], f"slot {page.slot}: {page.leases} leases, {counted[id(page)]} held"

    def damaged(self) -> list[Page]:
        """The pages whose headers in the arena are not what was written there."""
        pages = self.pages()
        rows = self._arena.headers[[page.slot for page in pages]]
        sealed = seals_of(rows) == rows["seal"]
        return [
            page
            for page, row, whole in zip(pages, rows, sealed.tolist(), strict=True)
            if not (
                whole
                and row["state"] == VALID
                and row["key"][: row["key_bytes"]].tobytes() == page.key
                and slot_bytes_for(int(row["length"])) == page.slot_bytes
            )
        ]

    def _make_room(self, slot_bytes: int) -> int | None:
        """A slot of that size that a page, or all pages of a segment, had to be evicted for; None when none can be."""
        slot = None
        while slot is None:
            victim = self._victim(lambda size, _: size == slot_bytes)
            segment = self._colder_segment(slot_bytes, victim)
            if segment is not None:
                self._evict_segment(segment)
            elif victim is not None:
                self.drop(victim, evicted=True)
            else:
                return None
            slot = self._slots.take(slot_bytes)
        return slot

    def _keep_quota(self, slot_bytes: int, label: bytes, evict: bool) -> bool:
        """Evict the namespace's own pages until one more fits its quota, if it has one; False when that can't be."""
        quota = self._quotas.get(label, math.inf)
        while self.used_bytes[label] + slot_bytes > quota:
            victim = self._victim(lambda _, group: group == label) if evict else None
            if victim is None:
                return False
            self.drop(victim, evicted=True)
        return True

    def _victim(self, of: Callable[[int, bytes], bool]) -> Page | None:
        """The coldest of the pages that the orders which `of` (slot bytes, quota group) selects would give up."""
        candidates = [order.victim() for (size, group), order in self._order.items() if of(size, group)]
        return min((page for page in candidates if page is not None), key=lambda page: page.tick, default=None)

    def _colder_segment(self, slot_bytes: int, victim: Page | None) -> int | None:
        """A segment of another size class, free to go, last used before the victim was (whenever, without a victim)."""
        if self._slots.classes == [slot_bytes]:
            return None
        others = [
            segment for size in self._slots.classes if size != slot_bytes for segment in self._slots.segments_of(size)
        ]
        for segment in sorted(others, key=lambda segment: (self._segment_tick[segment], -segment)):
            if victim is not None and self._segment_tick[segment] >= victim.tick:
                return None
            pages = self._pages_in[segment]
            if self._slots.used_in_segment[segment] == len(pages) and not any(page.leases for page in pages):
                return segment
        return None

    def _evict_segment(self, segment: int) -> None:
        for page in list(self._pages_in[segment]):
            self.drop(page, evicted=True)
        self._slots.release_segment(segment)

    def _order_for(self, slot_bytes: int, label: bytes) -> EvictionPolicy:
        group = (slot_bytes, label if label in self._quotas else b"")
        if group not in self._order:
            self._order[group] = make_policy(self._policy)
        return self._order[group]


def named_pages(pages: Sequence[Page]) -> str:
    """How many pages these are, and which: slot and key of the first few."""
    named = "; ".join(f"slot {page.slot}, key {page.key.hex()}" for page in pages[:NAMED_PAGES])
    more = f"; and {len(pages) - NAMED_PAGES} more" if len(pages) > NAMED_PAGES else ""
    return f"{len(pages)} pages ({named}{more})"
