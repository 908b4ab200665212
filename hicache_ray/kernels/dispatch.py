"""The one table of copies between L1 and L2: io backend x host layout x attention -> operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from hicache_ray.kernels import ascend, direct, kernel
from hicache_ray.kernels.base import Plan, Transfer, UnsupportedTransferError, as_given, by_host_address
from hicache_ray.pools.device import DevicePool
from hicache_ray.pools.host import HostPool
from hicache_ray.pools.layouts import LAYOUTS
from hicache_ray.pools.slots import Pages
from hicache_ray.pools.spec import Attention


class Operators(NamedTuple):
    """How the pages are ordered, how a layer is loaded (L2 -> L1), how all layers are backed up (L1 -> L2)."""

    order: Callable[[DevicePool, HostPool, Pages, Pages], Plan]
    load_layer: Callable[[Plan, int], None]
    backup: Callable[[Plan], None]


Cell = tuple[str, str, Attention]

TABLE: dict[Cell, Operators] = {
    # io backend, host layout, attention: order of the pages, load of a layer, backup of all layers
    ("kernel", "layer_first", "mha"): Operators(as_given, kernel.load_layer, kernel.backup),
    ("kernel", "layer_first", "mla"): Operators(as_given, kernel.load_layer, kernel.backup),
    ("kernel", "page_first", "mha"): Operators(as_given, kernel.load_layer, kernel.backup),
    ("kernel", "page_first", "mla"): Operators(as_given, kernel.load_layer, kernel.backup),
    ("kernel", "page_head", "mha"): Operators(as_given, kernel.load_layer, kernel.backup),
    ("direct", "layer_first", "mha"): Operators(by_host_address, direct.load_layer, direct.backup),
    ("direct", "layer_first", "mla"): Operators(by_host_address, direct.load_layer, direct.backup),
    ("direct", "page_first_direct", "mha"): Operators(as_given, direct.load_layer, direct.backup),
    ("direct", "page_first_direct", "mla"): Operators(as_given, direct.load_layer, direct.backup),
    # The configuration turns this pair into page_first_direct (case 59); it works, token by token.
    ("direct", "page_first", "mha"): Operators(as_given, direct.load_layer, direct.backup),
    ("direct", "page_first", "mla"): Operators(as_given, direct.load_layer, direct.backup),
    ("kernel_ascend", "page_first_direct", "mha"): Operators(as_given, ascend.load_layer, ascend.backup),
    ("kernel_ascend", "page_first_direct", "mla"): Operators(as_given, ascend.load_layer, ascend.backup),
    ("kernel_ascend", "page_first_kv_split", "mha"): Operators(as_given, ascend.load_layer, ascend.backup),
    ("kernel_ascend", "page_first_kv_split", "mla"): Operators(as_given, ascend.load_layer, ascend.backup),
}

REFUSED: dict[Cell, str] = {
    ("direct", "page_head", "mha"): "direct copies move a token's heads together, and page_head keeps them apart",
    ("kernel", "page_head", "mla"): "an MLA latent has no heads",
    ("kernel", "page_first_direct", "mha"): "the kernel's pages are token by token",
    ("kernel", "page_first_direct", "mla"): "the kernel's pages are token by token",
    ("kernel_ascend", "layer_first", "mha"): "the NPU exchanges the dims of whole pages",
    ("kernel_ascend", "layer_first", "mla"): "the NPU exchanges the dims of whole pages",
}
IO_BACKENDS = tuple(dict.fromkeys(cell[0] for cell in TABLE))


def operators(io_backend: str, layout: str, attention: str) -> Operators:
    """The operators of a cell; UnsupportedTransferError names the reason and what works instead."""
    for cell, found in TABLE.items():
        if cell == (io_backend, layout, attention):
            return found
    if io_backend not in IO_BACKENDS:
        raise UnsupportedTransferError(f"io backend {io_backend!r} is unknown; use one of {', '.join(IO_BACKENDS)}")
    if layout not in LAYOUTS:
        raise UnsupportedTransferError(f"host layout {layout!r} is unknown; use one of {', '.join(LAYOUTS)}")
    layouts = [cell[1] for cell in TABLE if (cell[0], cell[2]) == (io_backend, attention)]
    if not layouts:
        raise UnsupportedTransferError(f"attention {attention!r} has no copies; use mha or mla")
    reasons = [reason for cell, reason in REFUSED.items() if cell == (io_backend, layout, attention)]
    why = f" ({reasons[0]})" if reasons else ""
    raise UnsupportedTransferError(
        f"io backend {io_backend} can't copy host layout {layout} with {attention}{why}; use {' or '.join(layouts)}"
    )


@dataclass(frozen=True)
class PreparedCopy:
    """A plan and what carries it out (kernels.base.Prepared)."""

    plan: Plan
    operators: Operators

    def backup(self) -> None:
        """Copies all layers of the pages from L1 to L2."""
        self.operators.backup(self.plan)

    def load_layer(self, layer: int) -> None:
        """Copies one layer of the pages from L2 to L1."""
        self.operators.load_layer(self.plan, layer)


@dataclass(frozen=True)
class TableTransfer:
    """The copies of one cell of the table (kernels.base.Transfer)."""

    layout: str
    operators: Operators

    def prepare(
        self, device_pool: DevicePool, host_pool: HostPool, device_pages: Pages, host_pages: Pages
    ) -> PreparedCopy:
        """Checks and orders the pages once; ValueError where they or the pools do not fit."""
        if host_pool.layout != self.layout:
            raise ValueError(f"these copies are for host layout {self.layout}, and the pool has {host_pool.layout}")
        return PreparedCopy(self.operators.order(device_pool, host_pool, device_pages, host_pages), self.operators)

    def backup(self, device_pool: DevicePool, host_pool: HostPool, device_pages: Pages, host_pages: Pages) -> None:
        """Copies all layers of the pages from L1 to L2."""
        self.prepare(device_pool, host_pool, device_pages, host_pages).backup()

    def load_layer(
        self, device_pool: DevicePool, host_pool: HostPool, device_pages: Pages, host_pages: Pages, layer: int
    ) -> None:
        """Copies one layer of the pages from L2 to L1; for all layers, prepare once."""
        self.prepare(device_pool, host_pool, device_pages, host_pages).load_layer(layer)


def transfer(io_backend: str, layout: str, attention: str) -> Transfer:
    """The copies for an io backend, host layout and attention ("mha" or "mla").

    Raises UnsupportedTransferError for a combination outside the table, and for kernel_ascend where no NPU is.
    """
    found = operators(io_backend, layout, attention)
    if io_backend == "kernel_ascend":
        ascend.require_npu()
    return TableTransfer(layout, found)
