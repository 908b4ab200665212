"""Copies between two pools in CPU memory, as numpy views: any layout, no temporary, the GIL released.

Both pools are seen as [layers, pages, page_size, heads, dim bytes]; numpy orders the loops by the strides and moves
whatever is contiguous on both sides at once.
"""

from __future__ import annotations

import numpy as np

from hicache_ray.kernels.base import Plan, runs_of
from hicache_ray.kernels.threads import in_parallel
from hicache_ray.pools.layouts import Bytes

SMALL_RUN = 8 << 10
"""Bytes of a run below which numpy's fancy indexing, which copies twice, beats one call per run."""


def backup(plan: Plan) -> None:
    """All layers of the plan's pages, L1 -> L2."""
    layers = range(plan.device_pool.spec.layers)
    for placed, host in zip(plan.host_pool.geometry.parts, plan.host_pool.part_views, strict=True):
        stacked = plan.device_pool.stacked_bytes(placed.part)
        if stacked is not None and not _scattered(plan, layers=len(layers)):
            _copy_runs(plan, host, stacked, to_host=True)
            continue
        for layer in layers:
            _copy_layer(plan, host[layer], plan.device_pool.part_bytes(placed.part, layer), to_host=True)


def load_layer(plan: Plan, layer: int) -> None:
    """One layer of the plan's pages, L2 -> L1."""
    for placed, host in zip(plan.host_pool.geometry.parts, plan.host_pool.part_views, strict=True):
        _copy_layer(plan, host[layer], plan.device_pool.part_bytes(placed.part, layer), to_host=False)


def _scattered(plan: Plan, layers: int) -> bool:
    """Whether the runs are so short that a call for each costs more than copying twice."""
    if not plan.runs:
        return False
    run_bytes = len(plan.device_pages) * plan.host_pool.page_size * plan.host_pool.spec.row_bytes // len(plan.runs)
    return run_bytes * layers < SMALL_RUN


def _copy_layer(plan: Plan, host: Bytes, device: Bytes, *, to_host: bool) -> None:
    """host and device: [pages, page_size, heads, dim bytes]."""
    if not _scattered(plan, layers=1):
        _copy_runs(plan, host[None], device[None], to_host=to_host)
        return
    target, source = (host, device) if to_host else (device, host)
    target_pages, source_pages = plan.host_pages, plan.device_pages
    if not to_host:
        target_pages, source_pages = source_pages, target_pages

    def work(start: int, stop: int) -> None:
        target[target_pages[start:stop]] = source[source_pages[start:stop]]

    in_parallel(work, len(target_pages), plan.nbytes // plan.host_pool.spec.layers)


def _copy_runs(plan: Plan, host: Bytes, device: Bytes, *, to_host: bool) -> None:
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

    in_parallel(work, pages, plan.nbytes * len(host) // plan.host_pool.spec.layers)
