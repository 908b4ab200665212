"""What each fault does to requests, how long until it is noticed and healed: the table of docs/reliability.md.

    python benchmarks/faults.py [--times 2] [--only kill,hang] [--json FILE]     # all of it: about 20 minutes

Every fault has a service of its own with the default deadlines (two ranks, two storage actors, a supervisor), which
serves a verified chat as in `hicache-ray chaos`. Rows of nodes and drivers: benchmarks/faults_nodes.py. Exit code 1
when a run found anything wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# This folder comes first on the path of a script, where its file names would hide modules of the standard library.
FOLDER = Path(__file__).resolve().parent
sys.path[:] = [str(FOLDER.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER)]
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^A worker died or was killed")

from hicache_ray.config import HiCacheConfig  # noqa: E402
from hicache_ray.faults.chaos import SHORT_DEADLINES, ChaosSettings, run_chaos  # noqa: E402
from hicache_ray.faults.plan import FaultPlan  # noqa: E402

FIRST = 4.0
"""Seconds from the start to the first fault."""
DEFAULTS = {name: getattr(HiCacheConfig(), name) for name in SHORT_DEADLINES}


@dataclass(frozen=True)
class Row:
    """One fault of the table.

    Attributes:
        name: what breaks.
        effect: what it means for requests, beside the figures.
        faults: of the plan; each happens `times` times, the first after FIRST seconds.
        apart: seconds from one time to the next.
        once: the plan can't be repeated within a run.
        instances: groups that share L3; with two, one reads there what the other has stored.
    """

    name: str
    effect: str
    faults: tuple[dict[str, Any], ...]
    apart: float = 10.0
    once: bool = False
    instances: int = 1

    def plan(self, times: int) -> FaultPlan:
        """The faults, repeated."""
        count = 1 if self.once else times
        timed = [{"time": FIRST, "times": count, "every": self.apart, **fault} for fault in self.faults]
        for fault in timed:
            if "call" in fault:
                del fault["time"], fault["every"]
        return FaultPlan.parse({"seed": 1, "faults": timed})

    def seconds(self, times: int) -> float:
        """How long its run breaks things."""
        return FIRST + self.apart * (1 if self.once else times)


RESTART = "`GroupRestarted`, to be sent again"
AWAY = "its pages are misses while it is away"
MISS = "misses"

ROWS = (
    Row("rank killed", RESTART, ({"kind": "kill", "who": "rank 1"},)),
    Row("rank killed inside the reduction", RESTART, ({"kind": "kill", "who": "rank 1", "point": "rank.reduce"},)),
    Row("all ranks killed", RESTART, ({"kind": "kill", "who": "rank *"},)),
    Row(
        "rank killed, and another while it comes back",
        RESTART,
        (
            {"kind": "kill", "who": "rank 1"},
            {"kind": "kill", "who": "rank 0", "point": "rank.claim", "call": 1},
        ),
        apart=20.0,
        once=True,
    ),
    Row("rank stopped (SIGSTOP)", RESTART, ({"kind": "hang", "who": "rank 1"},), apart=25.0),
    Row(
        "rank hangs inside a step",
        RESTART,
        ({"kind": "hang", "who": "rank 1", "point": "rank.step", "seconds": 120},),
        apart=25.0,
    ),
    Row("ranks decide differently (no room on one)", RESTART, ({"kind": "alloc_fail", "who": "rank 1"},)),
    Row("no memory in a rank", RESTART, ({"kind": "oom", "who": "rank 0", "point": "alloc.device"},)),
    Row("storage actor killed", AWAY, ({"kind": "kill", "who": "storage 0"},), instances=2),
    Row("storage actor stopped (SIGSTOP)", AWAY, ({"kind": "hang", "who": "storage 0"},), apart=25.0, instances=2),
    Row(
        "storage actor slow, 0.5 s a call",
        "a prefetch takes longer",
        ({"kind": "slow", "who": "storage 0", "point": "actor.acquire", "seconds": 0.5},),
        instances=2,
    ),
    Row(
        "no way from a rank to a storage actor for 4 s",
        AWAY,
        ({"kind": "partition", "who": "rank 0", "peer": "*-0", "seconds": 4},),
        instances=2,
    ),
    Row(
        "calls to storage actors lost",
        MISS,
        ({"kind": "drop", "who": "rank *", "point": "channel.call"},),
        apart=2.0,
        instances=2,
    ),
    Row("a bit flipped in an arena", MISS, ({"kind": "corrupt", "who": "storage *"},), apart=2.0, instances=2),
    Row("a read brings less than asked for", MISS, ({"kind": "short_read", "who": "rank *"},), apart=2.0, instances=2),
    Row(
        "a lookup says yes to what is not there",
        MISS,
        ({"kind": "stale_exists", "who": "rank *"},),
        apart=2.0,
        instances=2,
    ),
    Row("supervisor killed", "none", ({"kind": "kill", "who": "supervisor"},)),
    Row(
        "supervisor killed with a rank",
        RESTART,
        ({"kind": "kill", "who": "supervisor"}, {"kind": "kill", "who": "rank 1"}),
    ),
    Row(
        "supervisor stopped (SIGSTOP) with a rank",
        RESTART,
        ({"kind": "hang", "who": "supervisor"}, {"kind": "kill", "who": "rank 1"}),
        apart=60.0,
        once=True,
    ),
)


def measure(row: Row, times: int) -> dict[str, Any]:
    """One row: a run under its fault."""
    minutes = row.seconds(times) / 60
    settings = ChaosSettings(minutes, seed=1, instances=row.instances, heal_limit=60.0, deadlines=DEFAULTS)
    found = run_chaos(settings, row.plan(times)).as_dict()
    rows = found["timeline"]
    if not rows:
        raise RuntimeError(f"{row.name}: it never happened")
    healed = [entry["healed_after"] for entry in rows if entry["healed_after"] is not None]
    noticed = [entry["noticed_after"] for entry in rows if entry["noticed_after"] is not None]
    return {
        "name": row.name,
        "effect": row.effect,
        "faults": len(rows),
        "noticed": [min(noticed), max(noticed)] if noticed else None,
        "healed": [min(healed), max(healed)],
        **{
            name: found[name]
            for name in ("requests_ok", "requests_again", "requests_failed", "wrong_pages", "hit_rate", "wrong")
        },
    }


def as_line(found: dict[str, Any]) -> str:
    """A line of the table."""
    again = f"; {found['requests_again']} of {found['requests_ok']}" if found["requests_again"] else ""
    return f"| {found['name']} | {found['effect']}{again} | {_span(found['noticed'])} | {_span(found['healed'])} |"


def _span(seconds: Sequence[float] | None) -> str:
    if seconds is None:
        return "at once, by who uses it"
    least, most = (f"{value:.1f}" for value in seconds)
    return f"{most} s" if least == most else f"{least} to {most} s"


def main() -> int:
    """Prints the table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=2, help="how often each fault happens")
    parser.add_argument("--only", default="", help="words, with commas between: rows whose name has one of them")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wanted = [row for row in ROWS if any(word in row.name for word in options.only.split(","))]
    found = []
    print("| fault | effect on requests | noticed after | healed after |\n|---|---|---|---|")
    for row in wanted:
        found.append(measure(row, options.times))
        print(as_line(found[-1]), *found[-1]["wrong"], sep="\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return int(any(row["wrong"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
