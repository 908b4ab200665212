"""Options of the "ray" backend, and the names under which a pool is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hicache_ray.storage.options import read_bool, read_choice, read_count, refuse_unknown
from hicache_ray.storage.registry import BackendError

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
        refuse_unknown("ray", extra, cls.__dataclass_fields__)
        checks: dict[str, Callable[[Any], Any]] = {
            "transport": lambda value: read_choice("transport", value, TRANSPORTS),
            "call_timeout": lambda value: _seconds("call_timeout", value),
            "refusal_seconds": lambda value: _seconds("refusal_seconds", value),
            "copy_threads": lambda value: read_count("copy_threads", value),
            "prefault": lambda value: read_bool("prefault", value),
        }
        given: dict[str, Any] = {
            name: checks.get(name, str)(extra[name]) for name in cls.__dataclass_fields__ if extra.get(name) is not None
        }
        return cls(**given)


def actor_name(member: str) -> str:
    """Name of the Ray actor of a pool's member."""
    return f"hicache-storage:{member}"


def _seconds(name: str, value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = 0.0
    if not seconds > 0:
        raise BackendError(f"{name} is {value!r}; use a number of seconds above 0")
    return seconds
