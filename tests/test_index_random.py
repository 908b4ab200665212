"""Random operation sequences against the naive index: answers, pages and states equal after every step (D11)."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from tests.index_pair import OPERATIONS, IndexPair

SEQUENCES = int(os.environ.get("HICACHE_RANDOM_INDEX_SEQUENCES", "2500"))
"""`make random` plays 10,000."""
STEPS = 16
PARTS = 20


@pytest.mark.parametrize("part", range(PARTS))
def test_random_sequences_equal_the_naive_index(part: int) -> None:
    """D11. Short sequences: inserts, locks, evictions, late acknowledgements, loads, prefetches, flushes."""
    for seed in range(part * SEQUENCES // PARTS, (part + 1) * SEQUENCES // PARTS):
        pair = IndexPair(random.Random(seed))
        for step in range(STEPS):
            try:
                pair.step()
            except Exception as error:
                raise AssertionError(f"seed {seed}, step {step}, last operation {list(pair.did)[-1]}") from error


def test_long_sequences_equal_the_naive_index() -> None:
    """D11. Few but long sequences, in which every operation occurs and the tree splits and drops."""
    did: Counter[str] = Counter()
    splits = dropped = 0
    for seed in range(40):
        pair = IndexPair(random.Random(f"long {seed}"))
        for _ in range(150):
            pair.step()
        did += pair.did
        splits += pair.index.tree.splits
        dropped += pair.index.stats.dropped_pages
    assert set(did) == set(OPERATIONS) and splits > 100 and dropped > 10
