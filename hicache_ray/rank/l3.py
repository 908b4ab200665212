"""L2 <-> L3 on background threads: asking the store, reading pages into L2, backing pages up.

Three workers, one for each kind, so that a slow write never delays a lookup. Operations are page lists; every one ends,
whatever the store does: what failed is a miss.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hicache_ray.index import Backup
from hicache_ray.pages import NO_PAGES, Pages
from hicache_ray.storage.base import PageContext, Storage
from hicache_ray.storage.guard import GuardedStorage
from hicache_ray.storage.host_pages import HostPages
from hicache_ray.threads import Worker

BATCH_PAGES = 128
"""Most pages one storage call moves. No backend is asked for more, so none has to cut."""

_MAX_UNSTORED = 1 << 16
"""Most failed page hashes that are remembered."""


@dataclass(eq=False, kw_only=True)
class Fetch:
    """Pages that are asked of the store, then read; the control thread sets some fields, the IO threads the others.

    Attributes:
        hashes: of the pages asked for, in order.
        prefix_hashes: of the pages before them, where the store is told.
        host_pages: reserved L2 pages, one per hit, owned by this fetch from `read` until `read_ended`.
        cancelled: set to have no further batch begin.
        query_done, hit_pages: whether the query has ended, and how many leading pages the store has.
        completed_pages: leading pages that have been read; grows.
        read_ended: nothing touches the host pages any more.
    """

    hashes: Sequence[bytes]
    prefix_hashes: Sequence[bytes] = ()
    host_pages: Pages = field(default_factory=lambda: NO_PAGES)
    cancelled: bool = False
    query_done: bool = False
    hit_pages: int = 0
    completed_pages: int = 0
    read_ended: bool = False

    def end_read(self) -> None:
        """Sets `read_ended`. Called once, by whichever thread was the last to touch the host pages."""
        self.read_ended = True


class StorageIO:
    """The threads between a rank's host pool and one storage backend, from attach to detach.

    The store is guarded: a call that passes its deadline is given up, and its pages stay owned until it returns.
    """

    def __init__(
        self,
        storage: Storage,
        host_pool: HostPages,
        *,
        pass_prefix_hashes: bool = False,
        workers: Callable[[str], Worker] = Worker,
    ) -> None:
        self.storage = storage if isinstance(storage, GuardedStorage) else GuardedStorage(storage)
        self.host_pool = host_pool
        self.pass_prefix_hashes = pass_prefix_hashes
        self.bytes: Counter[str] = Counter()
        self.pages: Counter[str] = Counter()
        self._backups_done = 0
        self._backups: deque[threading.Event] = deque()
        self._unstored: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()
        self._query_worker = workers("l3-query")
        self._read_worker = workers("l3-read")
        self._write_worker = workers("l3-write")
        self.storage.register_host_pool(host_pool)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The threads, for health checks."""
        return (self._query_worker, self._read_worker, self._write_worker)

    def query(self, fetch: Fetch) -> None:
        """Find out how many leading pages the store has; sets `hit_pages`, then `query_done`, whatever happens."""
        self._query_worker.submit("query", lambda: self._query(fetch))

    def read(self, fetch: Fetch) -> None:
        """Read the hit pages into `host_pages`, in order; grows `completed_pages`, at last sets `read_ended`."""
        self._read_worker.submit("read", lambda: self._read(fetch))

    def backup(self, backup: Backup) -> None:
        """Store the pages of a backup; counted in `backups_done` when it has ended."""
        ended = threading.Event()
        self._backups.append(ended)
        self._write_worker.submit("backup", lambda: self._backup(backup, ended))

    @property
    def backups_done(self) -> int:
        """Ended backups, those that stored nothing included: cumulative, in the order in which they were submitted."""
        while self._backups and self._backups[0].is_set():
            self._backups.popleft()
            self._backups_done += 1
        return self._backups_done

    def close(self, timeout: float) -> bool:
        """Ends the threads and closes the store. Returns False when a call under way did not end within `timeout`
        seconds."""
        ended = all([worker.close(timeout) for worker in self.workers])
        if ended:
            self.storage.close()
        return ended

    def _query(self, fetch: Fetch) -> None:
        try:
            hashes = fetch.hashes
            for start, stop in _batches(len(hashes)):
                if fetch.cancelled:
                    break
                context = self._context(fetch.prefix_hashes, hashes, start)
                fetch.hit_pages = start + self.storage.lookup(hashes[start:stop], context)
                if fetch.hit_pages < stop:
                    break
        finally:
            fetch.query_done = True

    def _read(self, fetch: Fetch) -> None:
        try:
            hashes, pages = fetch.hashes, fetch.host_pages
            for start, stop in _batches(len(pages)):
                if fetch.cancelled:
                    break
                context = self._context(fetch.prefix_hashes, hashes, start)
                done = self.storage.load(hashes[start:stop], pages[start:stop], context)
                fetch.completed_pages = start + done
                self._count("l3_to_l2", done)
                if done < stop - start:
                    self._count("l3_lost", 1)
                    break
        finally:
            self.storage.when_returned(fetch.host_pages, fetch.end_read)

    def _backup(self, backup: Backup, ended: threading.Event) -> None:
        """Batches in order; a failed one is tried once more, then ends the backup: what is stored stays (12, 30).

        Ancestors that could not be stored before go first, in the same backup: else a prefix that was sent while the
        store was away would keep everything below it from the store for as long as it is in the tree.
        """
        first = self._first_unstored(backup.prefix_hashes)
        pages = np.concatenate([backup.prefix_pages[first:], backup.host_pages])
        hashes = [*backup.prefix_hashes[first:], *backup.hashes]
        stored = 0
        try:
            for start, stop in _batches(len(hashes)):
                context = self._context(backup.prefix_hashes[:first], hashes, start, backup.node.namespace.tenant or "")
                stored = start + self._store(hashes[start:stop], pages[start:stop], context)
                if stored < stop:
                    break
        finally:
            self._remember(hashes, stored)
            self.storage.when_returned(pages, ended.set)

    def _store(self, hashes: Sequence[bytes], pages: Pages, context: PageContext) -> int:
        stored = self.storage.store(hashes, pages, context)
        if stored < len(hashes):
            self._count("l3_backup_retried", len(hashes) - stored)
            stored += self.storage.store(hashes[stored:], pages[stored:], context)
        self._count("l2_to_l3", stored)
        return stored

    def _first_unstored(self, hashes: Sequence[bytes]) -> int:
        """Place of the first page that could not be stored before; how many there are, when all could."""
        with self._lock:
            if not self._unstored:
                return len(hashes)
            return next((at for at, page_hash in enumerate(hashes) if page_hash in self._unstored), len(hashes))

    def _remember(self, hashes: Sequence[bytes], stored: int) -> None:
        """Notes which pages are not in the store, so that no descendant is stored without its ancestors."""
        with self._lock:
            for page_hash in hashes[:stored]:
                self._unstored.pop(page_hash, None)
            for page_hash in hashes[stored:]:
                self._unstored[page_hash] = None
            while len(self._unstored) > _MAX_UNSTORED:
                self._unstored.popitem(last=False)
        if stored < len(hashes):
            self._count("l3_backup_failed", len(hashes) - stored)

    def _context(self, prefix: Sequence[bytes], hashes: Sequence[bytes], start: int, label: str = "") -> PageContext:
        known = (*prefix, *hashes[:start]) if self.pass_prefix_hashes else ()
        return PageContext(prefix_hashes=known, namespace=label)

    def _count(self, path: str, pages: int) -> None:
        with self._lock:
            self.pages[path] += pages
            self.bytes[path] += pages * self.host_pool.page_bytes


def _batches(count: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, BATCH_PAGES):
        yield start, min(start + BATCH_PAGES, count)
