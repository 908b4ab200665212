"""The timeline of a run under faults: each fault, when it was noticed, and when what it hit worked again."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hicache_ray.faults.kinds import KILL, RANK
from hicache_ray.faults.plan import Identity
from hicache_ray.faults.service import Process, ServiceFaults

PERIOD = 0.25
"""Seconds between two looks at all processes: so exact are the times of storage actors and the supervisor."""


@dataclass
class FaultRecord:
    """One fault that happened. Times are seconds since the epoch.

    Attributes:
        number: of the fault in its plan.
        kind, who: what, to whom.
        point: where; "" from outside.
        at: when.
        pid: the process it hit.
        noticed: when somebody found out; None: nobody had to.
        healed: when what it hit worked again: for a rank the first step of its group that began after the fault and
            was answered, for the others their first answer.
    """

    number: int
    kind: str
    who: Identity
    point: str
    at: float
    pid: int
    noticed: float | None = None
    healed: float | None = None

    @property
    def heal_seconds(self) -> float | None:
        """From the fault to the moment when it was healed."""
        return None if self.healed is None else self.healed - self.at


class ChaosWatch:
    """Collects faults and signs of life, and installs the plan where actors came up without it. Thread-safe."""

    def __init__(self, faults: ServiceFaults) -> None:
        self.faults = faults
        self.records: list[FaultRecord] = []
        self.processes: dict[Identity, Process] = {}
        self._seen: set[tuple[int, str, float]] = set()
        self._broken_at: dict[str, list[float]] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look_often, name="chaos-watch", daemon=True)

    def start(self) -> None:
        """Begin to look; every process has answered once when this returns (those that can)."""
        self._look()
        self._thread.start()

    def stop(self) -> None:
        """End the looking."""
        self._stopped.set()
        self._thread.join(10.0)

    def happened(self, number: int, kind: str, who: Identity, point: str, at: float, pid: int) -> None:
        """Notes a fault."""
        with self._lock:
            # What an actor did to itself is heard of later, sometimes after the group was found broken.
            noticed = next((moment for moment in self._broken_at.get(who.group, ()) if moment >= at), None)
            self.records.append(FaultRecord(number, kind, who, point, at, pid, noticed))

    def noticed(self, group: str) -> None:
        """Somebody found the group broken, now."""
        now = time.time()
        with self._lock:
            self._broken_at.setdefault(group, []).append(now)
            for record in self._open(group):
                record.noticed = record.noticed or now

    def stepped(self, group: str, began: float) -> None:
        """A step of the group that began then was answered, now."""
        now = time.time()
        with self._lock:
            for record in self._open(group):
                if record.at < began:
                    record.healed = now

    def unhealed(self) -> list[FaultRecord]:
        """Faults after which something does not work yet."""
        with self._lock:
            return [record for record in self.records if record.healed is None]

    def take_firings(self) -> None:
        """Adds what happened at the actors' points since the last time."""
        for firing in self.faults.firings():
            key = (firing.fault, firing.who, firing.at)
            if key not in self._seen:
                self._seen.add(key)
                who = Identity.parse(firing.who)
                self.happened(firing.fault, firing.kind, who, firing.point, firing.at, firing.pid)

    def _open(self, group: str) -> Iterable[FaultRecord]:
        return [r for r in self.records if r.healed is None and r.who.role == RANK and r.who.group == group]

    def _look_often(self) -> None:
        while not self._stopped.wait(PERIOD):
            self._look()
            self.take_firings()

    def _look(self) -> None:
        began = time.time()
        answers = self.faults.install(1.0)
        now = time.time()
        with self._lock:
            self.processes.update(answers)
            for record in self.records:
                if record.healed is None and record.who.role != RANK:
                    _judge(record, answers.get(record.who), began, now)


def _judge(record: FaultRecord, process: Process | None, began: float, now: float) -> None:
    """What a look at a storage actor or the supervisor says about a fault of it."""
    if began < record.at:
        return
    ended = record.kind == KILL
    if process is None or (ended and process.pid != record.pid):
        record.noticed = record.noticed or now
    if process is not None and (not ended or process.pid != record.pid):
        record.healed = now


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which that share of the values lies (nearest rank); 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
