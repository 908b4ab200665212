"""Killed, hung and lost ranks: the group is rebuilt, requests end, nothing wrong is served (docs/design.md 7)."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator

import pytest
import ray

from hicache_ray.actors.directory import RAY_NAMESPACE, supervisor_name
from hicache_ray.actors.group import TPGroup
from hicache_ray.rank.group import GroupRestarted
from hicache_ray.replay.driver import ENGINE, settle
from hicache_ray.service import Service
from hicache_ray.testing.serving import wait_for
from tests.processes import stop
from tests.ray_service import prompts, serve, serve_until_restarted, service

pytestmark = pytest.mark.ray

ASKED = prompts(8, seed=3)


@pytest.fixture(scope="module", params=["mha", "mla"])
def running(request: pytest.FixtureRequest) -> Iterator[Service]:
    with service("recovery", attention=request.param, hicache_ratio=6.0) as started:
        yield started


@pytest.fixture
def group(running: Service) -> TPGroup:
    group = running.group("a", engine=ENGINE)
    for prompt in ASKED:
        serve(group, prompt)
    settle(group)
    return group


def serves_again(group: TPGroup) -> None:
    """Everything that was in L3 is a hit again, the ledger balances, replicas agree."""
    for prompt in ASKED:
        assert serve(group, prompt).computed_tokens == 4
    settle(group)
    group.check_integrity()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_comes_back_with_its_pages(group: TPGroup, rank: int) -> None:
    before, pids = group.generation, group.pids
    os.kill(pids[rank], signal.SIGKILL)
    restarted = serve_until_restarted(group, itertools.cycle(ASKED))
    assert f"generation {group.generation}" in str(restarted) and group.generation > before
    assert group.pids[rank] != pids[rank] and group.pids[1 - rank] == pids[1 - rank]
    serves_again(group)


def test_a_hung_rank_is_noticed_and_replaced(running: Service, group: TPGroup) -> None:
    pids = group.pids
    stop(pids[1])
    serve_until_restarted(group, itertools.cycle(ASKED))
    assert group.pids[1] != pids[1]
    serves_again(group)


def test_the_supervisor_heals_a_group_that_nobody_steps(running: Service, group: TPGroup) -> None:
    heals = len(running.supervisor.history())
    os.kill(group.pids[0], signal.SIGKILL)
    wait_for(lambda: len(running.supervisor.history()) > heals, "a heal")
    with pytest.raises(GroupRestarted):
        group.step()
    serves_again(group)


def test_a_killed_supervisor_comes_back_and_heals(running: Service, group: TPGroup) -> None:
    supervisor = ray.get_actor(supervisor_name(running.name), namespace=RAY_NAMESPACE)
    ray.kill(supervisor, no_restart=False)
    os.kill(group.pids[1], signal.SIGKILL)
    serve_until_restarted(group, itertools.cycle(ASKED))
    serves_again(group)


def test_all_ranks_killed_at_once_start_empty_and_find_their_pages_in_l3(group: TPGroup) -> None:
    for pid in group.pids:
        os.kill(pid, signal.SIGKILL)
    serve_until_restarted(group, itertools.cycle(ASKED))
    serves_again(group)


@pytest.mark.chaos
def test_a_hung_supervisor_is_replaced_by_those_who_need_it(running: Service, group: TPGroup) -> None:
    """SIGSTOP: it neither answers nor dies, and neither does the rank that hangs meanwhile."""
    supervisor = ray.get_actor(supervisor_name(running.name), namespace=RAY_NAMESPACE)
    pid = ray.get(supervisor.__ray_call__.options(concurrency_group="status").remote(_process_id))
    stop(pid)
    stop(group.pids[0])
    serve_until_restarted(group, itertools.cycle(ASKED))
    assert ray.get(supervisor.__ray_call__.options(concurrency_group="status").remote(_process_id)) != pid
    serves_again(group)


def _process_id(actor: object) -> int:
    return os.getpid()
