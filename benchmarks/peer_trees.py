"""The `tree` and `evict` suites' part of the side-by-side adapter: `trees(case)` as the suite's example has it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hicache_ray.index import IndexOptions, Match, TieredIndex
from hicache_ray.index.integrity import check_index
from hicache_ray.pages import Pages
from hicache_ray.radix.key import TOKEN_BYTES, Key
from hicache_ray.radix.node import Node


class Tokens:
    """A request's tokens as the suite slices them: by token, off the clock."""

    __slots__ = ("key", "length")

    def __init__(self, key: Key, length: int) -> None:
        self.key = key
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> Tokens:
        assert part.start is None and part.step is None, "the suite only takes prompts off the front"
        return Tokens(self.key.prefix(part.stop * TOKEN_BYTES // self.key.page_bytes), part.stop)


class Handle(NamedTuple):
    """A request between match and insert."""

    match: Match
    node: Node
    hit_pages: int


class Replay:
    """match + lock, room for the rest, insert + unlock: with all the bookkeeping a serving rank does."""

    def __init__(self, l2_ratio: float, page: int, capacity: int) -> None:
        pages = capacity // page
        self.page = page
        self.index = TieredIndex(IndexOptions(page_size=page, device_pages=pages, host_pages=int(pages * l2_ratio)))
        self.n_evictions = 0

    @property
    def evicted(self) -> int:
        """Tokens evicted from L1 so far."""
        return self.index.stats.evicted_device_pages * self.page

    def prep(self, tokens: np.ndarray) -> Tokens:
        return Tokens(Key.of(tokens, self.page), len(tokens))

    def match(self, prompt: Tokens) -> Handle:
        index = self.index
        match = index.match(prompt.key)
        node, hit = match.device_node, match.device_pages
        if match.host_pages:
            loaded = index.load_back(match)
            if loaded is not None:
                node, hit = loaded.node, hit + len(loaded.device_pages)
        index.tree.lock(node)
        return Handle(match, node, hit)

    def hit_len(self, handle: Handle) -> int:
        return handle.hit_pages * self.page

    def alloc(self, handle: Handle, prompt: Tokens, full: Tokens) -> Pages:
        index = self.index
        need = -(-len(full) // self.page) - handle.hit_pages
        if need > index.device.free_pages:
            self.n_evictions += 1
        pages = index.allocate(need)
        if pages is None:
            raise RuntimeError(f"out of pages: {need} needed, every cached token is locked")
        return pages

    def insert(self, handle: Handle, full: Tokens, pages: Pages) -> None:
        index, key = self.index, full.key
        whole = key.pages - handle.hit_pages
        inserted = index.insert(key, pages[:whole], match=handle.match)
        index.tree.unlock(handle.node)
        duplicates = inserted.prefix_pages - handle.hit_pages
        if duplicates > 0:
            index.device.free(pages[:duplicates])
        if whole < len(pages):
            index.device.free(pages[whole:])
        if index.transfers.writes or index.transfers.loads:  # the copies themselves are no part of the suite
            index.transfers.take_issued()
            if index.transfers.writes:
                index.transfers.acknowledge_writes(len(index.transfers.writes))
            if index.transfers.loads:
                index.transfers.acknowledge_loads(len(index.transfers.loads))

    def evict(self, tokens: int) -> int:
        return self.index.evictor.evict_device(-(-tokens // self.page)) * self.page

    def close(self) -> None:
        check_index(self.index)


def trees(case: dict[str, Any]) -> dict[str, Callable[[int, int], Replay]]:
    """`TieredIndex` with one tier, or with two where the case gives an `l2_ratio`."""
    return {"TieredIndex": partial(Replay, case.get("l2_ratio", 0))}
