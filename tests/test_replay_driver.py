"""The driver, on a group that is a script: order, dependencies, room, and what it does when nothing comes on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hicache_ray.rank.group import GroupRestarted
from hicache_ray.rank.step import Admit, Admitted, Finish, Finished, Polled, Scheduled
from hicache_ray.replay.driver import Driver, DriveSettings, RequestSource, Stalled, drive, settle
from hicache_ray.replay.requests import ReplayRequest

IDLE = {"pages_verified": 1, "pages_mismatched": 0, "pages_computed": 2, "idle": True}


class ScriptedGroup:
    """Admits everything; a request is ready at its second poll, and fits when `room` says so."""

    size = 2

    def __init__(self, room: Any = lambda rid, running: True, ready_at: int = 2) -> None:
        self.room = room
        self.ready_at = ready_at
        self.polls: dict[str, int] = {}
        self.running: list[str] = []
        self.order: list[str] = []
        self.steps = 0
        self.most_running = 0

    def step(
        self,
        *,
        finishes: Sequence[Finish] = (),
        admits: Sequence[Admit] = (),
        polls: Sequence[str] = (),
        schedules: Sequence[str] = (),
    ) -> Any:
        self.steps += 1
        for finish in finishes:
            self.running.remove(finish.rid)
        for rid in polls:
            self.polls[rid] = self.polls.get(rid, 0) + 1
        scheduled = [self._schedule(rid) for rid in schedules]
        self.most_running = max(self.most_running, len(self.running))
        return SimpleNamespace(
            admitted=tuple(Admitted(admit.rid, 0, 0, "started") for admit in admits),
            polled=tuple(Polled(rid, self.polls[rid] >= self.ready_at, 0) for rid in polls),
            scheduled=tuple(scheduled),
            finished=tuple(Finished(finish.rid, 0, 0) for finish in finishes),
            engine=(IDLE, IDLE),
            timings_us={"total": 5.0, "work": 2.0},
        )

    def _schedule(self, rid: str) -> Scheduled:
        if not self.room(rid, self.running):
            return Scheduled(rid, False, "no_room")
        self.running.append(rid)
        self.order.append(rid)
        return Scheduled(rid, True, "", 4, 8, 0, 5)

    def stats(self) -> list[dict[str, Any]]:
        return [{}, {}]

    def audit(self) -> list[dict[str, Any]]:
        return [{}, {}]


def request(rid: str, after: str | None = None) -> ReplayRequest:
    return ReplayRequest(rid, np.arange(17, dtype=np.uint32), np.arange(3, dtype=np.uint32), after=after)


SETTINGS = DriveSettings(page_size=4, concurrency=2, stall_seconds=0.2)


def test_every_request_is_served_in_order_and_counted() -> None:
    group = ScriptedGroup()
    told: list[int] = []
    measured = drive([group], iter([request(f"r{n}") for n in range(7)]), SETTINGS, told.append)
    assert group.order == [f"r{n}" for n in range(7)]
    assert group.most_running <= 2
    assert told[-1] == 7
    counts = measured.counts
    assert (counts.requests, counts.blocks, counts.hit_blocks, counts.tokens) == (7, 7 * 5, 7 * 3, 7 * 17)
    assert (counts.tokens_l1, counts.tokens_l2, counts.tokens_l3, counts.tokens_computed) == (28, 56, 0, 35)
    assert measured.steps == group.steps
    assert measured.verified == 2 * group.steps
    assert measured.times.percentiles()["total"] == {"p50": 5.0, "p99": 5.0}


def test_instances_take_requests_round_robin() -> None:
    groups = [ScriptedGroup(), ScriptedGroup()]
    drive(groups, iter([request(f"r{n}") for n in range(6)]), SETTINGS)
    assert [group.order for group in groups] == [["r0", "r2", "r4"], ["r1", "r3", "r5"]]


def test_a_turn_waits_for_the_answer_it_builds_on() -> None:
    groups = [ScriptedGroup(ready_at=6), ScriptedGroup()]
    turns = [request("a0"), request("a1", after="a0"), request("b0"), request("b1", after="b0"), request("c0")]
    seen: list[str] = []
    for group in groups:
        group.room = lambda rid, running: seen.append(rid) or True
    drive(groups, iter(turns), SETTINGS)
    assert sorted(seen) == ["a0", "a1", "b0", "b1", "c0"]
    assert seen.index("a0") < seen.index("a1") and seen.index("b0") < seen.index("b1")


def test_others_may_enter_before_a_turn_that_waits() -> None:
    group = ScriptedGroup()
    drive([group], iter([request("a0"), request("a1", after="a0"), request("b0")]), SETTINGS)
    assert group.order == ["a0", "b0", "a1"]


def test_nobody_overtakes_a_request_that_finds_no_room() -> None:
    group = ScriptedGroup(room=lambda rid, running: rid != "large" or not running)
    drive([group], iter([request("r0"), request("large"), request("r1"), request("r2")]), SETTINGS)
    assert group.order == ["r0", "large", "r1", "r2"]


def test_a_run_that_does_not_come_on_ends_with_the_reason() -> None:
    with pytest.raises(Stalled, match="no request came on for 0.2 s: 2 wait for L3, 0 for room in L1"):
        drive([ScriptedGroup(ready_at=10**9)], iter([request("r0"), request("r1")]), SETTINGS)
    with pytest.raises(Stalled, match="1 for room in L1"):
        drive([ScriptedGroup(room=lambda rid, running: False)], iter([request("r0")]), SETTINGS)


def test_a_replay_stalls_after_a_minute_unless_told_otherwise() -> None:
    assert DriveSettings().stall_seconds == 60.0


def test_settling_ends_or_says_so() -> None:
    settle(ScriptedGroup())
    busy = ScriptedGroup()
    busy.step = lambda **_: SimpleNamespace(engine=({**IDLE, "idle": False},))  # type: ignore[method-assign]
    with pytest.raises(Stalled, match="transfers did not end within 0.05 s"):
        settle(busy, seconds=0.05)


def test_the_last_token_of_an_answer_is_not_kept() -> None:
    group = ScriptedGroup()
    kept: list[Finish] = []
    step = group.step
    group.step = lambda **given: kept.extend(given.get("finishes", ())) or step(**given)  # type: ignore[method-assign]
    drive([group], iter([request("r0")]), SETTINGS)
    assert [len(finish.output) for finish in kept] == [8]


def test_requests_in_flight_when_a_group_is_rebuilt_are_sent_again() -> None:
    group = ScriptedGroup()
    step = group.step

    def failing(**given: Any) -> Any:
        if group.steps == 4:
            group.steps, group.running, group.polls = 5, [], {}
            raise GroupRestarted("rebuilt")
        return step(**given)

    group.step = failing  # type: ignore[method-assign]
    told: list[int] = []
    measured = drive([group], iter([request(f"r{n}") for n in range(5)]), SETTINGS, told.append)
    assert measured.restarts == 1 and measured.again > 0 and not measured.failed
    assert told[-1] == 5
    assert set(group.order) == {f"r{n}" for n in range(5)}


def failing(group: ScriptedGroup, *at: int) -> list[int]:
    """Has the group lose everything in its steps of those numbers; gives the numbers still to come."""
    step, left, calls = group.step, list(at), [0]

    def broken(**given: Any) -> Any:
        calls[0] += 1
        if calls[0] in left:
            left.remove(calls[0])
            group.running, group.polls = [], {}
            raise GroupRestarted("rebuilt")
        return step(**given)

    group.step = broken  # type: ignore[method-assign]
    return left


def test_a_request_is_given_up_when_it_was_lost_as_often_as_it_may_be_sent() -> None:
    group = ScriptedGroup()
    left = failing(group, 2, 4)
    source = RequestSource([request("r0"), request("r1", after="r0"), request("r2")])
    driver = Driver(group, source, DriveSettings(concurrency=1, in_flight=1, attempts=2))
    while driver.busy:
        driver.advance()
    assert not left and group.order == ["r1", "r2"], "what builds on a request that was given up is sent all the same"
    assert driver.tally.failed == {"GroupRestarted": 1} and isinstance(driver.gave_up, GroupRestarted)
    assert (driver.tally.served, driver.tally.again, driver.tally.restarts, driver.unended) == (2, 1, 2, 0)


def test_a_driver_that_drains_ends_what_it_has_sent_and_takes_no_more() -> None:
    group = ScriptedGroup()
    driver = Driver(group, RequestSource(request(f"r{n}") for n in itertools.count()), DriveSettings(in_flight=3))
    for _ in range(20):
        driver.advance()
        assert driver.unended <= 3 + len(group.running)
    assert driver.busy
    driver.drain()
    while driver.busy:
        driver.advance()
    assert driver.tally.served == len(group.order) > 3 and not group.running


def test_drivers_that_share_a_lane_serve_each_request_once() -> None:
    groups = [ScriptedGroup(), ScriptedGroup()]
    source = RequestSource(request(f"r{n}") for n in range(30))
    drivers = [Driver(group, source, SETTINGS) for group in groups]
    while any(driver.busy for driver in drivers):
        for driver in drivers:
            driver.advance()
    assert sorted(groups[0].order + groups[1].order) == sorted(f"r{n}" for n in range(30))
    assert all(group.order for group in groups)


def test_what_looks_at_answers_may_end_the_run() -> None:
    def look(answer: Any) -> None:
        raise RuntimeError("seen")

    driver = Driver(ScriptedGroup(), RequestSource([request("r0")]), SETTINGS, answered=look)
    with pytest.raises(RuntimeError, match="seen"):
        driver.advance()
    assert driver.tally.steps == 0
