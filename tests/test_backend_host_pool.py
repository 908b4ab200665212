"""Backends on the cache's own host pool, in each of its layouts: every path sees a page's bytes in the same order."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from hicache_ray.hashing import ModelIdentity
from hicache_ray.pages import slots_of
from hicache_ray.pools.host import HostPool
from hicache_ray.pools.layouts import KVSpec
from hicache_ray.storage.host_pages import HostPages, memory_span, page_addresses, page_runs
from hicache_ray.testing.host_pages import LAYOUTS_OF
from hicache_ray.testing.suite_base import page_names
from tests.test_backend_dynamic import SGLangSubject, SqliteSubject
from tests.test_backend_file import FileSubject

SPECS = {"mha": KVSpec.mha(3, 2, 4, "float16"), "mla": KVSpec.mla(3, 6, 2, "float16")}
KINDS = [(attention, layout) for attention in LAYOUTS_OF for layout in LAYOUTS_OF[attention]]
PAGES = 8


def filled_pool(attention: str, layout: str) -> HostPool:
    pool = HostPool(SPECS[attention], PAGES, 2, layout)
    rng = np.random.default_rng(3)
    for page in range(PAGES):
        pool.write_page(page, rng.integers(0, 256, pool.page_bytes, dtype=np.uint8))
    return pool


@pytest.mark.parametrize(("attention", "layout"), KINDS)
def test_addresses_and_views_name_the_same_bytes(attention: str, layout: str) -> None:
    """Mooncake reads by address, its checksum is taken over the views."""
    pool = filled_pool(attention, layout)
    assert isinstance(pool, HostPages)
    for page in range(PAGES):
        pointers, sizes = pool.get_page_buffer_meta(slots_of(np.array([page]), 2))
        assert page_addresses(pool.segments, np.array([page])).reshape(-1).tolist() == pointers
        assert set(sizes) == {pool.segments.shape[-1]}
        by_address = b"".join(ctypes.string_at(p, s) for p, s in zip(pointers, sizes, strict=True))
        assert by_address == b"".join(page_runs(pool.segments, page)) == pool.read_page(page).tobytes()
    span = memory_span(pool.segments)
    assert (span.address, span.nbytes) == (pool.buffer.ctypes.data, pool.buffer.nbytes)


SUBJECTS = [FileSubject(), SqliteSubject(), SGLangSubject("sglang v1", interface_v1=1)]


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
@pytest.mark.parametrize(("attention", "layout"), KINDS)
def test_round_trip(tmp_path: Path, subject: FileSubject, attention: str, layout: str) -> None:
    pool = filled_pool(attention, layout)
    storage = subject.make(tmp_path, ModelIdentity("m", page_size=2, layout=layout, attention=attention))
    storage.register_host_pool(pool)
    names = page_names(4)
    assert storage.store(names, np.arange(4)) == 4
    assert storage.load(names, np.arange(4, 8)) == 4
    assert all(np.array_equal(pool.read_page(page), pool.read_page(page + 4)) for page in range(4))
    storage.close()
