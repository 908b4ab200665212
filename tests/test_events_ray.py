"""KV events of a group on Ray: rank 0 publishes, and a killed rank leaves no subscriber with a wrong picture."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hicache_ray.actors.group import TPGroup
from hicache_ray.events import CPU, GPU, EventIndex
from hicache_ray.events.subscriber import KVEventSubscriber
from hicache_ray.rank.group import GroupError
from hicache_ray.replay.driver import ENGINE, settle
from hicache_ray.service import Service
from hicache_ray.testing.serving import wait_for
from tests.ray_service import prompts, serve, serve_until_restarted, service

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def running() -> Iterator[Service]:
    with service(
        "events",
        enable_kv_events=True,
        kv_events_endpoint="tcp://127.0.0.1:*",
        kv_events_replay_endpoint="tcp://127.0.0.1:*",
        kv_events_topic="kv",
    ) as started:
        yield started


@pytest.fixture(scope="module")
def group(running: Service) -> TPGroup:
    return running.group("a", engine=ENGINE)


def follows(group: TPGroup, receiving: KVEventSubscriber, log: EventIndex) -> None:
    """The log leads to as many pages a tier as the group holds, once all events have come."""
    settle(group)
    held = group.status()[0]["pages"]

    def caught_up() -> bool:
        numbered = receiving.receive(0.5)
        if numbered is not None:
            log.apply(numbered.batch)
        return len(log.blocks(GPU)) == held["device"]["in_tree"] and len(log.blocks(CPU)) == held["host"]["in_tree"]

    wait_for(caught_up, "the log to lead to the tree")
    assert log.blocks(CPU)


def subscriber(group: TPGroup) -> KVEventSubscriber:
    events = group.status()[0]["events"]
    return KVEventSubscriber(events["endpoint"], events["replay_endpoint"], topic="kv")


def test_rank_0_publishes_what_the_group_holds(group: TPGroup) -> None:
    assert [row["events"] is None for row in group.status()] == [False, True]
    log = EventIndex()
    with subscriber(group) as receiving:
        for prompt in prompts(8):
            serve(group, prompt)
        follows(group, receiving, log)
        group.flush()
        wait_for(lambda: (b := receiving.receive(0.5)) is not None and b.batch.begins_anew, "the flush")


@pytest.mark.parametrize("rank", [1, 0])
def test_after_a_kill_the_log_begins_anew_and_leads_to_the_new_tree(group: TPGroup, rank: int) -> None:
    """Rank 1: the same publisher. Rank 0: a new one, at another port, with higher numbers."""
    log = EventIndex()
    for prompt in prompts(6, seed=1):
        serve(group, prompt)
    first = group.status()[0]["events"]
    with subscriber(group) as receiving:
        follows(group, receiving, log)
        os.kill(group.pids[rank], signal.SIGKILL)
        serve_until_restarted(group, prompts(300, seed=2))
        for prompt in prompts(3, seed=3):
            serve(group, prompt)
        second = group.status()[0]["events"]
        assert second["next_sequence"] > first["next_sequence"]
        if rank == 1:
            follows(group, receiving, log)
    if rank == 0:
        with subscriber(group) as receiving:
            follows(group, receiving, EventIndex())


def test_an_endpoint_in_use_is_refused_when_a_group_starts(running: Service, group: TPGroup) -> None:
    endpoint = group.status()[0]["events"]["replay_endpoint"]
    other = Service(
        running.name, replace(running.config, kv_events_replay_endpoint=endpoint), running.storage, running.options
    )
    with pytest.raises(GroupError, match="Address already in use; give every group its own"):
        other.group("b", engine=ENGINE)
