"""Arena files in shared memory: their names, who owns them, and which of them nobody will ever use again.

The owner of a file locks it (`flock`) while it lives; the kernel unlocks it when it dies.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hicache_ray.storage.shard.layout import (
    ARENA_MAGIC,
    FILE_HEADER,
    FILE_HEADER_BYTES,
    ArenaError,
    ArenaLocked,
    owner_of,
)

logger = logging.getLogger("hicache_ray.storage.shard.files")

SHARED_MEMORY = Path("/dev/shm")
_PREFIX, _SUFFIX = "hicache-", ".arena"


class ProcessId(NamedTuple):
    """A process, told apart from a later one with the same id by when it started (clock ticks after boot)."""

    pid: int
    started: int

    @classmethod
    def running(cls, pid: int) -> ProcessId | None:
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
        return ProcessId.running(self.pid) == self


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


def remove_if_unlocked(path: Path) -> bool:
    """Delete an arena file that no living process owns. Returns False when there is none.

    Raises:
        ArenaLocked: its owner lives.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        lock_file(path, descriptor)
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(descriptor)


def read_owner(path: Path) -> dict[str, Any]:
    """Who made the arena at `path`; ArenaError when it is none."""
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
        head = np.frombuffer(file.read(FILE_HEADER_BYTES), dtype=np.uint8)
    if head.size < FILE_HEADER_BYTES or head[: FILE_HEADER.itemsize].view(FILE_HEADER)[0]["magic"] != ARENA_MAGIC:
        raise ArenaError(f"{path} is no arena")
    return owner_of(head)


def new_locked_file(path: Path) -> tuple[Path, int]:
    """An empty file beside `path`, and its descriptor.

    A sweep that finds it between its making and its locking takes it for abandoned; then another is made.
    """
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            lock_file(temporary, descriptor)
        except ArenaLocked:
            os.close(descriptor)
            continue
        if os.fstat(descriptor).st_nlink:
            return temporary, descriptor
        os.close(descriptor)


def lock_file(path: Path, descriptor: int) -> None:
    """Own the file until the descriptor is closed or this process ends; ArenaLocked when another process does."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ArenaLocked(f"the arena {path} belongs to a living process") from None
