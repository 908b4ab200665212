"""The `copy` suite's part of the side-by-side adapter: `copiers(case)` as the suite's example describes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hicache_ray.kernels.base import Plan
from hicache_ray.kernels.dispatch import TABLE, Cell, operators
from hicache_ray.kernels.threads import set_copy_threads
from hicache_ray.pools.device import DevicePool
from hicache_ray.pools.host import HostPool
from hicache_ray.pools.slots import Pages
from hicache_ray.pools.spec import KVSpec

Copier = tuple[Callable[[], None], int]
SEED = 3


def copiers(case: dict[str, Any]) -> dict[str, Copier]:
    """The suite's random pages, copied by the `direct` cells: all layers to the host, layer by layer to the device."""
    set_copy_threads(case.get("threads", 1))
    heads = 8
    spec = KVSpec.mha(case["layers"], heads, case["token_bytes"] // heads // 2, torch.bfloat16)
    device = DevicePool(spec, case["pool_pages"], case["page"])
    pages = random_pages(case["pool_pages"], case["pages"])
    out: dict[str, Copier] = {}
    for cell in (cell for cell in TABLE if cell[0] == "direct" and cell[2] == "mha"):
        host = HostPool(spec, case["pool_pages"], case["page"], cell[1])
        out |= {
            f"{way}-{cell[0]}-{cell[1]}": copier for way, copier in cell_copiers(cell, device, host, *pages).items()
        }
    return out


def random_pages(pool_pages: int, count: int) -> tuple[Pages, Pages]:
    """Device and host pages in random order, none next to another's neighbour but by chance."""
    rng = np.random.default_rng(SEED)
    return rng.permutation(pool_pages)[:count], rng.permutation(pool_pages)[:count]


def cell_copiers(
    cell: Cell, device: DevicePool, host: HostPool, device_pages: Pages, host_pages: Pages
) -> dict[str, Copier]:
    """to-host and to-device of one cell, each with the bytes it moves; planning the pages is part of the copy."""
    order, load_layer, backup = operators(*cell)
    nbytes = len(device_pages) * host.page_bytes

    def plan() -> Plan:
        return order(device, host, device_pages, host_pages)

    def to_host() -> None:
        backup(plan())

    def to_device() -> None:
        pages = plan()
        for layer in range(device.spec.layers):
            load_layer(pages, layer)

    return {"to-host": (to_host, nbytes), "to-device": (to_device, nbytes)}
