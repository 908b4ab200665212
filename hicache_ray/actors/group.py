"""TPGroup: a group whose ranks are Ray actors. How it is started, found, called, and rebuilt (docs/design.md 4)."""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from hicache_ray.actors.directory import RAY_NAMESPACE, publish_locations, rank_name
from hicache_ray.actors.errors import RankDied, StaleGeneration, StepCollision, StepTimeout
from hicache_ray.actors.rank import CONCURRENCY_GROUPS, RankServer, RankSpec
from hicache_ray.rank.group import Exchange, Group, GroupError, GroupRestarted
from hicache_ray.rank.request import RequestError
from hicache_ray.rank.step import ProtocolError, StepAnswer

_remote: Any = ray.remote
"""Untyped: Ray's stubs do not know concurrency groups."""

logger = logging.getLogger("hicache_ray.group")

INLINE_BYTES = 64 << 10
"""Larger step messages travel once, through the object store, instead of once a rank."""

COLLISION_WAIT = 0.02
"""Most seconds a driver waits before it sends a step again that met another driver's."""


@dataclass(frozen=True)
class GroupOptions:
    """How a group's actors are placed.

    Attributes:
        cpus, gpus: Ray resources of one rank.
        strategy: placement strategy of the ranks ("PACK": on one node where possible).
        detached: the actors outlive the driver that made them.
        step_timeout: seconds within which every rank has to answer a step.
        start_timeout: seconds within which all ranks have to be up.
        heal: a rank that dies is started again and the group rebuilt; else the group is broken for good.
    """

    cpus: float = 0.1
    gpus: float = 0.0
    strategy: str = "PACK"
    detached: bool = False
    step_timeout: float = 10.0
    start_timeout: float = 120.0
    heal: bool = True


@dataclass
class _Ranks:
    """The actors of a group and the placement group they live in."""

    actors: list[Any]
    placement: Any
    pids: list[int] = field(default_factory=list)


Healer = Callable[[int], tuple[int, Sequence[int]]]
"""Rebuilds a group found broken at a generation: returns its new generation and the ranks' process ids."""


class RayExchange(Exchange):
    """Calls the ranks' actors.

    Args:
        name: full name of the group.
        ranks: its actors.
        options: deadlines.
        healer: rebuilds the group where it is found broken; None: nobody does.
    """

    def __init__(self, name: str, ranks: _Ranks, options: GroupOptions, healer: Healer | None = None) -> None:
        self.name = name
        self.ranks = ranks
        self.options = options
        self.healer = healer if options.heal else None
        self._generation = 0
        self._driver = secrets.randbits(62)
        self._answered = -1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks.actors)

    @property
    def generation(self) -> int:
        """As last heard: another driver may have had the group rebuilt since."""
        return self._generation

    def join(self, generation: int) -> None:
        """Has the ranks enter the reduction of a generation."""
        self._generation = generation
        # Ranks come up at their own pace, and wait for one another only when all are up.
        infos = self.call("survey", timeout=self.options.start_timeout)
        # Before anything can hang: who hangs can't be asked where it is.
        publish_locations(self.name, [info.location for info in infos])
        self.ranks.pids = self.call("join", generation, timeout=self.options.start_timeout)

    def find_generation(self) -> None:
        """Asks the ranks which generation they are in; GroupError when they differ, or one has lost everything."""
        infos = self.call("survey")
        self.ranks.pids = [info.pid for info in infos]
        generations = {info.generation for info in infos}
        if len(generations) > 1 or any(info.fresh for info in infos):
            raise GroupError(f"group {self.name}: ranks are in different generations: {sorted(generations)}")
        (self._generation,) = generations

    def send(self, message: bytes) -> Sequence[StepAnswer]:
        """The ranks' answers to a step, which is sent again while it meets other drivers' steps."""
        payload = ray.put(message) if len(message) > INLINE_BYTES and self.size > 1 else message
        deadline = time.monotonic() + self.options.step_timeout
        while True:
            refs = [actor.step.remote(payload, self._driver) for actor in self.ranks.actors]
            try:
                messages = self._gather(refs, f"the step after {self._answered}", self.options.step_timeout)
            except StepCollision as collision:
                self._forget(refs)
                if time.monotonic() > deadline:
                    raise StepTimeout(f"group {self.name}: a step met other drivers' too often: {collision}") from None
                logger.debug("group %s: %s", self.name, collision)
                threading.Event().wait(random.uniform(0.0, COLLISION_WAIT))
            else:
                answers = [StepAnswer.decode(answer) for answer in messages]
                self._answered = answers[0].step
                return answers

    def call(self, method: str, *arguments: Any, timeout: float | None = None) -> list[Any]:
        """Calls a method of every actor."""
        refs = [getattr(actor, method).remote(*arguments) for actor in self.ranks.actors]
        return self._gather(refs, method, timeout or self.options.step_timeout)

    def rebuild(self) -> bool:
        """Has the healer rebuild the group."""
        if self.healer is None:
            return False
        self._generation, pids = self.healer(self._generation)
        self.ranks.pids = list(pids)
        return True

    def close(self) -> None:
        """Ends the actors and gives their placement back."""
        closing = [actor.close.remote() for actor in self.ranks.actors]
        ray.wait(closing, num_returns=len(closing), timeout=5.0)
        for actor in self.ranks.actors:
            ray.kill(actor, no_restart=True)
        if self.ranks.placement is not None:
            ray.util.remove_placement_group(self.ranks.placement)
        self.ranks = _Ranks([], None)

    def _forget(self, refs: list[Any]) -> None:
        """Takes every rank's answer to a step that collided: Ray prints errors that nobody has taken."""
        for ref in ray.wait(refs, num_returns=len(refs), timeout=self.options.step_timeout)[0]:
            with suppress(RayError):
                ray.get(ref)

    def _gather(self, refs: list[Any], what: str, timeout: float) -> list[Any]:
        try:
            return ray.get(refs, timeout=timeout)
        except GetTimeoutError:
            raise StepTimeout(f"group {self.name}: {what} was not answered within {timeout:g} s") from None
        except RayTaskError as error:
            if isinstance(error.cause, ProtocolError | RequestError | AssertionError | StepCollision):
                raise error.cause from None
            if isinstance(error.cause, StaleGeneration):
                raise GroupError(f"group {self.name}: {error.cause}") from None
            raise RankDied(f"group {self.name}: a rank failed in {what}: {error.cause}") from error
        except RayActorError as error:
            raise RankDied(f"group {self.name}: a rank died in {what}: {error}") from error


