"""Runs the copies of one operation, in several threads where that pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from hicache_ray.storage.base import Bytes

Job = tuple[Callable[[int, Bytes], bool], int, Bytes]
"""A copying function, the number of the page and the page."""

LEAST_BYTES_A_THREAD = 2 << 20
"""Below that, waking another thread costs more than it copies."""


class Copier:
    """Copies pages in up to `threads` threads, of which the caller is one. Thread-safe."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads - 1, "l3-copy") if threads > 1 else None

    def run(self, jobs: Sequence[Job]) -> list[bool]:
        """The results of the jobs, in order; raises what a job raises."""
        total = sum(page.nbytes for _, _, page in jobs[:1]) * len(jobs)
        parts = max(1, min(self._threads, total // LEAST_BYTES_A_THREAD))
        if self._executor is None or parts == 1:
            return _copy(jobs)
        size = -(-len(jobs) // parts)
        others = [self._executor.submit(_copy, jobs[start : start + size]) for start in range(size, len(jobs), size)]
        done = _copy(jobs[:size])
        for other in others:
            done += other.result()
        return done

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)


def _copy(jobs: Sequence[Job]) -> list[bool]:
    return [copy(k, page) for copy, k, page in jobs]
