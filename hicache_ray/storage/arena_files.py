"""Arena files in shared memory: their names, and which of them nobody will ever use again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hicache_ray.storage.arena import read_owner, remove_if_unlocked
from hicache_ray.storage.arena_layout import ArenaError, ArenaLocked

logger = logging.getLogger("hicache_ray.storage.arena_files")

SHARED_MEMORY = Path("/dev/shm")
_PREFIX, _SUFFIX = "hicache-", ".arena"


class Process(NamedTuple):
    """A process, told apart from a later one with the same id by when it started (clock ticks after boot)."""

    pid: int
    started: int

    @classmethod
    def running(cls, pid: int) -> Process | None:
        """The process that has the id now, None when there is none."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        # The name, in parentheses, may hold spaces: the fields are counted from its end.
        return cls(pid, int(stat.rpartition(")")[2].split()[19]))

    @property
    def alive(self) -> bool:
        """Whether this very process still runs."""
        return Process.running(self.pid) == self


def arena_path(folder: Path, member: str, token: str) -> Path:
    """Where the arena of a pool's member is: the token tells a pool from earlier ones of its name."""
    return folder / f"{_PREFIX}{token}-{member}{_SUFFIX}"


def arenas_of(folder: Path, token: str) -> list[Path]:
    """The arenas of one pool, half-made ones included."""
    return [path for path in _arena_files(folder) if path.name.lstrip(".").startswith(f"{_PREFIX}{token}-")]


def sweep(folder: Path, is_stale: Callable[[Mapping[str, Any]], bool]) -> list[Path]:
    """Delete the arenas that no living process owns and whose owner will not come back; returns them.

    Args:
        is_stale: says so from the facts that the owner left in the file.
    """
    removed = []
    for path in _arena_files(folder):
        try:
            half_made = path.name.startswith(".")
            if (half_made or is_stale(read_owner(path))) and remove_if_unlocked(path):
                removed.append(path)
        except ArenaLocked:
            continue
        except (ArenaError, OSError) as error:
            logger.warning("the file %s looks like an arena but can't be read; delete it by hand: %s", path, error)
    return removed


def _arena_files(folder: Path) -> list[Path]:
    whole = folder.glob(f"{_PREFIX}*{_SUFFIX}")
    half_made = folder.glob(f".{_PREFIX}*{_SUFFIX}.*")
    return sorted([*whole, *half_made])
