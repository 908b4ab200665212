"""Fault plans on a running service: ranks killed at their points, replicas that diverge, storage that misbehaves."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import ray

from hicache_ray.actors import directory
from hicache_ray.actors.group import TPGroup
from hicache_ray.faults.plan import FaultPlan
from hicache_ray.faults.service import FaultRunner, ServiceFaults, processes_of
from hicache_ray.rank.group import GroupRestarted
from hicache_ray.rank.step import Scheduled
from hicache_ray.replay.driver import ENGINE, settle
from hicache_ray.service import Service
from hicache_ray.testing.serving import ask, wait_for
from tests.ray_service import service

pytestmark = pytest.mark.ray

PROMPTS = [np.arange(24, dtype="<u4") + 100 * number for number in range(8)]


@pytest.fixture(scope="module")
def running() -> Iterator[Service]:
    with service("faults", hicache_ratio=6.0) as started:
        yield started


@pytest.fixture
def group(running: Service) -> TPGroup:
    group = running.group("a", engine=ENGINE)
    for prompt in PROMPTS:
        ask(group, prompt)
    settle(group)
    return group


@contextmanager
def under(running: Service, *faults: dict[str, Any]) -> Iterator[ServiceFaults]:
    """The service under a plan."""
    at_work = ServiceFaults(running, FaultPlan.parse({"faults": list(faults)}))
    runner = FaultRunner(at_work)
    runner.start()
    try:
        yield at_work
    finally:
        runner.stop()


def is_well(group: TPGroup) -> None:
    """What was in L3 is a hit, every slot has an owner."""
    assert all(ask(group, prompt).computed_tokens == 4 for prompt in PROMPTS)
    settle(group)
    group.check_integrity()


def steps_until_restarted(group: TPGroup, steps: int = 400) -> GroupRestarted:
    """Serves until a step says that the group was rebuilt."""
    for number in range(steps):
        try:
            ask(group, PROMPTS[number % len(PROMPTS)], times=1)
        except GroupRestarted as restarted:
            return restarted
    raise AssertionError("nothing happened")


@pytest.mark.parametrize("call", [1, 2, 3])
def test_ranks_desynchronise_and_hang_one_rank_killed_inside_a_reduction(
    running: Service, group: TPGroup, call: int
) -> None:
    """The others are in it already, or come to it: they get an error within the deadline, and the group heals."""
    pids = group.pids
    with under(running, {"kind": "kill", "who": "rank 1 of a", "point": "rank.reduce", "call": call}) as faults:
        steps_until_restarted(group)
        assert [(firing.kind, firing.point) for firing in faults.firings()] == [("kill", "rank.reduce")]
        assert group.pids[0] == pids[0] and group.pids[1] != pids[1]
        is_well(group)


@pytest.mark.parametrize("point", ["rank.step", "rank.answer"])
def test_a_rank_killed_before_and_after_it_applied_a_step(running: Service, group: TPGroup, point: str) -> None:
    with under(running, {"kind": "kill", "who": "rank 0 of a", "point": point, "call": 4}):
        steps_until_restarted(group)
        is_well(group)


@pytest.mark.chaos
@pytest.mark.parametrize("who", ["rank 0 of a", "rank 1 of a"])
@pytest.mark.parametrize("point", ["rank.quiesce", "rank.claim", "rank.restore", "rank.join"])
def test_a_rank_killed_during_the_recovery_of_another(running: Service, group: TPGroup, point: str, who: str) -> None:
    with under(running, {"kind": "kill", "who": who, "point": point}) as faults:
        os.kill(group.pids[1 if "0" in who else 0], signal.SIGKILL)
        steps_until_restarted(group)
        assert [firing.point for firing in faults.firings()] == [point]
        is_well(group)


def test_ranks_desynchronise_and_hang_replicas_that_differ_are_rebuilt(running: Service, group: TPGroup) -> None:
    """Room on one rank and none on the other: noticed in that step, never silence."""
    with under(running, {"kind": "alloc_fail", "who": "rank 1 of a"}):
        restarted = steps_until_restarted(group)
        assert "ranks 0 and 1 differ at step" in str(restarted) and "scheduled" in str(restarted)
        is_well(group)


def test_a_rank_without_memory_ends_and_comes_back(running: Service, group: TPGroup) -> None:
    with under(running, {"kind": "oom", "who": "rank 0 of a", "point": "alloc.device"}):
        assert "no memory" in str(steps_until_restarted(group))
        is_well(group)


STORAGE_FAULTS = [
    {"kind": "corrupt", "who": "storage *", "times": 0, "probability": 0.3},
    {"kind": "drop", "who": "storage *", "point": "actor.acquire", "times": 0, "probability": 0.2},
    {"kind": "drop", "who": "storage *", "point": "actor.commit", "times": 0, "probability": 0.2},
    {"kind": "slow", "who": "storage *", "point": "actor.reserve", "seconds": 0.02, "times": 0, "probability": 0.5},
    {"kind": "partition", "who": "rank 0", "peer": "*-1", "call": 10, "seconds": 1.0},
    {"kind": "short_read", "who": "rank 1", "times": 0, "probability": 0.2},
    {"kind": "stale_exists", "who": "rank *", "times": 0, "probability": 0.2},
]


def test_storage_that_misbehaves_in_every_way_costs_hits_and_nothing_else(running: Service, group: TPGroup) -> None:
    """Bytes that flip, calls and answers that are lost, a partition, short reads, lookups that lie, all at once: every
    page used is right, the group is never rebuilt, and when it is over everything in L3 is whole."""
    generation = group.generation
    others = [np.arange(24, dtype="<u4") + 10_000 + 100 * number for number in range(24)]
    with under(running, *STORAGE_FAULTS) as faults:
        for _ in range(2):
            for prompt in others:
                ask(group, prompt)
        kinds = {firing.kind for firing in faults.firings()}
    assert kinds >= {"drop", "slow", "partition"}, kinds
    assert group.generation == generation
    settle(group)
    group.check_integrity()

    left: list[Scheduled] = []

    def used_again() -> bool:
        for prompt in others:
            ask(group, prompt)
        settle(group)
        rows = [ask(group, prompt) for prompt in others]
        left[:] = [row for row in rows if row.computed_tokens != 4]
        return not left

    try:
        wait_for(used_again, "everything to be hits again", 60.0)
    finally:
        assert not left, (left, group.stats())
    assert running.storage is not None
    assert set(running.storage.audit(read_pages=True).values()) <= {""}


def test_directory_or_owner_lost_services_are_listed_whole(running: Service) -> None:
    assert directory.names() == ["faults"]
    assert [str(one) for one in processes_of(running)][-3:] == ["storage 0", "storage 1", "supervisor"]


def test_a_plan_reaches_restarted_actors_and_happens_once(running: Service, group: TPGroup) -> None:
    """What happened to a process counts for its successor: a kill does not come again with every restart."""
    with under(running, {"kind": "kill", "who": "supervisor", "point": "supervisor.watch"}) as faults:
        wait_for(lambda: bool(faults.firings()), "the kill")

        def answers() -> bool:
            reached = faults.install(5.0)
            return faults.who[-1] in reached and reached[faults.who[-1]].pid != faults.firings()[0].pid

        wait_for(answers, "the supervisor")
        ray.get(faults.call(faults.who[-1], _nothing), timeout=30)
        assert len(faults.firings()) == 1


def _nothing(actor: object) -> None:
    return None


def test_a_plan_that_has_ended_does_not_come_back_with_a_look(running: Service, group: TPGroup) -> None:
    slow = {"kind": "slow", "who": "rank 0 of a", "seconds": 0.001, "times": 0}
    faults = ServiceFaults(running, FaultPlan.parse({"faults": [slow]}))
    assert set(faults.install(30.0)) == set(faults.who)
    group.step()
    faults.end()
    happened = len(faults.firings())
    assert happened and set(faults.install(30.0)) == set(faults.who)
    group.step()
    assert len(faults.firings()) == happened
    faults.remove()
    assert not faults.firings()
