"""The public face: start a cache service on Ray, find a running one by name, get its groups and its store.

service = hicache_ray.start(HiCacheConfig(tp_size=2, hicache_storage_backend="ray"))
group = service.group("instance-0")
...
service.stop()

Audit of a running service: every group's ranks, and the storage actors with their arenas, counted anew.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from hicache_ray.actors.cluster import RayStart, enter, join
from hicache_ray.actors.directory import RAY_NAMESPACE, ServiceRecord, forget, group_name, look_up, publish
from hicache_ray.actors.group import GroupOptions, Healer, TPGroup
from hicache_ray.actors.rank import RankSpec
from hicache_ray.actors.storage_pool import StoragePool, StoragePoolConfig
from hicache_ray.actors.supervisor import SupervisorClient
from hicache_ray.config import HiCacheConfig
from hicache_ray.config.extra import parse_extra_config
from hicache_ray.rank.group import GroupError
from hicache_ray.storage.shard.files import arenas_of

if TYPE_CHECKING:
    from hicache_ray.actors.storage_actor import StorageActorInfo
    from hicache_ray.actors.storage_pool import StoragePool
    from hicache_ray.storage.shard.grants import ShardStats


logger = logging.getLogger("hicache_ray.service")

DEFAULT_NAME = "hicache"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,48}")
DEFAULT_GROUP = "instance-0"


class ServiceError(RuntimeError):
    """A service can't be started or found; the text says why and what would work."""


def start(
    config: HiCacheConfig | None = None,
    *,
    name: str = DEFAULT_NAME,
    address: str | None = None,
    detached: bool = False,
    options: GroupOptions | None = None,
    ray_start: RayStart | None = None,
) -> Service:
    """Starts a service: joins the Ray cluster, or starts one on this machine where none runs, and starts the store.

    Groups are started by `Service.group`.

    Args:
        config: what every group is configured with; it is resolved here, with one warning per adjustment.
        name: under which others find it; one service a name.
        address: of the Ray cluster; None: the one this process is in, else `RAY_ADDRESS`, else a new one here.
        detached: groups and store outlive this process, until somebody calls `stop`.
        options: placement and deadlines of the groups.
        ray_start: how Ray is started, if it has to be.

    Raises:
        ConfigError: the configuration can't work.
        ConnectionError: the cluster named does not answer.
        ServiceError: a service of that name runs already, or the configuration is none.
        StoragePoolError: the storage actors did not come up.
    """
    if not isinstance(config, HiCacheConfig | None):
        raise ServiceError(f"the configuration is a {type(config).__name__}: give HiCacheConfig.from_mapping of it")
    if not _NAME.fullmatch(name):
        raise ServiceError(f"{name!r} is no name for a service: use 1 to 48 letters, digits, '_' or '-'")
    resolved = (config or HiCacheConfig()).resolve().config
    owns_ray = enter(address, ray_start or RayStart())
    try:
        if look_up(name) is not None:
            raise ServiceError(
                f"a service named {name!r} runs already: connect({name!r}), or start one of another name"
            )
        chosen = replace(options or GroupOptions(step_timeout=resolved.step_timeout), detached=detached)
        storage = _start_storage(name, resolved, detached)
        silence = max(chosen.step_timeout, resolved.storage_timeout)
        supervisor = SupervisorClient.start(name, detached=detached, silence=silence)
        service = Service(name, resolved, storage, chosen, owns_ray=owns_ray, supervisor=supervisor)
        service._publish()
    except BaseException:
        if owns_ray:
            ray.shutdown()
        raise
    return service


def connect(name: str = DEFAULT_NAME, *, address: str | None = None) -> Service:
    """A service that runs already, started by this process or another.

    Raises:
        ConnectionError: the cluster named does not answer.
        ServiceError: there is none of that name in the cluster.
    """
    join(address)
    record = look_up(name)
    if record is None:
        raise ServiceError(f"no service named {name!r} runs in this Ray cluster: start one with hicache_ray.start")
    config = HiCacheConfig.from_mapping(record.config)
    storage = StoragePool.connect(record.storage, RAY_NAMESPACE) if record.storage else None
    options = GroupOptions(**record.options)
    return Service(name, config, storage, options, groups={group: None for group in record.groups})


