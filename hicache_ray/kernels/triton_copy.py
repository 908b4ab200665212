"""The `kernel` backend's copies: Triton gathers and scatters rows between the device's layers and pinned host memory.

The device reads and writes the host pool itself, through its address, so one launch moves any number of scattered
pages: one layer for a load, all layers for a backup. Imports triton: see `kernels.table` for when that may be done.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hicache_ray.kernels.base import CopyPlan, PoolCopies
from hicache_ray.pools.device import DevicePool
from hicache_ray.pools.host import HostPool

ROW_UNITS = {8: tl.int64, 4: tl.int32}
"""Widths in bytes in which rows are moved; a row that neither divides is left to the caller."""

TILE = 4096
"""Units a program moves at a time."""

PROGRAMS = 32
"""Programs per layer and plane: the link to the host is full long before the device is."""


class RowShape(NamedTuple):
    """How the rows of a host layout lie: everything in units, rows of one head where heads are apart."""

    unit: int
    width: int
    heads: int
    page: int
    token: int
    layer: int
    head: int


# Not specialised: a load runs through all first layers and any page count, and must not compile for each kind of them.
@triton.jit(do_not_specialize=["count", "first_layer"])
def copy_rows(  # type: ignore[no-untyped-def]  # the compiler takes no annotations but constexpr
    layer_pointers,
    host_address,
    plane_bytes,
    pages,
    count,
    layers,
    first_layer,
    layer_span,
    page_stride,
    token_stride,
    layer_stride,
    head_stride,
    UNIT: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TO_HOST: tl.constexpr,
):
    """Moves the rows of `count` pages of the layers [first_layer, first_layer + layer_span) of every plane.

    layer_pointers: addresses of the device's layers, int64 [planes, layers]. pages: int64 [2, count], device then host.
    Grid: (programs, planes * layer_span).
    """
    plane = tl.program_id(1) // layer_span
    layer = (first_layer + tl.program_id(1) % layer_span).to(tl.int64)
    device = tl.load(layer_pointers + plane * layers + layer).to(tl.pointer_type(UNIT))
    host = (host_address + plane.to(tl.int64) * plane_bytes).to(tl.pointer_type(UNIT)) + layer * layer_stride
    rows = count * PAGE * HEADS
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        wanted = row < rows
        entry = row // (PAGE * HEADS)
        token = row % (PAGE * HEADS) // HEADS
        head = row % HEADS
        device_page = tl.load(pages + entry, mask=wanted, other=0)
        host_page = tl.load(pages + count + entry, mask=wanted, other=0)
        device_row = ((device_page * PAGE + token) * HEADS + head) * WIDTH
        host_row = host_page * page_stride + token * token_stride + head * head_stride
        for begin in range(0, WIDTH, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            mask = wanted[:, None] & (column < WIDTH)[None, :]
            in_device = device + (device_row[:, None] + column[None, :])
            in_host = host + (host_row[:, None] + column[None, :])
            if TO_HOST:
                tl.store(in_host, tl.load(in_device, mask=mask, other=0), mask=mask)
            else:
                tl.store(in_device, tl.load(in_host, mask=mask, other=0), mask=mask)


def row_bytes(host_pool: HostPool) -> int:
    """Bytes that lie together in L2: a token's heads of one layer, or one head where the layout keeps heads apart."""
    first = host_pool.geometry.parts[0]
    merged = first.strides["H"] == first.sizes["D"]
    return first.sizes["D"] * first.sizes["H"] if merged else first.sizes["D"]


def row_shape(host_pool: HostPool) -> RowShape | None:
    """The rows of a host pool, or None when the kernel can't move their width (no multiple of 4 bytes)."""
    first = host_pool.geometry.parts[0]
    sizes, strides = first.sizes, first.strides
    width = row_bytes(host_pool)
    heads = sizes["D"] * sizes["H"] // width
    for unit in ROW_UNITS:
        if width % unit == 0:
            return RowShape(unit, width // unit, heads, *(strides[axis] // unit for axis in "PTLH"))
    return None


class TritonCopies(PoolCopies):
    """The `kernel` copies. Raises ValueError for pools whose rows the kernel can't move."""

    def __init__(self, device_pool: DevicePool, host_pool: HostPool) -> None:
        super().__init__(device_pool, host_pool)
        shape = row_shape(host_pool)
        if shape is None:
            raise ValueError(
                f"rows of {row_bytes(host_pool)} bytes can't be moved by the kernel, which needs a multiple of 4"
            )
        self._shape = shape

    def backup(self, plan: CopyPlan) -> None:
        """All layers in one launch."""
        self._launch(plan, 0, self.device_pool.spec.layers, to_host=True)

    def load_layer(self, plan: CopyPlan, layer: int) -> None:
        """One layer in one launch."""
        self._launch(plan, layer, 1, to_host=False)

    def _launch(self, plan: CopyPlan, first_layer: int, layer_span: int, *, to_host: bool) -> None:
        pool, shape, count = self.device_pool, self._shape, len(plan.device_pages)
        if not count:
            return
        block = min(triton.next_power_of_2(shape.width), 1024)
        rows = max(1, TILE // block)
        programs = min(PROGRAMS, triton.cdiv(count * pool.page_size * shape.heads, rows))
        with _on(pool.device):
            copy_rows[(programs, pool.spec.planes * layer_span)](
                pool.layer_pointers,
                self.host_pool.buffer.ctypes.data,
                self.host_pool.geometry.parts[0].nbytes,
                plan.index_tensor,
                count,
                pool.spec.layers,
                first_layer,
                layer_span,
                shape.page,
                shape.token,
                shape.layer,
                shape.head,
                UNIT=ROW_UNITS[shape.unit],
                PAGE=pool.page_size,
                HEADS=shape.heads,
                WIDTH=shape.width,
                ROWS=rows,
                BLOCK=block,
                TO_HOST=to_host,
            )


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
