"""The watch over a service's storage actors: one that hangs is ended, so that Ray starts it again.

An actor that dies is started again by Ray alone. One that is stopped, or hangs, its clients would
refuse for ever.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from hicache_ray.actors.directory import look_up, publish_ranks, ranks_of
from hicache_ray.actors.names import RAY_NAMESPACE
from hicache_ray.actors.processes import STORAGE, kill_actor
from hicache_ray.storage.pool_options import actor_name
from hicache_ray.storage.ray_channel import PoolDirectory

logger = logging.getLogger("hicache_ray.supervisor")

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
