"""Fault plans: what they say, what is refused, and what they do at the points of one process."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_ray import faultpoints
from hicache_ray.faultpoints import InjectedFault
from hicache_ray.faults.injector import injected
from hicache_ray.faults.kinds import KINDS, ROLES, points_of
from hicache_ray.faults.plan import FaultPlan, FaultPlanError, Identity, PlannedFault, Target

THERE = [
    *[Identity("rank", rank, group) for group in ("a", "b") for rank in range(2)],
    *[Identity("storage", number) for number in range(2)],
    Identity("supervisor"),
]


def plan(*faults: Mapping[str, Any], seed: int = 0) -> FaultPlan:
    return FaultPlan.parse({"seed": seed, "faults": list(faults)})


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ({"who": "any"}, "without a kind"),
        ({"kind": "explode"}, "kind is 'explode'; use one of kill"),
        ({"kind": "kill", "who": "rank one"}, "who is 'rank one'; use 'rank 1 of instance-0'"),
        ({"kind": "kill", "when": 3}, "has when; known are kind, who"),
        ({"kind": "kill", "step": 1, "time": 2}, "step and time are given"),
        ({"kind": "kill", "who": "storage 0", "step": 3}, "only ranks have steps"),
        ({"kind": "slow", "who": "rank 0"}, "give seconds"),
        ({"kind": "kill", "who": "rank 0", "point": "rank.nap"}, "unknown point"),
        ({"kind": "corrupt", "who": "rank 0", "point": "rank.step"}, "no place"),
        ({"kind": "corrupt", "who": "supervisor"}, "it can at no point"),
        ({"kind": "kill", "who": "rank 0", "call": 0}, "call is 0; give a whole number from 1"),
        ({"kind": "kill", "who": "rank 0", "call": True}, "call is True"),
        ({"kind": "drop", "who": "rank 0", "probability": 1.5}, "probability is 1.5"),
        ("kill", "give a mapping"),
    ],
)
def test_what_can_not_be_is_refused_with_the_reason(fault: Any, text: str) -> None:
    with pytest.raises(FaultPlanError, match=f"fault 0: .*{text}"):
        FaultPlan.parse({"faults": [fault]})


@pytest.mark.parametrize("document", [None, [], {"fault": []}, {"faults": {}}, {"faults": [], "seed": "x"}])
def test_a_document_that_is_no_plan_is_refused(document: Any) -> None:
    with pytest.raises(FaultPlanError):
        FaultPlan.parse(document)


def test_a_plan_is_what_its_file_says(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    written = plan(
        {"kind": "kill", "who": "rank 1 of a", "point": "rank.reduce", "call": 20},
        {"kind": "partition", "who": "rank *", "peer": "*-1", "time": 8, "seconds": 4.5},
        {"kind": "drop", "who": "any", "probability": 0.25, "times": 0},
        seed=9,
    )
    path.write_text(written.to_yaml())
    assert FaultPlan.load(path) == written
    assert FaultPlan.parse(written.as_mapping()) == written
    path.write_text("faults: [")
    with pytest.raises(FaultPlanError, match="is no YAML"):
        FaultPlan.load(path)


@given(st.text(max_size=30))
def test_whatever_names_nobody_is_refused(text: str) -> None:
    try:
        target = Target.parse(text)
    except FaultPlanError:
        return
    assert Target.parse(str(target)) == target


def test_random_plans_are_reproducible_and_hit_everybody() -> None:
    one = FaultPlan.random(THERE, 600, seed=4, period=5)
    assert one == FaultPlan.random(THERE, 600, seed=4, period=5) != FaultPlan.random(THERE, 600, seed=5, period=5)
    assert [fault.time for fault in one.faults] == [5.0 * n for n in range(1, 121)]
    assert {fault.kind for fault in one.faults} == {"kill"}
    hit = {action.who for action in one.actions(THERE, 600)}
    assert hit == set(THERE) and len(one.actions(THERE, 600)) == 120
    assert FaultPlan.parse(one.as_mapping()) == one
    mixed = FaultPlan.random(THERE, 2000, seed=1, period=1, kinds=dict.fromkeys(KINDS, 1.0))
    assert {fault.kind for fault in mixed.faults} == set(KINDS)
    assert mixed.resolved(THERE) == mixed


def test_any_is_drawn_among_those_that_are_there() -> None:
    drawn = plan({"kind": "corrupt", "who": "any"}, {"kind": "kill", "who": "rank any", "step": 2}, seed=1)
    resolved = drawn.resolved(THERE)
    assert resolved == drawn.resolved(THERE)
    assert [fault.who.drawn for fault in resolved.faults] == [False, False]
    in_a_step = {"kind": "drop", "who": "any", "point": "rank.step"}
    assert {plan(in_a_step, seed=seed).resolved(THERE).faults[0].who.role for seed in range(20)} == {"rank"}
    again = plan({"kind": "kill", "who": "any", "time": 1, "every": 2})
    assert len({action.who for action in again.actions(THERE, 100)}) > 3
    with pytest.raises(FaultPlanError, match="fault 0 is about storage 7, and there are rank 0 of a"):
        plan({"kind": "kill", "who": "storage 7"}).resolved(THERE)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_happens_somewhere_or_is_refused(kind: str, role: str) -> None:
    who = "supervisor" if role == "supervisor" else f"{role} 0"
    fault = {"kind": kind, "who": who, "seconds": 0.01}
    if not points_of(kind, role):
        with pytest.raises(FaultPlanError):
            PlannedFault.parse(fault)
        return
    assert PlannedFault.parse(fault).places


def calls_that_fail(count: int, **fault: Any) -> list[int]:
    """Numbers, from 1, of the calls at a point that a fault makes fail."""
    failed = []
    with injected(plan({"kind": "drop", "who": "rank 0", "point": "channel.call", **fault})):
        for number in range(1, count + 1):
            if faultpoints.fails("channel.call", "pool-0"):
                failed.append(number)
    return failed


def test_when_and_how_often() -> None:
    assert calls_that_fail(9) == [1]
    assert calls_that_fail(9, call=4) == [4]
    assert calls_that_fail(9, call=4, times=3) == [4, 5, 6]
    assert calls_that_fail(9, call=2, every=3) == [2, 5, 8]
    assert calls_that_fail(9, call=2, every=3, times=2) == [2, 5]
    assert calls_that_fail(4, times=0) == [1, 2, 3, 4]
    assert calls_that_fail(4, peer="other-*", times=0) == []
    some = calls_that_fail(400, times=0, probability=0.25)
    assert some == calls_that_fail(400, times=0, probability=0.25) and 60 < len(some) < 140


def test_steps_and_seconds() -> None:
    with injected(plan({"kind": "alloc_fail", "who": "rank 0", "step": 3})):
        failed = []
        for step in range(1, 6):
            faultpoints.reach("rank.step")
            if faultpoints.fails("alloc.device"):
                failed.append(step)
        assert failed == [3]
    now = [100.0]
    window = {"kind": "partition", "who": "rank 0", "time": 5, "seconds": 2}
    with injected(plan(window), clock=lambda: now[0], started=100.0) as injector:
        lost = []
        for second in range(10):
            now[0] = 100.0 + second
            if faultpoints.fails("channel.call", "pool-0"):
                lost.append(second)
        assert lost == [5, 6] and [firing.fault for firing in injector.firings] == [0]


def test_what_each_kind_does() -> None:
    signals: list[int] = []
    faults = [
        {"kind": "kill", "who": "rank 0", "point": "rank.step"},
        {"kind": "hang", "who": "rank 0", "point": "rank.reduce"},
        {"kind": "drop", "who": "rank 0", "point": "rank.answer"},
        {"kind": "oom", "who": "rank 0", "point": "rank.claim"},
        {"kind": "short_read", "who": "rank 0"},
        {"kind": "stale_exists", "who": "rank 0"},
        {"kind": "hang", "who": "rank 0", "point": "copy.l1-load", "seconds": 0.01},
    ]
    with injected(plan(*faults), end=signals.append) as injector:
        faultpoints.reach("rank.step")
        faultpoints.reach("rank.reduce")
        assert signals == [signal.SIGKILL, signal.SIGSTOP]
        with pytest.raises(InjectedFault, match=r"rank\.answer fails in rank 0"):
            faultpoints.reach("rank.answer")
        with pytest.raises(MemoryError):
            faultpoints.reach("rank.claim")
        assert faultpoints.around("storage.load", 3, lambda: 3)() == 2
        assert faultpoints.around("storage.lookup", 3, lambda: 1)() == 3
        faultpoints.reach("copy.l1-load")
    assert [firing.fault for firing in injector.firings] == [0, 1, 2, 3, 4, 5, 6]
    assert faultpoints.installed() is None


def test_a_corrupted_page_differs_in_one_bit() -> None:
    pages = [np.zeros((2, 8), np.uint8) for _ in range(4)]
    with injected(plan({"kind": "corrupt", "who": "storage 0", "call": 2}, seed=5), "storage 0"):
        faultpoints.damage("page.arena", lambda: pages)
        assert not np.any(pages)
        faultpoints.damage("page.arena", lambda: pages)
    assert int(np.unpackbits(np.stack(pages)).sum()) == 1


def test_what_happened_to_a_predecessor_counts() -> None:
    once = plan({"kind": "drop", "who": "rank 0", "point": "channel.call", "times": 2})
    with injected(once, spent={0: 1}):
        assert [faultpoints.fails("channel.call", "x") for _ in range(3)] == [True, False, False]


def test_faults_of_others_do_not_happen_here() -> None:
    with injected(plan({"kind": "drop", "who": "rank 1 of a", "point": "rank.step"}), "rank 1 of b"):
        faultpoints.reach("rank.step")
