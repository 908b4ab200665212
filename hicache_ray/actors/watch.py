"""Ends the processes of actors that hang, so that Ray starts the actors again, and watches a service's storage actors.

Ray by itself starts an actor again when its process dies. A process that hangs or is stopped stays as it is, and the
clients of its actor would never get an answer.
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

from hicache_ray.actors.directory import RAY_NAMESPACE, locations_of, look_up
from hicache_ray.storage.pool.options import actor_name
from hicache_ray.storage.pool.ray_channel import PoolDirectory

logger = logging.getLogger("hicache_ray.actors.watch")

KILL_TIMEOUT = 10.0

RANK, STORAGE = "RankServer", "StorageActor"
"""Classes of the actors whose processes may be ended: Ray names a worker's process after its actor's class."""


def kill_worker(pid: int, actor_class: str) -> bool:
    """Send SIGKILL to a process on this node, if it is the worker of an actor of that class. Returns whether it was
    one."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    if f"ray::{actor_class}".encode() not in command:
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return True


def kill_actor(pid: int, node_id: str, actor_class: str = RANK) -> bool:
    """End an actor's process on its node, also when the process is stopped or hangs. Returns whether there was one.

    When the node can't be reached, its processes are gone with it: that is logged and is no error.
    """
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


class StorageHeal(NamedTuple):
    """One storage actor whose process was ended because it hung. Times are seconds since the epoch."""

    member: str
    silent_at: float
    ended_at: float
    pid: int


class _Ping(NamedTuple):
    """A ping under way. We keep waiting for its answer, however late: a late answer is a sign of life, too."""

    reference: Any
    sent: float


class StorageWatch:
    """Pings the members of a service's own storage pool, and ends the ones that hang. Not thread-safe.

    Args:
        service: name of the service.
        patience: seconds a member may be silent before its process is ended.
        clock: seconds, monotonic.
    """

    def __init__(self, service: str, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.service = service
        self.patience = patience
        self._clock = clock
        self._pings: dict[str, _Ping] = {}

    def look(self, wait: float) -> list[StorageHeal]:
        """Ping all members, wait `wait` seconds for the answers, and end each member that was silent for too long.

        A member that is being started is left alone, however long that takes: it publishes its process id and node only
        once it is up.
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
            ray.get(reference)
        except RayError as error:
            # The actor died, and Ray says so at once: nothing hangs.
            logger.debug("storage actor %s does not answer: %s", member, error)

    def _end_if_hung(self, member: str) -> StorageHeal | None:
        silence = self._clock() - self._pings[member].sent
        if silence < self.patience:
            return None
        location = next(iter(locations_of(actor_name(member))), None)
        if location is None or not kill_actor(*location, STORAGE):
            return None  # the actor is being started, or is dead already
        del self._pings[member]
        now = time.time()
        logger.warning(
            "storage actor %s was silent for %.0f s: its process %d was ended and Ray starts it again",
            member,
            silence,
            location.pid,
        )
        return StorageHeal(member, now - silence, now, location.pid)
