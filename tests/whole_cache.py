"""Whole ranks in one process, stepped in lockstep, whose transfers move only when the test says so.

Every page's bytes follow from the namespace, the tokens up to its end, layer, plane and rank, so any page that is used
can be compared with what it must hold.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from hicache_ray.hashing import EMPTY_NAMESPACE, ModelIdentity, Namespace
from hicache_ray.index import IndexOptions, TieredIndex
from hicache_ray.kernels.table import copies_between
from hicache_ray.pages import Bytes
from hicache_ray.pools.device import DevicePool
from hicache_ray.pools.host import HostPool
from hicache_ray.pools.layouts import KVSpec
from hicache_ray.rank.cache import HiRadixCache
from hicache_ray.rank.group import GroupAnswer
from hicache_ray.rank.l3 import Fetch, StorageIO
from hicache_ray.rank.local_group import LocalGroup
from hicache_ray.rank.mover import Mover
from hicache_ray.rank.prefetch import PrefetchPolicy
from hicache_ray.rank.request import Forward, Request
from hicache_ray.rank.step import Admit, StepRequest
from hicache_ray.storage.base import PageStorage, StorageConfig
from tests.manual import ManualLane, ManualWorker


class Clock:
    """Seconds that pass only when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class RacingIO(StorageIO):
    """L3 calls of which some have begun before they are cancelled, and so run to their end."""

    chance = random.Random(1)

    def _read(self, fetch: Fetch) -> None:
        cancelled = fetch.cancelled
        if self.chance.random() < 0.5:
            fetch.cancelled = False
        super()._read(fetch)
        fetch.cancelled = cancelled


class FaultyStore(PageStorage):
    """A shared dict of pages that now and then loses a page, fails a write, or raises."""

    def __init__(self, config: StorageConfig, pages: dict[str, bytes], chance: float, seed: int) -> None:
        super().__init__(config)
        self.pages = pages
        self.chance = chance
        self.random = random.Random(seed)

    def _faulty(self) -> bool:
        return self.random.random() < self.chance

    def exists(self, key: str) -> bool:
        if self._faulty():
            raise OSError("injected: the store is away")
        return key in self.pages

    def get(self, key: str, out: Bytes) -> bool:
        if self._faulty():
            return False
        data = self.pages.get(key)
        if data is None:
            return False
        out[:] = np.frombuffer(data, np.uint8)
        return True

    def set(self, key: str, data: Bytes) -> bool:
        if self._faulty():
            return False
        self.pages.setdefault(key, data.tobytes())
        return True

    def clear(self) -> None:
        self.pages.clear()


@dataclass
class Shape:
    """Sizes of a group of ranks; small, so that everything is short of room."""

    ranks: int = 2
    page_size: int = 2
    device_pages: int = 24
    host_pages: int = 40
    attention: str = "mha"
    layout: str = "layer_first"
    write_policy: str = "write_through"
    eviction_policy: str = "lru"
    prefetch_policy: str = "best_effort"
    storage: bool = True
    bigram: bool = False
    fault_chance: float = 0.0
    seed: int = 0

    def spec(self) -> KVSpec:
        return KVSpec.mha(2, 1, 4, "float16") if self.attention == "mha" else KVSpec.mla(2, 6, 2, "float16")


