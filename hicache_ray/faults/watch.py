"""The timeline of a run under faults: each fault, when it was noticed, and when its victim worked again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hicache_ray.faults.injector import Firing
from hicache_ray.faults.kinds import KILL, RANK
from hicache_ray.faults.plan import Identity
from hicache_ray.faults.service import ActorProcess


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
        healed: when its victim worked again: for a rank the first step of its group that began after the fault and
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
    """Collects faults and signs of life. Thread-safe."""

    def __init__(self) -> None:
        self.records: list[FaultRecord] = []
        self._seen: set[tuple[int, str, float]] = set()
        self._broken_at: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    def happened(self, firing: Firing) -> None:
        """Notes a fault, once however often it is heard of."""
        who, at = Identity.parse(firing.who), firing.at
        key = (firing.fault, firing.who, at)
        with self._lock:
            if key in self._seen:
                return
            self._seen.add(key)
            # What an actor did to itself is heard of later, sometimes after the group was found broken.
            noticed = next((moment for moment in self._broken_at.get(who.group, ()) if moment >= at), None)
            self.records.append(FaultRecord(firing.fault, firing.kind, who, firing.point, at, firing.pid, noticed))

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

    def looked(self, began: float, answers: Mapping[Identity, ActorProcess]) -> None:
        """A look at all processes that began then has ended now, with these answers."""
        now = time.time()
        with self._lock:
            for record in self.records:
                if record.healed is None and record.who.role != RANK:
                    _judge(record, answers.get(record.who), began, now)

    def unhealed(self) -> list[FaultRecord]:
        """Faults after which something does not work yet."""
        with self._lock:
            return [record for record in self.records if record.healed is None]

    def _open(self, group: str) -> Iterable[FaultRecord]:
        return [r for r in self.records if r.healed is None and r.who.role == RANK and r.who.group == group]


def _judge(record: FaultRecord, process: ActorProcess | None, began: float, now: float) -> None:
    """What a look at a storage actor or the supervisor says about a fault of it."""
    if began < record.at:
        return
    ended = record.kind == KILL
    if process is None or (ended and process.pid != record.pid):
        record.noticed = record.noticed or now
    if process is not None and (not ended or process.pid != record.pid):
        record.healed = now
