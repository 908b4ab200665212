"""Serving a request by hand, for tests: the whole life of a request on a group, with every cached page verified.

The group has to run `hicache_ray.replay.engine:SyntheticEngine`, whose KV is known.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from hicache_ray.actors.errors import GroupRestarted
from hicache_ray.hashing import token_bytes
from hicache_ray.rank.step import Admit, Finish, Scheduled
from hicache_ray.replay.driver import SteppedGroup, StepResult

DEADLINE_SECONDS = 60.0
_numbers = itertools.count()
_process = secrets.token_hex(4)
"""Tells drivers apart: they may step one group, and be on different nodes."""


class WrongBytes(AssertionError):
    """A cached page did not hold what it must."""


def ask(
    group: SteppedGroup,
    prompt: Sequence[int] | np.ndarray,
    answer: Sequence[int] | np.ndarray = (),
    *,
    times: int = 2,
    seconds: float = DEADLINE_SECONDS,
) -> Scheduled:
    """Serves one request to its end and says where its prompt's KV came from.

    Args:
        group: that runs the synthetic engine.
        prompt, answer: token ids.
        times: how often it is sent, should the group be rebuilt meanwhile; a service's clients do the same.
        seconds: that each wait of it may take.

    Raises:
        WrongBytes: a cached page was wrong.
        GroupRestarted: the group was rebuilt `times` times.
        GroupError: the group can't be rebuilt.
        TimeoutError: it did not end in time.
    """
    for attempt in range(times):
        try:
            return _ask(group, np.asarray(prompt, dtype="<u4"), np.asarray(answer, dtype="<u4"), seconds)
        except GroupRestarted:
            if attempt + 1 == times:
                raise
    raise ValueError(f"times is {times}; give at least 1")


def settle(group: SteppedGroup, *, seconds: float = DEADLINE_SECONDS) -> None:
    """Steps a group without requests until nothing is in flight on any rank. TimeoutError when it takes too long."""
    wait_for(lambda: all(rank["idle"] for rank in group.step().engine), "transfers to end", seconds)


def wait_for(condition: Callable[[], bool], what: str, seconds: float = DEADLINE_SECONDS) -> None:
    """Returns when the condition holds; TimeoutError, which says what was waited for, when it does not in time."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s in vain for {what}")
        pause.wait(0.01)


def _ask(group: SteppedGroup, prompt: np.ndarray, answer: np.ndarray, seconds: float) -> Scheduled:
    rid = f"ask-{_process}-{next(_numbers)}"
    group.step(admits=[Admit(rid, token_bytes(prompt), max_new_tokens=max(0, len(answer) - 1))])
    wait_for(lambda: group.step(polls=[rid]).polled[0].ready, f"the prefetch of {rid}", seconds)
    rows: list[Scheduled] = []

    def scheduled() -> bool:
        answered = group.step(schedules=[rid])
        _verify(answered)
        rows[:] = answered.scheduled
        return rows[0].ok

    wait_for(scheduled, f"room for {rid}", seconds)
    _verify(group.step(finishes=[Finish(rid, token_bytes(answer[:-1]))]))
    return rows[0]


def _verify(answer: StepResult) -> None:
    wrong = [counters["pages_mismatched"] for counters in answer.engine]
    if any(wrong):
        raise WrongBytes(f"cached pages with wrong bytes, by rank: {wrong}")
