"""The supervisor of a service: it notices who died or hangs, and sees to it that the service goes on.

A rank that died comes back empty, because Ray starts its actor again; a rank that hangs gives no sign of life. The
supervisor looks at all ranks once a second (`_watch`, `_is_broken`) and has a broken group recovered (`_recover`; the
steps are in `actors.recovery`). A driver whose step failed before the supervisor saw it asks for the same (`recover`).
A storage actor that died is started again by Ray alone; one that hangs is ended here (`actors.watch`).

It keeps nothing of its own: groups, generations and locations are in the directory, so its own death is harmless. Ray
starts it again and it reads them again; a supervisor that hangs is ended by the driver that waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from hicache_ray import faultpoints
from hicache_ray.actors.directory import (
    RAY_NAMESPACE,
    generation_of,
    group_name,
    locations_of,
    look_up,
    publish_generation,
    publish_locations,
    rank_name,
    supervisor_name,
)
from hicache_ray.actors.recovery import RankInfo, Recovered, Recovery
from hicache_ray.actors.watch import StorageHeal, StorageWatch
from hicache_ray.deadline import Deadline
from hicache_ray.metrics import HealMetrics, RayExporter
from hicache_ray.rank.group import GroupError

_remote: Any = ray.remote
"""Untyped: Ray's stubs do not know concurrency groups."""

_beside: Any = ray.method
"""Untyped: Ray's stubs would hide the methods' own types inside the class."""

logger = logging.getLogger("hicache_ray.supervisor")

_STATUS_THREAD = {"status": 1}
STATUS_SECONDS = 10.0
HISTORY = 1000
"""Most heals that are remembered."""


class Heal(NamedTuple):
    """One rebuild of a group, for the record. Times are seconds since the epoch."""

    group: str
    noticed_at: float
    healed_at: float
    generation: int
    fresh: tuple[int, ...]
    pages: int
    retained: int
    error: str = ""


