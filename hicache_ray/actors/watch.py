"""Ending the process of a rank or storage actor when it does not answer any more, on whatever node it is.

The watch over a service's storage actors: one that hangs is ended, so that Ray starts it again.

An actor that dies is started again by Ray alone. One that is stopped, or hangs, its clients would
refuse for ever.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hicache_ray.actors.directory import RAY_NAMESPACE, look_up, publish_ranks, ranks_of
from hicache_ray.storage.pool.options import actor_name
from hicache_ray.storage.pool.ray_channel import PoolDirectory

logger = logging.getLogger("hicache_ray.processes")

KILL_TIMEOUT = 10.0


RANK, STORAGE = "RankServer", "StorageActor"
"""Classes of the actors whose processes may be ended: Ray names a worker's process after its actor's class."""


def kill_worker(pid: int, actor_class: str = RANK) -> bool:
    """SIGKILL to such an actor's process on this node; True when there was one. Other processes are never touched."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    if f"ray::{actor_class}".encode() not in command:
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return True


def kill_rank(pid: int, node_id: str) -> None:
    """Ends a rank's process on its node, also one that is stopped or hangs, so that Ray starts the actor again.

    A node that can't be reached takes its processes along; that is logged and no error.
    """
    kill_actor(pid, node_id, RANK)


def kill_actor(pid: int, node_id: str, actor_class: str) -> bool:
    """As `kill_rank`, for an actor of that class; True when there was a process and it was ended."""
    if node_id == ray.get_runtime_context().get_node_id():
        return kill_worker(pid, actor_class)
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    remote: Any = ray.remote(num_cpus=0, max_retries=0)
    task = remote(kill_worker).options(scheduling_strategy=strategy)
    try:
        return bool(ray.get(task.remote(pid, actor_class), timeout=KILL_TIMEOUT))
    except ray.exceptions.RayError as error:
        logger.warning("process %d on node %s could not be ended: %s", pid, node_id, error)
        return False


Place = tuple[int, str]
"""Process id and node of an actor."""


class StorageHeal(NamedTuple):
    """A storage actor whose process was ended because it hung. Times are seconds since the epoch."""

    member: str
    silent_at: float
    ended_at: float
    pid: int


class _Ping(NamedTuple):
    """A ping under way. It is waited for until it is answered: a late answer is a sign of life, too."""

    reference: Any
    sent: float


class StorageWatch:
    """Looks at the members of a service's own storage pool. Not thread-safe.

    Args:
        service: whose pool.
        patience: seconds a member may be silent before its process is ended.
        clock: seconds, monotonic.
    """

    def __init__(self, service: str, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.service = service
        self.patience = patience
        self._clock = clock
        self._pings: dict[str, _Ping] = {}
        self._places: dict[str, Place] = {}

    def look(self, wait: float) -> list[StorageHeal]:
        """Pings all members, waits `wait` seconds for their answers, and ends those that were silent for too long.

        A member that is being started has no process that was seen alive and is left alone, however long it takes.
        """
        members = self._members()
        self._pings = {member: ping for member, ping in self._pings.items() if member in members}
        for member in members:
            self._send(member)
        by_reference = {ping.reference: member for member, ping in self._pings.items()}
        waiting = list(by_reference)
        done, silent = ray.wait(waiting, num_returns=len(waiting), timeout=wait) if waiting else ([], [])
        for reference in done:
            self._take(by_reference[reference], reference)
        ended = [self._end_if_hung(by_reference[reference]) for reference in silent]
        return [heal for heal in ended if heal is not None]

    def _members(self) -> tuple[str, ...]:
        record = look_up(self.service)
        membership = PoolDirectory(record.storage, RAY_NAMESPACE).read() if record and record.storage else None
        return tuple(membership.everyone) if membership else ()

    def _send(self, member: str) -> None:
        if member in self._pings:
            return
        try:
            actor = ray.get_actor(actor_name(member), namespace=RAY_NAMESPACE)
            self._pings[member] = _Ping(actor.ping.remote(), self._clock())
        except (ValueError, RayError) as error:
            logger.debug("storage actor %s can't be asked: %s", member, error)

    def _take(self, member: str, reference: Any) -> None:
        del self._pings[member]
        try:
            pid, node_id = ray.get(reference)
        except RayError as error:
            # It died, and Ray says so at once: nothing hangs.
            logger.debug("storage actor %s does not answer: %s", member, error)
            return
        if self._places.get(member) != (pid, node_id):
            self._places[member] = (pid, node_id)
            publish_ranks(self._key(member), [(pid, node_id)])  # for a successor: who hangs can't be asked

    def _end_if_hung(self, member: str) -> StorageHeal | None:
        silence = self._clock() - self._pings[member].sent
        if silence < self.patience:
            return None
        place = self._places.get(member) or next(iter(ranks_of(self._key(member))), None)
        if place is None or not kill_actor(*place, STORAGE):
            return None  # being started, or dead already
        del self._pings[member]
        now = time.time()
        logger.warning(
            "storage actor %s was silent for %.0f s: its process %d was ended and Ray starts it again",
            member,
            silence,
            place[0],
        )
        return StorageHeal(member, now - silence, now, place[0])

    def _key(self, member: str) -> str:
        """Where the place of a member is noted; forgotten with the service."""
        return f"{self.service}:storage/{member}"
