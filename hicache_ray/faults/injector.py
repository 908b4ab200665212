"""Carries out a fault plan at the points of one process.

with injected(FaultPlan.parse({"faults": [{"kind": "drop", "who": "rank 0", "point": "storage.load"}]})):
    ...  # the first read from L3 fails
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from hicache_ray import faultpoints
from hicache_ray.faultpoints import InjectedFault, Views
from hicache_ray.faults.kinds import KINDS, RANK, FaultKind, Strike
from hicache_ray.faults.plan import FaultPlan, Identity, PlannedFault


class Firing(NamedTuple):
    """One time that a fault of a plan happened. `at`: seconds since the epoch."""

    fault: int
    who: str
    kind: str
    point: str
    at: float
    pid: int


class PlanInjector:
    """A plan's faults about one process.

    Args:
        plan: resolved: nothing in it is left to be drawn but probabilities and bytes.
        who: the process this is.
        plan_id: tells plans apart, for who installs them.
        started: when the plan began, by `clock`; the process may have begun later.
        spent: how often each fault happened to this process's predecessors, by number.
        note: told of each firing before its effect: the effect may be the last thing that happens here.
        end: ends or stops the process with a signal.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        plan: FaultPlan,
        who: Identity,
        *,
        plan_id: str = "",
        started: float | None = None,
        spent: Mapping[int, int] | None = None,
        note: Callable[[Firing], None] | None = None,
        end: Callable[[int], None] = signal.raise_signal,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.plan_id = plan_id
        self.firings: list[Firing] = []
        self._who = who
        self._clock = clock
        self._started = clock() if started is None else started
        self._note = note or self.firings.append
        self._end = end
        self._lock = threading.Lock()
        self._steps = 0
        self._at: dict[str, list[_Armed]] = {}
        for number, fault in enumerate(plan.faults):
            if fault.can_hit(who) and not fault.outside:
                armed = _Armed(number, fault, f"{plan.seed} {number} {who}", (spent or {}).get(number, 0))
                for point in fault.places:
                    self._at.setdefault(point, []).append(armed)

    def reach(self, point: str, peer: str) -> None:
        """See `faultpoints.Injector`."""
        if self.fails(point, peer):
            raise InjectedFault(f"{point} fails in {self._who}: a fault plan wants it")

    def fails(self, point: str, peer: str) -> bool:
        """See `faultpoints.Injector`."""
        if point == "rank.step":
            self._steps += 1
        lost = False
        for armed, strike in self._due(point, peer, "strike"):
            lost = strike(Strike(point, str(self._who), armed.fault.seconds, self._end)) or lost
        return lost

    def answered(self, point: str, asked: int, answer: Any) -> Any:
        """See `faultpoints.Injector`."""
        for _, change in self._due(point, "", "answer"):
            answer = change(asked, answer)
        return answer

    def damage(self, point: str, pages: Callable[[], Views]) -> None:
        """See `faultpoints.Injector`."""
        for armed, damage in self._due(point, "", "damage"):
            views = pages()
            if len(views):
                damage(views[armed.rng.randrange(len(views))], armed.rng)

    def _due(self, point: str, peer: str, name: str) -> list[tuple[_Armed, Callable[..., Any]]]:
        """The faults with an effect of that name that happen here and now, with the effect; each is noted."""
        armed_here = self._at.get(point)
        if not armed_here:
            return []
        now, due = self._clock(), []
        with self._lock:
            for armed in armed_here:
                effect = getattr(armed.kind, name)
                if effect is None or not armed.reaches(peer):
                    continue
                if now < armed.goes_on_until:
                    due.append((armed, effect))
                elif armed.happens(self._steps, now - self._started, now):
                    self._note(Firing(armed.number, str(self._who), armed.fault.kind, point, now, os.getpid()))
                    due.append((armed, effect))
        return due


class _Armed:
    """A fault and how often it happened here."""

    def __init__(self, number: int, fault: PlannedFault, seed: str, spent: int) -> None:
        self.number = number
        self.fault = fault
        self.kind: FaultKind = KINDS[fault.kind]
        self.rng = random.Random(seed)
        self.goes_on_until = 0.0
        self._fired = spent
        self._turns = spent
        self._calls = 0

    def reaches(self, peer: str) -> bool:
        """Counts a call, where it is one to the fault's peer."""
        if peer and not fnmatchcase(peer, self.fault.peer):
            return False
        self._calls += 1
        return True

    def happens(self, steps: int, seconds: float, now: float) -> bool:
        """Whether it happens this time; counts it when it does."""
        fault = self.fault
        if fault.limit and self._fired >= fault.limit:
            return False
        reached, first = float(self._calls), float(fault.call or 1)
        if fault.step is not None:
            reached, first = steps, fault.step
        elif fault.time is not None:
            reached, first = seconds, fault.time
        if reached < first + self._turns * (fault.every or 0):
            return False
        self._turns += 1
        if self.rng.random() >= fault.probability:
            return False
        self._fired += 1
        if self.kind.goes_on:
            self.goes_on_until = now + (fault.seconds or 0)
        return True


@contextmanager
def injected(plan: FaultPlan, who: str = f"{RANK} 0", **options: Any) -> Iterator[PlanInjector]:
    """This process, as that one, under a plan; at the end its points are as they were.

    Args:
        plan: what happens.
        who: which process of a service this one plays.
        options: of `PlanInjector`.
    """
    identity, before = Identity.parse(who), faultpoints.installed()
    injector = PlanInjector(plan.resolved([identity], partial=True), identity, **options)
    faultpoints.install(injector)
    try:
        yield injector
    finally:
        faultpoints.install(before)
