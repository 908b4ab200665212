"""Audit of a running service: every group's ranks, and the storage actors with their arenas, counted anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray

from hicache_ray.actors.storage_actor import StorageActorInfo
from hicache_ray.actors.storage_pool import StoragePool
from hicache_ray.rank.group import GroupError
from hicache_ray.service import Service
from hicache_ray.storage.shard.files import arenas_of
from hicache_ray.storage.shard.grants import ShardStats


@dataclass(frozen=True)
class StorageAudit:
    """What one storage actor holds.

    Attributes:
        member: its name; the other numbers are 0 where it is away.
        pages, used_bytes, total_bytes: its shard's.
        reserved, leased: slots that clients write to and pages that they read, now.
        arena: its arena file.
    """

    member: str
    pages: int = 0
    used_bytes: int = 0
    total_bytes: int = 0
    reserved: int = 0
    leased: int = 0
    arena: str = ""


@dataclass(frozen=True)
class ServiceAudit:
    """What was counted, and a sentence for each thing that does not add up.

    Attributes:
        groups: audits of the ranks (`rank.audit.RankAudit` as dicts), by group.
        storage: one entry a storage actor.
        faults: empty when everything adds up.
    """

    groups: dict[str, list[dict[str, Any]]]
    storage: tuple[StorageAudit, ...] = ()
    faults: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)


def audit_service(service: Service, groups: Sequence[str], *, read_pages: bool = False) -> ServiceAudit:
    """Counts slots, bytes, references, leases and arenas of a service.

    Args:
        service: may be in use meanwhile: each rank is counted between two of its steps.
        groups: those of its groups that are counted.
        read_pages: also compare every page in L3 with its checksum.
    """
    counted: dict[str, list[dict[str, Any]]] = {}
    faults: list[str] = []
    for name in groups:
        try:
            counted[name] = service.group(name).audit()
        except GroupError as error:
            faults.append(f"group {name}: not audited: {error}")
            continue
        faults += [f"group {name}, rank {row['rank']}: {fault}" for row in counted[name] for fault in row["faults"]]
    if service.storage is None:
        return ServiceAudit(counted, (), tuple(faults))
    idle = set(groups) == set(service.groups) == set(counted) and all(
        not any(row["in_flight"].values()) for rows in counted.values() for row in rows
    )
    storage, found = _audit_storage(service.storage, read_pages=read_pages, idle=idle)
    return ServiceAudit(counted, storage, tuple(faults + found))


def _audit_storage(pool: StoragePool, *, read_pages: bool, idle: bool) -> tuple[tuple[StorageAudit, ...], list[str]]:
    infos, stats, texts = pool.info(), pool.stats(), pool.audit(read_pages=read_pages)
    audits, faults = [], []
    for member in pool.membership.members:
        info, stat, text = infos[member], stats[member], texts[member]
        if info is None or stat is None or text is None:
            audits.append(StorageAudit(member))
            faults.append(f"storage actor {member} is away")
            continue
        audits.append(
            StorageAudit(
                member, stat.pages, stat.used_bytes, stat.total_bytes, stat.reserved, stat.leased, arena=info.path
            )
        )
        faults += [f"storage actor {member}: {fault}" for fault in _faults_of(pool, info, stat, text, idle=idle)]
    faults += _left_arenas(pool, infos)
    return tuple(audits), faults


def _faults_of(pool: StoragePool, info: StorageActorInfo, stat: ShardStats, text: str, *, idle: bool) -> list[str]:
    found = [text] if text else []
    if info.epoch != pool.membership.epoch:
        found.append(f"it is at epoch {info.epoch} of the membership, the pool is at {pool.membership.epoch}")
    if stat.used_bytes > stat.total_bytes:
        found.append(f"{stat.used_bytes} bytes are used of {stat.total_bytes}")
    if idle and (stat.reserved or stat.leased):
        found.append(f"{stat.reserved} slots are reserved and {stat.leased} pages leased, and no rank reads or writes")
    if info.node_id == ray.get_runtime_context().get_node_id() and not Path(info.path).exists():
        found.append(f"its arena {info.path} is gone from this node")
    return found


def _left_arenas(pool: StoragePool, infos: Mapping[str, StorageActorInfo | None]) -> list[str]:
    """Arenas of this pool on this node that none of its actors has."""
    known = {Path(info.path) for info in infos.values() if info is not None}
    if len(known) < len(infos):
        return []  # an actor that is away may own what is found
    folders = {path.parent for path in known}
    left = {path for folder in folders for path in arenas_of(folder, pool.membership.token)} - known
    return [f"no storage actor has the arena {path}" for path in sorted(left)]
