"""Copies with checksums, whatever the size and the strides of a page."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from hicache_ray.storage.pool.transport import LEAST_BYTES_A_THREAD, Copier
from hicache_ray.storage.shard.page_copy import CHUNK_BYTES, checksum_of, load_page, store_page


def pages() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    host = random.integers(0, 256, (2, 4, 6, 512), dtype=np.uint8)
    return {
        "small": random.integers(0, 256, 1000, dtype=np.uint8),
        "large": random.integers(0, 256, 2 * CHUNK_BYTES + 13, dtype=np.uint8),
        "two segments": random.integers(0, 256, (2, CHUNK_BYTES), dtype=np.uint8),
        "strided": host[:, :, 3].transpose(1, 0, 2),
        "rows apart": random.integers(0, 256, (8, CHUNK_BYTES), dtype=np.uint8)[::2],
    }


@pytest.mark.parametrize("kind", sorted(pages()))
def test_copies_and_checksums(kind: str) -> None:
    page = pages()[kind]
    expected = xxhash.xxh3_64_intdigest(page.tobytes())
    slot = np.zeros(page.nbytes, np.uint8)
    assert store_page(slot, page) == checksum_of(page) == checksum_of(slot) == expected
    assert slot.tobytes() == page.tobytes()
    target = np.zeros((*page.shape[:-1], page.shape[-1] * 2), np.uint8)[..., : page.shape[-1]]
    if page.ndim == 1:
        target = np.zeros_like(page)
    assert load_page(target, slot) == expected
    assert np.array_equal(target, page)


def test_copier_keeps_the_order_of_results_and_raises_errors() -> None:
    page = np.zeros(LEAST_BYTES_A_THREAD, np.uint8)
    copier = Copier(3)
    assert copier.run([(lambda k, _: k % 3 == 0, k, page) for k in range(10)]) == [k % 3 == 0 for k in range(10)]
    assert copier.run([]) == []
    with pytest.raises(ZeroDivisionError):
        copier.run([(lambda k, _: bool(1 // (k - 9)), k, page) for k in range(10)])
    copier.close()
