"""The index replays a real trace with the hit rates that two independent simulators and others' papers give for it.

One block id of the trace is one page. Per request: look up, lock, room for what is missing (only the shortfall is
evicted, in whole nodes), insert, unlock. A request makes its own blocks the most recent and no others, so the index
runs with `refresh_remainder=False`.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from hicache_ray.index import IndexOptions, TieredIndex
from hicache_ray.index.integrity import check_index
from hicache_ray.radix.key import Key

BLOCK_TOKENS = 512
UNIQUE_BLOCKS = 182_790


class Request(NamedTuple):
    """One request of the trace."""

    key: Key
    tokens: int


class Hits(NamedTuple):
    """Shares of the blocks and of the tokens that were found."""

    block: float
    token: float


@pytest.fixture(scope="module")
def requests(shared: Path) -> list[Request]:
    """The conversation trace, in file order."""
    path = shared / "traces" / "conversation_trace.jsonl.gz"
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    return [Request(Key.of(np.array(row["hash_ids"], dtype=np.uint32), 1), row["input_length"]) for row in rows]


def replay(requests: list[Request], capacity: int, policy: str = "lru") -> Hits:
    """Serves the requests one at a time with an L1 of `capacity` blocks and no L2."""
    index = TieredIndex(
        IndexOptions(page_size=1, device_pages=capacity, host_pages=0, eviction_policy=policy, refresh_remainder=False)
    )
    hit_blocks = hit_tokens = 0
    for key, tokens in requests:
        match = index.match(key)
        index.tree.lock(match.device_node)
        room = index.allocate(key.pages - match.device_pages)
        assert room is not None
        index.insert(key, room, match=match)
        index.tree.unlock(match.device_node)
        hit_blocks += match.device_pages
        hit_tokens += min(BLOCK_TOKENS * match.device_pages, tokens)
    check_index(index)
    blocks = sum(request.key.pages for request in requests)
    return Hits(hit_blocks / blocks, hit_tokens / sum(request.tokens for request in requests))


def test_infinite_cache(requests: list[Request]) -> None:
    """Every block fits: block hit 0.3664, token hit 0.3736."""
    hits = replay(requests, UNIQUE_BLOCKS)
    assert (round(hits.block, 4), round(hits.token, 4)) == (0.3664, 0.3736)


@pytest.mark.parametrize(
    ("blocks", "expected"), [(1_000, 0.0445), (10_000, 0.2112), (30_000, 0.3257), (50_000, 0.3546), (100_000, 0.3637)]
)
def test_lru(requests: list[Request], blocks: int, expected: float) -> None:
    """Block hit under LRU, within 0.001."""
    assert replay(requests, blocks).block == pytest.approx(expected, abs=0.001)


@pytest.mark.parametrize(
    ("blocks", "least", "most"), [(1_000, 0.0481, 0.0481), (10_000, 0.1318, 0.1322), (50_000, 0.3438, 0.3438)]
)
def test_lfu(requests: list[Request], blocks: int, least: float, most: float) -> None:
    """Block hit under LFU; the range is that of the two orders in which a request's own blocks can be counted."""
    assert least - 0.001 <= replay(requests, blocks, "lfu").block <= most + 0.001
