"""A whole step of a group beside its floor: an empty call to the same actors, sent and gathered the same way.

    python benchmarks/step.py [--ranks 2] [--steps 300] [--rounds 3]

`empty` is a step that holds nothing; `serve` is one iteration of serving: finish a request, admit the next one (512
tokens), poll and schedule it. Floor and steps take turns, round by round. Wall time, as a serving loop waits it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# This folder comes first on the path of a script, where its file names would hide modules of the standard library.
FOLDER = Path(__file__).resolve().parent
sys.path[:] = [str(FOLDER.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER)]
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402

import numpy as np  # noqa: E402
import ray  # noqa: E402

from hicache_ray.actors.group import TPGroup  # noqa: E402
from hicache_ray.config import HiCacheConfig  # noqa: E402
from hicache_ray.rank.step import Admit, Finish  # noqa: E402
from hicache_ray.service import start  # noqa: E402

PROMPT_TOKENS = 512


def microseconds(call: Callable[[int], object], steps: int) -> np.ndarray:
    """Wall time of each of `steps` calls."""
    times = np.empty(steps)
    for step in range(steps):
        began = time.perf_counter()
        call(step)
        times[step] = (time.perf_counter() - began) * 1e6
    return times


def serving(group: TPGroup, round_number: int) -> Callable[[int], object]:
    """One iteration of a serving loop a call; every prompt is half old, half new."""
    rng = np.random.default_rng(round_number)
    shared = rng.integers(0, 1000, PROMPT_TOKENS // 2).astype("<u4")
    running: list[str] = []

    def step(number: int) -> None:
        prompt = np.concatenate([shared, rng.integers(0, 1000, PROMPT_TOKENS // 2).astype("<u4")])
        rid = f"{round_number}-{number}"
        finishes = [Finish(running.pop())] if running else []
        group.step(finishes=finishes, admits=[Admit(rid, prompt.tobytes())], polls=[rid], schedules=[rid])
        running.append(rid)

    return step


def measure(group: TPGroup, steps: int, rounds: int) -> dict[str, np.ndarray]:
    """Microseconds by kind of call, all rounds together."""
    found: dict[str, list[np.ndarray]] = {"floor": [], "empty": [], "serve": []}
    parts: list[dict[str, float]] = []
    for round_number in range(rounds):
        floor = lambda _: ray.get([actor.ping.remote() for actor in group.actors])  # noqa: E731
        found["floor"].append(microseconds(floor, steps))
        found["empty"].append(microseconds(lambda _: parts.append(group.step().timings_us), steps))
        found["serve"].append(microseconds(serving(group, round_number), steps))
        group.step(aborts=[f"{round_number}-{steps - 1}"])
    for part in ("message", "reduction", "work"):
        found[f"empty: {part}"] = [np.array([timings[part] for timings in parts])]
    return {kind: np.concatenate(times) for kind, times in found.items()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    config = HiCacheConfig(
        tp_size=asked.ranks,
        page_size=16,
        layers=2,
        heads=asked.ranks,
        head_dim=16,
        l1_tokens=16384,
        device="cpu",
        host_memory_reserve=1.0,
        hicache_io_backend="direct",
    )
    with start(config, name="benchmark") as service:
        found = measure(service.group("steps"), asked.steps, asked.rounds)
    floor = float(np.median(found["floor"]))
    print(f"{asked.ranks} ranks, {asked.steps} x {asked.rounds} steps, load {os.getloadavg()[0]:.1f}")
    for kind, times in found.items():
        p50, p99 = np.percentile(times, [50, 99])
        print(f"{kind:<17} p50 {p50:8.0f} us   p99 {p99:8.0f} us   {p50 / floor:5.2f} of floor")


if __name__ == "__main__":
    main()
