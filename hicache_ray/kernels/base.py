"""What every copy between L1 and L2 has in common: pages in, bytes moved, no waiting."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch

from hicache_ray.pools.device import DevicePool
from hicache_ray.pools.host import HostPool
from hicache_ray.pools.slots import Pages


class UnsupportedTransferError(ValueError):
    """No operator exists for this io backend, layout and attention, or the machine lacks what it needs."""


class Prepared(Protocol):
    """One operation's pages, checked, ordered and (on CUDA) uploaded once."""

    def backup(self) -> None:
        """Copies all layers of the pages from L1 to L2."""

    def load_layer(self, layer: int) -> None:
        """Copies one layer of the pages from L2 to L1."""


class Transfer(Protocol):
    """The copies for one io backend, host layout and attention.

    On the CPU a call returns when the bytes are there. On CUDA it only puts the copies on the current stream; both
    pools and the pages must stay as they are until that stream has passed them. `device_pages` and `host_pages` are
    int64 [n], the same page at the same place; neither may name a page twice. ValueError when they are of different
    lengths or lie outside a pool.
    """

    def prepare(self, device_pool: DevicePool, host_pool: HostPool, device_pages: Pages, host_pages: Pages) -> Prepared:
        """Checks and orders the pages once, for loads that go layer by layer."""

    def backup(self, device_pool: DevicePool, host_pool: HostPool, device_pages: Pages, host_pages: Pages) -> None:
        """Copies all layers of the pages from L1 to L2."""

    def load_layer(
        self, device_pool: DevicePool, host_pool: HostPool, device_pages: Pages, host_pages: Pages, layer: int
    ) -> None:
        """Copies one layer of the pages from L2 to L1."""


class Run(NamedTuple):
    """`length` pages that follow each other on both sides, from page `device` in L1 and page `host` in L2."""

    device: int
    host: int
    length: int


@dataclass(frozen=True)
class Plan:
    """The pages of one operation, in the order in which they are copied."""

    device_pool: DevicePool
    host_pool: HostPool
    device_pages: Pages
    host_pages: Pages

    @property
    def nbytes(self) -> int:
        """Bytes of the pages, all layers."""
        return len(self.device_pages) * self.host_pool.page_bytes

    @cached_property
    def runs(self) -> list[Run]:
        """The pages as runs, in order: neighbours on both sides are copied together."""
        return runs_of(self.device_pages, self.host_pages)

    @cached_property
    def index_tensor(self) -> torch.Tensor:
        """Device pages, then host pages, [2, n] int64 on the pool's device; uploaded without waiting for it."""
        both = torch.from_numpy(np.stack([self.device_pages, self.host_pages]))
        if self.device_pool.device.type == "cpu":
            return both
        return both.pin_memory().to(self.device_pool.device, non_blocking=True)


def runs_of(device_pages: Pages, host_pages: Pages) -> list[Run]:
    """The runs of two page lists of equal length, in order."""
    if not len(device_pages):
        return []
    joined = (np.diff(device_pages) == 1) & (np.diff(host_pages) == 1)
    starts = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    lengths = np.diff(np.append(starts, len(device_pages)))
    columns = (device_pages[starts], host_pages[starts], lengths)
    return [Run(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def as_given(device_pool: DevicePool, host_pool: HostPool, device_pages: Pages, host_pages: Pages) -> Plan:
    """The pages in the caller's order."""
    _check_pools(device_pool, host_pool)
    device = np.ascontiguousarray(device_pages, dtype=np.int64)
    host = np.ascontiguousarray(host_pages, dtype=np.int64)
    if device.shape != host.shape or device.ndim != 1:
        raise ValueError(f"device pages {device.shape} and host pages {host.shape} must be two lists of equal length")
    for name, pages, total in (("device", device, device_pool.pages), ("host", host, host_pool.pages)):
        if pages.size and (pages.min() < 0 or pages.max() >= total):
            raise ValueError(f"{name} pages {pages.min()} to {pages.max()} are not all in a pool of {total} pages")
    return Plan(device_pool, host_pool, device, host)


def by_host_address(device_pool: DevicePool, host_pool: HostPool, device_pages: Pages, host_pages: Pages) -> Plan:
    """The pages sorted by their place in L2, so that neighbours join to runs (what layer_first + direct needs)."""
    plan = as_given(device_pool, host_pool, device_pages, host_pages)
    order = np.argsort(plan.host_pages, kind="stable")
    return Plan(device_pool, host_pool, plan.device_pages[order], plan.host_pages[order])


def _check_pools(device_pool: DevicePool, host_pool: HostPool) -> None:
    ours = (device_pool.spec, device_pool.page_size)
    theirs = (host_pool.spec, host_pool.page_size)
    if ours != theirs:
        raise ValueError(f"the pools do not hold the same pages: L1 has {ours}, L2 has {theirs}")
