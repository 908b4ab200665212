"""Copies between L1 and L2: what every way of copying promises, and the pages of one operation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from hicache_ray.pages import Pages
from hicache_ray.pools.device import DevicePool
from hicache_ray.pools.host import HostPool


class UnsupportedCopyError(ValueError):
    """There are no copies for this io backend, layout and attention, or the machine lacks what they need."""


class CopyRun(NamedTuple):
    """`length` pages that follow each other on both sides, from page `device` in L1 and page `host` in L2."""

    device: int
    host: int
    length: int


@dataclass(frozen=True)
class CopyPlan:
    """The pages of one operation, checked, in the order in which they are copied: int64 [n] each."""

    device_pages: Pages
    host_pages: Pages
    device: torch.device

    @cached_property
    def runs(self) -> list[CopyRun]:
        """The pages as runs, in order: neighbours on both sides are copied together."""
        return runs_of(self.device_pages, self.host_pages)

    @cached_property
    def index_tensor(self) -> torch.Tensor:
        """Device pages, then host pages, [2, n] int64 on the pool's device; uploaded without waiting for it."""
        both = torch.from_numpy(np.stack([self.device_pages, self.host_pages]))
        if self.device.type == "cpu":
            return both
        return both.pin_memory().to(self.device, non_blocking=True)


class PoolCopies(ABC):
    """Copies between one device pool and one host pool.

    On the CPU a copy returns when the bytes are there. On CUDA it only puts the copies on the current stream, and never
    waits; both pools and the plan must stay as they are until that stream has passed them.

    Args:
        device_pool: L1.
        host_pool: L2, of the same spec and page size. ValueError when it is not.
        sort_by_host: copy the pages in the order of their places in L2, so that neighbours join to runs.
    """

    def __init__(self, device_pool: DevicePool, host_pool: HostPool, *, sort_by_host: bool = False) -> None:
        ours, theirs = ((pool.spec, pool.page_size) for pool in (device_pool, host_pool))
        if ours != theirs:
            raise ValueError(f"the pools do not hold the same pages: L1 has {ours}, L2 has {theirs}")
        self.device_pool = device_pool
        self.host_pool = host_pool
        self.sort_by_host = sort_by_host

    def plan(self, device_pages: Pages, host_pages: Pages) -> CopyPlan:
        """Checks and orders the pages of one operation: the same page at the same place, no page twice.

        Raises:
            ValueError: the lists are of different lengths, or a page lies outside its pool.
        """
        device = np.ascontiguousarray(device_pages, dtype=np.int64)
        host = np.ascontiguousarray(host_pages, dtype=np.int64)
        if device.shape != host.shape or device.ndim != 1:
            raise ValueError(
                f"device pages {device.shape} and host pages {host.shape} must be two lists of equal length"
            )
        for name, pages, total in (("device", device, self.device_pool.pages), ("host", host, self.host_pool.pages)):
            if pages.size and (pages.min() < 0 or pages.max() >= total):
                raise ValueError(f"{name} pages {pages.min()} to {pages.max()} are not all in a pool of {total} pages")
        if self.sort_by_host:
            order = np.argsort(host, kind="stable")
            device, host = device[order], host[order]
        return CopyPlan(device, host, self.device_pool.device)

    @abstractmethod
    def backup(self, plan: CopyPlan) -> None:
        """Copies all layers of the pages from L1 to L2."""

    @abstractmethod
    def load_layer(self, plan: CopyPlan, layer: int) -> None:
        """Copies one layer of the pages from L2 to L1."""


def runs_of(device_pages: Pages, host_pages: Pages) -> list[CopyRun]:
    """The runs of two page lists of equal length, in order."""
    if not len(device_pages):
        return []
    joined = (np.diff(device_pages) == 1) & (np.diff(host_pages) == 1)
    starts = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    lengths = np.diff(np.append(starts, len(device_pages)))
    columns = (device_pages[starts], host_pages[starts], lengths)
    return [CopyRun(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
