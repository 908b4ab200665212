"""All L3 backends side by side in one run: put, exists and get of a batch of pages, beside memcpy and a file read.

    python benchmarks/backends.py [--pages 128] [--kib 64,256,2048] [--rounds 10] [--only file,ray] [--json FILE]

Every round does each operation of each backend once, so that what else the machine does hits all alike. `of memcpy` is
the median over the rounds of memcpy's time over the backend's. Pages are as in the page_first layout: K and V. Starts
and stops a Ray node, and a Mooncake master with a process that lends memory (left out where Mooncake is not).

* ray: one storage actor, in its own process on this node
* mooncake: the pages lie in another process, bytes cross loopback TCP; mooncake (own): in this process's segment
* file: page files in --folder (default: a temporary folder), in the page cache of the operating system
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peer_store import PAGE_SIZE, BufferPool  # noqa: E402
from hicache_ray.hashing import ModelIdentity  # noqa: E402
from hicache_ray.storage.base import Storage, StorageConfig  # noqa: E402
from hicache_ray.storage.registry import create_backend  # noqa: E402

IDENTITY = ModelIdentity("benchmark", layout="page_first", page_size=PAGE_SIZE)
WARM_UP = 2
"""Rounds that are not counted."""

MEMORY = 2 << 30
"""Bytes each store may hold; it is emptied after every round."""


class Store(NamedTuple):
    """A backend under measurement."""

    name: str
    backend: str
    options: dict[str, Any]


@contextlib.contextmanager
def ray_store(folder: Path) -> Iterator[list[Store]]:
    """A pool of one actor."""
    import ray

    from hicache_ray.actors.storage_pool import StoragePool, StoragePoolConfig

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=str(folder / "ray"))
    try:
        with StoragePool.start(StoragePoolConfig(name="backends", bytes_per_actor=MEMORY)) as pool:
            yield [Store("ray", "ray", pool.handle.options())]
    finally:
        ray.shutdown()


@contextlib.contextmanager
def mooncake_stores(folder: Path) -> Iterator[list[Store]]:
    """A store whose memory is another process's, and one whose memory is ours."""
    from tests.mooncake_cluster import MooncakeCluster, unavailable

    if unavailable():
        print(f"mooncake is left out: {unavailable()}", file=sys.stderr)
        yield []
        return
    with contextlib.ExitStack() as stack:
        clusters = []
        for name in ("other", "own"):
            (folder / name).mkdir()
            cluster = MooncakeCluster(folder / name, MEMORY)
            stack.callback(cluster.stop)
            cluster.start_master()
            clusters.append(cluster)
        clusters[0].start_holder()
        own = {**clusters[1].options(), "global_segment_size": MEMORY}
        yield [Store("mooncake", "mooncake", dict(clusters[0].options())), Store("mooncake (own)", "mooncake", own)]


@contextlib.contextmanager
def file_store(folder: Path) -> Iterator[list[Store]]:
    """Page files."""
    yield [Store("file", "file", {"directory": str(folder / "pages"), "max_bytes": MEMORY, "min_free_bytes": 0})]


STORES = {"ray": ray_store, "mooncake": mooncake_stores, "file": file_store}


class Operation(NamedTuple):
    """Something that is timed; `moved` says whether it moves the pages (exists does not)."""

    store: str
    name: str
    call: Callable[[int], object]
    moved: bool = True


def page_names(count: int, number: int) -> list[bytes]:
    """Page hashes of a round."""
    return [hashlib.sha256(f"{number} {page}".encode()).digest() for page in range(count)]


def operations_of(name: str, storage: Storage, pages: int) -> list[Operation]:
    """Put, exists and get, each checked."""
    source, target = np.arange(pages), np.arange(pages, 2 * pages)

    def put(number: int) -> None:
        if storage.store(page_names(pages, number), source) != pages:
            raise RuntimeError(f"{name} did not store all pages: {storage.get_stats()}")

    def exists(number: int) -> None:
        if storage.lookup(page_names(pages, number)) != pages:
            raise RuntimeError(f"{name} does not find all pages: {storage.get_stats()}")

    def get(number: int) -> None:
        if storage.load(page_names(pages, number), target) != pages:
            raise RuntimeError(f"{name} did not give all pages: {storage.get_stats()}")

    return [Operation(name, "put", put), Operation(name, "exists", exists, moved=False), Operation(name, "get", get)]


