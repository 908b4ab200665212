"""What a rank does to come back into step with its group: end everything in flight, claim pages, restore the tree.

The order is the recovery's (`actors.recovery`): every rank quiesces, one tells its catalog, all say which of its pages
they hold or can get, and all restore the part that every rank has. Pages live on in L2; L1 starts empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hicache_ray.deadline import Deadline, wait_until
from hicache_ray.index.catalog import Catalog, Mask, catalog_of, host_pages_by_hash, restored
from hicache_ray.rank.cache import HiRadixCache
from hicache_ray.rank.l3 import BATCH_PAGES

Peer = Callable[[Sequence[bytes]], np.ndarray | None]
"""Asks another rank for pages by hash: [n, page_bytes] uint8 in order, or None when it has not all of them."""


class Rejoin:
    """One rank on its way back into its group."""

    def __init__(self, cache: HiRadixCache) -> None:
        self.cache = cache
        self._pages: dict[bytes, int] = {}

    def quiesce(self, timeout: float) -> None:
        """Ends every request and transfer of this rank, then notes which pages it holds.

        Raises:
            TimeoutError: a transfer did not end within `timeout` seconds; the rank's process has to be replaced.
        """
        cache = self.cache
        for rid in list(cache.requests):
            cache.abort(rid)
        cache.prefetcher.cancel_all()
        if not cache.mover.settle(timeout):
            raise TimeoutError(f"copies between L1 and L2 did not end within {timeout:g} s")
        if not wait_until(cache.drain_alone, timeout):
            raise TimeoutError(f"storage calls did not end within {timeout:g} s")
        self._pages = host_pages_by_hash(cache.index)

    def catalog(self) -> bytes:
        """This rank's host tier as a message."""
        return catalog_of(self.cache.index).pack()

    def claim(self, message: bytes, peers: Sequence[Peer], seconds: float) -> bytes:
        """Which pages of a catalog this rank holds now, one byte a page, after trying for at most `seconds` to get the
        missing ones: from a peer that has the same bytes, else from L3.

        Raises:
            TimeoutError: a storage call was given up and may still touch L2; the rank's process has to be replaced.
        """
        catalog = Catalog.unpack(message)
        deadline = Deadline(seconds)
        at = 0
        for entry in catalog.entries:
            wanted = catalog.hashes[at : at + entry.pages]
            at += entry.pages
            missing = [page_hash for page_hash in wanted if page_hash not in self._pages]
            if missing and not deadline.passed:
                self._fetch(missing, peers)
        io = self.cache.mover.storage_io
        if io is not None and io.storage.given_up:
            raise TimeoutError("a storage call did not return in time and may still write to L2")
        return np.array([page_hash in self._pages for page_hash in catalog.hashes], dtype=np.uint8).tobytes()

    def pages(self, hashes: Sequence[bytes]) -> np.ndarray | None:
        """Bytes of pages this rank holds in L2, [n, page_bytes] uint8; None when one is missing."""
        host = self.cache.mover.host_pool
        if any(page_hash not in self._pages for page_hash in hashes):
            return None
        return np.stack([host.read_page(self._pages[page_hash]) for page_hash in hashes])

    def restore(self, message: bytes, retained: bytes) -> int:
        """Takes the retained pages of the catalog as the new tree. Returns its digest, equal on all ranks."""
        catalog = Catalog.unpack(message)
        mask: Mask = np.frombuffer(retained, dtype=np.uint8).astype(bool)
        self.cache.replace_index(restored(self.cache.index, catalog, mask, self._pages.__getitem__))
        self._pages = {}
        return self.cache.index.tree.digest()

    def _fetch(self, hashes: Sequence[bytes], peers: Sequence[Peer]) -> None:
        for start in range(0, len(hashes), BATCH_PAGES):
            batch = hashes[start : start + BATCH_PAGES]
            room = self.cache.index.host.alloc(len(batch))
            if room is None:
                return
            got = self._from_peers(batch, room, peers) or self._from_storage(batch, room)
            self._pages.update(zip(batch[:got], room[:got].tolist(), strict=True))
            if got < len(batch):
                self.cache.index.host.free(room[got:])
                return

    def _from_peers(self, hashes: Sequence[bytes], room: np.ndarray, peers: Sequence[Peer]) -> int:
        for peer in peers:
            data = peer(hashes)
            if data is not None:
                for page, content in zip(room.tolist(), data, strict=True):
                    self.cache.mover.host_pool.write_page(page, content)
                return len(hashes)
        return 0

    def _from_storage(self, hashes: Sequence[bytes], room: np.ndarray) -> int:
        io = self.cache.mover.storage_io
        if io is None:
            return 0
        return io.storage.load(hashes, room)
