"""A service under a fault plan: serves verified requests, breaks things, and says what came of it.

report = run_chaos(ChaosSettings(minutes=1, seed=3), plan=None)   # None: kills, drawn from the seed
assert not report.wrongs
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hicache_ray.actors.group import TPGroup
from hicache_ray.config import HiCacheConfig
from hicache_ray.deadline import wait_until
from hicache_ray.faults.audit import audit_at_rest
from hicache_ray.faults.client import ChaosClient, endless_chat
from hicache_ray.faults.kinds import CORRUPT
from hicache_ray.faults.plan import FaultPlan, Identity
from hicache_ray.faults.report import Audit, ChaosReport
from hicache_ray.faults.service import ActorProcess, FaultRunner, ServiceFaults, processes_of
from hicache_ray.faults.watch import ChaosWatch
from hicache_ray.replay.chat import ChatSpec
from hicache_ray.replay.driver import ENGINE, RequestSource
from hicache_ray.replay.settings import ReplaySettings, replay_config
from hicache_ray.replay.traces import load_workload
from hicache_ray.service import RayStart, Service, start

DRAIN_SECONDS = 60.0
"""After the last fault: until everything is healed, and then until every request has ended."""
HUNG_SECONDS = 60.0
"""Beyond its deadline and a heal, what a step may take before it counts as hung."""


@dataclass(frozen=True)
class ChaosSettings:
    """A run under faults.

    Attributes:
        minutes: how long faults happen.
        seed: of the workload, and of a drawn plan.
        period: seconds between the faults of a drawn plan.
        kinds: weights of the kinds of a drawn plan.
        tp, instances, storage_actors, replicas: the service.
        attention: "mha" or "mla".
        concurrency: most requests of an instance in flight.
        chat: shape of the workload, as for a replay.
        heal_limit: seconds within which everything has to work again.
        deadlines: options of the service by name, on top of short ones.
    """

    minutes: float = 1.0
    seed: int = 0
    period: float = 5.0
    kinds: Mapping[str, float] = field(default_factory=lambda: {"kill": 1.0})
    tp: int = 2
    instances: int = 1
    storage_actors: int = 2
    replicas: int = 1
    attention: str = "mha"
    concurrency: int = 4
    chat: str = "chat:sessions=24,turns=5,system=96,turn=24,answer=24"
    heal_limit: float = 15.0
    deadlines: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """How long faults happen."""
        return 60.0 * self.minutes


SHORT_DEADLINES = {"step_timeout": 6.0, "collective_timeout": 3.0, "storage_timeout": 3.0}


def chaos_config(settings: ChaosSettings) -> HiCacheConfig:
    """The service's configuration: tiers so small that pages move through all of them."""
    workload = load_workload(settings.chat, seed=settings.seed)
    longest = -(-workload.longest // 16) * 16
    sizes = ReplaySettings.of(
        tp=settings.tp,
        attention=settings.attention,
        l1_tokens=longest * (settings.concurrency + 1),
        l2_tokens=longest * (settings.concurrency + 1) * 3,
        l3_bytes=settings.storage_actors * (32 << 20),
        storage_actors=settings.storage_actors,
        prefetch_policy="wait_complete",
        storage_replicas=settings.replicas,
        **{**SHORT_DEADLINES, **settings.deadlines},
    )
    return replay_config(sizes, workload, storage_backend="ray")


def run_chaos(
    settings: ChaosSettings,
    plan: FaultPlan | None = None,
    *,
    ray_start: RayStart | None = None,
    progress: Callable[[str], None] | None = None,
) -> ChaosReport:
    """Starts a service, serves a chat under faults, waits until everything is healed, and audits it.

    Args:
        settings: of the run.
        plan: what happens; None: drawn from the seed.
        ray_start: how Ray is started where none runs.
        progress: told each fault as it happens, in words.

    Raises:
        FaultPlanError: the plan is about processes that are not there.
        ServiceError, GroupError: the service did not come up.
    """
    service = start(chaos_config(settings), name=f"chaos-{uuid.uuid4().hex[:8]}", ray_start=ray_start)
    try:
        groups = {
            name: service.group(name, engine=ENGINE)
            for name in (f"instance-{number}" for number in range(settings.instances))
        }
        return _Run(settings, service, groups, plan, progress or (lambda text: None)).run()
    finally:
        service.stop()


class _Run:
    """One run on a service that is up."""

    def __init__(
        self,
        settings: ChaosSettings,
        service: Service,
        groups: Mapping[str, TPGroup],
        plan: FaultPlan | None,
        progress: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self.service = service
        self.groups = groups
        drawn = plan or FaultPlan.random(
            processes_of(service), settings.seconds, seed=settings.seed, period=settings.period, kinds=settings.kinds
        )
        self.faults = ServiceFaults(service, drawn)
        self.watch = ChaosWatch()
        self.runner = FaultRunner(
            self.faults, seconds=settings.seconds, acted=self.watch.happened, told=progress, looked=self._looked
        )
        source = RequestSource(endless_chat(ChatSpec.parse(settings.chat), settings.seed))
        self.clients = [
            ChaosClient(
                name,
                group,
                source,
                concurrency=settings.concurrency,
                step_limit=service.config.step_timeout + settings.heal_limit + HUNG_SECONDS,
                stepped=self.watch.stepped,
            )
            for name, group in groups.items()
        ]
        for name, group in groups.items():
            tell_when_noticed(group, lambda name=name: self.watch.noticed(name))  # type: ignore[misc]

    def run(self) -> ChaosReport:
        try:
            self.runner.start()
            for client in self.clients:
                client.start()
            self.runner.wait()
            time.sleep(max(0.0, self.faults.started + self.settings.seconds - time.time()))
            self.faults.end()
            self._take_firings()
            wait_until(lambda: not self.watch.unhealed(), DRAIN_SECONDS)
            unended = self._drain()
        except BaseException:
            self._abandon()
            raise
        finally:
            self.runner.stop()
        hung = [client for client in self.clients if client.is_alive()]
        for client in hung:
            client.outcomes.hung += 1
        whole = not any(record.kind == CORRUPT for record in self.watch.records)
        found = Audit() if hung else audit_at_rest(self.service, self.groups, self.settings.seed, read_pages=whole)
        return ChaosReport(
            plan=self.faults.plan,
            records=sorted(self.watch.records, key=lambda record: record.at),
            outcomes=[client.outcomes for client in self.clients],
            audit=found,
            began=self.faults.started,
            seconds=self.settings.seconds,
            heal_limit=self.settings.heal_limit,
            unended=unended,
            settings=asdict(self.settings),
        )

    def _looked(self, began: float, answers: Mapping[Identity, ActorProcess]) -> None:
        self.watch.looked(began, answers)
        self._take_firings()

    def _take_firings(self) -> None:
        """Adds what happened at the actors' points."""
        for firing in self.faults.firings():
            self.watch.happened(firing)

    def _drain(self) -> int:
        """Lets every request end. Returns how many did not."""
        for client in self.clients:
            client.drain()
        wait_until(lambda: not any(client.is_alive() for client in self.clients), DRAIN_SECONDS)
        return sum(client.unended for client in self.clients if client.is_alive())

    def _abandon(self) -> None:
        """Nobody may step a group while its service is stopped."""
        for client in self.clients:
            client.leave(self.service.config.step_timeout)


def tell_when_noticed(group: TPGroup, noticed: Callable[[], None]) -> None:
    """Calls `noticed` each time a step of the group finds it broken, before it is rebuilt."""
    heal = group.exchange.healer
    assert heal is not None, "a group under faults needs a healer"

    def healer(seen: int) -> tuple[int, Sequence[int]]:
        noticed()
        return heal(seen)

    group.exchange.healer = healer
