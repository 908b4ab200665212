"""A replay on groups: the groups come up and go within a context; drive, settle, audit, report."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from hicache_ray.config import ConfigError, HiCacheConfig
from hicache_ray.rank.group import Group
from hicache_ray.replay.driver import ENGINE, DriveSettings, drive, settle
from hicache_ray.replay.report import POOL_NAMES, OnProgress, ReplayReport, add_up, evictions_of
from hicache_ray.replay.requests import Workload
from hicache_ray.replay.settings import ReplaySettings
from hicache_ray.storage.memory import BACKEND as MEMORY_BACKEND
from hicache_ray.storage.memory import drop_store
from hicache_ray.storage.shard.files import SHARED_MEMORY


def check_memory(config: HiCacheConfig, settings: ReplaySettings) -> None:
    """Raises PoolMemoryError or ConfigError, with the numbers, where all pools together don't fit this machine."""
    from hicache_ray.pools.memory import check_fits
    from hicache_ray.rank.build import kv_spec

    ranks = settings.instances * config.tp_size
    l1_tokens = config.l1_tokens if config.device == "cpu" else 0
    tokens = int(l1_tokens + config.hicache_ratio * config.l1_tokens)
    nbytes = ranks * tokens * kv_spec(config).token_bytes + settings.l3_bytes
    check_fits(nbytes, reserve=config.host_memory_reserve_bytes, what=f"memory of {ranks} ranks and L3")
    if config.hicache_storage_backend == "ray" and SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(SHARED_MEMORY).free
        if settings.l3_bytes > free:
            raise ConfigError(f"l3_bytes is {settings.l3_bytes}, and {SHARED_MEMORY} has {free} left; make it smaller")


@contextmanager
def local_groups(config: HiCacheConfig, settings: ReplaySettings) -> Iterator[list[Group]]:
    """Groups in this process that share an L3 in its memory.

    Raises:
        PoolMemoryError: the pools do not fit this machine.
    """
    from hicache_ray.rank.local_group import LocalGroup

    store = f"replay-{uuid.uuid4().hex}"
    in_memory = config.hicache_storage_backend == MEMORY_BACKEND
    options = {"store": store, "capacity_bytes": settings.l3_bytes} if in_memory else {}
    groups: list[LocalGroup] = []
    try:
        for number in range(settings.instances):
            groups.append(LocalGroup.create(config, engine=ENGINE, storage_options=options, name=f"instance-{number}"))
        yield list(groups)
    finally:
        for group in groups:
            group.stop()
        drop_store(store)


@contextmanager
def ray_groups(config: HiCacheConfig, settings: ReplaySettings) -> Iterator[list[Group]]:
    """Groups of rank actors and a pool of storage actors, on the Ray cluster this process finds or else starts here.

    Raises:
        RayAddressError: `RAY_ADDRESS` is no address, or that of a cluster that does not answer.
        RayStartError: Ray did not start.
        GroupError, ServiceError, StoragePoolError: they did not come up; what was started is stopped again.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from hicache_ray.service import start

    service = start(config, name=f"replay-{uuid.uuid4().hex[:8]}")
    try:
        yield [service.group(f"instance-{number}", engine=ENGINE) for number in range(settings.instances)]
    finally:
        with _uninterrupted():
            service.stop()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Signals to end wait: stopping is bounded by its own deadlines, and broken off it would leave processes behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    ends = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda signum, frame: waiting.append(signum)) for number in ends}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for waited in dict.fromkeys(waiting):
            signal.raise_signal(waited)


class Mode(NamedTuple):
    """Where the groups of a replay run: the registered name of their L3 backend, and the context that has them."""

    backend: str
    groups: Callable[[HiCacheConfig, ReplaySettings], AbstractContextManager[list[Group]]]


MODES = {"local": Mode(MEMORY_BACKEND, local_groups), "ray": Mode("ray", ray_groups)}
"""By the name in reports."""


def replay_workload(
    workload: Workload,
    groups: Sequence[Group],
    settings: DriveSettings,
    *,
    mode: str,
    described: Mapping[str, Any],
    progress: OnProgress | None = None,
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
        Stalled: requests or transfers did not end in time.
        RequestError: a request can never run.
    """
    began = time.perf_counter()
    tally = drive(groups, workload, settings, progress)
    seconds = time.perf_counter() - began
    settle(*groups)
    stats = [group.stats() for group in groups]
    audits = [group.audit() for group in groups]
    return ReplayReport(
        workload=workload.name,
        mode=mode,
        settings=dict(described),
        counts=tally.counts,
        seconds=seconds,
        pages_verified=tally.verified,
        pages_mismatched=tally.wrong,
        bytes=add_up(rank["bytes"] for ranks in stats for rank in ranks),
        step_us=tally.times.percentiles(),
        ledger={
            name: add_up(rank["pages"][pool] for ranks in audits for rank in ranks) for pool, name in POOL_NAMES.items()
        },
        unbalanced=tuple(_faults(audits)),
        digest_checks=tally.steps if groups[0].size > 1 else 0,
        restarts=tally.restarts,
        evictions=add_up(evictions_of(ranks[0]["index"]) for ranks in stats),
        storage=add_up(rank["storage"] for ranks in stats for rank in ranks),
    )


def _faults(audits: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """A sentence for each thing that does not add up now that nothing is in flight."""
    for instance, ranks in enumerate(audits):
        for rank in ranks:
            where = f"instance {instance}, rank {rank['rank']}"
            yield from (f"{where}: {fault}" for fault in rank["faults"])
            for pool, name in POOL_NAMES.items():
                pages = rank["pages"][pool]
                if pages["free"] + pages["in_tree"] != pages["total"]:
                    yield f"{where}: pages of {name} are missing: {pages}"
