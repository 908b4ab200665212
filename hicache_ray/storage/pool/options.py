"""Options of the "ray" backend, and the names under which a pool is found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from hicache_ray.storage.options import (
    Reader,
    backend_options,
    read_bool,
    read_choice,
    read_count,
    read_seconds,
    read_text,
)

DEFAULT_POOL = "default"
TRANSPORTS = ("auto", "object_store")


@dataclass(frozen=True)
class RayPoolOptions:
    """What `StorageConfig.extra` may say to the "ray" backend.

    Attributes:
        pool: name of the storage pool.
        namespace: Ray namespace of the pool; None: the one this process is in.
        address: cluster to connect to when Ray is not initialised in this process.
        transport: "auto" maps the arenas of actors on this node, "object_store" never does.
        call_timeout: seconds one call to one actor may take; None: a share of the backend's timeout.
        refusal_seconds: how long an actor that failed is left alone before it is tried again.
        copy_threads: threads that copy pages.
        prefault: map arenas as a whole at start.
    """

    pool: str = DEFAULT_POOL
    namespace: str | None = None
    address: str | None = None
    transport: str = "auto"
    call_timeout: float | None = None
    refusal_seconds: float = 0.5
    copy_threads: int = 1
    prefault: bool = True

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> RayPoolOptions:
        """The options in a backend's extra config; BackendError for a name or a value that is none."""
        return cls(**backend_options("ray", extra, _READERS))


_READERS: dict[str, Reader] = {
    "pool": read_text,
    "namespace": read_text,
    "address": read_text,
    "transport": partial(read_choice, choices=TRANSPORTS),
    "call_timeout": read_seconds,
    "refusal_seconds": read_seconds,
    "copy_threads": read_count,
    "prefault": read_bool,
}


def actor_name(member: str) -> str:
    """Name of the Ray actor of a pool's member."""
    return f"hicache-storage:{member}"
