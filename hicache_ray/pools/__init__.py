"""L1 and L2 memory: pools, their layouts and sizes. Names load on first use, so page numbers need no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hicache_ray.pools.slots import pages_of, slots_of

if TYPE_CHECKING:
    from hicache_ray.pools.allocator import PageAllocator, PageError
    from hicache_ray.pools.device import DevicePool
    from hicache_ray.pools.host import HostPool
    from hicache_ray.pools.layer_done import LayerDoneCounter
    from hicache_ray.pools.memory import PoolMemoryError
    from hicache_ray.pools.sizing import host_pages
    from hicache_ray.pools.spec import KVSpec

__all__ = [
    "DevicePool",
    "HostPool",
    "KVSpec",
    "LayerDoneCounter",
    "PageAllocator",
    "PageError",
    "PoolMemoryError",
    "host_pages",
    "pages_of",
    "slots_of",
]

_HOMES = {
    "DevicePool": "device",
    "HostPool": "host",
    "KVSpec": "spec",
    "LayerDoneCounter": "layer_done",
    "PageAllocator": "allocator",
    "PageError": "allocator",
    "PoolMemoryError": "memory",
    "host_pages": "sizing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
