"""Serving a request by hand, for tests: the whole life of a request on a group, with every cached page verified.

The group has to run `hicache_ray.replay.engine:SyntheticEngine`, whose KV is known.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Sequence

import numpy as np

from hicache_ray.deadline import wait_until
from hicache_ray.rank.group import Group, GroupAnswer
from hicache_ray.rank.step import Scheduled
from hicache_ray.replay.driver import IDLE_SECONDS, Driver, DriveSettings, RequestSource
from hicache_ray.replay.requests import ReplayRequest

DEADLINE_SECONDS = 60.0
_numbers = itertools.count()
_process = secrets.token_hex(4)
"""Tells drivers apart: they may step one group, and be on different nodes."""


class WrongBytes(AssertionError):
    """A cached page did not hold what it must."""


def ask(
    group: Group,
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
    if times < 1:
        raise ValueError(f"times is {times}; give at least 1")
    rid = f"ask-{_process}-{next(_numbers)}"
    request = ReplayRequest(rid, np.asarray(prompt, dtype="<u4"), np.asarray(answer, dtype="<u4"))
    rows: list[Scheduled] = []

    def look(answer: GroupAnswer) -> None:
        wrong = [counters["pages_mismatched"] for counters in answer.engine]
        if any(wrong):
            raise WrongBytes(f"cached pages with wrong bytes, by rank: {wrong}")
        rows.extend(answer.scheduled)

    settings = DriveSettings(attempts=times, stall_seconds=seconds)
    driver = Driver(group, RequestSource([request]), settings, answered=look)
    while driver.busy:
        if not driver.advance():
            time.sleep(IDLE_SECONDS)
    if driver.gave_up is not None:
        raise driver.gave_up
    return rows[-1]


def wait_for(condition: Callable[[], bool], what: str, seconds: float = DEADLINE_SECONDS) -> None:
    """Returns when the condition holds; TimeoutError, which says what was waited for, when it does not in time."""
    if not wait_until(condition, seconds):
        raise TimeoutError(f"waited {seconds:g} s in vain for {what}")
