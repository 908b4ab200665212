"""The reduced vector: MIN and MAX come out right, and ranks that are not at the same point are seen in it."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_ray.rank.progress import DesyncError, PrefetchProgress, Progress

counts = st.integers(0, 1000)
prefetches = st.builds(PrefetchProgress, st.booleans(), counts, counts, st.booleans(), st.booleans())
digests = st.integers(0, 2**64 - 1)


def progress(rows: tuple[PrefetchProgress, ...] = (), **changes: int) -> Progress:
    values = {"generation": 1, "step": 2, "digest": 3, "writes": 4, "loads": 5, "backups": 6, "releases": 7} | changes
    return Progress(**values, prefetches=rows)  # type: ignore[arg-type]


@given(st.lists(prefetches, max_size=4), digests)
def test_one_rank_agrees_with_itself(rows: list[PrefetchProgress], digest: int) -> None:
    one = progress(tuple(rows), digest=digest)
    assert Progress.agreed(one.vector()) == one


@given(st.lists(st.tuples(prefetches, counts), min_size=2, max_size=4))
def test_case_51_min_of_counts_max_of_waiting_and_terminated(ranks: list[tuple[PrefetchProgress, int]]) -> None:
    """Case 51: a prefetch ends when all ranks are done or any has terminated it. Case 52: counts take the minimum."""
    vectors = [progress((row,), writes=writes).vector() for row, writes in ranks]
    agreed = Progress.agreed(reduce(np.minimum, vectors))
    rows = [row for row, _ in ranks]
    assert agreed.writes == min(writes for _, writes in ranks)
    assert agreed.prefetches == (
        PrefetchProgress(
            queried=all(row.queried for row in rows),
            hit_pages=min(row.hit_pages for row in rows),
            completed_pages=min(row.completed_pages for row in rows),
            can_terminate=all(row.can_terminate for row in rows),
            terminated=any(row.terminated for row in rows),
        ),
    )


@pytest.mark.parametrize("name", ["generation", "step", "digest"])
@pytest.mark.parametrize("value", [0, 9, 2**40])
def test_a_desynchronised_rank_is_seen_in_the_reduction(name: str, value: int) -> None:
    vectors = [progress().vector(), progress(**{name: value}).vector()]
    with pytest.raises(DesyncError, match=name):
        Progress.agreed(np.minimum(*vectors))
