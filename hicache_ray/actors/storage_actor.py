"""A storage actor: one member of the L3 pool, a shard on an arena in shared memory (docs/design.md 6).

An actor that dies is started again by Ray, on its old node where that lives, and serves what its arena holds.
"""

from __future__ import annotations

import logging
import os
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import ray

from hicache_ray.actors.directory import Location, publish_locations
from hicache_ray.metrics import RayExporter, ShardMetrics
from hicache_ray.storage.base import StorageCounters
from hicache_ray.storage.breaker import Breaker
from hicache_ray.storage.pool.member import PoolMember
from hicache_ray.storage.pool.membership import Membership
from hicache_ray.storage.pool.near import NearServer
from hicache_ray.storage.pool.options import DEFAULT_POOL, actor_name
from hicache_ray.storage.pool.ray_channel import PoolDirectory, RayChannel
from hicache_ray.storage.pool.rebalance import Rebalancer
from hicache_ray.storage.pool.rebalance_plan import BalanceReport, RebalanceOptions
from hicache_ray.storage.pool.service import ShardService
from hicache_ray.storage.shard.arena import Arena
from hicache_ray.storage.shard.files import SHARED_MEMORY, ProcessId, arena_path, sweep
from hicache_ray.storage.shard.grants import NamespaceLimit, ShardStats
from hicache_ray.storage.shard.layout import ArenaError, ArenaGeometry, ArenaLocked
from hicache_ray.storage.shard.shard import Shard

logger = logging.getLogger("hicache_ray.actors.storage_actor")