class Service:
    """Groups of ranks and the store they share. Made by `start` and `connect`; not thread-safe."""

    def __init__(
        self,
        name: str,
        config: HiCacheConfig,
        storage: StoragePool | None,
        options: GroupOptions,
        *,
        groups: Mapping[str, TPGroup | None] | None = None,
        owns_ray: bool = False,
        supervisor: SupervisorClient | None = None,
    ) -> None:
        self.name = name
        self.config = config
        self.storage = storage
        self.options = options
        self._groups: dict[str, TPGroup | None] = dict(groups or {})
        self._owns_ray = owns_ray
        self._stopped = False
        self.supervisor = supervisor or SupervisorClient(name)

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups of this service."""
        return tuple(self._groups)

    def group(
        self,
        name: str = DEFAULT_GROUP,
        *,
        engine: str = "",
        engine_options: Mapping[str, Any] | None = None,
    ) -> TPGroup:
        """The group of that name; it is started where there is none yet.

        Args:
            name: of the model instance.
            engine: import path of the model's hook ("package.module:Class"), for a new group.
            engine_options: given to it.

        Raises:
            GroupError: the group can't be started, its actors are gone, or the service was stopped.
        """
        if self._stopped:
            raise GroupError(f"service {self.name} is stopped")
        known = self._groups.get(name)
        if known is not None:
            return known
        if not _NAME.fullmatch(name):
            raise GroupError(f"{name!r} is no name for a group: use 1 to 48 letters, digits, '_' or '-'")
        if name in self._groups:
            return self._connect(name)
        if look_up(self.name) is None:
            raise GroupError(f"service {self.name} was stopped by another driver: start it again")
        specs = self._specs(group_name(self.name, name), engine, engine_options or {})
        group = self._groups[name] = TPGroup.create(specs, self.options, self._healer(name))
        self._publish()
        return group

    def stop(self) -> None:
        """Ends the groups and the store, and Ray if `start` started it. May be called twice."""
        if self._stopped:
            return
        self._stopped = True
        self.supervisor.stop()
        for name, group in self._groups.items():
            try:
                (group or self._connect(name)).stop()
            except GroupError as error:
                logger.warning("group %s was gone when the service stopped: %s", name, error)
        if self.storage is not None:
            self.storage.stop()
        forget(self.name)
        if self._owns_ray:
            ray.shutdown()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _connect(self, name: str) -> TPGroup:
        full = group_name(self.name, name)
        group = self._groups[name] = TPGroup.connect(full, self.config.tp_size, self.options, self._healer(name))
        return group

    def _healer(self, group: str) -> Healer:
        return lambda seen: self.supervisor.recover(group, seen)

    def _specs(self, group: str, engine: str, engine_options: Mapping[str, Any]) -> list[RankSpec]:
        storage = self.storage.handle.options() if self.storage is not None else {}
        return [
            RankSpec(group, rank, self.config, storage, engine, dict(engine_options))
            for rank in range(self.config.tp_size)
        ]

    def _publish(self) -> None:
        publish(
            ServiceRecord(
                name=self.name,
                config=asdict(self.config),
                options=asdict(self.options),
                storage=self.storage.handle.name if self.storage is not None else "",
                groups=tuple(self._groups),
            )
        )


def _start_storage(name: str, config: HiCacheConfig, detached: bool) -> StoragePool | None:
    if config.hicache_storage_backend != "ray" or "pool" in parse_extra_config(
        config.hicache_storage_backend_extra_config
    ):
        return None
    return StoragePool.start(
        StoragePoolConfig(
            name=f"{name}.storage",
            actors=config.storage_actors,
            bytes_per_actor=config.storage_actor_bytes,
            replicas=config.storage_replicas,
            namespace=RAY_NAMESPACE,
            detached=detached,
            metrics=config.enable_metrics,
        )
    )


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
        groups: audits of the ranks (`inspection.RankAudit` as dicts), by group.
        storage: one entry a storage actor.
        faults: empty when everything adds up.
    """

    groups: dict[str, list[dict[str, Any]]]
    storage: tuple[StorageAudit, ...] = ()
    faults: tuple[str, ...] = field(default=())

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