def baselines(pool: BufferPool, folder: Path) -> list[Operation]:
    """memcpy of the batch, and reading it from one file."""
    half = pool.pages // 2
    path = folder / "plain"
    path.write_bytes(pool.segments[:half].tobytes())

    def read(number: int) -> None:
        with path.open("rb", buffering=0) as file:
            file.readinto(memoryview(pool.segments[half:].reshape(-1)))

    return [
        Operation("memcpy", "copy", lambda number: np.copyto(pool.segments[half:], pool.segments[:half])),
        Operation("plain file", "read", read),
    ]


def measure(stores: Sequence[Store], kib: int, rounds: int, pages: int, folder: Path) -> list[dict[str, Any]]:
    """Every operation on batches of pages of one size."""
    pool = BufferPool(2 * pages, kib << 10)
    rng = np.random.default_rng(0)
    pool.segments[:pages] = rng.integers(0, 256, pool.segments[:pages].shape, dtype=np.uint8)
    backends = [create_backend(store.backend, StorageConfig(IDENTITY, store.options, 120.0)) for store in stores]
    operations = baselines(pool, folder)
    for store, backend in zip(stores, backends, strict=True):
        backend.register_host_pool(pool)
        operations += operations_of(store.name, backend, pages)
    seconds: list[list[float]] = [[] for _ in operations]
    for number in range(WARM_UP + rounds):
        for operation, times in zip(operations, seconds, strict=True):
            began = time.perf_counter()
            operation.call(number)
            times.append(time.perf_counter() - began)
        check(pool, pages)
        for backend in backends:
            backend.clear()
    for backend in backends:
        backend.close()
    memcpy = seconds[0][WARM_UP:]
    return [
        row(operation, times[WARM_UP:], memcpy, kib, pages)
        for operation, times in zip(operations, seconds, strict=True)
    ]


def check(pool: BufferPool, pages: int) -> None:
    """What came back last is what was stored."""
    if not np.array_equal(pool.segments[:pages], pool.segments[pages:]):
        raise RuntimeError("pages came back with other bytes")


def row(operation: Operation, times: Sequence[float], memcpy: Sequence[float], kib: int, pages: int) -> dict[str, Any]:
    """Medians of one operation."""
    median = statistics.median(times)
    ratio = statistics.median(base / own for base, own in zip(memcpy, times, strict=True))
    return {
        "kib": kib,
        "store": operation.store,
        "operation": operation.name,
        "milliseconds": round(median * 1e3, 3),
        "gb_s": round(pages * (kib << 10) / median / 1e9, 2) if operation.moved else None,
        "of_memcpy": round(ratio, 3) if operation.moved else None,
    }


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pages", type=int, default=128, help="pages a batch")
    parser.add_argument("--kib", default="64,256,2048", help="page sizes, comma separated")
    parser.add_argument("--rounds", type=int, default=10, help="rounds that are counted")
    parser.add_argument("--only", default=",".join(STORES), help="backends, comma separated")
    parser.add_argument("--folder", type=Path, help="where files lie; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    rows = []
    print(f"{'KiB':>5}  {'store':15} {'operation':9} {'ms':>9} {'GB/s':>7} {'of memcpy':>9}")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=options.folder)))
        stores = [store for kind in options.only.split(",") for store in stack.enter_context(STORES[kind](folder))]
        for kib in map(int, options.kib.split(",")):
            for entry in measure(stores, kib, options.rounds, options.pages, folder):
                rows.append(entry)
                print(line(entry), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def line(entry: dict[str, Any]) -> str:
    """A row of the table."""
    speed = f"{entry['gb_s']:7.2f} {entry['of_memcpy']:9.2f}" if entry["gb_s"] is not None else ""
    return f"{entry['kib']:5}  {entry['store']:15} {entry['operation']:9} {entry['milliseconds']:9.2f} {speed}".rstrip()


if __name__ == "__main__":
    main()
