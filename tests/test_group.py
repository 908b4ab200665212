"""A service with real actors: steps, tiers, a second driver (docs/design.md 4), on one Ray cluster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import ray
from msgspec.structs import replace

import hicache_ray
from hicache_ray.actors.directory import look_up
from hicache_ray.actors.group import TPGroup
from hicache_ray.rank.group import DivergenceError, GroupError, check_agreement
from hicache_ray.rank.request import RequestError
from hicache_ray.rank.step import Admit, Finish, ProtocolError, StepAnswer
from hicache_ray.replay.driver import ENGINE, settle
from hicache_ray.service import Service, ServiceError
from hicache_ray.testing.serving import wait_for
from tests.ray_service import prompts, serve, service

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def running() -> Iterator[Service]:
    with service() as started:
        yield started


@pytest.fixture(scope="module")
def group(running: Service) -> TPGroup:
    return running.group("a", engine=ENGINE)


def test_requests_move_through_all_tiers_and_the_ledger_balances(running: Service, group: TPGroup) -> None:
    asked = prompts(12)
    for prompt in asked:
        assert serve(group, prompt).computed_tokens == 24
    settle(group)
    again = [serve(group, prompt) for prompt in reversed(asked)]
    assert sum(s.host_tokens for s in again) > 0 and sum(s.storage_tokens for s in again) > 0
    settle(group)
    group.check_integrity()
    for stats in group.stats():
        assert all(pool["in_flight"] == 0 for pool in stats["ledger"].values())
        assert stats["bytes"]["l2_to_l3"] > 0


def test_what_one_instance_computed_another_finds_in_l3(running: Service, group: TPGroup) -> None:
    prompt = prompts(1, seed=5)[0]
    serve(group, prompt)
    settle(group)
    other = running.group("b", engine=ENGINE)
    served = serve(other, prompt)
    assert served.storage_tokens == 20 and served.computed_tokens == 4
    assert running.groups == ("a", "b")
    other.stop()


def test_a_step_that_can_not_be_done_says_why_and_changes_nothing(group: TPGroup) -> None:
    for step, text in (
        ({"schedules": ["nobody"]}, "unknown"),
        ({"finishes": [Finish("nobody")]}, "unknown"),
        ({"admits": [Admit("huge", np.zeros(65, "<u4").tobytes())]}, "needs 65 tokens of L1, which has 64"),
    ):
        with pytest.raises(RequestError, match=text):
            group.step(**step)  # type: ignore[arg-type]
    generation = group.generation
    for bad in (
        lambda: group.step(admits=[Admit("odd", b"abc")]),
        lambda: group.step(polls=[5]),  # type: ignore[list-item]
        lambda: group.step(admits=[Admit("a", b"", max_new_tokens=-1)]),
    ):
        with pytest.raises(ProtocolError):
            bad()
    serve(group, prompts(1, seed=9)[0])
    assert group.generation == generation, "a caller's mistake rebuilt the group"


def test_timings_are_split_and_add_up(group: TPGroup) -> None:
    timings = group.step().timings_us
    parts = timings["message"] + timings["reduction"] + timings["work"] + timings["engine"]
    assert 0 < parts <= timings["total"] * 1.01


def test_a_second_driver_finds_the_service_and_goes_on(running: Service, group: TPGroup) -> None:
    serve(group, prompts(1, seed=11)[0])
    address = ray.get_runtime_context().gcs_address
    code = (
        "import hicache_ray; from tests.ray_service import prompts, serve\n"
        f"service = hicache_ray.connect('test', address={address!r})\n"
        "print(serve(service.group('a'), prompts(1, seed=11)[0]).computed_tokens, service.groups)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("4 ("), done.stdout
    serve(group, prompts(1, seed=11)[0])


def test_a_name_is_taken_once_and_unknown_names_are_refused(running: Service) -> None:
    with pytest.raises(ServiceError, match="runs already"):
        hicache_ray.start(running.config, name="test")
    with pytest.raises(ServiceError, match="no service named 'other'"):
        hicache_ray.connect("other")
    with pytest.raises(ServiceError, match="no name for a service"):
        hicache_ray.start(running.config, name="a:b")
    with pytest.raises(ServiceError, match="the configuration is a dict: give HiCacheConfig.from_mapping"):
        hicache_ray.start({"tp_size": 2})  # type: ignore[arg-type]


def test_a_group_of_a_service_that_another_driver_stopped_is_refused_at_once(
    running: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache_ray.service.look_up", lambda name: None)
    with pytest.raises(GroupError, match="was stopped by another driver"):
        running.group("another")


def test_ranks_that_answer_differently_are_an_error_that_names_step_and_ranks(group: TPGroup) -> None:
    one = StepAnswer(7, 1, timings_us={"total": 1.0})
    with pytest.raises(DivergenceError, match=r"ranks 0 and 1 differ at step 7 in digest"):
        check_agreement(group.name, [one, replace(one, rank=1, digest=2)])


def test_stop_leaves_nothing(running: Service) -> None:
    """Last in this module: the service of the other tests ends here."""
    running.stop()
    running.stop()
    with pytest.raises(GroupError, match="stopped"):
        running.group("a")
    if ray.is_initialized():
        assert look_up("test") is None
        wait_for(lambda: not ray.util.list_named_actors(all_namespaces=True), "actors to end")
