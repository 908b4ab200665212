"""Does memory level off? Many requests through tiers of fixed size, memory sampled all the way, the plot written.

    python benchmarks/soak.py                          # 20,000 requests on Ray, about ten minutes on two cores
    python benchmarks/soak.py --requests 2000 --json soak.json --plot soak.svg

Every cached page is verified. Exit code 1 when a page was wrong, a pool does not balance, or the memory of a process
(its own, and what it shares) grew by more than 3 % and 4 MiB over the second half of the run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

MIB = 1 << 20
SAMPLES = 200
GROWTH_SHARE, GROWTH_BYTES = 0.03, 4 * MIB
TURNS = 5


@dataclass(frozen=True)
class Sample:
    """Memory at one moment, bytes by process; `arenas`: memory that the storage actors' files hold."""

    requests: int
    seconds: float
    own: dict[str, int]
    shared: dict[str, int]
    arenas: int


class Memory:
    """Samples the processes of a service.

    Args:
        processes: process ids by name.
        arenas: files in shared memory.
    """

    def __init__(self, processes: dict[str, int], arenas: Sequence[Path]) -> None:
        self.processes = processes
        self.arenas = list(arenas)
        self.samples: list[Sample] = []
        self._began = time.monotonic()

    def take(self, requests: int) -> None:
        """Adds a sample."""
        status = {name: _status(pid) for name, pid in self.processes.items()}
        self.samples.append(
            Sample(
                requests,
                time.monotonic() - self._began,
                {name: rows["RssAnon"] for name, rows in status.items()},
                {name: rows["RssShmem"] for name, rows in status.items()},
                sum(path.stat().st_blocks * 512 for path in self.arenas),
            )
        )

    def grown(self) -> list[str]:
        """A sentence for each number that went on growing: the last tenth of the samples against the middle one."""
        count = len(self.samples)
        middle, last = self.samples[count // 2 : count // 2 + count // 10 + 1], self.samples[-count // 10 :]
        values: dict[str, Callable[[Sample], int]] = {"arenas": lambda sample: sample.arenas}
        for name in self.processes:
            values[f"{name}, own"] = lambda sample, name=name: sample.own[name]  # type: ignore[misc]
            values[f"{name}, shared"] = lambda sample, name=name: sample.shared[name]  # type: ignore[misc]
        found = []
        for name, value in values.items():
            before, after = (float(np.median([value(sample) for sample in part])) for part in (middle, last))
            if after - before > max(GROWTH_BYTES, GROWTH_SHARE * before):
                found.append(f"{name}: {before / MIB:.1f} MiB in the middle, {after / MIB:.1f} MiB at the end")
        return found


def main() -> int:
    """Runs the soak; the exit code."""
    options = _options()
    from hicache_ray.replay.driver import DriveSettings
    from hicache_ray.replay.run import ray_groups, replay_workload
    from hicache_ray.replay.settings import ReplaySettings, replay_config
    from hicache_ray.replay.traces import load_workload

    shape = f"chat:sessions={-(-options.requests // TURNS)},turns={TURNS},system=128,turn=32,answer=32"
    workload = load_workload(shape, seed=options.seed, limit=options.requests)
    sizes = ReplaySettings.of(
        tp=options.tp, l1_tokens=4096, l2_tokens=12288, l3_bytes=options.l3_mib * MIB, storage_actors=2
    )
    config = replay_config(sizes, workload, storage_backend="ray")
    with ray_groups(config, sizes) as groups:
        memory = Memory(*_processes(groups))
        step = max(1, options.requests // SAMPLES)

        def progress(done: int) -> None:
            if done // step > (memory.samples[-1].requests // step if memory.samples else -1):
                memory.take(done)

        drive = DriveSettings(page_size=config.page_size)
        report = replay_workload(workload, groups, drive, mode="ray", described={}, progress=progress)
        memory.take(options.requests)
    wrong = [*report.faults, *memory.grown()]
    document = _document(options, report, memory, wrong)
    _print(document)
    if options.json:
        Path(options.json).write_text(json.dumps(document, indent=2) + "\n")
    plot(memory, Path(options.plot))
    return int(bool(wrong))


def plot(memory: Memory, path: Path) -> None:
    """Draws own and shared memory of every process, and the arenas, over the requests."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (own, shared) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 7))
    requests = [sample.requests for sample in memory.samples]
    for name in memory.processes:
        own.plot(requests, [sample.own[name] / MIB for sample in memory.samples], label=name)
        shared.plot(requests, [sample.shared[name] / MIB for sample in memory.samples], label=name)
    shared.plot(requests, [sample.arenas / MIB for sample in memory.samples], "k--", label="arena files")
    for axes, title in ((own, "own memory (RssAnon)"), (shared, "shared memory (RssShmem)")):
        axes.set_title(title)
        axes.set_ylabel("MiB")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="small", loc="lower right")
        axes.grid(alpha=0.3)
    shared.set_xlabel("requests served")
    figure.tight_layout()
    figure.savefig(path)


def _document(options: argparse.Namespace, report: Any, memory: Memory, wrong: list[str]) -> dict[str, Any]:
    first, last = memory.samples[0], memory.samples[-1]
    return {
        "requests": report.counts.requests,
        "seconds": round(report.seconds, 1),
        "pages_verified": report.pages_verified,
        "pages_mismatched": report.pages_mismatched,
        "evictions": report.evictions,
        "options": vars(options),
        "own_mib": {name: [_mib(first.own[name]), _mib(last.own[name])] for name in memory.processes},
        "shared_mib": {name: [_mib(first.shared[name]), _mib(last.shared[name])] for name in memory.processes},
        "arenas_mib": [_mib(first.arenas), _mib(last.arenas)],
        "wrong": wrong,
        "samples": [asdict(sample) for sample in memory.samples],
    }


def _print(document: dict[str, Any]) -> None:
    print(f"{document['requests']} requests in {document['seconds']} s, {document['pages_verified']} pages verified")
    for kind in ("own_mib", "shared_mib"):
        for name, (first, last) in document[kind].items():
            print(f"{kind[:-4]:>7} memory of {name}: {first} MiB at first, {last} MiB at the end")
    print("level" if not document["wrong"] else "\n".join(document["wrong"]))


def _processes(groups: Sequence[Any]) -> tuple[dict[str, int], list[Path]]:
    """Process ids of ranks, storage actors and this driver; the arenas' files."""
    from hicache_ray.actors.directory import RAY_NAMESPACE
    from hicache_ray.actors.storage_pool import StoragePool

    processes = {"driver": os.getpid()}
    for group in groups:
        processes |= {f"rank {rank}": pid for rank, pid in enumerate(group.pids)}
    service = groups[0].name.partition(":")[0]
    pool = StoragePool.connect(f"{service}.storage", RAY_NAMESPACE)
    infos = [info for info in pool.info().values() if info is not None]
    processes |= {f"storage {number}": info.pid for number, info in enumerate(infos)}
    return processes, [Path(info.path) for info in infos]


def _status(pid: int) -> dict[str, int]:
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: int(rows[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem")}


def _mib(value: int) -> float:
    return round(value / MIB, 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--l3-mib", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    parser.add_argument("--plot", default="soak.png")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