class SupervisorServer:
    """The actor's class.

    Args:
        service: whose groups it watches.
        period: seconds between two looks at all ranks.
        patience: seconds a rank may be silent before its group is rebuilt, or a storage actor before it is ended.
    """

    def __init__(self, service: str, period: float = 1.0, patience: float = 10.0) -> None:
        self.service = service
        self.period = period
        self.patience = patience
        self.heals: list[Heal] = []
        self.storage_heals: list[StorageHeal] = []
        self.metrics = HealMetrics(service)
        self._exporter: RayExporter | None = None
        self._one_at_a_time = threading.Lock()
        self._seen: dict[str, dict[int, RankInfo]] = {}
        self._silent_since: dict[tuple[str, int], float] = {}
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="hicache-supervisor", daemon=True).start()
        threading.Thread(target=self._watch_storage, name="hicache-storage-watch", daemon=True).start()

    def recover(self, group: str, seen: int) -> tuple[int, tuple[int, ...]]:
        """Rebuilds a group that its caller found broken at generation `seen`. Returns (generation, pids) after it.

        When somebody else rebuilt it meanwhile, the newer generation is returned and nothing is done.

        Raises:
            GroupError: it can't be rebuilt, or the service does not know it.
        """
        with self._one_at_a_time:
            full = group_name(self.service, group)
            current = generation_of(full)
            infos = self._ping(group)
            if current > seen and len(infos) == self._size(group) and not any(i.fresh for i in infos.values()):
                return current, tuple(infos[rank].pid for rank in sorted(infos))
            recovered = self._recover(group)
            return recovered.generation, tuple(location.pid for location in recovered.locations)

    @_beside(concurrency_group="status")
    def history(self) -> list[Heal]:
        """The rebuilds since this supervisor's process began, oldest first."""
        return list(self.heals)

    @_beside(concurrency_group="status")
    def storage_history(self) -> list[StorageHeal]:
        """The storage actors that were ended since this supervisor's process began, oldest first."""
        return list(self.storage_heals)

    @_beside(concurrency_group="status")
    def stop(self) -> None:
        """Ends the watch; a rebuild under way ends first. May be called twice."""
        self._stopped.set()
        with self._one_at_a_time:
            pass

    def _watch(self) -> None:
        while not self._stopped.wait(self.period):
            try:
                faultpoints.reach("supervisor.watch")
                record = look_up(self.service)
                for group in record.groups if record else ():
                    if self._is_broken(group):
                        with self._one_at_a_time:
                            if self._is_broken(group) and not self._stopped.is_set():
                                self._recover(group)
            except Exception:
                logger.exception("the watch over service %s failed once; it goes on", self.service)

    def _watch_storage(self) -> None:
        """In a thread of its own: neither a rebuild nor a storage actor that hangs delays the other."""
        watch = StorageWatch(self.service, self.patience)
        while not self._stopped.wait(self.period):
            try:
                ended = watch.look(self.period)
            except Exception:
                logger.exception("the watch over the storage of service %s failed once; it goes on", self.service)
                continue
            self.storage_heals = [*self.storage_heals, *ended][-HISTORY:]

    def _is_broken(self, group: str) -> bool:
        """Whether a rank came back empty, or has been silent for too long."""
        infos = self._ping(group)
        now = time.monotonic()
        broken = False
        for rank in range(self._size(group)):
            info = infos.get(rank)
            if info is None:
                since = self._silent_since.setdefault((group, rank), now)
                broken = broken or now - since >= self.patience
                continue
            self._silent_since.pop((group, rank), None)
            broken = broken or info.fresh
        return broken

    def _ping(self, group: str) -> dict[int, RankInfo]:
        refs = {}
        for rank in range(self._size(group)):
            if faultpoints.fails("supervisor.ping", rank_name(group, rank)):
                continue
            try:
                refs[self._actor(group, rank).ping.remote()] = rank
            except ValueError:
                continue
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=self.period) if refs else ([], [])
        infos = {}
        for ref in done:
            try:
                infos[refs[ref]] = ray.get(ref)
            except RayError as error:
                logger.debug("rank %d of %s does not answer: %s", refs[ref], group, error)
        self._note(group, {rank: info for rank, info in infos.items() if not info.fresh})
        return infos

    def _note(self, group: str, infos: dict[int, RankInfo]) -> None:
        """Remembers where the ranks are, also for this supervisor's successor: who hangs can't be asked."""
        seen = self._seen.setdefault(group, {})
        before = dict(seen)
        seen.update(infos)
        locations = [seen[rank].location for rank in sorted(seen)]
        if len(locations) == self._size(group) and locations != [before[rank].location for rank in sorted(before)]:
            publish_locations(group_name(self.service, group), locations)

    def _recover(self, group: str) -> Recovered:
        noticed, full = time.time(), group_name(self.service, group)
        faultpoints.reach("supervisor.recover")
        record = look_up(self.service)
        if record is None or group not in record.groups:
            raise GroupError(f"service {self.service} has no group {group!r}")
        actors = [self._actor(group, rank) for rank in range(self._size(group))]
        shares = record.config["attention"] == "mla"
        known = self._seen.get(group, {})
        begin = max([generation_of(full), *(info.generation for info in known.values())]) + 1
        try:
            recovered = Recovery(full, actors, shares_bytes=shares).run(begin, locations_of(full))
        except GroupError as error:
            self._remember(Heal(group, noticed, time.time(), begin, (), 0, 0, str(error)))
            raise
        publish_generation(full, recovered.generation)
        publish_locations(full, recovered.locations)
        pages, retained = recovered.pages, recovered.retained
        self._remember(Heal(group, noticed, time.time(), recovered.generation, recovered.fresh, pages, retained))
        return recovered

    def _remember(self, heal: Heal) -> None:
        self.heals = [*self.heals[-HISTORY + 1 :], heal]
        self.metrics.observe(heal.group, heal.healed_at - heal.noticed_at, healed=not heal.error)
        record = look_up(self.service)
        if self._exporter is None and record is not None and record.config["enable_metrics"]:
            self._exporter = RayExporter(self.metrics.registry)
        logger.warning("group %s: %s", heal.group, heal)

    def _size(self, group: str) -> int:
        record = look_up(self.service)
        return int(record.config["tp_size"]) if record else 0

    def _actor(self, group: str, rank: int) -> Any:
        return ray.get_actor(rank_name(group_name(self.service, group), rank), namespace=RAY_NAMESPACE)


