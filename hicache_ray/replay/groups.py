"""The groups a replay runs on, up within a context and gone after it."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from hicache_ray.config import ConfigError, HiCacheConfig
from hicache_ray.replay.driver import SteppedGroup
from hicache_ray.replay.run import ENGINE
from hicache_ray.replay.settings import ReplaySettings
from hicache_ray.testing.memory_storage import BACKEND as MEMORY_BACKEND
from hicache_ray.testing.memory_storage import drop_store

BACKENDS = {"local": MEMORY_BACKEND, "ray": "ray"}
"""L3 backend of each mode."""


SHARED_MEMORY = Path("/dev/shm")
"""Where storage actors keep their arenas."""


def check_memory(config: HiCacheConfig, settings: ReplaySettings) -> None:
    """Raises PoolMemoryError or ConfigError, with the numbers, where all pools together don't fit this machine."""
    from hicache_ray.build import kv_spec
    from hicache_ray.pools.memory import check_fits
    from hicache_ray.pools.sizing import GB

    ranks = settings.instances * config.tp_size
    l1_tokens = config.l1_tokens if config.device == "cpu" else 0
    tokens = int(l1_tokens + config.hicache_ratio * config.l1_tokens)
    nbytes = ranks * tokens * kv_spec(config).token_bytes + settings.l3_bytes
    check_fits(nbytes, reserve=int(config.host_memory_reserve * GB), what=f"memory of {ranks} ranks and L3")
    if config.hicache_storage_backend == "ray" and SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(SHARED_MEMORY).free
        if settings.l3_bytes > free:
            raise ConfigError(f"l3_bytes is {settings.l3_bytes}, and {SHARED_MEMORY} has {free} left; make it smaller")


@contextmanager
def local_groups(config: HiCacheConfig, settings: ReplaySettings) -> Iterator[list[SteppedGroup]]:
    """Groups in this process that share an L3 in its memory.

    Raises:
        PoolMemoryError: the pools do not fit this machine.
    """
    from hicache_ray.testing.local_group import LocalGroup

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
def ray_groups(config: HiCacheConfig, settings: ReplaySettings) -> Iterator[list[SteppedGroup]]:
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


GROUPS: Mapping[str, Callable[[HiCacheConfig, ReplaySettings], AbstractContextManager[list[SteppedGroup]]]] = {
    "local": local_groups,
    "ray": ray_groups,
}
"""How each mode gets its groups."""
