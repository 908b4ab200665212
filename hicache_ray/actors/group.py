"""TPGroup: the ranks of one model instance, stepped together (DESIGN 4).

The driver's side of a step: one message to every rank, their answers gathered within a deadline and compared. What the
ranks must agree on is compared field by field; a difference is an error that names the step and the ranks.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from hicache_ray.actors.control import RuntimeControl
from hicache_ray.actors.directory import RAY_NAMESPACE, publish_ranks, rank_name
from hicache_ray.actors.errors import (
    DivergenceError,
    GroupError,
    GroupRestarted,
    RankDied,
    StaleGeneration,
    StepCollision,
    StepTimeout,
)
from hicache_ray.actors.rank import CONCURRENCY_GROUPS, RankServer, RankSpec
from hicache_ray.rank.request import RequestError
from hicache_ray.rank.step import (
    NEXT_STEP,
    Admit,
    Chunk,
    Control,
    Finish,
    GroupAnswer,
    Peek,
    ProtocolError,
    StepAnswer,
    StepRequest,
    differences,
    merge,
)

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


class TPGroup(RuntimeControl):
    """The ranks of one model instance. An object of this class is not thread-safe; several drivers may each have one.

    Steps of several drivers are applied one after the other, each on all ranks or on none.

    A step that finds the group broken has it rebuilt by the `healer` and then raises GroupRestarted: requests that were
    in flight are gone, the next step works. Without a healer the error stays, and so does every later step's.
    """

    def __init__(
        self, name: str, ranks: _Ranks, generation: int, options: GroupOptions, healer: Healer | None = None
    ) -> None:
        self.name = name
        self.healer = healer if options.heal else None
        self.generation = generation
        self.options = options
        self.broken: GroupError | None = None
        self._ranks = ranks
        self._driver = secrets.randbits(62)
        self._answered = -1

    @classmethod
    def create(
        cls, specs: Sequence[RankSpec], options: GroupOptions | None = None, healer: Healer | None = None
    ) -> TPGroup:
        """Starts the actors of a group and joins them; returns when every rank is ready.

        Args:
            specs: one a rank, in rank order, all of one group.
            options: placement and deadlines.
            healer: see the class.

        Raises:
            GroupError: a rank did not come up; what was started is stopped again.
        """
        options = options or GroupOptions()
        name = specs[0].group
        ranks = _start(specs, options)
        group = cls(name, ranks, 0, options, healer)
        try:
            group._join(0)
        except BaseException:
            group.stop()
            raise
        return group

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
        group = cls(name, _Ranks(actors, None), 0, options or GroupOptions(), healer)
        try:
            group._find_generation()
        except GroupRestarted as restarted:
            logger.info("%s", restarted)
        return group

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._ranks.actors)

    @property
    def actors(self) -> tuple[Any, ...]:
        """Handles of the rank actors, in rank order."""
        return tuple(self._ranks.actors)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks, in rank order."""
        return tuple(self._ranks.pids)

    def step(
        self,
        *,
        aborts: Sequence[str] = (),
        finishes: Sequence[Finish] = (),
        admits: Sequence[Admit] = (),
        polls: Sequence[str] = (),
        schedules: Sequence[str] = (),
        controls: Sequence[Control] = (),
        chunks: Sequence[Chunk] = (),
        peeks: Sequence[Peek] = (),
    ) -> GroupAnswer:
        """One scheduling iteration on all ranks.

        Raises:
            ProtocolError: a field of the step is not what it must be; nothing was sent.
            RequestError: the step names a request in a state in which that can't be done; nothing was applied anywhere.
            GroupRestarted: the group was broken and is rebuilt; send the requests again.
            StepTimeout, RankDied, DivergenceError: the group is broken and nobody rebuilds it; so is every later step.
        """
        if self.broken is not None:
            raise self.broken
        began = time.perf_counter()
        request = StepRequest(
            generation=self.generation,
            step=NEXT_STEP,
            aborts=tuple(aborts),
            finishes=tuple(finishes),
            admits=tuple(admits),
            polls=tuple(polls),
            schedules=tuple(schedules),
            controls=tuple(controls),
            chunks=tuple(chunks),
            peeks=tuple(peeks),
        )
        message = request.encode()
        try:
            answers = [StepAnswer.decode(answer) for answer in self._send(message)]
            self._compare(answers)
        except GroupError as error:
            self._heal(error)
        self._answered = answers[0].step
        return merge(answers, _timings(answers, (time.perf_counter() - began) * 1e6))

    def stats(self) -> list[dict[str, Any]]:
        """Counters of every rank, by rank."""
        return self._call("stats")

    def check_integrity(self) -> None:
        """Raises AssertionError when a rank's tree, allocators or ledger don't add up."""
        self._call("check_integrity")

    def stop(self) -> None:
        """Ends the ranks and gives their placement back. May be called twice; never raises for ranks already gone."""
        closing = [actor.close.remote() for actor in self._ranks.actors]
        ray.wait(closing, num_returns=len(closing), timeout=5.0)
        for actor in self._ranks.actors:
            ray.kill(actor, no_restart=True)
        if self._ranks.placement is not None:
            ray.util.remove_placement_group(self._ranks.placement)
        self._ranks = _Ranks([], None)
        self.broken = self.broken or GroupError(f"group {self.name} is stopped")

    def _join(self, generation: int) -> None:
        self.generation = generation
        # Ranks come up at their own pace, and wait for one another only when all are up.
        infos = self._call("survey", timeout=self.options.start_timeout)
        # Before anything can hang: who hangs can't be asked where it is.
        publish_ranks(self.name, [(info.pid, info.node_id) for info in infos])
        self._ranks.pids = self._call("join", generation, timeout=self.options.start_timeout)

    def _find_generation(self) -> None:
        try:
            infos = self._call("survey")
        except GroupError as error:
            self._heal(error)
        self._ranks.pids = [info.pid for info in infos]
        generations = {info.generation for info in infos}
        if len(generations) > 1 or any(info.fresh for info in infos):
            self._heal(GroupError(f"group {self.name}: ranks are in different generations: {sorted(generations)}"))
        (self.generation,) = generations

    def _heal(self, error: GroupError) -> NoReturn:
        """Has the group rebuilt and raises GroupRestarted; without a healer the group stays broken."""
        if self.healer is None:
            self.broken = error
            raise error
        began = time.monotonic()
        self.generation, pids = self.healer(self.generation)
        self._ranks.pids = list(pids)
        took = time.monotonic() - began
        raise GroupRestarted(
            f"group {self.name} was rebuilt as generation {self.generation} in {took:.1f} s: {error}"
        ) from error

    def _call(self, method: str, *arguments: Any, timeout: float | None = None) -> list[Any]:
        timeout = timeout or self.options.step_timeout
        refs = [getattr(actor, method).remote(*arguments) for actor in self._ranks.actors]
        return self._gather(refs, method, timeout)

    def _send(self, message: bytes) -> list[bytes]:
        """The ranks' answers to a step, which is sent again while it meets other drivers' steps."""
        payload = ray.put(message) if len(message) > INLINE_BYTES and self.size > 1 else message
        deadline = time.monotonic() + self.options.step_timeout
        while True:
            refs = [actor.step.remote(payload, self._driver) for actor in self._ranks.actors]
            try:
                return self._gather(refs, f"the step after {self._answered}", self.options.step_timeout)
            except StepCollision as collision:
                self._forget(refs)
                if time.monotonic() > deadline:
                    raise StepTimeout(f"group {self.name}: a step met other drivers' too often: {collision}") from None
                logger.debug("group %s: %s", self.name, collision)
                threading.Event().wait(random.uniform(0.0, COLLISION_WAIT))

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

    def _compare(self, answers: Sequence[StepAnswer]) -> None:
        first = answers[0]
        for answer in answers[1:]:
            differing = differences(first, answer)
            if not differing:
                continue
            raise DivergenceError(
                f"group {self.name}: ranks {first.rank} and {answer.rank} differ at step {first.step} "
                f"in {', '.join(differing)}"
            )


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


def _timings(answers: Sequence[StepAnswer], total_us: float) -> dict[str, float]:
    slowest = max(answers, key=lambda answer: answer.timings_us["total"]).timings_us
    timings = {part: slowest[part] for part in ("reduction", "work", "engine")}
    timings["message"] = max(0.0, total_us - slowest["total"])
    timings["total"] = total_us
    return timings
