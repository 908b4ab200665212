"""Memory for pools: how much there is and how much L2 gets, large buffers touched once, and pinning for CUDA."""

from __future__ import annotations

import logging
import mmap
import os
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from hicache_ray.config.options import GIGABYTE

logger = logging.getLogger("hicache_ray.pools.memory")

RESERVE_BYTES = 10 * GIGABYTE
"""Host memory left to everything else unless configured otherwise."""

HUGE_PAGE = 2 << 20
_TOUCH_CHUNK = 256 << 20
_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a huge number that depends on the kernel's page size."""


class PoolMemoryError(ValueError):
    """A pool does not fit the memory that is there, or can't be pinned; nothing was allocated."""


def available_memory(root: Path = Path("/")) -> int:
    """Bytes this process may still use: MemAvailable, or less where a cgroup (v1 or v2) on the way up limits it.

    `root` is where /proc and /sys are found. Raises PoolMemoryError where the kernel tells neither.
    """
    limits = list(_cgroup_rooms(root))
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    if not limits:
        raise PoolMemoryError("free memory is unknown here: no /proc/meminfo; give the pool sizes explicitly")
    return max(0, min(limits))


def _cgroup_rooms(root: Path) -> list[int]:
    """Room left in every memory cgroup from this process's own up to the top one that can be seen."""
    listing = root / "proc/self/cgroup"
    rooms: list[int] = []
    for line in listing.read_text().splitlines() if listing.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        # In a container the path may be the host's; what is mounted then shows the own group at the top.
        folder = mount / path.lstrip("/")
        while True:
            rooms.extend(_room(folder, *names))
            if folder == mount or mount not in folder.parents:
                break
            folder = folder.parent
    return rooms


def _room(folder: Path, limit_name: str, usage_name: str) -> list[int]:
    try:
        limit = (folder / limit_name).read_text().strip()
        usage = int((folder / usage_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return []
    if limit == "max" or int(limit) >= _UNLIMITED:
        return []
    # File pages that nobody uses count as used until the kernel takes them back, which it does before it refuses.
    reclaimable = int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))
    return [int(limit) - usage + reclaimable]


def check_fits(nbytes: int, *, reserve: int = 0, what: str = "pool", available: int | None = None) -> None:
    """Raises PoolMemoryError with the numbers when `nbytes` plus `reserve` bytes for others do not fit (case 58)."""
    free = available_memory() if available is None else available
    if nbytes + reserve > free:
        raise PoolMemoryError(
            f"the {what} needs {nbytes / 1e9:.2f} GB and {reserve / 1e9:.2f} GB are kept in reserve, but only "
            f"{free / 1e9:.2f} GB of memory are available; make it smaller or lower the reserve"
        )


def host_pages(
    *,
    device_tokens: int,
    page_size: int,
    token_bytes: int,
    ratio: float = 2.0,
    size_gb: float = 0.0,
    reserve: int = RESERVE_BYTES,
    available: int | None = None,
) -> int:
    """Pages of the host pool: `size_gb` (GB of 1e9 bytes) when it is above 0, else `ratio` x the device's tokens.

    One page more than the whole pages of that size, as case 58 has it. Raises PoolMemoryError (a ValueError) with the
    numbers when the pool and `reserve` bytes do not fit `available` (default: what the machine and its cgroups leave).
    L2 may be smaller than L1.
    """
    if size_gb < 0 or (size_gb == 0 and ratio <= 0):
        raise ValueError(f"host size {size_gb} GB and ratio {ratio}: one of them must be above 0")
    tokens = int(size_gb * GIGABYTE // token_bytes) if size_gb > 0 else int(device_tokens * ratio)
    pages = tokens // page_size + 1
    what = f"host pool of {pages * page_size} tokens x {token_bytes} bytes"
    check_fits(pages * page_size * token_bytes, reserve=reserve, what=what, available=available)
    return pages


def allocate(nbytes: int) -> npt.NDArray[np.uint8]:
    """A private zeroed buffer of `nbytes`, on huge pages where the kernel has them, every page of it touched.

    First touch is an order of magnitude slower than a copy, so it is paid here and not by the first requests.
    """
    start = time.perf_counter()
    area = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(area, dtype=np.uint8)
    begin = -whole.ctypes.data % HUGE_PAGE
    buffer = whole[begin : begin + nbytes]
    _touch(buffer)
    if nbytes >= _TOUCH_CHUNK:
        logger.info("touched %.2f GB in %.2f s", nbytes / 1e9, time.perf_counter() - start)
    return buffer


def _touch(buffer: npt.NDArray[np.uint8]) -> None:
    chunks = [buffer[start : start + _TOUCH_CHUNK] for start in range(0, buffer.size, _TOUCH_CHUNK)]
    if len(chunks) == 1:
        _touch_chunk(chunks[0])
        return
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1, len(chunks)), thread_name_prefix="touch") as threads:
        list(threads.map(_touch_chunk, chunks))


def _touch_chunk(chunk: npt.NDArray[np.uint8]) -> None:
    chunk[:: mmap.PAGESIZE] = 0


def pin_buffer(buffer: npt.NDArray[np.uint8], owner: object, *, required: bool) -> bool:
    """Registers a buffer with CUDA for as long as `owner` lives. Returns True when it is pinned.

    Where it can't be: PoolMemoryError when `required`, else a warning, since unpinned copies are slow and synchronous.
    """
    if not torch.cuda.is_available():
        if required:
            raise PoolMemoryError("pinned host memory was asked for, but CUDA is not available; use pin=None")
        return False
    runtime = torch.cuda.cudart()
    portable_and_mapped = 3
    code = int(runtime.cudaHostRegister(buffer.ctypes.data, buffer.nbytes, portable_and_mapped))
    if code:
        problem = f"CUDA could not pin {buffer.nbytes / 1e9:.2f} GB of host memory (error {code}; see ulimit -l)"
        if required:
            raise PoolMemoryError(problem)
        logger.warning("%s: copies between L1 and L2 will be slow", problem)
        return False
    weakref.finalize(owner, _unpin, buffer)
    return True


def _unpin(buffer: npt.NDArray[np.uint8]) -> None:
    torch.cuda.cudart().cudaHostUnregister(buffer.ctypes.data)
