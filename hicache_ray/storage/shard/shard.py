"""One storage actor's pages, without Ray: an index over an arena, reservations, leases, eviction.

To write a page, a client calls `reserve`, copies, and calls `commit`. To read one, it calls `acquire`, copies, and
calls `release`. The copying is the client's. A page is visible from its commit on, whole. Reservations and leases of a
dead client expire. All methods are thread-safe and short: none copies pages (`release` may read a suspect one).

Pages also move between shards. The shard that has them looks at them with `keys_by_use`, `describe` and `lend`. The
shard that gets them answers `offer` and `commit`. After that the first shard may `discard` them.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_ray.storage.shard.arena import Arena
from hicache_ray.storage.shard.eviction import Page
from hicache_ray.storage.shard.grants import (
    EXISTING,
    GRANT,
    GRANTED,
    REFUSED,
    Flags,
    Granted,
    HeldPage,
    NamespaceLimit,
    ShardStats,
    namespace_label,
)
from hicache_ray.storage.shard.layout import MAX_KEY_BYTES, MAX_LABEL_BYTES, cell_bytes_for, seals_of
from hicache_ray.storage.shard.page_copy import checksum_of
from hicache_ray.storage.shard.residents import Residents, named_pages

REMEMBERED_COMMITS = 1024
AUDIT_PAGES = 64
_COUNTED = ("stored", "existing", "refused", "expired", "corrupt", "asked", "hits", "abandoned", "received", "moved")


class _Reserved(NamedTuple):
    keys: list[bytes]
    cells: list[int]
    length: int
    cell_bytes: int
    label: bytes
    deadline: float
    expires: npt.NDArray[np.float64] | None
    """Of pages that another shard brought; None: new pages."""


class _Leased(NamedTuple):
    pages: list[Page]
    deadline: float


class Shard:
    """See the module. `clock` gives seconds; it must be comparable across restarts for TTL to survive them."""

    def __init__(
        self,
        arena: Arena,
        *,
        policy: str = "lru",
        limits: Mapping[str, NamespaceLimit] | None = None,
        lease_seconds: float = 30.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Take over whatever whole pages the arena holds.

        Raises:
            ValueError: unknown policy.
        """
        self.arena = arena
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._ids = itertools.count(int(arena.next_generation(1)[0]))
        self._limits = {namespace_label(name): limit for name, limit in (limits or {}).items()}
        quotas = {label: limit.quota_bytes for label, limit in self._limits.items() if limit.quota_bytes is not None}
        self._residents = Residents(arena, policy, quotas)
        self._expiry: list[tuple[float, int, Page]] = []
        self._reserved: OrderedDict[int, _Reserved] = OrderedDict()
        self._leased: OrderedDict[int, _Leased] = OrderedDict()
        self._committed: OrderedDict[int, Flags] = OrderedDict()
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._watch_expiry(self._residents.pages())
        self._reopened = len(self._residents)

    def exists(self, keys: Sequence[bytes]) -> Flags:
        """Which keys are stored. Counts as a use: what was just looked up is the last to be evicted."""
        with self._lock:
            self._expire()
            pages = [self._residents.get(key) for key in keys]
            self._residents.touch([page for page in pages if page is not None])
            self._counts["asked"] += len(keys)
            flags = np.array([page is not None for page in pages], dtype=np.bool_)
            self._counts["hits"] += int(flags.sum())
            return flags

    def reserve(self, keys: Sequence[bytes], length: int, label: bytes = b"") -> Granted:
        """Cells to write pages of `length` bytes into.

        Per key the status is EXISTING (nothing to write), GRANTED (write `length` bytes at the offset, then commit) or
        REFUSED (no room that may be taken: the rest of the keys is refused too). Other pages may be evicted. Two
        writers of one key both get a cell; the first commit wins.

        Raises:
            ValueError: a key, the label or the length does not fit an arena's cell.
        """
        cell_bytes = self._checked_size(keys, length, label)
        with self._lock:
            self._expire()
            present = [self._residents.get(key) for key in keys]
            self._residents.touch([page for page in present if page is not None])
            wanted = [i for i, page in enumerate(present) if page is None]
            cells = self._residents.take_cells(cell_bytes, len(wanted), label)
            self._counts["existing"] += len(keys) - len(wanted)
            self._counts["refused"] += len(wanted) - len(cells)
            return self._grant(keys, wanted, cells, length, label, None)

    def offer(
        self, keys: Sequence[bytes], length: int, label: bytes, expires: npt.NDArray[np.float64], displace: bool
    ) -> Granted:
        """`reserve`, for pages that another shard wants to bring: nothing counts as used.

        Args:
            expires: clock time, per key, after which it is a miss.
            displace: whether other pages may be evicted; if not, what finds no free cell is REFUSED.

        Raises:
            ValueError: as `reserve`.
        """
        cell_bytes = self._checked_size(keys, length, label)
        with self._lock:
            self._expire()
            wanted = [i for i, key in enumerate(keys) if self._residents.get(key) is None]
            cells = self._residents.take_cells(cell_bytes, len(wanted), label, evict=displace)
            return self._grant(keys, wanted, cells, length, label, expires[wanted[: len(cells)]])

    def commit(self, reservation: int, checksums: npt.NDArray[np.uint64], good: Flags | None = None) -> Flags:
        """The granted pages of a reservation are written: they become visible. One flag per granted page.

        Args:
            checksums: xxh3_64 of each granted page, in the order of the grants.
            good: which of them were written; the others' cells are given back and their flag is False.

        A reservation that expired, was released or is unknown gives all False. Committing twice gives the first answer.

        Raises:
            ValueError: not one checksum per granted page.
        """
        with self._lock:
            self._expire()
            held = self._reserved.get(reservation)
            if held is None:
                return self._committed.get(reservation, np.zeros(len(checksums), np.bool_))
            if len(checksums) != len(held.keys):
                raise ValueError(f"{len(checksums)} checksums for a reservation of {len(held.keys)} pages")
            del self._reserved[reservation]
            flags = np.ones(len(held.keys), np.bool_) if good is None else good.astype(np.bool_)
            self._store(held, checksums, flags)
            self._committed[reservation] = flags
            while len(self._committed) > REMEMBERED_COMMITS:
                self._committed.popitem(last=False)
            return flags

    def reserved(self, reservation: int) -> tuple[list[int], int]:
        """File offsets of a reservation's granted cells and the bytes a page; ([], 0) for one that is not open."""
        with self._lock:
            held = self._reserved.get(reservation)
            if held is None:
                return [], 0
            return self.arena.offsets(np.array(held.cells, np.int64)).tolist(), held.length

    def acquire(self, keys: Sequence[bytes], length: int) -> Granted:
        """Lease the stored pages among `keys` for reading: status GRANTED with offset, generation and checksum, or
        MISSING. A page stored with another length is MISSING. A leased page is not evicted until it is released or
        the lease expires."""
        grants = np.zeros(len(keys), GRANT)
        with self._lock:
            self._expire()
            self._counts["asked"] += len(keys)
            found = self._readable(keys, length)
            if not found:
                return Granted(0, grants)
            where, pages = [i for i, _ in found], [page for _, page in found]
            cells = np.array([page.cell for page in pages], dtype=np.int64)
            self._counts["hits"] += len(pages)
            self._residents.touch(pages)
            headers = self.arena.headers
            grants["cell"][where] = cells
            grants["offset"][where] = self.arena.offsets(cells)
            grants["generation"][where] = headers["generation"][cells]
            grants["checksum"][where] = headers["checksum"][cells]
            grants["status"][where] = GRANTED
            return Granted(self._lease(pages), grants)

    def release(self, identity: int, suspects: Sequence[int] = ()) -> None:
        """End a lease, or give up a reservation; harmless for one that is unknown or expired.

        Args:
            suspects: cells of the lease whose bytes did not match for the reader. Those that do not match for the shard
                either are dropped, so that the page can be stored again.
        """
        with self._lock:
            self._abandon(self._reserved.pop(identity, None))
            held = self._leased.pop(identity, None)
            if held is None:
                return
            suspected = set(suspects)
            for page in held.pages:
                if page.cell in suspected and page.stored and not self._intact(page):
                    self._counts["corrupt"] += 1
                    self._residents.drop(page)
                self._residents.end_lease(page)

    def clear(self, label: bytes | None = None, prefix: bytes = b"") -> int:
        """Drop the pages of a namespace label (None: of all) whose keys begin with `prefix`; what is being written is
        dropped too. Returns the number of dropped pages."""

        def goes(key: bytes, of: bytes) -> bool:
            return (label is None or of == label) and key.startswith(prefix)

        with self._lock:
            for identity, held in list(self._reserved.items()):
                if any(goes(key, held.label) for key in held.keys):
                    self._abandon(self._reserved.pop(identity))
            gone = [page for page in self._residents.pages() if goes(page.key, page.label)]
            for page in gone:
                self._residents.drop(page)
            return len(gone)

    def keys_by_use(self) -> list[bytes]:
        """The keys of all pages, those used last first."""
        with self._lock:
            self._expire()
            pages = self._residents.pages()
        ticks = np.fromiter((page.tick for page in pages), np.int64, len(pages))
        return [pages[i].key for i in np.argsort(-ticks, kind="stable").tolist()]

    def describe(self, keys: Sequence[bytes]) -> list[HeldPage]:
        """The stored pages among `keys`."""
        with self._lock:
            return self._described(self._residents.stored(keys))

    def lend(self, keys: Sequence[bytes]) -> tuple[int, list[HeldPage]]:
        """The stored pages among `keys`, under a lease with that id; does not count as a use."""
        with self._lock:
            pages = self._residents.stored(keys)
            return self._lease(pages), self._described(pages)

    def discard(self, keys: Sequence[bytes]) -> None:
        """Drop pages that the members that own them have."""
        with self._lock:
            for page in self._residents.stored(set(keys)):
                self._residents.drop(page)
                self._counts["moved"] += 1

    def mark(self) -> int:
        """A point in time, for `written_since`."""
        with self._lock:
            return next(self._ids)

    def written_since(self, mark: int) -> bool:
        """Whether all that was being written at that point is visible or given up by now."""
        with self._lock:
            self._expire()
            return not self._reserved or next(iter(self._reserved)) > mark

    def stats(self) -> ShardStats:
        """State and counters now."""
        with self._lock:
            self._expire()
            geometry = self.arena.geometry
            return ShardStats(
                pages=len(self._residents),
                used_bytes=sum(self._residents.used_bytes.values()),
                total_bytes=geometry.segments * geometry.segment_bytes,
                reserved=sum(len(held.cells) for held in self._reserved.values()),
                leased=sum(len(held.pages) for held in self._leased.values()),
                reopened=self._reopened,
                evicted=self._residents.evicted,
                used_bytes_by_namespace={
                    label.decode(errors="replace"): used for label, used in self._residents.used_bytes.items() if used
                },
                **self._counts,
            )

    def check_integrity(self, *, read_pages: bool = False) -> None:
        """Compare index, headers, free cells, leases and byte counts; AssertionError names what differs.

        Args:
            read_pages: also compare every page with its checksum.
        """
        with self._lock:
            leases = [page for held in self._leased.values() for page in held.pages]
            self._residents.check_integrity(leases, [(held.cell_bytes, held.cells) for held in self._reserved.values()])
            damaged = self._residents.damaged()
        known = set(damaged)
        broken = [page for page in self._broken_pages() if page not in known] if read_pages else []
        faults = [f"{named_pages(damaged)} have damaged headers"] if damaged else []
        faults += [f"{named_pages(broken)} do not match their checksums"] if broken else []
        assert not faults, "; ".join(faults)

    def _checked_size(self, keys: Sequence[bytes], length: int, label: bytes) -> int:
        if not 0 < length <= self.arena.geometry.segment_bytes:
            raise ValueError(f"a page of {length} bytes does not fit a segment of {self.arena.geometry.segment_bytes}")
        if len(label) > MAX_LABEL_BYTES or any(not 0 < len(key) <= MAX_KEY_BYTES for key in keys):
            raise ValueError(f"keys must have 1 to {MAX_KEY_BYTES} bytes, a label at most {MAX_LABEL_BYTES}")
        return cell_bytes_for(length)

    def _grant(
        self,
        keys: Sequence[bytes],
        wanted: list[int],
        cells: list[int],
        length: int,
        label: bytes,
        expires: npt.NDArray[np.float64] | None,
    ) -> Granted:
        """Reserve the cells for the first of the wanted keys; the other wanted keys are refused."""
        grants = np.zeros(len(keys), GRANT)
        granted, refused = wanted[: len(cells)], wanted[len(cells) :]
        grants["status"] = EXISTING
        grants["status"][refused] = REFUSED
        if not granted:
            return Granted(0, grants)
        numbers = np.array(cells, dtype=np.int64)
        generations = self.arena.next_generation(len(cells))
        self.arena.mark_writing(numbers, generations, length)
        grants["cell"][granted] = numbers
        grants["offset"][granted] = self.arena.offsets(numbers)
        grants["generation"][granted] = generations
        grants["status"][granted] = GRANTED
        identity, deadline = next(self._ids), self._clock() + self._lease_seconds
        chosen, size = [keys[i] for i in granted], cell_bytes_for(length)
        self._reserved[identity] = _Reserved(chosen, cells, length, size, label, deadline, expires)
        return Granted(identity, grants)

    def _store(self, held: _Reserved, checksums: npt.NDArray[np.uint64], flags: Flags) -> None:
        """Make the flagged pages visible; the cells of the others, and of keys somebody stored meanwhile, are free."""
        new: dict[bytes, int] = {}
        for i, (key, cell, good) in enumerate(zip(held.keys, held.cells, flags.tolist(), strict=True)):
            if good and key not in new and self._residents.get(key) is None:
                new[key] = i
            else:
                self._residents.give_cell(cell, held.cell_bytes, held.label)
                self._counts["existing"] += good
        if not new:
            return
        order = list(new.values())
        expires = self._expiry_of(held)[order]
        cells = [held.cells[i] for i in order]
        self.arena.mark_valid(np.array(cells, np.int64), list(new), checksums[order], held.label, expires)
        self._watch_expiry(self._residents.add(list(new), cells, held.cell_bytes, held.label, expires.tolist()))
        self._counts["stored" if held.expires is None else "received"] += len(new)

    def _expiry_of(self, held: _Reserved) -> npt.NDArray[np.float64]:
        if held.expires is not None:
            return held.expires
        ttl = self._limits.get(held.label, NamespaceLimit()).ttl
        return np.full(len(held.keys), math.inf if ttl is None else self._clock() + ttl)

    def _described(self, pages: Sequence[Page]) -> list[HeldPage]:
        cells = np.array([page.cell for page in pages], dtype=np.int64)
        rows = self.arena.headers[cells]
        where = zip(rows["length"].tolist(), rows["checksum"].tolist(), self.arena.offsets(cells).tolist(), strict=True)
        return [
            HeldPage(page.key, page.label, length, page.expires, checksum, page.cell, offset)
            for page, (length, checksum, offset) in zip(pages, where, strict=True)
        ]

    def _readable(self, keys: Sequence[bytes], length: int) -> list[tuple[int, Page]]:
        """Positions and pages of the keys that are stored with that length. A page whose header was damaged is dropped:
        it could neither be read nor be stored again."""
        found = [(i, page) for i, key in enumerate(keys) if (page := self._residents.get(key)) is not None]
        fits = self.arena.headers["length"][[page.cell for _, page in found]] == length
        if fits.all():
            return found
        for _, page in itertools.compress(found, ~fits):
            row = self.arena.headers[page.cell : page.cell + 1]
            if page.stored and seals_of(row) != row["seal"]:
                self._counts["corrupt"] += 1
                self._residents.drop(page)
        return list(itertools.compress(found, fits))

    def _lease(self, pages: list[Page]) -> int:
        for page in pages:
            page.leases += 1
        identity = next(self._ids)
        self._leased[identity] = _Leased(pages, self._clock() + self._lease_seconds)
        return identity

    def _broken_pages(self) -> list[Page]:
        """The pages that do not match their checksums. They are read a few at a time, under a lease, so that
        clients go on meanwhile."""
        with self._lock:
            pages = self._residents.pages()
        broken = []
        for start in range(0, len(pages), AUDIT_PAGES):
            with self._lock:
                batch = [page for page in pages[start : start + AUDIT_PAGES] if page.stored]
                lease = self._lease(batch)
            broken += [page for page in batch if not self._intact(page)]
            self.release(lease)
        return broken

    def _intact(self, page: Page) -> bool:
        header = self.arena.headers[page.cell]
        offset = int(self.arena.offsets(np.array([page.cell], np.int64))[0])
        return checksum_of(self.arena.data(offset, int(header["length"]))) == int(header["checksum"])

    def _watch_expiry(self, pages: list[Page]) -> None:
        for page in pages:
            if page.expires < math.inf:
                heapq.heappush(self._expiry, (page.expires, next(self._ids), page))

    def _expire(self) -> None:
        now = self._clock()
        while self._expiry and self._expiry[0][0] <= now:
            page = heapq.heappop(self._expiry)[2]
            if page.stored:
                self._residents.drop(page)
                self._counts["expired"] += 1
        while self._reserved and next(iter(self._reserved.values())).deadline <= now:
            self._abandon(self._reserved.popitem(last=False)[1])
            self._counts["abandoned"] += 1
        while self._leased and next(iter(self._leased.values())).deadline <= now:
            for page in self._leased.popitem(last=False)[1].pages:
                self._residents.end_lease(page)
            self._counts["abandoned"] += 1

    def _abandon(self, held: _Reserved | None) -> None:
        if held is None:
            return
        self.arena.mark_empty(np.array(held.cells, np.int64))
        for cell in held.cells:
            self._residents.give_cell(cell, held.cell_bytes, held.label)