LOCK_WAIT_SECONDS = 30.0
"""How long a restarted actor waits until its dead predecessor lets go of the arena: a large one takes long to unmap."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class StoragePoolConfig:
    """What a storage pool is made from.

    Attributes:
        name: found under it, one pool a name and Ray namespace. Letters, digits, "_", ".", "-", at most 64.
        actors: storage actors at start, spread over the nodes.
        bytes_per_actor: pages each may hold.
        replicas: actors that hold each page.
        policy: eviction policy of each actor ("lru", "lfu", "fifo", "s3fifo").
        limits: quotas (per actor) and TTL by namespace label.
        namespace: Ray namespace; None: the driver's.
        detached: the actors outlive the driver; else they end with it.
        nodes: ids of the nodes for the actors, in turn; empty: all living nodes, the driver's first.
        segment_bytes: size of an arena's segments; None: chosen from the budget.
        lease_seconds: after which a silent client's leases and reservations end.
        folder: where the arenas lie; must be in memory.
        start_timeout: seconds until every actor must be ready.
        rebalance: how much of an actor's time moving pages may take.
        metrics: the actors export their counters through Ray's metrics.
    """

    name: str = DEFAULT_POOL
    actors: int = 1
    bytes_per_actor: int = 1 << 30
    replicas: int = 1
    policy: str = "lru"
    limits: Mapping[str, NamespaceLimit] = field(default_factory=dict)
    namespace: str | None = None
    detached: bool = False
    nodes: Sequence[str] = ()
    segment_bytes: int | None = None
    lease_seconds: float = 30.0
    folder: str = str(SHARED_MEMORY)
    start_timeout: float = 120.0
    rebalance: RebalanceOptions = field(default_factory=RebalanceOptions)
    metrics: bool = True

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is no name for a pool: use 1 to 64 letters, digits, '_', '.' or '-'")
        if self.actors < 1 or self.replicas < 1:
            raise ValueError(f"a pool needs at least 1 actor and 1 replica, not {self.actors} and {self.replicas}")
        if self.replicas > self.actors:
            raise ValueError(f"{self.replicas} replicas need as many actors, the pool has {self.actors}")


@dataclass(frozen=True)
class StorageActorSpec:
    """What a storage actor is made from, also after a restart.

    Attributes:
        pool: the configuration of its pool.
        namespace, token: tell the pool from others of its name.
        member: name of the actor in the pool.
    """

    pool: StoragePoolConfig
    namespace: str
    token: str
    member: str = ""


class StorageActorInfo(NamedTuple):
    """What an actor says about itself; `start_seconds` is the time it took to make or open its arena and touch it,
    `balance` how far it is with moving pages to where they belong."""

    member: str
    pid: int
    node_id: str
    path: str
    arena_id: int
    epoch: int
    reopened_pages: int
    reconstructed: bool
    start_seconds: float
    balance: BalanceReport


ACTOR_OPTIONS: Mapping[str, Any] = {
    "num_cpus": 0,
    # One byte: Ray 2.60 does not keep to the preferred node for an actor that asks for nothing at all.
    "memory": 1,
    "max_restarts": -1,
    "max_task_retries": 0,
    "max_concurrency": 4,
    "concurrency_groups": {"ctl": 1, "alive": 1},
}
"""How `StorageActor` is made a Ray actor. No call is repeated by Ray: a client that got no answer decides itself."""


class StorageActor(ShardService):
    """See the module. A call may be repeated, every mutation is idempotent.

    The calls about pages are those of `ShardService`, in Ray's default concurrency group; what the calls about the pool
    ask is answered also while those are held up.
    """

    def __init__(self, spec: StorageActorSpec) -> None:
        started = time.perf_counter()
        context = ray.get_runtime_context()
        self._spec = spec
        self._node_id = str(context.get_node_id())
        with warnings.catch_warnings():
            # Ray 2.60 answers this through a property of its own that it has deprecated.
            warnings.simplefilter("ignore")
            self._reconstructed = bool(context.was_current_actor_reconstructed)
        sweep(Path(spec.pool.folder), _is_stale)
        self._arena = self._open_arena()
        shard = Shard(
            self._arena, policy=spec.pool.policy, limits=spec.pool.limits, lease_seconds=spec.pool.lease_seconds
        )
        directory = PoolDirectory(spec.pool.name, spec.namespace)
        super().__init__(shard, directory.read() or Membership(0, (spec.member,)))
        self._near = NearServer(self)
        self._rebalancer = Rebalancer(
            spec.member,
            self,
            self._connect,
            directory,
            spec.pool.rebalance,
            returned=self._reconstructed,
            on_gone=self._end,
        )
        self._rebalancer.start()
        self._metrics = ShardMetrics(shard.stats, pool=spec.pool.name, member=spec.member)
        self._exporter = RayExporter(self._metrics.registry, self._metrics.collect) if spec.pool.metrics else None
        self._start_seconds = time.perf_counter() - started
        # For the watch: an actor that hangs can't be asked where it is.
        publish_locations(actor_name(spec.member), [Location(os.getpid(), self._node_id)])

    @ray.method(concurrency_group="ctl")
    def describe(self) -> tuple[str, int, str]:
        """Path and id of the arena, and the address where clients on this node may call instead of over Ray."""
        return str(self._arena.path), self._arena.arena_id, self._near.address

    @ray.method(concurrency_group="ctl")
    def clear(self, label: bytes | None = None, prefix: bytes = b"") -> bytes:  # type: ignore[override]
        return super().clear(label, prefix)

    @ray.method(concurrency_group="ctl")
    def set_membership(self, message: bytes) -> int:  # type: ignore[override]
        return super().set_membership(message)

    @ray.method(concurrency_group="ctl")
    def balance(self) -> bytes:
        """See `Rebalancer`, as for the next one."""
        return self._rebalancer.balance()

    @ray.method(concurrency_group="ctl")
    def rebalance(self) -> int:
        return self._rebalancer.request()

    @ray.method(concurrency_group="ctl")
    def stats(self) -> ShardStats:
        """State and counters of the shard."""
        return self.shard.stats()

    @ray.method(concurrency_group="ctl")
    def info(self) -> StorageActorInfo:
        """What this actor is and where."""
        return StorageActorInfo(
            member=self._spec.member,
            pid=os.getpid(),
            node_id=self._node_id,
            path=str(self._arena.path),
            arena_id=self._arena.arena_id,
            epoch=self.membership.epoch,
            reopened_pages=self.shard.stats().reopened,
            reconstructed=self._reconstructed,
            start_seconds=self._start_seconds,
            balance=self._rebalancer.report,
        )

    @ray.method(concurrency_group="alive")
    def ping(self) -> None:
        """A sign of life, given also while other calls take long."""

    @ray.method(concurrency_group="ctl")
    def spec(self) -> StorageActorSpec:
        """What this actor was made from."""
        return self._spec

    @ray.method(concurrency_group="ctl")
    def audit(self, read_pages: bool) -> str:
        """What is wrong with the shard, "" when nothing is; see `Shard.check_integrity`."""
        try:
            self.shard.check_integrity(read_pages=read_pages)
        except AssertionError as error:
            return str(error) or "inconsistent"
        return ""

    @ray.method(concurrency_group="ctl")
    def shut_down(self) -> None:
        """Delete the arena: its pages are gone when the last process lets go of it. The actor is to be killed next."""
        self._rebalancer.stop()
        self._near.close()  # the process outlives its kill by a moment, in which it must store nothing more
        self._arena.remove()

    def _connect(self, member: str) -> PoolMember:
        """Another member of the pool, to bring pages to."""
        options = self._spec.pool.rebalance
        return PoolMember(
            member,
            RayChannel(actor_name(member), self._spec.namespace, options.call_timeout),
            Breaker(),
            StorageCounters(),
            call_timeout=options.call_timeout,
            use_shm=options.transport == "auto",
            prefault=False,
        )

    def _end(self) -> None:
        """This actor has left the pool, and the driver that wanted it did not live to end it."""
        logger.warning("storage actor %s has left the pool and ends itself", self._spec.member)
        self._rebalancer.stop()
        self._arena.remove()
        ray.kill(ray.get_actor(actor_name(self._spec.member), namespace=self._spec.namespace), no_restart=True)

    def _open_arena(self) -> Arena:
        spec = self._spec
        path = arena_path(Path(spec.pool.folder), spec.member, spec.token)
        if self._reconstructed:
            arena = _take_over(path)
            if arena is not None:
                return arena
        geometry = ArenaGeometry.of(spec.pool.bytes_per_actor, spec.pool.segment_bytes)
        arena = Arena.create(path, geometry, self._owner_facts())
        # Only a new arena: the memory of an old one exists, and mapping it would keep its pages away for longer.
        arena.prefault()
        return arena

    def _owner_facts(self) -> dict[str, str | int]:
        raylet = ProcessId.running(os.getppid()) or ProcessId(0, 0)
        return {
            "service": self._spec.pool.name,
            "namespace": self._spec.namespace,
            "token": self._spec.token,
            "member": self._spec.member,
            "raylet_pid": raylet.pid,
            "raylet_started": raylet.started,
        }


def _is_stale(owner: Mapping[str, Any]) -> bool:
    """Whether the actor that made an arena can't come back: its node's Ray is gone, or its pool is."""
    raylet = ProcessId(_number(owner, "raylet_pid"), _number(owner, "raylet_started"))
    if not raylet.alive:
        return True
    if raylet != ProcessId.running(os.getppid()):
        return False
    namespace, member = str(owner.get("namespace", "")), str(owner.get("member", ""))
    membership = PoolDirectory(str(owner.get("service", "")), namespace).read()
    if membership is None or membership.token != owner.get("token") or member not in membership.members:
        return True
    return not actor_exists(member, namespace)


def _number(owner: Mapping[str, Any], name: str) -> int:
    value = owner.get(name, 0)
    return value if isinstance(value, int) else 0


def actor_exists(member: str, namespace: str) -> bool:
    """Whether a pool's member runs or is being started again by Ray."""
    try:
        ray.get_actor(actor_name(member), namespace=namespace)
    except ValueError:
        return False
    return True


def _take_over(path: Path) -> Arena | None:
    """The arena of this actor's dead predecessor, None when there is none that can be read (another node, damaged)."""
    deadline = time.monotonic() + LOCK_WAIT_SECONDS
    while True:
        try:
            return Arena.open(path)
        except ArenaLocked:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        except (FileNotFoundError, ArenaError) as error:
            logger.warning("starting with an empty arena, the old one can't be used: %s", error)
            return None