class SupervisorClient:
    """A service's supervisor as its users see it; outlasts the supervisor's restarts."""

    def __init__(self, service: str, timeout: float = 120.0, patience: float = 5.0) -> None:
        """
        Args:
            service: whose supervisor.
            timeout: seconds that a rebuild may take.
            patience: seconds without a sign of life after which the supervisor counts as hung.
        """
        self.service = service
        self.timeout = timeout
        self.patience = patience
        self._owned: Any = None

    @classmethod
    def start(cls, service: str, *, detached: bool, silence: float) -> SupervisorClient:
        """Starts the supervisor's actor.

        Args:
            service: whose supervisor.
            detached: it outlives this process.
            silence: seconds after which a rank or a storage actor without a sign of life counts as hung.
        """
        actor = _remote(concurrency_groups=_STATUS_THREAD)(SupervisorServer).options(
            name=supervisor_name(service),
            namespace=RAY_NAMESPACE,
            lifetime="detached" if detached else None,
            num_cpus=0,
            max_restarts=-1,
        )
        client = cls(service)
        # An actor that is not detached ends with its last handle.
        client._owned = actor.remote(service, patience=silence)
        return client

    def recover(self, group: str, seen: int) -> tuple[int, tuple[int, ...]]:
        """As `SupervisorServer.recover`; asks again when the supervisor itself died, and ends one that hangs.

        Raises:
            GroupError: the group can't be rebuilt, or no supervisor answered in time.
        """
        deadline = Deadline(self.timeout)
        while not deadline.passed:
            try:
                actor = self._actor()
                ref = actor.recover.remote(group, seen)
                while not ray.wait([ref], timeout=self.patience)[0]:
                    if deadline.passed:
                        break
                    self._end_if_silent(actor)
                else:
                    return ray.get(ref)
            except RayActorError as error:
                logger.info("the supervisor of %s is away: %s", self.service, error)
                time.sleep(0.2)
            except RayTaskError as error:
                raise GroupError(f"group {group} can't be rebuilt: {error.cause}") from error
        raise GroupError(f"group {group}: no supervisor answered within {self.timeout:g} s")

    def _end_if_silent(self, actor: Any) -> None:
        """A supervisor that gives no sign of life beside its work is ended: Ray starts it again."""
        try:
            ray.get(actor.history.remote(), timeout=self.patience)
        except GetTimeoutError:
            logger.warning("the supervisor of %s is silent and is started again", self.service)
            ray.kill(actor, no_restart=False)

    def history(self) -> list[Heal]:
        """The rebuilds since the supervisor's process began."""
        return self._status("history")

    def storage_history(self) -> list[StorageHeal]:
        """The storage actors that were ended since the supervisor's process began."""
        return self._status("storage_history")

    def stop(self) -> None:
        """Ends the supervisor for good; nothing happens when there is none."""
        try:
            actor = ray.get_actor(supervisor_name(self.service), namespace=RAY_NAMESPACE)
        except ValueError:
            return
        try:
            ray.get(actor.stop.remote(), timeout=10.0)
        except RayError as error:
            logger.warning("the supervisor of %s did not stop by itself: %s", self.service, error)
        ray.kill(actor, no_restart=True)

    def _status(self, method: str) -> Any:
        try:
            return ray.get(getattr(self._actor(), method).remote(), timeout=STATUS_SECONDS)
        except GetTimeoutError:
            raise GroupError(f"the supervisor of {self.service} gave no answer in {STATUS_SECONDS:g} s") from None
        except RayActorError as error:
            raise GroupError(f"the supervisor of {self.service} is being started again: {error}") from error

    def _actor(self) -> Any:
        try:
            return ray.get_actor(supervisor_name(self.service), namespace=RAY_NAMESPACE)
        except ValueError:
            raise GroupError(f"service {self.service} has no supervisor: it is not running") from None
