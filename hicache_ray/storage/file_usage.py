"""The byte count of a folder that several processes fill, and the sign by which they know of each other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

_COUNT = struct.Struct("<q")


class SharedCount:
    """A number in a file, changed under the file's lock: all processes on the folder see the same one.

    A process killed in the middle leaves the lock free and at most one batch too much in the count; who starts alone
    in the folder, and every scan, puts it right.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = _opened(path)
        self._lock = threading.RLock()

    @property
    def is_in_place(self) -> bool:
        """Whether the file is still there under its name. OSError after `close`."""
        with self._lock:
            return _is_at(self._descriptor, self._path)

    def reopen(self) -> None:
        """Go on with the file that is there now, a new one where there is none."""
        descriptor = _opened(self._path)
        with self._lock:
            os.close(self._descriptor)
            self._descriptor = descriptor

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock against threads and processes."""
        with self._lock:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def add(self, amount: int) -> int:
        """Change the count; the new one."""
        with self.locked():
            total = max(0, self.read() + amount)
            os.pwrite(self._descriptor, _COUNT.pack(total), 0)
            return total

    def read(self) -> int:
        """The count."""
        with self._lock:
            data = os.pread(self._descriptor, _COUNT.size, 0)
        return int(_COUNT.unpack(data)[0]) if len(data) == _COUNT.size else 0

    def close(self) -> None:
        """Close the file; the count stays. Later calls raise OSError: a call that was given up may go on, and by then
        the number of the closed descriptor may be another file's."""
        with self._lock:
            os.close(self._descriptor)
            self._descriptor = -1


class WritingFolder:
    """A folder of one process for files under construction. Its lock lives as long as the process, so leftovers of a
    killed one are known from files still being written."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self.path, self._descriptor = self._made()

    @property
    def is_in_place(self) -> bool:
        """Whether the folder is still there. OSError after `close`."""
        return _is_at(self._descriptor, self.path / "lock")

    def make_again(self) -> None:
        """Go on with a new folder."""
        path, descriptor = self._made()
        old, self.path, self._descriptor = self._descriptor, path, descriptor
        os.close(old)

    def remove_abandoned(self) -> bool:
        """Remove the folders of processes that ended without closing; True when no other process is at work here."""
        alone = True
        for folder in self._parent.iterdir():
            if folder != self.path and not _remove_if_abandoned(folder):
                alone = False
        return alone

    def close(self) -> None:
        """Remove the folder and give the lock back."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)
        self._descriptor = -1

    def _made(self) -> tuple[Path, int]:
        path = self._parent / f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        path.mkdir(parents=True)
        descriptor = _opened(path / "lock")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return path, descriptor


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_at(descriptor: int, path: Path) -> bool:
    held = os.fstat(descriptor)
    try:
        return os.path.samestat(held, os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _remove_if_abandoned(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        # Between another process's mkdir and its lock, or already being removed: not ours to judge.
        return not folder.exists()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        shutil.rmtree(folder, ignore_errors=True)
        return True
    finally:
        os.close(descriptor)
