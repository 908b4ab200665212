"""Replays a workload on the index alone: the rank's own tree and policies, no bytes, no Ray.

One block of a trace is one page, so whole traces take seconds. Transfers end at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from hicache_ray.index import IndexOptions, TieredIndex
from hicache_ray.radix.key import Key
from hicache_ray.replay.report import POOL_NAMES, OnProgress, ReplayReport, TokenCounts, add_up, evictions_of
from hicache_ray.replay.requests import Workload


class IndexReplayError(ValueError):
    """Sizes with which the workload can't be replayed; the text names both numbers."""


@dataclass(frozen=True)
class IndexSettings:
    """Capacities and policies of an index-only replay.

    Attributes:
        l1_pages: pages (trace blocks) of L1; None: all that the workload has.
        l2_pages: pages of L2; 0: no L2.
        page_size: tokens a page, for a workload without blocks of its own.
        policy: eviction policy.
        write_policy: when L1 is copied to L2.
        instances: indexes that share nothing; requests go round robin.
    """

    l1_pages: int | None = None
    l2_pages: int = 0
    page_size: int = 64
    policy: str = "lru"
    write_policy: str = "write_through"
    instances: int = 1


def replay_index(workload: Workload, settings: IndexSettings, progress: OnProgress | None = None) -> ReplayReport:
    """Runs every request of the workload: look up, load back, make room, insert.

    Raises:
        IndexReplayError: L1 is smaller than one of the requests.
    """
    l1_pages = settings.l1_pages or _all_pages(workload, settings.page_size)
    indexes = [_index(workload, settings, l1_pages) for _ in range(settings.instances)]
    page_tokens = workload.blocks.block_tokens if workload.blocks else settings.page_size
    counts = TokenCounts()
    began = time.perf_counter()
    for number, (key, tokens) in enumerate(_keys(workload, settings.page_size)):
        _serve(indexes[number % len(indexes)], key, tokens, page_tokens, counts)
        if progress is not None:
            progress(number + 1)
    return ReplayReport(
        workload=workload.name,
        mode="index",
        settings={**asdict(settings), "l1_pages": l1_pages},
        counts=counts,
        seconds=time.perf_counter() - began,
        ledger={name: add_up(index.ledger()[pool].as_dict() for index in indexes) for pool, name in POOL_NAMES.items()},
        evictions=add_up(evictions_of(asdict(index.stats)) for index in indexes),
    )


def _index(workload: Workload, settings: IndexSettings, l1_pages: int) -> TieredIndex:
    return TieredIndex(
        IndexOptions(
            page_size=1 if workload.blocks else settings.page_size,
            device_pages=l1_pages,
            host_pages=settings.l2_pages,
            eviction_policy=settings.policy,
            write_policy=settings.write_policy,
            load_back_threshold=1,
            refresh_remainder=False,  # recency to the block, as the simulators have it that traces are published with
        )
    )


def _keys(workload: Workload, page_size: int) -> Iterator[tuple[Key, int]]:
    """Each request as the index sees it, with its prompt's tokens."""
    if workload.blocks is not None:
        for blocks, tokens in workload.blocks.requests:
            yield Key.of(blocks, 1), tokens
        return
    for request in workload:
        yield Key.of(request.prompt, page_size, namespace=request.namespace), len(request.prompt)


def _all_pages(workload: Workload, page_size: int) -> int:
    if workload.blocks is not None:
        return workload.blocks.unique
    return sum(key.pages for key, _ in _keys(workload, page_size)) or 1


def _serve(index: TieredIndex, key: Key, tokens: int, page_tokens: int, counts: TokenCounts) -> None:
    match = index.match(key)
    index.tree.lock(match.device_node)
    loaded = index.load_back(match) if match.host_pages else None
    cached = match.device_pages + (match.host_pages if loaded else 0)
    pages = index.allocate(key.pages - cached)
    if pages is None:
        raise IndexReplayError(
            f"a request has {key.pages} pages and L1 {index.device.total}: give L1 at least {key.pages}"
        )
    index.insert(key, pages, match=match)
    index.tree.unlock(match.device_node)
    index.transfers.take_issued()
    index.transfers.acknowledge_writes(len(index.transfers.writes))
    index.transfers.acknowledge_loads(len(index.transfers.loads))
    found_l1 = min(match.device_pages * page_tokens, tokens)
    found = min(cached * page_tokens, tokens)
    counts.add(found_l1, found - found_l1, 0, tokens - found, block_tokens=page_tokens, hit_blocks=cached)
