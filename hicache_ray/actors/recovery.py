"""Brings a group back after a rank died, hung or diverged: a new generation all ranks agree in (docs/design.md 7).

    survey -> end what does not answer -> quiesce -> catalog of a survivor -> claims -> restore what all have -> join

Ray restarts a dead rank's actor by itself. Every wait has a deadline; a rank that misses one is ended and comes back as
a fresh one in the next attempt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from hicache_ray.actors.directory import Location
from hicache_ray.actors.watch import kill_actor
from hicache_ray.index.catalog import Catalog
from hicache_ray.rank.group import GroupError

logger = logging.getLogger("hicache_ray.recovery")

ATTEMPTS = 3

# Deadlines in seconds.
_SIGN_OF_LIFE = 4.0  # for an answer beside a running step; a process that gives none is stopped, or hangs as a whole
_ANSWER = 8.0  # for a rank that may still be inside a reduction
_START = 60.0  # for an actor to come up again
_QUIESCE = 10.0  # for a rank's own transfers to end
_JOIN = 4.0  # for all ranks to meet in the new generation; they are all up and idle by then
_CLAIM = 5.0  # spent on getting pages back; what is not back by then is dropped (and found in L3 later)


class RankInfo(NamedTuple):
    """What a rank says about itself: `fresh` until it has joined a generation."""

    pid: int
    node_id: str
    generation: int
    next_step: int
    fresh: bool

    @property
    def location(self) -> Location:
        """Where its process is."""
        return Location(self.pid, self.node_id)


@dataclass(frozen=True)
class Recovered:
    """How a recovery ended.

    Attributes:
        generation: the group's new one.
        locations: of the ranks, in rank order.
        fresh: ranks that had lost everything.
        pages, retained: pages in the agreed catalog, and how many of them all ranks have.
    """

    generation: int
    locations: tuple[Location, ...]
    fresh: tuple[int, ...]
    pages: int
    retained: int


class _Lost(Exception):
    """Ranks that missed a deadline or failed in a phase."""

    def __init__(self, ranks: Sequence[int], why: str) -> None:
        super().__init__(why)
        self.ranks = ranks


class Recovery:
    """One recovery of one group. Not to be run twice at the same time for the same group."""

    def __init__(self, name: str, actors: Sequence[Any], *, shares_bytes: bool) -> None:
        """`shares_bytes`: all ranks hold the same bytes (MLA), so a lost rank can get them from any other."""
        self.name = name
        self.actors = tuple(actors)
        self.shares_bytes = shares_bytes
        self._known: dict[int, Location] = {}

    def run(self, generation: int, known: Sequence[Location] = ()) -> Recovered:
        """Rebuilds the group as `generation`, or a later one if that takes several attempts.

        Args:
            generation: to begin with; above all that the group ever had.
            known: where the ranks' processes were last seen, in rank order, to end those that hang.

        Raises:
            GroupError: it could not be rebuilt in `ATTEMPTS` attempts.
        """
        self._known = dict(enumerate(known))
        claim = _CLAIM
        for attempt in range(ATTEMPTS):
            try:
                return self._attempt(generation + attempt, claim)
            except _Lost as error:
                logger.warning("group %s: %s; trying again", self.name, error)
                for rank in error.ranks:
                    self._end(rank)
                claim = 0.0  # whatever hung while pages were fetched must not stop the group a second time
        raise GroupError(f"group {self.name} could not be rebuilt in {ATTEMPTS} attempts")

    def _attempt(self, generation: int, claim: float) -> Recovered:
        ranks = self._survey()
        everyone = range(len(self.actors))
        self._all("quiesce", _QUIESCE, everyone, _QUIESCE)
        survivors = [rank for rank in everyone if not ranks[rank].fresh]
        pages = retained = 0
        if survivors:
            pages, retained = self._restore(survivors, claim)
        else:
            # A rank that was lost may have begun to come back in an attempt that failed.
            self._all("restore", _ANSWER, everyone, Catalog(()).pack(), b"")
        self._all("join", _JOIN + _ANSWER, everyone, generation, _JOIN)
        fresh = tuple(rank for rank in everyone if ranks[rank].fresh)
        locations = tuple(info.location for info in ranks)
        return Recovered(generation, locations, fresh, pages, retained)

    def _restore(self, survivors: list[int], claim: float) -> tuple[int, int]:
        everyone = range(len(self.actors))
        source = survivors[0]
        (settings,) = self._all("settings", _ANSWER, [source])
        self._all("adopt", _ANSWER, [rank for rank in everyone if rank != source], settings)
        (catalog,) = self._all("catalog", _ANSWER, [source])
        shared = ray.put(catalog)
        peers = [self.actors[rank] for rank in survivors] if self.shares_bytes else []
        masks = self._all("claim", claim + _QUIESCE, everyone, shared, peers, claim)
        kept = np.minimum.reduce([np.frombuffer(mask, dtype=np.uint8) for mask in masks])
        digests = self._all("restore", _ANSWER, everyone, shared, kept.tobytes())
        if len(set(digests)) > 1:
            raise _Lost(list(everyone), f"ranks restored different trees from one catalog: {digests}")
        return len(kept), int(kept.sum())

    def _survey(self) -> list[RankInfo]:
        """Who is there. A rank that does not answer in time is ended, and awaited as a fresh one."""
        everyone = range(len(self.actors))
        pings = self._ask("ping", everyone)
        self._ask("leave", everyone)  # frees ranks that wait for another in a reduction
        surveys = self._ask("survey", everyone)
        for rank in self._unanswered(pings, _SIGN_OF_LIFE):
            self._end_known(rank)
        answers: dict[int, RankInfo] = self._collected("survey", surveys, _ANSWER)
        silent = [rank for rank in everyone if rank not in answers]
        for rank in silent:
            self._end(rank)
        deadline = time.monotonic() + _START
        while silent and time.monotonic() < deadline:
            answers.update(self._answers("survey", deadline - time.monotonic(), silent))
            silent = [rank for rank in silent if rank not in answers]
        if silent:
            raise GroupError(f"group {self.name}: ranks {silent} did not come up within {_START:g} s")
        self._known.update({rank: info.location for rank, info in answers.items()})
        return [answers[rank] for rank in range(len(self.actors))]

    def _ask(self, method: str, ranks: Sequence[int], *arguments: Any) -> dict[Any, int]:
        return {getattr(self.actors[rank], method).remote(*arguments): rank for rank in ranks}

    def _unanswered(self, refs: Mapping[Any, int], timeout: float) -> list[int]:
        """The ranks from which neither an answer nor an error came within `timeout` seconds."""
        return [refs[ref] for ref in ray.wait(list(refs), num_returns=len(refs), timeout=timeout)[1]]

    def _answers(self, method: str, timeout: float, ranks: Sequence[int], *arguments: Any) -> dict[int, Any]:
        """The answers that came within `timeout` seconds, by rank."""
        return self._collected(method, self._ask(method, ranks, *arguments), timeout)

    def _collected(self, method: str, refs: Mapping[Any, int], timeout: float) -> dict[int, Any]:
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=max(0.0, timeout))
        answers = {}
        for ref in done:
            try:
                answers[refs[ref]] = ray.get(ref, timeout=1.0)
            except (RayError, GetTimeoutError) as error:
                logger.info("group %s: rank %d failed in %s: %s", self.name, refs[ref], method, error)
        return answers

    def _all(self, method: str, timeout: float, ranks: Sequence[int], *arguments: Any) -> list[Any]:
        answers = self._answers(method, timeout, ranks, *arguments)
        lost = [rank for rank in ranks if rank not in answers]
        if lost:
            raise _Lost(lost, f"ranks {lost} did not answer {method} within {timeout:g} s")
        return [answers[rank] for rank in ranks]

    def _end(self, rank: int) -> None:
        """Ends a rank's process, wherever it is; Ray starts the actor again."""
        if not self._end_known(rank):
            ray.kill(self.actors[rank], no_restart=False)

    def _end_known(self, rank: int) -> bool:
        """Ends a rank's process where it was last seen. Returns False when it was never seen. One that is being started
        has another process, and is left alone."""
        if rank not in self._known:
            return False
        kill_actor(*self._known[rank])
        return True
