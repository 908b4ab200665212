"""Where the parts of a service are found: the names of its actors, and what is noted of it in Ray's internal KV.

What is noted outlives the process that noted it, so whoever finds a record still has to find its actors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put

RAY_NAMESPACE = "hicache_ray"
"""Ray namespace of all named actors of this package."""


def group_name(service: str, group: str) -> str:
    """Full name of a group, unique in the cluster."""
    return f"{service}:{group}"


def rank_name(group: str, rank: int) -> str:
    """Name of a rank's actor, from its group's full name."""
    return f"{group}:rank{rank}"


def supervisor_name(service: str) -> str:
    """Name of a service's supervisor actor."""
    return f"{service}:supervisor"


_SERVICES = b"hicache_ray.services"  # without a colon: Ray cuts the keys it lists at the first one
_GENERATIONS = b"hicache_ray.generations"
_LOCATIONS = b"hicache_ray.ranks"
"""Namespaces in Ray's internal KV."""


class Location(NamedTuple):
    """Where an actor's process was last seen: what it takes to end one that hangs."""

    pid: int
    node_id: str


@dataclass(frozen=True)
class ServiceRecord:
    """What is needed to find a service again.

    Attributes:
        name: of the service.
        config: the resolved configuration, by option name.
        options: placement and deadlines of its groups.
        storage: name of its storage pool, or "".
        groups: names of its groups.
    """

    name: str
    config: dict[str, Any]
    options: dict[str, Any]
    storage: str
    groups: tuple[str, ...]


def publish(record: ServiceRecord) -> None:
    """Writes a service's record, in place of an older one."""
    _internal_kv_put(record.name.encode(), msgspec.msgpack.encode(record), overwrite=True, namespace=_SERVICES)


def look_up(name: str) -> ServiceRecord | None:
    """The record of a service, or None when there is none."""
    packed = _internal_kv_get(name.encode(), namespace=_SERVICES)
    return None if packed is None else msgspec.msgpack.decode(packed, type=ServiceRecord)


def forget(name: str) -> None:
    """Drops a service's record and what is known of its groups; nothing happens when there is none."""
    _internal_kv_del(name.encode(), namespace=_SERVICES)
    for namespace in (_GENERATIONS, _LOCATIONS):
        _internal_kv_del(f"{name}:".encode(), del_by_prefix=True, namespace=namespace)


def publish_generation(group: str, generation: int) -> None:
    """Notes the generation a group (by its full name) is at."""
    _internal_kv_put(group.encode(), str(generation).encode(), overwrite=True, namespace=_GENERATIONS)


def generation_of(group: str) -> int:
    """The generation a group was last known to be at; 0 when it has none."""
    return int(_internal_kv_get(group.encode(), namespace=_GENERATIONS) or b"0")


def publish_locations(of: str, locations: Sequence[Location]) -> None:
    """Notes where actors are, whom nobody could ask when they hang.

    Args:
        of: a group's full name, with the locations of its ranks in rank order; or the name of one actor.
        locations: replace those noted before.
    """
    _internal_kv_put(of.encode(), msgspec.msgpack.encode(locations), overwrite=True, namespace=_LOCATIONS)


def locations_of(of: str) -> list[Location]:
    """What was last noted by `publish_locations`; empty when nothing was."""
    packed = _internal_kv_get(of.encode(), namespace=_LOCATIONS)
    return msgspec.msgpack.decode(packed, type=list[Location]) if packed else []


def forget_locations(of: str) -> None:
    """Drops what `publish_locations` noted under this name; nothing happens when it noted nothing."""
    _internal_kv_del(of.encode(), namespace=_LOCATIONS)


def names() -> list[str]:
    """Names of all services with a record, sorted."""
    return sorted(key.decode() for key in _internal_kv_list(b"", namespace=_SERVICES))
