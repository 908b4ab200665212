"""The `copy` suite's part of the side-by-side adapter: `copiers(case)` as the suite's example describes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hicache_ray.config.names import COPIES
from hicache_ray.kernels.cpu import set_copy_threads
from hicache_ray.kernels.table import copies_between
from hicache_ray.pages import Pages
from hicache_ray.pools.device import DevicePool
from hicache_ray.pools.host import HostPool
from hicache_ray.pools.layouts import KVSpec

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
    for layout in COPIES["direct"]:
        host = HostPool(spec, case["pool_pages"], case["page"], layout)
        out |= {
            f"{way}-direct-{layout}": copier for way, copier in pool_copiers("direct", device, host, *pages).items()
        }
    return out


def random_pages(pool_pages: int, count: int) -> tuple[Pages, Pages]:
    """Device and host pages in random order, none next to another's neighbour but by chance."""
    rng = np.random.default_rng(SEED)
    return rng.permutation(pool_pages)[:count], rng.permutation(pool_pages)[:count]


def pool_copiers(
    io_backend: str, device: DevicePool, host: HostPool, device_pages: Pages, host_pages: Pages
) -> dict[str, Copier]:
    """to-host and to-device of two pools, each with the bytes it moves; planning the pages is part of the copy."""
    copies = copies_between(io_backend, device, host)
    nbytes = len(device_pages) * host.page_bytes

    def to_host() -> None:
        copies.backup(copies.plan(device_pages, host_pages))

    def to_device() -> None:
        plan = copies.plan(device_pages, host_pages)
        for layer in range(device.spec.layers):
            copies.load_layer(plan, layer)

    return {"to-host": (to_host, nbytes), "to-device": (to_device, nbytes)}