class TPGroup(Group):
    """A group of Ray actors, one a tensor-parallel rank."""

    exchange: RayExchange

    @classmethod
    def create(
        cls, specs: Sequence[RankSpec], options: GroupOptions | None = None, healer: Healer | None = None
    ) -> TPGroup:
        """Starts the actors of a group and joins them. Returns when every rank is ready.

        Args:
            specs: one a rank, in rank order, all of one group.
            options: placement and deadlines.
            healer: rebuilds it where it is found broken; None: nobody does.

        Raises:
            GroupError: a rank did not come up; what was started is stopped again.
        """
        options = options or GroupOptions()
        exchange = RayExchange(specs[0].group, _start(specs, options), options, healer)
        try:
            exchange.join(0)
        except BaseException:
            exchange.close()
            raise
        return cls(exchange)

    @classmethod
    def connect(
        cls, name: str, size: int, options: GroupOptions | None = None, healer: Healer | None = None
    ) -> TPGroup:
        """A running group by name, which other drivers may go on stepping. A broken one is rebuilt first.

        Raises:
            GroupError: an actor of the group is gone, or it is broken and there is no healer.
        """
        actors = []
        for rank in range(size):
            try:
                actors.append(ray.get_actor(rank_name(name, rank), namespace=RAY_NAMESPACE))
            except ValueError:
                raise GroupError(f"group {name}: rank {rank} is not running in this Ray cluster") from None
        group = cls(RayExchange(name, _Ranks(actors, None), options or GroupOptions(), healer))
        try:
            group.exchange.find_generation()
        except GroupError as error:
            try:
                group._rebuild(error)
            except GroupRestarted as restarted:
                logger.info("%s", restarted)
        return group

    @property
    def options(self) -> GroupOptions:
        """Placement and deadlines."""
        return self.exchange.options

    @property
    def actors(self) -> tuple[Any, ...]:
        """Handles of the rank actors, in rank order."""
        return tuple(self.exchange.ranks.actors)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks, in rank order."""
        return tuple(self.exchange.ranks.pids)


def _start(specs: Sequence[RankSpec], options: GroupOptions) -> _Ranks:
    bundle: Mapping[str, float] = {k: v for k, v in (("CPU", options.cpus), ("GPU", options.gpus)) if v}
    name = specs[0].group
    lifetime = "detached" if options.detached else None
    placement = None
    if bundle:
        placement = ray.util.placement_group([dict(bundle)] * len(specs), options.strategy, lifetime=lifetime)
        if not placement.wait(options.start_timeout):
            ray.util.remove_placement_group(placement)
            raise GroupError(
                f"group {name}: no room for {len(specs)} ranks of {dict(bundle)} within {options.start_timeout:g} s"
            )
    actors = [_start_rank(spec, at, placement, options, lifetime) for at, spec in enumerate(specs)]
    return _Ranks(actors, placement)


def _start_rank(spec: RankSpec, bundle: int, placement: Any, options: GroupOptions, lifetime: str | None) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(placement, bundle) if placement is not None else "DEFAULT"
    actor = _remote(concurrency_groups=CONCURRENCY_GROUPS)(RankServer).options(
        name=rank_name(spec.group, spec.rank),
        namespace=RAY_NAMESPACE,
        lifetime=lifetime,
        num_cpus=options.cpus,
        num_gpus=options.gpus,
        scheduling_strategy=strategy,
        max_restarts=-1 if options.heal else 0,
    )
    return actor.remote(spec)
