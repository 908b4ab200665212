"""The one int64 vector a step reduces with MIN: local progress in, what all ranks have reached out (docs/design.md 4).

Layout: a header that proves the ranks are at the same point (each value x beside -x: MIN of both shows any
difference), cumulative counters of finished transfers, and five numbers for each prefetch in flight. Counts are
cumulative, not "new since last time", so a rank that applied an extra step can be seen and nothing is counted twice. A
value that needs MAX travels as its negative (case 51).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_HEADER = 8
_COUNTERS = 4
_PER_PREFETCH = 5


class DesyncError(RuntimeError):
    """Ranks of a group are not at the same generation, step or tree: seen in the reduction itself."""


class PrefetchProgress(NamedTuple):
    """How far one prefetch is; after the reduction, how far it is on every rank."""

    queried: bool
    """The store has said how many pages it has."""
    hit_pages: int
    completed_pages: int
    can_terminate: bool
    """False if any rank still wants to wait (MAX of "not done")."""
    terminated: bool
    """True if any rank has ended it (MAX)."""


class Progress(NamedTuple):
    """A rank's local progress, or the agreed one. Counters are cumulative since the generation began."""

    generation: int
    step: int
    digest: int
    """64-bit tree digest before this step."""
    writes: int
    loads: int
    backups: int
    releases: int
    prefetches: tuple[PrefetchProgress, ...]

    def vector(self) -> np.ndarray:
        """int64 vector of 12 numbers and 5 a prefetch, to be reduced with MIN."""
        high, low = self.digest >> 32, self.digest & 0xFFFFFFFF
        numbers = [
            *(self.generation, -self.generation, self.step, -self.step, high, -high, low, -low),
            *(self.writes, self.loads, self.backups, self.releases),
        ]
        for p in self.prefetches:
            numbers += (p.queried, p.hit_pages, p.completed_pages, -(not p.can_terminate), -p.terminated)
        return np.array(numbers, dtype=np.int64)

    @classmethod
    def agreed(cls, reduced: np.ndarray) -> Progress:
        """Reads a reduced vector; raises DesyncError when the ranks were not at the same point."""
        numbers: Sequence[int] = reduced.tolist()
        for name, at in (("generation", 0), ("step", 2), ("tree digest", 4), ("tree digest", 6)):
            if numbers[at] != -numbers[at + 1]:
                raise DesyncError(
                    f"ranks differ in their {name} at step {numbers[2]}: {numbers[at]} to {-numbers[at + 1]}"
                )
        tail = numbers[_HEADER + _COUNTERS :]
        rows = [tail[i : i + _PER_PREFETCH] for i in range(0, len(tail), _PER_PREFETCH)]
        writes, loads, backups, releases = numbers[_HEADER : _HEADER + _COUNTERS]
        return cls(
            generation=numbers[0],
            step=numbers[2],
            digest=numbers[4] << 32 | numbers[6],
            writes=writes,
            loads=loads,
            backups=backups,
            releases=releases,
            prefetches=tuple(
                PrefetchProgress(bool(queried), hit, done, waiting == 0, ended != 0)
                for queried, hit, done, waiting, ended in rows
            ),
        )
