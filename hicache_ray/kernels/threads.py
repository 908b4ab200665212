"""How many threads share a large copy between two pools in CPU memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

MIN_BYTES = 4 << 20
"""A copy is shared from this size on: handing work to a thread costs about as much as copying 0.5 MB."""

_lock = threading.Lock()
_threads = max(1, min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))
_executor: ThreadPoolExecutor | None = None


def get_copy_threads() -> int:
    """Threads a large copy uses, the caller's included; at first the cores there are, at most 4."""
    return _threads


def set_copy_threads(threads: int) -> None:
    """Sets the threads of later copies in this process; 1 copies in the caller's thread only."""
    global _threads, _executor
    if threads < 1:
        raise ValueError(f"a copy needs at least 1 thread, not {threads}")
    with _lock:
        # The old executor is not shut down: a copy that is using it finishes there, then its threads end by themselves.
        _threads, _executor = threads, None


def in_parallel(work: Callable[[int, int], None], count: int, nbytes: int) -> None:
    """Runs work(start, stop) over the range of `count` items, in equal shares; returns when all are done.

    An exception of any share is raised once all have ended.
    """
    shares = min(_threads, count) if nbytes >= MIN_BYTES else 1
    if shares <= 1:
        if count:
            work(0, count)
        return
    cuts = [count * share // shares for share in range(shares + 1)]
    executor = _shared_executor()
    others = [executor.submit(work, start, stop) for start, stop in zip(cuts[1:-1], cuts[2:], strict=True)]
    try:
        work(cuts[0], cuts[1])
    finally:
        errors = [other.exception() for other in others]
    for error in errors:
        if error is not None:
            raise error


def _shared_executor() -> ThreadPoolExecutor:
    global _executor
    with _lock:
        if _executor is None:
            _executor = ThreadPoolExecutor(max(1, _threads - 1), thread_name_prefix="l1-l2-copy")
        return _executor
