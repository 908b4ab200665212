"""What the tests of the reduction share: ranks as plain Ray actors, and waiting for conditions."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray

from hicache_ray.actors.collective import ReductionGroup
from hicache_ray.deadline import wait_until

PATIENCE = 120
"""Seconds after which a test gives up waiting for an answer that has to come."""


@ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"health": 1})
class Rank:
    """One process that can be in several groups."""

    def __init__(self) -> None:
        self.groups: dict[str, ReductionGroup] = {}
        self.entered = 0

    def join(self, group: str, generation: int, rank: int, size: int, options: dict[str, Any]) -> int:
        self.groups[group] = ReductionGroup.join(group, generation, rank=rank, world_size=size, **options)
        return os.getpid()

    def reduce(self, group: str, vector: list[int]) -> list[int]:
        self.entered += 1
        return self.groups[group].allreduce_min(np.array(vector, dtype=np.int64)).tolist()

    def leave(self, group: str) -> None:
        self.groups[group].close()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    @ray.method(concurrency_group="health")
    def reductions_entered(self) -> int:
        return self.entered

    @ray.method(concurrency_group="health")
    def pid(self) -> int:
        return os.getpid()


class Pool:
    """Rank processes that outlive a test: starting one takes seconds. The dead are replaced as they are handed out."""

    def __init__(self, spare: int) -> None:
        self._idle = [Rank.remote() for _ in range(spare)]
        self._spare = spare
        self._taken: list[Any] = []

    def take(self, count: int) -> list[Any]:
        self._idle += [Rank.remote() for _ in range(count - len(self._idle))]
        given, self._idle = self._idle[:count], self._idle[count:]
        self._taken += given
        return given

    def give_back(self) -> None:
        self._idle += [rank for rank in self._taken if is_alive(rank)]
        self._idle += [Rank.remote() for _ in range(self._spare - len(self._idle))]
        self._taken.clear()


def is_alive(rank: Any) -> bool:
    try:
        return bool(get(rank.pid.remote()))
    except ray.exceptions.RayActorError:
        return False


def join(ranks: Sequence[Any], group: str, generation: int = 0, **options: Any) -> None:
    """All of them join as ranks 0, 1, ..."""
    options = {"timeout": 20.0, **options}
    get([rank.join.remote(group, generation, at, len(ranks), options) for at, rank in enumerate(ranks)])


def reduce(ranks: Sequence[Any], group: str, vectors: Sequence[Sequence[int]]) -> list[list[int]]:
    refs = [rank.reduce.remote(group, list(vector)) for rank, vector in zip(ranks, vectors, strict=True)]
    return get(refs)


def get(refs: Any) -> Any:
    return ray.get(refs, timeout=PATIENCE)


def enter(ranks: Sequence[Any], group: str) -> list[Any]:
    """Sends these ranks into a reduction that lacks another rank; returns once each is in it."""
    before = get([rank.reductions_entered.remote() for rank in ranks])
    refs = [rank.reduce.remote(group, [1]) for rank in ranks]
    wait_for(lambda: all(now > then for now, then in zip(entered(ranks), before, strict=True)))
    return refs


def entered(ranks: Sequence[Any]) -> list[int]:
    return get([rank.reductions_entered.remote() for rank in ranks])


def failure(ref: Any) -> str:
    """The text of the CollectiveError a call has to end with."""
    try:
        answer = ray.get(ref, timeout=PATIENCE)
    except ray.exceptions.RayTaskError as error:
        assert type(error.cause).__name__ == "CollectiveError", error.cause
        return str(error.cause)
    raise AssertionError(f"no CollectiveError but {answer!r}")


def wait_for(condition: Callable[[], bool]) -> None:
    assert wait_until(condition, PATIENCE), "the awaited condition did not come"
