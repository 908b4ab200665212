"""The pages a shard holds: which pages there are, who may have more room, and which pages go when there is none."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from hicache_ray.storage.shard.arena import Arena, Survivor
from hicache_ray.storage.shard.cells import CellAllocator
from hicache_ray.storage.shard.eviction import EvictionPolicy, Page, make_policy
from hicache_ray.storage.shard.layout import VALID, cell_bytes_for, seals_of

NAMED_PAGES = 10
"""Most pages that an audit names one by one."""


class Residents:
    """Index, eviction order and cell accounting of one arena. Not thread-safe; the shard holds its lock.

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
                arena.mark_empty(survivors[survivor.key].cell)
            survivors[survivor.key] = survivor
        self._cells = CellAllocator(arena, [survivor.cell for survivor in survivors.values()])
        for survivor in survivors.values():
            cell_bytes = self._cells.class_of(self._cells.segment_of(survivor.cell))
            self.used_bytes[survivor.label] += cell_bytes
            self.add([survivor.key], [survivor.cell], cell_bytes, survivor.label, [survivor.expires])

    def __len__(self) -> int:
        return len(self._index)

    def get(self, key: bytes) -> Page | None:
        """The page stored under `key`."""
        return self._index.get(key)

    def stored(self, keys: Iterable[bytes]) -> list[Page]:
        """The pages that are stored under `keys`."""
        return [page for key in keys if (page := self._index.get(key)) is not None]

    def pages(self) -> list[Page]:
        """All pages, oldest first."""
        return list(self._index.values())

    def add(
        self, keys: Sequence[bytes], cells: Sequence[int], cell_bytes: int, label: bytes, expires: Sequence[float]
    ) -> list[Page]:
        """The pages in cells that were taken before are stored now. The last of them is the first to be evicted: of
        pages stored together, the deeper ones go before those they hang under."""
        self._tick = tick = self._tick + 1
        order, segment_of = self._order_for(cell_bytes, label), self._cells.segment_of
        pages = [
            Page(key, cell, cell_bytes, label, order, tick, until)
            for key, cell, until in zip(keys, cells, expires, strict=True)
        ]
        for page in reversed(pages):
            segment = segment_of(page.cell)
            self._segment_tick[segment] = tick
            self._pages_in[segment][page] = None
            self._index[page.key] = page
            order.add(page)
        return pages

    def touch(self, pages: Sequence[Page]) -> None:
        """The pages were used; the last of them is the first to be evicted."""
        self._tick = tick = self._tick + 1
        segment_tick, segment_of = self._segment_tick, self._cells.segment_of
        for page in reversed(pages):
            page.tick = segment_tick[segment_of(page.cell)] = tick
            page.order.touch(page)

    def drop(self, page: Page, *, evicted: bool = False) -> None:
        """The page is no longer stored. Its cell is free now, or when its last lease ends."""
        del self._index[page.key]
        del self._pages_in[self._cells.segment_of(page.cell)][page]
        page.order.remove(page, evicted=evicted)
        page.stored = False
        self._arena.mark_empty(page.cell)
        self.evicted += int(evicted)
        if not page.leases:
            self.give_cell(page.cell, page.cell_bytes, page.label)

    def end_lease(self, page: Page) -> None:
        """One reader of the page is done."""
        page.leases -= 1
        if not page.leases and not page.stored:
            self.give_cell(page.cell, page.cell_bytes, page.label)

    def take_cells(self, cell_bytes: int, count: int, label: bytes, *, evict: bool = True) -> list[int]:
        """Up to `count` cells for new pages of a namespace, evicting where needed (and allowed); fewer when there is no
        more room."""
        cells: list[int] = []
        while len(cells) < count and self._keep_quota(cell_bytes, label, evict):
            cell = self._cells.take(cell_bytes)
            if cell is None and evict:
                cell = self._make_room(cell_bytes)
            if cell is None:
                break
            self.used_bytes[label] += cell_bytes
            cells.append(cell)
        return cells

    def give_cell(self, cell: int, cell_bytes: int, label: bytes) -> None:
        """A cell that was taken holds nothing any more."""
        self.used_bytes[label] -= cell_bytes
        self._cells.give(cell, cell_bytes)

    def check_integrity(self, leases: Sequence[Page], reserved: Iterable[tuple[int, list[int]]]) -> None:
        """AssertionError when index, cells, leases and byte counts do not agree.

        Args:
            leases: one entry per page and lease.
            reserved: cell size and cells of each reservation.
        """
        held = [(size, cell) for size, cells in reserved for cell in cells]
        unstored = {(page.cell_bytes, page.cell) for page in leases if not page.stored}
        stored = [(page.cell_bytes, page.cell) for page in self._index.values()]
        free = [(size, cell) for size, cells in self._cells.free_cells().items() for cell in cells]
        everything = held + list(unstored) + stored + free
        assert len(everything) == len(set(everything)), "a cell is in two places"
        capacity = [(size, cell) for size in self._cells.classes for cell in self._cells.cells_of(size)]
        wrong = sorted({cell for _, cell in set(everything) ^ set(capacity)})
        assert not wrong, f"{len(wrong)} cells are lost or not of their segment's size: {wrong[:NAMED_PAGES]}"
        used = sum(size for size, _ in held + list(unstored) + stored)
        assert sum(self.used_bytes.values()) == used, f"{self.used_bytes} bytes counted, {used} used"
        assert sum(len(order) for order in self._order.values()) == len(self._index), "the eviction order lost a page"
        counted = Counter(map(id, leases))
        for page in [*self._index.values(), *leases]:
            assert page.leases == counted[id(page)], f"cell {page.cell}: {page.leases} leases, {counted[id(page)]} held"

    def damaged(self) -> list[Page]:
        """The pages whose headers in the arena are not what was written there."""
        pages = self.pages()
        rows = self._arena.headers[[page.cell for page in pages]]
        sealed = seals_of(rows) == rows["seal"]
        return [
            page
            for page, row, whole in zip(pages, rows, sealed.tolist(), strict=True)
            if not (
                whole
                and row["state"] == VALID
                and row["key"][: row["key_bytes"]].tobytes() == page.key
                and cell_bytes_for(int(row["length"])) == page.cell_bytes
            )
        ]

    def _make_room(self, cell_bytes: int) -> int | None:
        """A cell of that size that a page, or all pages of a segment, had to be evicted for; None when none can be."""
        cell = None
        while cell is None:
            victim = self._victim(lambda size, _: size == cell_bytes)
            segment = self._colder_segment(cell_bytes, victim)
            if segment is not None:
                self._evict_segment(segment)
            elif victim is not None:
                self.drop(victim, evicted=True)
            else:
                return None
            cell = self._cells.take(cell_bytes)
        return cell

    def _keep_quota(self, cell_bytes: int, label: bytes, evict: bool) -> bool:
        """Evict the namespace's own pages until one more fits its quota, if it has one. Returns False when that can't
        be."""
        quota = self._quotas.get(label, math.inf)
        while self.used_bytes[label] + cell_bytes > quota:
            victim = self._victim(lambda _, group: group == label) if evict else None
            if victim is None:
                return False
            self.drop(victim, evicted=True)
        return True

    def _victim(self, of: Callable[[int, bytes], bool]) -> Page | None:
        """The coldest of the pages that the orders which `of` (cell bytes, quota group) selects would give up."""
        candidates = [order.victim() for (size, group), order in self._order.items() if of(size, group)]
        return min((page for page in candidates if page is not None), key=lambda page: page.tick, default=None)

    def _colder_segment(self, cell_bytes: int, victim: Page | None) -> int | None:
        """A segment of another size class, free to go, last used before the victim was (whenever, without a victim)."""
        if self._cells.classes == [cell_bytes]:
            return None
        others = [
            segment for size in self._cells.classes if size != cell_bytes for segment in self._cells.segments_of(size)
        ]
        for segment in sorted(others, key=lambda segment: (self._segment_tick[segment], -segment)):
            if victim is not None and self._segment_tick[segment] >= victim.tick:
                return None
            pages = self._pages_in[segment]
            if self._cells.used_in_segment[segment] == len(pages) and not any(page.leases for page in pages):
                return segment
        return None

    def _evict_segment(self, segment: int) -> None:
        for page in list(self._pages_in[segment]):
            self.drop(page, evicted=True)
        self._cells.release_segment(segment)

    def _order_for(self, cell_bytes: int, label: bytes) -> EvictionPolicy:
        group = (cell_bytes, label if label in self._quotas else b"")
        if group not in self._order:
            self._order[group] = make_policy(self._policy)
        return self._order[group]


def named_pages(pages: Sequence[Page]) -> str:
    """How many pages these are, and which: cell and key of the first few."""
    named = "; ".join(f"cell {page.cell}, key {page.key.hex()}" for page in pages[:NAMED_PAGES])
    more = f"; and {len(pages) - NAMED_PAGES} more" if len(pages) > NAMED_PAGES else ""
    return f"{len(pages)} pages ({named}{more})"
