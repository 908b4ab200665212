"""Which page files a folder has, in order of use, and how many bytes they may take, over all processes that fill it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import struct
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

logger = logging.getLogger("hicache_ray.storage")

PAGE_SUFFIXES = (".page", ".bin")
USAGE_NAME, WRITING_NAME = ".usage", ".writing"


class FileSpace:
    """The page files of a folder, least recently used first, kept under a byte cap and above a free-space floor.

    Every process keeps its own order, found by a scan at start and renewed by later ones; the byte count is shared, so
    the cap holds for all processes together. The order of use travels between processes in the files' modification
    times: a file that another process used since is passed over once. A folder that was removed meanwhile is made again
    by the next `reserve`. Thread-safe.
    """

    def __init__(self, root: Path, max_bytes: int | None, min_free_bytes: int) -> None:
        """`root` for at most `max_bytes` of page files (None: only the floor counts), with `min_free_bytes` of its file
        system left free."""
        self._root = root
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._lock = threading.RLock()
        self._order: OrderedDict[str, int] = OrderedDict()
        self._written = 0
        self._outstanding = 0
        self._stamp = 0
        self.evicted = 0
        self._make_folders()
        self._usage = SharedCount(root / USAGE_NAME)
        with self._usage.locked():
            self._writing = WritingFolder(root / WRITING_NAME)
            if self._writing.remove_abandoned():
                self._usage.add(self._scan() - self._usage.read())
                return
        self._scan()

    @property
    def writing(self) -> Path:
        """Where this process writes its files before they get their names."""
        return self._writing.path

    @property
    def used_bytes(self) -> int:
        """Bytes of page files in the folder, those being written included."""
        return self._usage.read()

    def __len__(self) -> int:
        return len(self._order)

    def stamps(self, count: int) -> list[int]:
        """Modification times (ns) for the pages of one call, newer than all before; a page's parent, which comes before
        it, counts as used after it, so that a chain is evicted from its end."""
        with self._lock:
            self._stamp = max(time.time_ns(), self._stamp + count)
            return [self._stamp - position for position in range(count)]

    def used(self, names: Sequence[str], stamps: Sequence[int]) -> None:
        """Note that files were written or read, in the order of `stamps` (newest first)."""
        with self._lock:
            for name, stamp in zip(reversed(names), reversed(stamps), strict=True):
                self._order[name] = stamp
                self._order.move_to_end(name)

    def reserve(self, size: int) -> bool:
        """Count `size` bytes that are about to be written, and make room for them. Returns False when there is no room.
        After True comes `settle`. OSError when the folder can't be used; nothing is reserved then."""
        with self._lock:
            self._restore()
            total = self._usage.add(size)
            self._outstanding += size
            try:
                fits = self._make_room(total, size)
            except OSError:
                self.settle(size, 0)
                raise
            if not fits:
                self.settle(size, 0)
            return fits

    def settle(self, reserved: int, written: int) -> None:
        """End a reservation: `written` bytes of it are now page files."""
        with self._lock:
            self._outstanding -= reserved
            self._written += written
            self._usage.add(written - reserved)

    def forget(self, name: str) -> None:
        """Remove a file and its bytes from the count; nothing when it is gone."""
        with self._lock:
            self._order.pop(name, None)
        self._remove(name)

    def names(self) -> list[str]:
        """Names of all page files now in the folder, relative to it."""
        return [name for name, _, _ in _page_files(self._root)]

    def close(self) -> None:
        """Give the folder back; the files stay."""
        self._writing.close()
        self._usage.close()

    def _make_folders(self) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        (self._root / WRITING_NAME).mkdir(exist_ok=True)

    def _restore(self) -> None:
        """Make the folder and what belongs into it again where it was removed, or another took its place."""
        if self._usage.is_in_place and self._writing.is_in_place:
            return
        logger.warning("the folder %s was removed while it was in use and is made again", self._root)
        self._make_folders()
        self._usage.reopen()
        with self._usage.locked():
            self._writing.make_again()
            self._rescan()

    def _make_room(self, total: int, size: int) -> bool:
        """Whether `size` bytes, which `total` counts already, fit, once files were evicted for them where need be."""
        cap, over = self._max_bytes, 0
        if cap is not None:
            over = total - cap
            if self._written > cap // 2:
                over += self._rescan()
        over = max(over, self._min_free_bytes + size - free_bytes(self._root))
        return over <= 0 or self._evict(over)

    def _evict(self, need: int) -> bool:
        for attempt in range(2):
            need -= self._evict_known(need)
            if need <= 0:
                return True
            if attempt == 0:
                need += self._rescan()
        return need <= 0

    def _evict_known(self, need: int) -> int:
        freed = 0
        while freed < need and self._order:
            name, stamp = self._order.popitem(last=False)
            try:
                status = os.stat(self._root / name)
            except FileNotFoundError:
                continue
            if status.st_mtime_ns > stamp:
                self._order[name] = status.st_mtime_ns
                continue
            freed += self._remove(name)
            self.evicted += 1
        return freed

    def _remove(self, name: str) -> int:
        path = self._root / name
        try:
            size = os.stat(path).st_size
            os.unlink(path)
        except FileNotFoundError:
            return 0
        self._usage.add(-size)
        return size

    def _rescan(self) -> int:
        """Bring order and count up to date. Returns the bytes by which the count was too low. What other processes have
        reserved and not yet written falls out of the count until the next scan: at most a batch of each."""
        before = self._usage.read()
        difference = self._scan() + self._outstanding - before
        self._usage.add(difference)
        return difference

    def _scan(self) -> int:
        found = sorted(_page_files(self._root), key=lambda file: file[1])
        with self._lock:
            self._order = OrderedDict((name, stamp) for name, stamp, _ in found)
            self._written = 0
            self._stamp = max(self._stamp, found[-1][1] if found else 0)
        return sum(size for _, _, size in found)


def _page_files(root: Path) -> Iterator[tuple[str, int, int]]:
    """Name relative to `root`, modification time (ns) and size of every page file."""
    folders = [""]
    while folders:
        folder = folders.pop()
        with contextlib.suppress(FileNotFoundError), os.scandir(root / folder) as entries:
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(name)
                elif entry.name.endswith(PAGE_SUFFIXES):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat()
                        yield name, status.st_mtime_ns, status.st_size


def free_bytes(root: Path) -> int:
    """Bytes of the folder's file system that this user may still fill."""
    status = os.statvfs(root)
    return status.f_bavail * status.f_frsize


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
        """Change the count. Returns the new one."""
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
        """Remove the folders of processes that ended without closing. Returns True when no other process is at work
        here."""
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
