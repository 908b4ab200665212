"""Copies with checksums, whatever the size and the strides of a page."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from hicache_ray.storage.shard.page_copy import (
    COPY_CHUNK_BYTES,
    LEAST_BYTES_A_THREAD,
    Copier,
    checksum_of,
    load_page,
    store_page,
)


def pages() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    host = random.integers(0, 256, (2, 4, 6, 512), dtype=np.uint8)
    return {
        "small": random.integers(0, 256, 1000, dtype=np.uint8),
        "large": random.integers(0, 256, 2 * COPY_CHUNK_BYTES + 13, dtype=np.uint8),
        "two segments": random.integers(0, 256, (2, COPY_CHUNK_BYTES), dtype=np.uint8),
        "strided": host[:, :, 3].transpose(1, 0, 2),
        "rows apart": random.integers(0, 256, (8, COPY_CHUNK_BYTES), dtype=np.uint8)[::2],
    }


@pytest.mark.parametrize("kind", sorted(pages()))
def test_copies_and_checksums(kind: str) -> None:
    page = pages()[kind]
    expected = xxhash.xxh3_64_intdigest(page.tobytes())
    cell = np.zeros(page.nbytes, np.uint8)
    assert store_page(cell, page) == checksum_of(page) == checksum_of(cell) == expected
    assert cell.tobytes() == page.tobytes()
    target = np.zeros((*page.shape[:-1], page.shape[-1] * 2), np.uint8)[..., : page.shape[-1]]
    if page.ndim == 1:
        target = np.zeros_like(page)
    assert load_page(target, cell) == expected
    assert np.array_equal(target, page)


def test_copier_keeps_the_order_of_results_and_raises_errors() -> None:
    random = np.random.default_rng(1)
    sources = [random.integers(0, 256, LEAST_BYTES_A_THREAD, dtype=np.uint8) for _ in range(10)]
    targets = [np.zeros_like(page) for page in sources]
    copier = Copier(3)
    assert copier.run(store_page, targets, sources) == [checksum_of(page) for page in sources]
    assert all(np.array_equal(target, source) for target, source in zip(targets, sources, strict=True))
    assert copier.run(load_page, [], []) == []
    with pytest.raises(ZeroDivisionError):
        copier.run(lambda target, source: 1 // (1 - (target is targets[9])), targets, sources)
    copier.close()
