"""L3 over Ray: put, exists and get of one batch of pages beside memcpy of the same bytes, in the same rounds.

    python benchmarks/storage.py [--pages 128] [--kib 64,256,2048] [--actors 1] [--rounds 30] [--transport auto]
                                 [--copy-threads 1] [--segments 2] [--json FILE]

Checksums are on, as always; `--segments 2` is a page_first page (K and V), 64 a layer_first page of 32 layers. Wall
time; `of memcpy` is the median over the rounds of memcpy's time over ours. Starts a Ray node of its own and stops it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peer_store import PAGE_SIZE, BufferPool  # noqa: E402
from hicache_ray.actors.storage_pool import StoragePool, StoragePoolConfig  # noqa: E402
from hicache_ray.hashing import ModelIdentity  # noqa: E402
from hicache_ray.storage.base import Storage, StorageConfig  # noqa: E402
from hicache_ray.storage.registry import create_backend  # noqa: E402

WARM_UP = 2
"""Rounds that are not counted."""


@dataclass(frozen=True)
class Result:
    """Medians of one operation: milliseconds a batch, GB (1e9 bytes) a second, share of memcpy's speed."""

    kib: int
    operation: str
    milliseconds: float
    gb_s: float
    of_memcpy: float


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure(pool: StoragePool, kib: int, options: argparse.Namespace) -> list[Result]:
    """All operations on batches of pages of one size."""
    pages, total = options.pages, options.pages * kib << 10
    host = BufferPool(2 * pages, kib << 10, options.segments)
    half = host.segments[:pages], host.segments[pages:]
    half[0][:] = np.random.default_rng(kib).integers(0, 256, half[0].shape, dtype=np.uint8)
    half[1][:] = 1
    flat = np.array(half[0]).reshape(-1), np.array(half[1]).reshape(-1)
    extra = pool.handle.options(transport=options.transport, copy_threads=options.copy_threads)
    storage = create_backend("ray", StorageConfig(ModelIdentity(model="bench"), extra, 30.0))
    storage.register_host_pool(host)
    samples: dict[str, list[float]] = {"memcpy": [], "put": [], "exists": [], "get": []}
    for number in range(options.rounds + WARM_UP):
        floor = timed(lambda: np.copyto(flat[1], flat[0]))
        times = {"memcpy": floor, **one_round(storage, number, pages)}
        expect(np.array_equal(*half))
        half[1][:] = number
        pool.clear()
        if number >= WARM_UP:
            for name, seconds in times.items():
                samples[name].append(seconds)
    storage.close()
    return [result(kib, name, samples[name], samples["memcpy"], total) for name in samples]


def one_round(storage: Storage, number: int, pages: int) -> dict[str, float]:
    """Seconds of each operation on keys that are new."""
    hashes = [hashlib.sha256(b"%d %d" % (number, page)).digest() for page in range(pages)]
    return {
        "put": timed(lambda: expect(storage.store(hashes, np.arange(pages)) == pages)),
        "exists": timed(lambda: expect(storage.lookup(hashes) == pages)),
        "get": timed(lambda: expect(storage.load(hashes, np.arange(pages, 2 * pages)) == pages)),
    }


def result(kib: int, name: str, seconds: list[float], floor: list[float], total: int) -> Result:
    median = statistics.median(seconds)
    share = statistics.median(best / own for best, own in zip(floor, seconds, strict=True))
    return Result(kib, name, median * 1e3, total / median / 1e9, share)


def expect(holds: bool) -> None:
    if not holds:
        raise RuntimeError("the pool did not do what was asked: the figures mean nothing")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--kib", default="64,256,2048")
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--transport", default="auto", choices=["auto", "object_store"])
    parser.add_argument("--copy-threads", type=int, default=1)
    parser.add_argument("--segments", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = [int(kib) for kib in options.kib.split(",")]
    budget = 2 * options.pages * max(sizes) << 10
    with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir="/tmp") as folder:
        store = max(200 << 20, 4 * budget if options.transport == "object_store" else 0)
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder, object_store_memory=store, log_to_driver=False)
        config = StoragePoolConfig(name="bench", actors=options.actors, bytes_per_actor=budget)
        with StoragePool.start(config) as pool:
            results = [entry for kib in sizes for entry in measure(pool, kib, options)]
        ray.shutdown()
    print(f"{options.pages} pages of {PAGE_SIZE} tokens a batch, {options.actors} actors, {options.transport}")
    print(f"{'KiB':>6} {'operation':<9} {'ms':>8} {'GB/s':>7} {'of memcpy':>9}")
    for entry in results:
        rate = "" if entry.operation == "exists" else f"{entry.gb_s:.2f}"
        print(f"{entry.kib:>6} {entry.operation:<9} {entry.milliseconds:>8.2f} {rate:>7} {entry.of_memcpy:>9.2f}")
    if options.json:
        options.json.write_text(json.dumps([asdict(entry) for entry in results], indent=1))


if __name__ == "__main__":
    main()
