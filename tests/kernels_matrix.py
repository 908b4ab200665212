"""Checks cells of the copy table against the plain reference, byte for byte.

`python -m tests.kernels_matrix` with TRITON_INTERPRET=1 checks the cells of the `kernel` backend on Triton.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from hicache_ray.config.names import COPIES
from hicache_ray.kernels.base import PoolCopies
from hicache_ray.kernels.table import copies_between, why_no_triton
from hicache_ray.pools.device import DevicePool
from hicache_ray.pools.host import HostPool
from hicache_ray.pools.layouts import KVSpec
from tests import kernels_reference as reference

PAGE_SIZES = (1, 2, 3, 16)
HEADS = (1, 3)
HEAD_DIMS = (5, 64)
DTYPES = ("fp16", "bf16", "fp8", "int8")
Cell = tuple[str, str, str]
"""An io backend, a host layout and an attention."""
CELLS: list[Cell] = [
    (io_backend, layout, attention)
    for io_backend, layouts in COPIES.items()
    for layout, attentions in layouts.items()
    for attention in attentions
]
MakeCopies = Callable[[DevicePool, HostPool], PoolCopies]
LAYERS, DEVICE_PAGES, HOST_PAGES = 3, 7, 11


@dataclass(frozen=True)
class Shape:
    """One combination: a KV spec and a page size."""

    spec: KVSpec
    page_size: int

    @property
    def seed(self) -> list[int]:
        return [self.spec.heads, self.spec.dim, self.page_size, self.spec.itemsize]


def shapes(attention: str) -> Iterator[Shape]:
    """Every combination of page size, heads, dims and dtype."""
    for page_size, dim, dtype in itertools.product(PAGE_SIZES, HEAD_DIMS, DTYPES):
        if attention == "mla":
            yield Shape(KVSpec.mla(LAYERS, dim - 2, 2, dtype), page_size)
            continue
        for heads in HEADS:
            yield Shape(KVSpec.mha(LAYERS, heads, dim, dtype), page_size)


def random_pages(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Pages of both pools: random ones, in every other case sorted, so that some are runs."""
    count = int(rng.integers(1, DEVICE_PAGES + 1))
    device = rng.permutation(DEVICE_PAGES)[:count]
    host = rng.permutation(HOST_PAGES)[:count]
    if rng.random() < 0.5:
        device, host = np.sort(device), np.sort(host)
    return device.astype(np.int64), host.astype(np.int64)


def device_bytes(pool: DevicePool) -> torch.Tensor:
    """Every byte of a device pool, on the CPU."""
    return torch.stack([torch.stack([tensor.view(torch.uint8) for tensor in plane]) for plane in pool.layers]).cpu()


def fill(pool: DevicePool, rng: np.random.Generator) -> None:
    """Random bytes in every layer."""
    for plane in pool.layers:
        for tensor in plane:
            view = tensor.view(torch.uint8)
            view.copy_(torch.from_numpy(rng.integers(0, 256, tuple(view.shape), dtype=np.uint8)))


def check(make: MakeCopies, layout: str, shape: Shape, device: str = "cpu") -> None:
    """A backup and a load of random pages leave both pools exactly as the reference does, untouched pages included."""
    rng = np.random.default_rng(shape.seed)
    expected = HostPool(shape.spec, HOST_PAGES, shape.page_size, layout, pin=False)
    actual = HostPool(shape.spec, HOST_PAGES, shape.page_size, layout)
    source = DevicePool(shape.spec, DEVICE_PAGES, shape.page_size, device)
    fill(source, rng)
    expected.buffer[:] = rng.integers(0, 256, expected.buffer.size, dtype=np.uint8)
    actual.buffer[:] = expected.buffer
    device_pages, host_pages = random_pages(rng)
    reference.backup(source, expected, device_pages, host_pages)
    copies = make(source, actual)
    copies.backup(copies.plan(device_pages, host_pages))
    synchronize(device)
    np.testing.assert_array_equal(actual.buffer, expected.buffer)

    wanted = DevicePool(shape.spec, DEVICE_PAGES, shape.page_size)
    loaded = DevicePool(shape.spec, DEVICE_PAGES, shape.page_size, device)
    copies = make(loaded, actual)
    plan = copies.plan(device_pages[::-1], host_pages)
    for layer in reversed(range(LAYERS)):
        reference.load_layer(wanted, expected, device_pages[::-1], host_pages, layer)
        copies.load_layer(plan, layer)
        synchronize(device)
        assert torch.equal(device_bytes(loaded), device_bytes(wanted)), f"layer {layer} of {shape}"


def synchronize(device: str) -> None:
    """Ends what is on the device's streams."""
    if device == "cuda":
        torch.cuda.synchronize()


def on_triton(cell: Cell, shape: Shape) -> bool:
    """Whether the kernel backend moves this shape with Triton."""
    pool = DevicePool(shape.spec, 1, shape.page_size)
    host = HostPool(shape.spec, 1, shape.page_size, cell[1])
    return why_no_triton(pool, host) is None


def main() -> None:
    """Checks the kernel cells on Triton; prints how many combinations it moved, and how many widths fall back."""
    moved = left = 0
    for cell in CELLS:
        for shape in shapes(cell[2]) if cell[0] == "kernel" else ():
            if on_triton(cell, shape):
                check(partial(copies_between, cell[0]), cell[1], shape)
                moved += 1
            else:
                left += 1
    print(f"{moved} combinations on Triton equal the reference, {left} fall back by width")


if __name__ == "__main__":
    main()
