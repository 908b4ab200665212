"""Fixtures and helpers of the storage suite."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from hicache_ray.deadline import wait_until
from hicache_ray.hashing import ModelIdentity
from hicache_ray.storage.base import Storage
from hicache_ray.testing.host_pages import LAYOUTS_OF, NumpyHostPages, PageShape
from hicache_ray.testing.subject import StorageSubject, Unsupported
from hicache_ray.testing.suite_table import SuiteTable

SHAPES = [PageShape(attention, layout) for attention in LAYOUTS_OF for layout in LAYOUTS_OF[attention]]
BIG = PageShape("mha", "page_first", page_size=16, layers=4, token_bytes=1024)
"""128 KiB a page."""

SEPARATE = {
    "model": "other",
    "revision": "v2",
    "kv_dtype": "float8_e4m3fn",
    "layout": "layer_first",
    "key_mode": "bigram",
    "tp_rank": 1,
    "tp_size": 4,
    "pp_rank": 1,
    "pp_size": 4,
    "dp_rank": 1,
    "layer_end": 8,
}
"""Changes of a model identity; each must lead to other pages (D9)."""


def identity_of(shape: PageShape, **changes: Any) -> ModelIdentity:
    """The identity of pages of `shape`, on rank 0 of tp 2, stage 0 of pp 2."""
    values: dict[str, Any] = {
        "model": "org/m",
        "kv_dtype": "bfloat16",
        "page_size": shape.page_size,
        "layout": shape.layout,
        "attention": shape.attention,
        "tp_size": 2,
        "dp_size": 2,
        "layer_end": shape.layers,
    }
    return ModelIdentity(**{**values, **changes})


def page_names(count: int, seed: int = 0) -> list[bytes]:
    """`count` page hashes."""
    return [hashlib.sha256(f"{seed} {position}".encode()).digest() for position in range(count)]


MakeStorage = Callable[..., tuple[Storage, NumpyHostPages]]
"""Makes a backend on the test's store, with a host pool, as `SuiteBase.make` says."""


class SuiteBase:
    """Fixtures of the suite. `store` is set by `storage_suite`."""

    store: StorageSubject

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
        """The store, running."""
        subject = cls.store
        SuiteTable.of(request.config).columns[request.node.nodeid] = subject.name
        try:
            subject.start(tmp_path_factory.mktemp("store"))
        except Unsupported as reason:
            pytest.skip(str(reason))
        yield subject
        subject.stop()

    @pytest.fixture
    def make(self, subject: StorageSubject, tmp_path: Path) -> Iterator[MakeStorage]:
        """Makes backends on the emptied store, each with a host pool, and closes them when the test ends."""
        made: list[Storage] = []
        subject.empty(tmp_path)

        def make_storage(
            shape: PageShape = SHAPES[1],
            *,
            pages: int = 16,
            identity: ModelIdentity | None = None,
            pool: NumpyHostPages | None = None,
            **options: Any,
        ) -> tuple[Storage, NumpyHostPages]:
            storage = subject.make(tmp_path, identity or identity_of(shape), **options)
            made.append(storage)
            pool = pool or NumpyHostPages(pages, shape)
            storage.register_host_pool(pool)
            return storage, pool

        yield make_storage
        for storage in made:
            subject.close(storage)


def at_once(functions: list[Callable[[], Any]]) -> list[Any]:
    """Results of the functions, each on its own thread, begun together; raises what one of them raised."""
    begin = threading.Barrier(len(functions))

    def run(function: Callable[[], Any]) -> Any:
        begin.wait()
        return function()

    threads = ThreadPoolExecutor(len(functions))
    calls = [threads.submit(run, function) for function in functions]
    threads.shutdown(wait=False)
    assert not wait(calls, 120).not_done, "a storage call did not end"
    return [call.result() for call in calls]


def eventually(condition: Callable[[], bool], otherwise: str, seconds: float = 30.0) -> None:
    """Wait until `condition` holds; AssertionError with the text `otherwise` when it does not within `seconds`."""
    assert wait_until(condition, seconds, pause=0.02), otherwise
