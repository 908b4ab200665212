"""Copies between L1 and L2 beside memcpy in the same run.

    python benchmarks/copies.py [--page-size 64] [--mb 512] [--rounds 5] [--threads 1] [--non-temporal]

Each round takes each copy once, and before it a plain memcpy of the same bytes in one run and one in pieces of the size
that the layouts allow (a layer of a page); ratios are medians over the rounds. One thread on the CPU is measured in CPU
time, which a busy machine disturbs less; threads and CUDA in wall time. All memory was touched before.

A long memcpy writes past the caches, pieces do not and so read what they overwrite: that is most of the difference.
--non-temporal starts the process again with glibc set to do so for pieces of 32 KiB on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peer_copy import Copier, pool_copiers, random_pages  # noqa: E402
from hicache_ray.config.names import COPIES, can_copy  # noqa: E402
from hicache_ray.config.options import GIGABYTE as GB  # noqa: E402
from hicache_ray.kernels.cpu import set_copy_threads  # noqa: E402
from hicache_ray.pages import Bytes, Pages  # noqa: E402
from hicache_ray.pools.device import DevicePool  # noqa: E402
from hicache_ray.pools.host import HostPool  # noqa: E402
from hicache_ray.pools.layouts import KVSpec  # noqa: E402
from hicache_ray.pools.memory import allocate  # noqa: E402

SPECS = {"mha": KVSpec.mha(32, 8, 128), "mla": KVSpec.mla(61, 512, 64)}
NON_TEMPORAL = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x8000"}
RUN = 16
"""Pages of a run in the page lists that have runs."""


@dataclass(frozen=True)
class Result:
    """Median GB (1e9 bytes) a second of one copy, and its median share of the two plain copies taken beside it."""

    attention: str
    io_backend: str
    layout: str
    way: str
    pages: str
    gb_s: float
    of_memcpy: float
    of_pieces: float


class Plain:
    """memcpy of as many bytes as a copy moves, in one run and in pieces in random order."""

    def __init__(self, nbytes: int, piece: int) -> None:
        self.source, self.target = allocate(nbytes), allocate(nbytes)
        self.piece = piece
        order = np.random.default_rng(1).permutation(nbytes // piece)
        self.order = list(zip(order.tolist(), reversed(order.tolist()), strict=True))

    def run(self, nbytes: int) -> None:
        """One copy of `nbytes`."""
        np.copyto(self.target[:nbytes], self.source[:nbytes])

    def pieces(self, nbytes: int) -> None:
        """`nbytes` in scattered pieces."""
        count = nbytes // self.piece
        target, source = self._cut(self.target), self._cut(self.source)
        for to, start in self.order[:count]:
            np.copyto(target[to], source[start])

    def _cut(self, buffer: Bytes) -> Bytes:
        return buffer[: len(self.order) * self.piece].reshape(-1, self.piece)


def seconds(copy: Callable[[], None], clock: Callable[[], float], device: str) -> float:
    """Time of one call, up to the end of what it put on the device's streams."""
    start = clock()
    copy()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def measure(copies: dict[str, Copier], plain: Plain, rounds: int, clock: Callable[[], float], device: str) -> dict:
    """For each copy its rates in every round, [rounds, 3]: itself, one memcpy, memcpy in pieces."""
    rates: dict[str, list[list[float]]] = {name: [] for name in copies}
    for number in range(rounds + 1):
        for name, (copy, nbytes) in copies.items():
            taken = [seconds(way, clock, "cpu") for way in (partial(plain.run, nbytes), partial(plain.pieces, nbytes))]
            taken.insert(0, seconds(copy, clock, device))
            if number:  # the first round maps pages and starts threads
                rates[name].append([nbytes / spent / GB for spent in taken])
    return rates


def page_lists(pool_pages: int) -> dict[str, tuple[Pages, Pages]]:
    """Random pages, and as many in runs at random places."""
    count = pool_pages * 7 // 8 // RUN * RUN
    starts = random_pages(pool_pages // RUN, count // RUN)
    device, host = ((first[:, None] * RUN + np.arange(RUN)).reshape(-1) for first in starts)
    return {"random": random_pages(pool_pages, count), f"runs of {RUN}": (device, host)}


def results(attention: str, options: argparse.Namespace) -> Iterator[Result]:
    """The cells of one attention type that run here, on pools of --mb each."""
    spec, page_size = SPECS[attention], options.page_size
    pool_pages = max(2 * RUN, (options.mb << 20) // spec.token_bytes // page_size // RUN * RUN)
    device_pool = DevicePool(spec, pool_pages, page_size, options.device)
    plain = Plain(spec.token_bytes * device_pool.tokens, page_size * spec.row_bytes)
    clock = time.process_time if options.device == "cpu" and options.threads == 1 else time.perf_counter
    cells = [(io, layout) for io in options.io for layout in COPIES[io] if can_copy(io, layout, attention)]
    for io, layout in cells:
        host_pool = HostPool(spec, pool_pages, page_size, layout)
        copies = {
            f"{way}/{kind}": copier
            for kind, lists in page_lists(pool_pages).items()
            for way, copier in pool_copiers(io, device_pool, host_pool, *lists).items()
        }
        for name, rounds in measure(copies, plain, options.rounds, clock, options.device).items():
            ratios = [statistics.median(own / other[i] for own, *other in rounds) for i in range(2)]
            rate = statistics.median(own for own, *_ in rounds)
            way, kind = name.split("/")
            yield Result(attention, io, layout, way, kind, rate, *ratios)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--mb", type=int, default=512, help="size of each pool")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--attention", choices=tuple(SPECS), action="append")
    parser.add_argument("--io", choices=("direct", "kernel"), action="append")
    parser.add_argument("--non-temporal", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="also write the rows as JSON")
    options = parser.parse_args()
    options.attention = options.attention or list(SPECS)
    options.io = options.io or ["direct"]
    return options


def main() -> None:
    """Prints a table, and with --out writes it as JSON."""
    options = parse()
    if options.non_temporal and "GLIBC_TUNABLES" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | NON_TEMPORAL)
    set_copy_threads(options.threads)
    print(f"pages of {options.page_size}, {options.threads} threads, {options.device}, load {os.getloadavg()[0]:.1f}")
    print(f"{'':4}{'io':7} {'layout':18} {'way':10} {'pages':11} {'GB/s':>6} {'of memcpy':>10} {'of pieces':>10}")
    rows = []
    for attention in options.attention:
        for row in results(attention, options):
            rows.append(row)
            names = f"{row.attention:4}{row.io_backend:7} {row.layout:18} {row.way:10} {row.pages:11}"
            print(f"{names} {row.gb_s:6.2f} {row.of_memcpy:10.2f} {row.of_pieces:10.2f}", flush=True)
    if options.out:
        options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
