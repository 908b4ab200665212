"""The configuration: `HiCacheConfig`, what it resolves to on a machine, and the error that says what can't work."""

from hicache_ray.config.config import Adjustment, Capabilities, HiCacheConfig, Resolution, explain
from hicache_ray.config.option import ConfigError
from hicache_ray.config.options import prefetch_timeout_per_page

__all__ = [
    "Adjustment",
    "Capabilities",
    "ConfigError",
    "HiCacheConfig",
    "Resolution",
    "explain",
    "prefetch_timeout_per_page",
]
