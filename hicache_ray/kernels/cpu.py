"""Copies between two pools in CPU memory, as numpy views: any layout, no temporary, the GIL released.

Both pools are seen as [layers, pages, page_size, heads, dim bytes]; numpy orders the loops by the strides and moves
whatever is contiguous on both sides at once. A large copy is shared among a few threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from hicache_ray.kernels.base import CopyPlan, PoolCopies, runs_of
from hicache_ray.pages import Bytes
from hicache_ray.threads import HelperThreads

SMALL_RUN = 8 << 10
"""Bytes of a run below which numpy's fancy indexing, which copies twice, beats one call per run."""

SHARED_BYTES = 4 << 20
"""A copy is shared from this size on: handing work to a thread costs about as much as copying 0.5 MB."""


class NumpyCopies(PoolCopies):
    """The copies of two pools in CPU memory."""

    def backup(self, plan: CopyPlan) -> None:
        """All layers; at once where the device pool's own tensor stacks them and the runs are long enough."""
        layers = range(self.device_pool.spec.layers)
        for placed, host in zip(self.host_pool.geometry.parts, self.host_pool.part_views, strict=True):
            stacked = self.device_pool.stacked_bytes(placed.part)
            if stacked is not None and not self._scattered(plan, layers=len(layers)):
                self._copy_runs(plan, host, stacked, to_host=True)
                continue
            for layer in layers:
                device = self.device_pool.part_tensor(placed.part, layer).numpy()
                self._copy_layer(plan, host[layer], device, to_host=True)

    def load_layer(self, plan: CopyPlan, layer: int) -> None:
        """One layer."""
        for placed, host in zip(self.host_pool.geometry.parts, self.host_pool.part_views, strict=True):
            self._copy_layer(plan, host[layer], self.device_pool.part_tensor(placed.part, layer).numpy(), to_host=False)

    def _scattered(self, plan: CopyPlan, layers: int) -> bool:
        """Whether the runs are so short that a call for each costs more than copying twice."""
        if not plan.runs:
            return False
        host = self.host_pool
        run_bytes = len(plan.device_pages) * host.page_size * host.spec.row_bytes // len(plan.runs)
        return run_bytes * layers < SMALL_RUN

    def _layer_bytes(self, plan: CopyPlan) -> int:
        return len(plan.device_pages) * self.host_pool.page_bytes // self.host_pool.spec.layers

    def _copy_layer(self, plan: CopyPlan, host: Bytes, device: Bytes, *, to_host: bool) -> None:
        """host and device: [pages, page_size, heads, dim bytes]."""
        if not self._scattered(plan, layers=1):
            self._copy_runs(plan, host[None], device[None], to_host=to_host)
            return
        sides = (host, plan.host_pages), (device, plan.device_pages)
        (target, target_pages), (source, source_pages) = sides if to_host else sides[::-1]

        def work(start: int, stop: int) -> None:
            target[target_pages[start:stop]] = source[source_pages[start:stop]]

        share(work, len(target_pages), self._layer_bytes(plan))

    def _copy_runs(self, plan: CopyPlan, host: Bytes, device: Bytes, *, to_host: bool) -> None:
        """host and device: [layers, pages, page_size, heads, dim bytes]."""
        pages = len(plan.device_pages)

        def work(start: int, stop: int) -> None:
            whole = start == 0 and stop == pages
            runs = plan.runs if whole else runs_of(plan.device_pages[start:stop], plan.host_pages[start:stop])
            for first, host_first, length in runs:
                in_host = host[:, host_first : host_first + length]
                in_device = device[:, first : first + length]
                if to_host:
                    np.copyto(in_host, in_device)
                else:
                    np.copyto(in_device, in_host)

        share(work, pages, self._layer_bytes(plan) * len(host))


_lock = threading.Lock()
_threads = max(1, min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))
_helpers: HelperThreads | None = None


def set_copy_threads(threads: int) -> int:
    """Sets the threads that later copies in this process use, the caller's included; returns how many they were.

    At first they are the cores there are, at most 4. 1 copies in the caller's thread only.
    """
    global _threads, _helpers
    if threads < 1:
        raise ValueError(f"a copy needs at least 1 thread, not {threads}")
    with _lock:
        before, _threads = _threads, threads
        helpers, _helpers = _helpers, None
    if helpers is not None:
        helpers.close()
    return before


def share(work: Callable[[int, int], None], count: int, nbytes: int) -> None:
    """Runs work(start, stop) over the range of `count` items, in equal shares; returns when all are done.

    An exception of any share is raised once all have ended.
    """
    shares = min(_threads, count) if nbytes >= SHARED_BYTES else 1
    if shares <= 1:
        if count:
            work(0, count)
        return
    cuts = [count * number // shares for number in range(shares + 1)]
    _helper_threads().map(lambda cut: work(*cut), list(pairwise(cuts)))


def _helper_threads() -> HelperThreads:
    global _helpers
    with _lock:
        if _helpers is None:
            _helpers = HelperThreads("l1-l2-copy", _threads - 1)
        return _helpers
