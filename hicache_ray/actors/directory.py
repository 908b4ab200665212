"""Which services run in a Ray cluster: one small record each in Ray's internal key-value store.

The record outlives the process that wrote it, so whoever finds one still has to find its actors.

Names under which the actors of a service are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgpack
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put

KV_NAMESPACE = b"hicache_ray.services"  # without a colon: Ray cuts the keys it lists at the first one
GENERATIONS = b"hicache_ray.generations"
RANKS = b"hicache_ray.ranks"


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
    _internal_kv_put(record.name.encode(), msgpack.packb(asdict(record)), overwrite=True, namespace=KV_NAMESPACE)


def look_up(name: str) -> ServiceRecord | None:
    """The record of a service, or None when there is none."""
    packed = _internal_kv_get(name.encode(), namespace=KV_NAMESPACE)
    if packed is None:
        return None
    fields = msgpack.unpackb(packed)
    return ServiceRecord(**{**fields, "groups": tuple(fields["groups"])})


def forget(name: str) -> None:
    """Drops a service's record and what is known of its groups; nothing happens when there is none."""
    _internal_kv_del(name.encode(), namespace=KV_NAMESPACE)
    for namespace in (GENERATIONS, RANKS):
        _internal_kv_del(f"{name}:".encode(), del_by_prefix=True, namespace=namespace)


def publish_generation(group: str, generation: int) -> None:
    """Notes the generation a group (by its full name) is at."""
    _internal_kv_put(group.encode(), str(generation).encode(), overwrite=True, namespace=GENERATIONS)


def generation_of(group: str) -> int:
    """The generation a group was last known to be at; 0 when it has none."""
    return int(_internal_kv_get(group.encode(), namespace=GENERATIONS) or b"0")


def publish_ranks(group: str, places: Sequence[tuple[int, str]]) -> None:
    """Notes the process id and node of each rank of a group, in rank order: where to end one that hangs."""
    _internal_kv_put(group.encode(), msgpack.packb([list(place) for place in places]), overwrite=True, namespace=RANKS)


def ranks_of(group: str) -> list[tuple[int, str]]:
    """What was last noted by `publish_ranks`; empty when nothing was."""
    packed = _internal_kv_get(group.encode(), namespace=RANKS)
    return [(pid, node) for pid, node in msgpack.unpackb(packed)] if packed else []


def names() -> list[str]:
    """Names of all services with a record, sorted."""
    return sorted(key.decode() for key in _internal_kv_list(b"", namespace=KV_NAMESPACE))


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
