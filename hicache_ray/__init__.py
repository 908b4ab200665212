"""hicache_ray: a hierarchical KV cache for LLM inference on Ray.

The service, which needs Ray: `start`, `connect`, `Service`. One rank, which does not: `HiRadixCache`, `build_cache`.
Their parts: `TieredIndex`, `page_hashes`, `DevicePool`, `HostPool`. Everything is configured by `HiCacheConfig`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hicache_ray.config import ConfigError as ConfigError
    from hicache_ray.config import HiCacheConfig as HiCacheConfig
    from hicache_ray.hashing import Namespace as Namespace
    from hicache_ray.hashing import page_hashes as page_hashes
    from hicache_ray.index import IndexOptions as IndexOptions
    from hicache_ray.index import TieredIndex as TieredIndex
    from hicache_ray.pools.device import DevicePool as DevicePool
    from hicache_ray.pools.host import HostPool as HostPool
    from hicache_ray.pools.layouts import KVSpec as KVSpec
    from hicache_ray.rank.build import build_cache as build_cache
    from hicache_ray.rank.cache import HiRadixCache as HiRadixCache
    from hicache_ray.service import Service as Service
    from hicache_ray.service import connect as connect
    from hicache_ray.service import start as start

_HOME = {
    "ConfigError": "config",
    "DevicePool": "pools.device",
    "HiCacheConfig": "config",
    "HiRadixCache": "rank.cache",
    "HostPool": "pools.host",
    "IndexOptions": "index",
    "KVSpec": "pools.layouts",
    "Namespace": "hashing",
    "Service": "service",
    "TieredIndex": "index",
    "build_cache": "rank.build",
    "connect": "service",
    "page_hashes": "hashing",
    "start": "service",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    # Imported when asked for: the tree and the hashes must be usable without loading torch and Ray.
    if name not in _HOME:
        raise AttributeError(f"module 'hicache_ray' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hicache_ray.{_HOME[name]}"), name)
