"""The fault points: none breaks anything by itself, all are in the code that they name, off costs one comparison."""

from __future__ import annotations

import ast
import dis
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hicache_ray import faultpoints
from hicache_ray.faultpoints import POINTS, InjectedFault, Views
from tests.conftest import REPOSITORY

CALLS = {"reach", "fails", "around", "damage"}


class Recorder:
    """An injector that notes where it was asked and fails everything that can fail."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def reach(self, point: str, peer: str) -> None:
        self.seen.append((point, peer))

    def fails(self, point: str, peer: str) -> bool:
        self.seen.append((point, peer))
        return True

    def answered(self, point: str, asked: int, answer: Any) -> Any:
        return [answer, asked]

    def damage(self, point: str, pages: Callable[[], Views]) -> None:
        pages()[0][0] ^= 1


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    faultpoints.install(recorder)
    yield recorder
    faultpoints.install(None)


def test_without_an_injector_nothing_happens() -> None:
    assert faultpoints.installed() is None
    faultpoints.reach("rank.step")
    assert not faultpoints.fails("alloc.device")
    call = object
    assert faultpoints.around("storage.lookup", 3, call) is call
    faultpoints.damage("page.arena", lambda: pytest.fail("the pages were asked for"))


@pytest.mark.parametrize("name", ["reach", "fails", "damage"])
def test_a_point_that_is_off_is_one_comparison(name: str) -> None:
    """The first thing the function does is to compare the injector with None and leave."""
    steps = [entry for entry in dis.get_instructions(getattr(faultpoints, name)) if entry.opname != "RESUME"]
    assert steps[0].argval == "_injector"
    assert any("NONE" in entry.opname or entry.argval is None for entry in steps[1:4])


def test_an_injector_is_asked(recorder: Recorder) -> None:
    assert faultpoints.installed() is recorder
    faultpoints.reach("rank.step")
    assert faultpoints.fails("channel.call", "pool-0")
    assert faultpoints.around("storage.lookup", 3, lambda: 2)() == [2, 3]
    page = np.zeros(4, np.uint8)
    faultpoints.damage("page.arena", lambda: [page])
    assert page.tolist() == [1, 0, 0, 0]
    assert recorder.seen == [("rank.step", ""), ("channel.call", "pool-0"), ("storage.lookup", "")]
    assert issubclass(InjectedFault, RuntimeError)


def named_points() -> Iterator[str]:
    """The point names in the package's sources, f-strings as their fixed beginning."""
    for path in sorted((REPOSITORY / "hicache_ray").rglob("*.py")):
        if {"testing", "faults"} & set(path.parts) or path.name == "faultpoints.py":
            continue
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in POINTS:
                yield node.value
            elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
                yield from (point for point in POINTS if point.startswith(node.values[0].value + "l1-"))


def test_every_point_is_in_the_code() -> None:
    assert set(named_points()) == set(POINTS)
