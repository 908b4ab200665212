"""The public face: start a cache service on Ray, find a running one by name, get its groups and its store.

service = hicache_ray.start(HiCacheConfig(tp_size=2, hicache_storage_backend="ray"))
group = service.group("instance-0")
...
service.stop()
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

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

logger = logging.getLogger("hicache_ray.service")

DEFAULT_NAME, DEFAULT_GROUP = "hicache", "instance-0"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,48}")


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
