"""One replay on groups that are up: drive, settle, audit, report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from hicache_ray.replay.driver import DriveSettings, Measured, Progress, SteppedGroup, drive, settle
from hicache_ray.replay.index_only import evictions_of
from hicache_ray.replay.report import POOL_NAMES, ReplayReport, add_up
from hicache_ray.replay.workload import Workload

ENGINE = "hicache_ray.replay.synthetic:SyntheticEngine"
"""The engine a replay needs its groups to run."""


def replay(
    workload: Workload,
    groups: Sequence[SteppedGroup],
    settings: DriveSettings,
    *,
    mode: str,
    described: Mapping[str, Any],
    progress: Progress | None = None,
) -> ReplayReport:
    """Replays a workload on groups that run `ENGINE`, one group an instance.

    Args:
        workload: what is replayed.
        groups: empty groups that nobody else steps meanwhile.
        settings: how requests are sent.
        mode: "local" or "ray", for the report.
        described: options of the run by name, for the report.
        progress: told the number of finished requests.

    Raises:
        ReplayStalled: requests or transfers did not end in time.
        RequestError: a request can never run.
    """
    began = time.perf_counter()
    measured = drive(groups, iter(workload), settings, progress)
    seconds = time.perf_counter() - began
    settle(groups)
    return report(workload, groups, measured, mode=mode, described=described, seconds=seconds)


def report(
    workload: Workload,
    groups: Sequence[SteppedGroup],
    measured: Measured,
    *,
    mode: str,
    described: Mapping[str, Any],
    seconds: float,
) -> ReplayReport:
    """The report of a run whose transfers have ended, from its steps and the ranks' own counters."""
    stats = [group.stats() for group in groups]
    ranks = [rank for group in stats for rank in group]
    return ReplayReport(
        workload=workload.name,
        mode=mode,
        settings=dict(described),
        counts=measured.counts,
        seconds=seconds,
        pages_verified=measured.engine.get("pages_verified", 0),
        pages_mismatched=measured.engine.get("pages_mismatched", 0),
        bytes=add_up(rank["bytes"] for rank in ranks),
        step_us=measured.times.percentiles(),
        ledger={name: add_up(rank["ledger"][pool] for rank in ranks) for pool, name in POOL_NAMES.items()},
        unbalanced=tuple(_audit(groups, stats)),
        digest_checks=measured.digest_checks,
        restarts=measured.restarts,
        evictions=add_up(evictions_of(group[0]["index"]) for group in stats),
        storage=add_up(rank["storage"] for rank in ranks),
    )


def _audit(groups: Sequence[SteppedGroup], stats: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """A sentence for each thing that does not add up now that nothing is in flight."""
    found = []
    for instance, (group, ranks) in enumerate(zip(groups, stats, strict=True)):
        for rank, row in enumerate(ranks):
            for pool, name in POOL_NAMES.items():
                ledger = row["ledger"][pool]
                if ledger["free"] + ledger["in_tree"] != ledger["total"]:
                    found.append(f"instance {instance}, rank {rank}: pages of {name} are missing: {ledger}")
        try:
            group.check_integrity()
        except AssertionError as error:
            found.append(f"instance {instance}: {error}")
    return found
