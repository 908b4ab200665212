"""Latency of a step's reduction beside gloo's own all_reduce, over the same ranks in the same rounds.

    python benchmarks/step_reduction.py [--ranks 2,4] [--numbers 16] [--steps 300] [--rounds 4]

`ours` is ReductionGroup.allreduce_min on Ray actors; `gloo` is one torch all_reduce(MIN) of the same vector on the same
connections; `gather` is gloo's gather to rank 0, fold and broadcast. Microseconds as rank 0 sees them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
import torch
from torch import distributed

from hicache_ray.actors.collective import ReductionGroup, generation_name

WARM_UP = 20


@ray.remote(num_cpus=0)
class Rank:
    """One rank: joins, then runs the same sequence of reductions as its peers."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def join(self, name: str) -> None:
        self.group = ReductionGroup.join(name, 0, rank=self.rank, world_size=self.size, timeout=60.0)
        from ray.util import collective

        self.gloo = collective.get_group_handle(generation_name(name, 0)).connect()

    def measure(self, numbers: int, steps: int, rounds: int) -> dict[str, list[float]]:
        """Microseconds of every reduction, the ways taking turns by round."""
        vector = np.arange(numbers, dtype=np.int64)
        ways = {"ours": lambda: self.group.allreduce_min(vector), **self._gloo_ways(torch.from_numpy(vector.copy()))}
        samples: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, reduce in ways.items():
                samples[name] += time_calls(reduce, steps)
        return samples

    def _gloo_ways(self, tensor: torch.Tensor) -> dict[str, Callable[[], Any]]:
        minimum: Any = distributed.AllreduceOptions()
        minimum.reduceOp = distributed.ReduceOp.MIN
        rows = [torch.empty_like(tensor) for _ in range(self.size)]

        def gather() -> None:
            self.gloo.gather([rows] if self.rank == 0 else [], [tensor], distributed.GatherOptions()).wait()
            if self.rank == 0:
                for row in rows:
                    torch.minimum(tensor, row, out=tensor)
            self.gloo.broadcast([tensor], distributed.BroadcastOptions()).wait()

        return {"gloo": lambda: self.gloo.allreduce([tensor], minimum).wait(), "gather": gather}


def time_calls(call: Callable[[], Any], steps: int) -> list[float]:
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(steps):
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1000)
    return times


def report(size: int, numbers: int, steps: int, rounds: int) -> None:
    ranks = [Rank.remote(rank, size) for rank in range(size)]
    ray.get([rank.join.remote(f"bench-{size}") for rank in ranks])
    samples = ray.get([rank.measure.remote(numbers, steps, rounds) for rank in ranks])[0]
    raw = float(np.percentile(samples["gloo"], 50))
    for name, times in samples.items():
        p50, p99 = np.percentile(times, [50, 99])
        print(
            f"{size} ranks  {numbers:>4} numbers  {name:<6}  p50 {p50:>7.0f} us  p99 {p99:>7.0f} us"
            f"  best {min(times):>6.0f} us  {raw / p50:>6.2f} x gloo"
        )
    for rank in ranks:
        ray.kill(rank)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="group sizes, comma separated")
    parser.add_argument("--numbers", type=int, default=16, help="length of the vector")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="hicache-bench-", dir="/tmp")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False, _temp_dir=folder)
    try:
        for size in (int(text) for text in options.ranks.split(",")):
            report(size, options.numbers, options.steps, options.rounds)
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