@dataclass
class Lockstep:
    """A group of ranks without Ray: collect on each, MIN over all, apply on each, compare."""

    shape: Shape
    store: dict[str, bytes] = field(default_factory=dict)
    caches: list[HiRadixCache] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    steps: int = 0
    reductions: int = 0
    verified: int = 0

    def __post_init__(self) -> None:
        self.lanes: list[ManualLane] = []
        self.workers: list[ManualWorker] = []
        self.caches = [self._rank(rank) for rank in range(self.shape.ranks)]

    def _rank(self, rank: int) -> HiRadixCache:
        shape, spec = self.shape, self.shape.spec()
        device = DevicePool(spec, shape.device_pages, shape.page_size)
        host = HostPool(spec, shape.host_pages, shape.page_size, shape.layout)
        index = TieredIndex(
            IndexOptions(
                page_size=shape.page_size,
                device_pages=shape.device_pages,
                host_pages=shape.host_pages,
                eviction_policy=shape.eviction_policy,
                write_policy=shape.write_policy,
                load_back_threshold=1,
                bigram=shape.bigram,
            )
        )
        mover = Mover(
            copies_between("direct", device, host),
            copy_timeout=5.0,
            lanes=self._lane,
            workers=self._worker,
            storage_io=RacingIO,
        )
        policy = PrefetchPolicy(
            name=shape.prefetch_policy,
            threshold=shape.page_size,
            page_size=shape.page_size,
            timeout_base=1.0,
            timeout_per_page=0.5,
            hard_limit=60.0,
            capacity_pages=shape.host_pages // 2,
            clock=self.clock,
        )
        cache = HiRadixCache(index, mover, policy, rank=rank, make_storage=lambda name, options: self.make_store(rank))
        if shape.storage:
            cache.control.attach_backend("faulty", {})
        return cache

    def make_store(self, rank: int) -> FaultyStore:
        shape = self.shape
        identity = ModelIdentity(
            model="m",
            page_size=shape.page_size,
            attention=shape.attention,
            tp_rank=rank,
            tp_size=shape.ranks,
            key_mode="bigram" if shape.bigram else "plain",
        )
        writer = shape.attention == "mha" or rank == 0
        config = StorageConfig(identity, timeout=5.0, is_writer=writer)
        return FaultyStore(config, self.store, shape.fault_chance, seed=shape.seed * 100 + rank)

    def _lane(self, device: torch.device, name: str) -> ManualLane:
        self.lanes.append(ManualLane(device, name))
        return self.lanes[-1]

    def _worker(self, name: str) -> ManualWorker:
        self.workers.append(ManualWorker(name))
        return self.workers[-1]

    # -- stepping ----------------------------------------------------------------------------------------------------

    def step(self, **operations: Any) -> GroupAnswer:
        """One step of all ranks; runs the scheduled requests and checks everything that must hold after it."""
        group = LocalGroup(self.caches, [self] * len(self.caches))
        answer = group.step(**operations)
        self.reductions += group.reductions
        self.steps += 1
        assert all(controlled == answer.controlled[0] for controlled in answer.controlled)
        for cache in self.caches:
            cache.check_integrity()
        return answer

    def before_step(self, cache: HiRadixCache, request: StepRequest) -> None:
        """As every rank's engine: writes the answers of requests that end."""
        for finish in request.finishes:
            self.fill(cache, cache.requests[finish.rid], finish.output)

    def settle(self) -> None:
        """Lets every transfer end and steps until nothing is in flight."""
        for _ in range(20):
            for lane in self.lanes:
                lane.advance(lane.pending)
            for worker in self.workers:
                worker.advance(worker.pending)
            self.step()
            if all(cache.is_idle() for cache in self.caches):
                return
        raise AssertionError("the group did not come to rest in 20 steps")

    # -- contents ----------------------------------------------------------------------------------------------------

    def forward(self, cache: HiRadixCache, batch: Forward) -> dict[str, Any]:
        """As every rank's engine: compares the cached prefixes with what they must hold, computes the rest."""
        for request in batch.requests:
            for lane in self.lanes:
                if lane.name == "l1-load":
                    lane.advance(lane.pending)
            for page in range(request.prefix_pages):
                self.check(cache, request, page)
            self.fill(cache, request, b"", start=request.prefix_pages)
        return {}

    def fill(self, cache: HiRadixCache, request: Request, output: bytes, start: int = 0) -> None:
        """Writes the pages of prompt and answer from page `start` on that this request owns."""
        tokens = request.tokens.tobytes() + output
        pages = len(tokens) // (4 * self.shape.page_size)
        for page in range(max(start, request.prefix_pages), min(pages, len(request.pages))):
            for view, pattern in self._page(cache, request, page, tokens):
                view[:] = pattern

    def check(self, cache: HiRadixCache, request: Request, page: int) -> None:
        """Raises AssertionError when a page of a request's prefix does not hold what it must."""
        for view, pattern in self._page(cache, request, page, request.tokens.tobytes()):
            assert np.array_equal(view, pattern), f"rank {cache.rank}: wrong bytes in page {page} of {request.rid}"
        self.verified += 1

    def _page(
        self, cache: HiRadixCache, request: Request, page: int, tokens: bytes
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        pool = cache.mover.device_pool
        prefix = tokens[: (page + 1) * self.shape.page_size * 4]
        rank = cache.rank if self.shape.attention == "mha" else 0
        result = []
        for layer in range(pool.spec.layers):
            for plane, tensor in enumerate(pool.layer_pages(layer)):
                view = tensor[int(request.pages[page])].view(torch.uint8).numpy().reshape(-1)
                seed = repr((tuple(request.namespace), layer, plane, rank)).encode() + prefix
                word = xxhash.xxh3_64_digest(seed)
                result.append((view, np.frombuffer((word * (view.size // 8 + 1))[: view.size], np.uint8)))
        return result


def admit(
    rid: str, tokens: Sequence[int], namespace: Namespace = EMPTY_NAMESPACE, new: int = 0, priority: int = 0
) -> Admit:
    """An Admit of a list of token ids."""
    return Admit(rid, np.array(tokens, dtype="<u4").tobytes(), namespace, priority, new)


def tokens_of(ids: Sequence[int]) -> bytes:
    """Token ids as they travel."""
    return np.array(ids, dtype="<u4").tobytes()
