"""HiRadixCache: one rank of the hierarchical cache, without Ray (docs/design.md 1 to 5).

An engine embeds it in its worker process and calls `step` once per scheduling iteration with a reducer over its
ranks; a Ray service runs the same class in an actor. It owns the control half (`TieredIndex`, metadata) and the data
half (`Mover`, bytes), and hands the transfers of the one to the other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from hicache_ray import faultpoints
from hicache_ray.index import Ledger, TieredIndex
from hicache_ray.index.integrity import check_balance, check_index, count_pages
from hicache_ray.pages import NO_PAGES
from hicache_ray.radix.key import Key
from hicache_ray.rank.control import RankControl
from hicache_ray.rank.mover import NO_LOAD, Mover
from hicache_ray.rank.prefetch import Prefetcher, PrefetchPolicy
from hicache_ray.rank.progress import Progress
from hicache_ray.rank.request import Forward, Request, check_step
from hicache_ray.rank.step import (
    Admit,
    Admitted,
    Chunk,
    Chunked,
    Finish,
    Finished,
    Peek,
    Peeked,
    Polled,
    Scheduled,
    StepAnswer,
    StepRequest,
)
from hicache_ray.storage.prepared import PreparedStores, StorageFactory

logger = logging.getLogger("hicache_ray.rank.cache")

Reducer = Callable[[np.ndarray], np.ndarray]
"""MIN over all ranks of an int64 vector; every rank calls it once a step."""


def alone(vector: np.ndarray) -> np.ndarray:
    """The reducer of a group of one rank."""
    return vector


class HiRadixCache:
    """One rank: L1 and L2 pools, the tree replica over them, transfers in flight, and the requests it serves.

    Not thread-safe: one thread steps it. Its own background threads only move bytes and report progress.

    Args:
        index: the control half.
        mover: the data half, over pools of the same sizes.
        prefetch_policy: when to ask L3 and how long to wait.
        rank: this rank's number in its group.
        generation: number of the group's current incarnation.
        make_storage: makes a backend by name and options, for `control`.
    """

    def __init__(
        self,
        index: TieredIndex,
        mover: Mover,
        prefetch_policy: PrefetchPolicy,
        *,
        rank: int = 0,
        generation: int = 0,
        make_storage: StorageFactory | None = None,
    ) -> None:
        self.index = index
        self.mover = mover
        self.prefetcher = Prefetcher(index, mover, prefetch_policy)
        self.rank = rank
        self.generation = generation
        self.requests: dict[str, Request] = {}
        self.control = RankControl(self.prefetcher, self.requests, PreparedStores(make_storage, mover.host_pool))
        self.forward = Forward((), NO_LOAD)
        self.next_step = 0
        self._collected = (0.0, 0.0)
        self._acknowledged = {"writes": 0, "loads": 0, "backups": 0}
        self._base = self._done()

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.index.page_size

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self, request: StepRequest, reduce: Reducer = alone) -> StepAnswer:
        """One scheduling iteration: exactly one reduction, whatever the request holds.

        Raises:
            RequestError: the request names something in a state in which that can't be done; nothing was applied.
            DesyncError: the ranks are not at the same point.
            CopyError: a copy between L1 and L2 failed; the rank must end.
        """
        self.check(request)
        progress = self.collect(request.polls)
        return self.apply(request, Progress.agreed(reduce(progress.vector())))

    def check(self, request: StepRequest) -> None:
        """Raises RequestError when the request names something in a state in which that can't be done."""
        room = self.index.device.total * self.page_size
        check_step(request, self.requests, generation=self.generation, next_step=self.next_step, room=room)

    def collect(self, polls: Sequence[str] = ()) -> Progress:
        """Returns this rank's progress and notes which requests the scheduler polls. Changes no replicated state."""
        began = time.perf_counter()
        self.prefetcher.mark_polled(polls)
        progress = Progress(
            generation=self.generation,
            step=self.next_step,
            digest=self.index.tree.digest(),
            **{kind: done - self._base[kind] for kind, done in self._done().items()},
            releases=self.prefetcher.releases_done,
            prefetches=self.prefetcher.progress(),
        )
        self._collected = began, time.perf_counter()
        return progress

    def apply(self, request: StepRequest, agreed: Progress) -> StepAnswer:
        """Applies the agreed progress, then the operations of a checked request in order, and begins the transfers.

        The answer's `timings_us` has the `work` of `collect` and of this, and the `reduction` between them.
        """
        reduced = time.perf_counter()
        self._apply_progress(agreed)
        for rid in request.aborts:
            self.abort(rid)
        finished = tuple(self.finish(finish) for finish in request.finishes)
        chunked = tuple(self.chunk(chunk) for chunk in request.chunks)
        controlled = tuple(self.control.carry_out(control) for control in request.controls)
        admitted = tuple(self.admit(admit) for admit in request.admits)
        polled = tuple(self.poll(rid) for rid in request.polls)
        scheduled = tuple(self.schedule(rid) for rid in request.schedules)
        peeked = tuple(self.peek(peek) for peek in request.peeks)
        consumer = self.mover.begin(self.index.transfers.take_issued())
        running = (self.requests[row.rid] for row in scheduled if row.ok)
        self.forward = Forward(tuple(running), consumer)
        self.next_step += 1
        digest = self.index.tree.digest()
        began, collected = self._collected
        work = collected - began + time.perf_counter() - reduced
        return StepAnswer(
            rank=self.rank,
            step=agreed.step,
            digest=digest,
            admitted=admitted,
            polled=polled,
            scheduled=scheduled,
            finished=finished,
            chunked=chunked,
            peeked=peeked,
            controlled=controlled,
            timings_us={"reduction": (reduced - collected) * 1e6, "work": work * 1e6},
        )

    # -- the operations of a step ------------------------------------------------------------------------------------

    def admit(self, admit: Admit) -> Admitted:
        """Takes a request in: looks its prompt up and, where it pays, begins to fetch the rest from L3."""
        tokens = np.frombuffer(admit.tokens, dtype="<u4")
        key = self.key(tokens[: max(0, len(tokens) - 1)], admit)
        match = self.index.match(key)
        prefetch = self.prefetcher.begin(admit.rid, key, match)
        self.requests[admit.rid] = Request(
            rid=admit.rid,
            tokens=tokens,
            key=key,
            namespace=admit.namespace,
            priority=admit.priority,
            max_new_tokens=admit.max_new_tokens,
            prefetch=self.prefetcher.active.get(admit.rid),
        )
        return Admitted(admit.rid, match.device_pages * self.page_size, match.host_pages * self.page_size, prefetch)

    def poll(self, rid: str) -> Polled:
        """Whether a waiting request may be scheduled: its prefetch has ended, or it has none."""
        request = self.requests[rid]
        return Polled(rid, rid not in self.prefetcher.active, request.storage_pages * self.page_size)

    def schedule(self, rid: str) -> Scheduled:
        """Gives a waiting request its L1 pages: cached prefix, loaded-back prefix, and room for the rest."""
        request = self.requests[rid]
        self.prefetcher.cancel(rid)
        match = self.index.match(request.key)
        self.index.tree.lock(match.device_node)
        loads = match.host_pages and not faultpoints.fails("alloc.load")
        loaded = self.index.load_back(match) if loads else None
        node, prefix = match.device_node, self.index.device_value(match)
        if loaded is not None:
            self.index.tree.lock(loaded.node)
            self.index.tree.unlock(match.device_node)
            node, prefix = loaded.node, np.concatenate([prefix, loaded.device_pages])
        wanted = -(-(len(request.tokens) + request.max_new_tokens) // self.page_size) - len(prefix)
        room = None if faultpoints.fails("alloc.device") else self.index.allocate(wanted)
        if room is None:
            self.index.tree.unlock(node)
            return Scheduled(rid, False, "no_room")
        request.match, request.node = match, node
        request.pages, request.prefix_pages = np.concatenate([prefix, room]), len(prefix)
        loaded_pages = len(prefix) - match.device_pages
        storage_pages = min(loaded_pages, request.storage_pages)  # case 64: what was really loaded, never more
        return Scheduled(
            rid,
            True,
            "",
            device_tokens=match.device_pages * self.page_size,
            host_tokens=(loaded_pages - storage_pages) * self.page_size,
            storage_tokens=storage_pages * self.page_size,
            computed_tokens=len(request.tokens) - len(prefix) * self.page_size,
        )

    def finish(self, finish: Finish) -> Finished:
        """Ends a running request: its full pages enter the tree, what is a duplicate or fills no page is given back.

        0         prefix_pages   inserted.prefix_pages    kept         len(request.pages)
        |--- the tree's ---|-- duplicates --|-- enter the tree --|-- no whole page --|
                           |<--- freed ---->|                    |<----- freed ----->|
        """
        request = self.requests.pop(finish.rid)
        assert request.node is not None
        if not finish.insert:
            self._give_back(request)
            return Finished(finish.rid, 0, 0)
        output = np.frombuffer(finish.output, dtype="<u4")
        key = self.key(np.concatenate([request.tokens, output]), request)
        kept = min(key.pages, len(request.pages))
        inserted = self.index.insert(
            key.prefix(kept), request.pages[:kept], match=request.match, priority=request.priority
        )
        self.index.tree.unlock(request.node)
        self.index.device.free(request.pages[request.prefix_pages : inserted.prefix_pages])
        self.index.device.free(request.pages[kept:])
        duplicates = max(0, inserted.prefix_pages - request.prefix_pages)
        return Finished(finish.rid, kept * self.page_size, duplicates * self.page_size)

    def chunk(self, chunk: Chunk) -> Chunked:
        """Lets others share the computed part of a running request; it counts no hit and begins no write (case 22).

            0         prefix_pages   inserted.prefix_pages  key.pages    len(request.pages)
            |--- the tree's ---|-- duplicates --|-- enter the tree --|-- the request's --|
                               |<--- freed ---->|
        after it, with the tree's pages in place of the duplicates:
            |-------------------- the tree's, prefix_pages ----------|-- the request's --|
        """
        request = self.requests[chunk.rid]
        assert request.node is not None and request.match is not None
        key = self.key(request.tokens[: chunk.computed_tokens], request)
        if key.pages <= request.prefix_pages:
            return Chunked(chunk.rid, request.prefix_pages * self.page_size)
        inserted = self.index.insert(
            key, request.pages[: key.pages], match=request.match, priority=request.priority, chunked=True
        )
        self.index.tree.lock(inserted.node)
        self.index.tree.unlock(request.node)
        self.index.device.free(request.pages[request.prefix_pages : inserted.prefix_pages])
        request.node = inserted.node
        request.match = request.match._replace(
            node=inserted.node, device_node=inserted.node, device_pages=key.pages, host_pages=0, key=key
        )
        request.pages = np.concatenate([self.index.device_value(request.match), request.pages[key.pages :]])
        request.prefix_pages = key.pages
        return Chunked(chunk.rid, key.pages * self.page_size)

    def peek(self, peek: Peek) -> Peeked:
        """What L1 and L2 hold of a prompt; changes nothing, not even recency."""
        tokens = np.frombuffer(peek.tokens, dtype="<u4")
        device, host = self.index.peek(self.key(tokens[: max(0, len(tokens) - 1)], peek))
        return Peeked(device * self.page_size, host * self.page_size)

    def abort(self, rid: str) -> None:
        """Ends a request in any state, keeping nothing of it; unknown requests are ignored (it may have ended)."""
        request = self.requests.pop(rid, None)
        self.prefetcher.cancel(rid)
        if request is not None and request.running:
            self._give_back(request)

    # -- what a user of one rank may ask -----------------------------------------------------------------------------

    def key(self, tokens: np.ndarray, owner: Admit | Peek | Request) -> Key:
        """The cache key of a token sequence in its owner's namespace; the tail that fills no page is cut (case 20)."""
        return Key.of(tokens, self.page_size, namespace=owner.namespace, bigram=self.index.bigram)

    def ledger(self) -> dict[str, Ledger]:
        """Where every page of L1 and L2 is: free, in the tree, or in flight (owned by a request or a transfer)."""
        running = [request.pages[request.prefix_pages :] for request in self.requests.values() if request.running]
        device = np.concatenate(running) if running else NO_PAGES
        return count_pages(self.index, {"device": device, "host": self.prefetcher.in_flight_pages()})

    def check_integrity(self) -> None:
        """Raises AssertionError when tree, allocators or ledger don't add up. Heavy: for tests and audits."""
        check_index(self.index)
        check_balance(self.ledger())

    def stats(self) -> dict[str, Any]:
        """Counters of this rank under stable names; plain numbers, msgpack-able."""
        io = self.mover.storage_io
        return {
            "bytes": self.mover.bytes_moved(),
            "index": asdict(self.index.stats),
            "prefetch": dict(self.prefetcher.counts),
            "ledger": {pool: ledger.as_dict() for pool, ledger in self.ledger().items()},
            "storage": io.storage.get_stats().as_dict() if io else {},
            "storage_pages": dict(io.pages) if io else {},
            "worker_failures": {w.name: sum(w.failures.values()) for w in io.workers} if io else {},
            "requests": len(self.requests),
            "idle": self.is_idle(),
        }

    def is_idle(self) -> bool:
        """Whether no transfer is in flight anywhere in this rank."""
        return self.index.transfers.is_idle() and self.prefetcher.is_idle()

    def close(self) -> None:
        """Ends the background threads. May be called twice."""
        self.mover.close()
        self.control.stores.close()

    # -- recovery ----------------------------------------------------------------------------------------------------

    def drain_alone(self) -> bool:
        """Applies this rank's own progress, as if all ranks had reached it (for a rejoin). The caller has ended all
        requests and prefetches.

        No backup begins. Copies between L1 and L2 that a broken-off step issued but did not begin are begun here.
        Returns whether nothing is in flight any more.
        """
        enabled, self.prefetcher.enabled = self.prefetcher.enabled, False
        self._apply_progress(self.collect())
        self.mover.begin(self.index.transfers.take_issued())
        self.prefetcher.enabled = enabled
        return self.is_idle()

    def replace_index(self, index: TieredIndex) -> None:
        """Goes on with another control half; this rank must be idle and have no requests."""
        assert self.is_idle() and not self.requests, "the index can only be replaced while nothing is in flight"
        self.index = self.prefetcher.index = index

    def begin_generation(self, generation: int) -> None:
        """Starts counting anew, as every rank of the group does: steps and finished transfers from zero."""
        assert self.is_idle(), "a generation can only begin while nothing is in flight"
        self.generation, self.next_step = generation, 0
        self._base = self._done()
        self._acknowledged = {"writes": 0, "loads": 0, "backups": 0}
        self.prefetcher.begin_generation()

    # -- internals ---------------------------------------------------------------------------------------------------

    def _give_back(self, request: Request) -> None:
        assert request.node is not None
        self.index.tree.unlock(request.node)
        self.index.device.free(request.pages[request.prefix_pages :])

    def _done(self) -> dict[str, int]:
        """Finished transfers of this rank since its process began."""
        mover = self.mover
        return {"writes": mover.writes_done, "loads": mover.loads_done, "backups": mover.backups_done}

    def _apply_progress(self, agreed: Progress) -> None:
        done = self._acknowledged
        written = self.index.transfers.acknowledge_writes(agreed.writes - done["writes"])
        self.index.transfers.acknowledge_loads(agreed.loads - done["loads"])
        self.index.transfers.acknowledge_backups(agreed.backups - done["backups"])
        done.update(writes=agreed.writes, loads=agreed.loads, backups=agreed.backups)
        io = self.mover.storage_io
        if io is not None and self.prefetcher.enabled:
            for write in written:
                for backup in self.index.transfers.begin_backups(write):
                    io.backup(backup)
        self.prefetcher.apply(agreed.prefetches, agreed.releases)
