"""The names that options take as values."""

from __future__ import annotations

import sys
from collections.abc import Mapping

ATTENTION_KINDS = ("mha", "mla")
UNSUPPORTED_ATTENTION: Mapping[str, str] = {
    "swa": "sliding-window layers beside full ones",
    "mamba": "state-space layers beside full ones",
}

KV_DTYPES: Mapping[str, str] = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""KV cache dtypes, and what torch calls them."""

DEVICES = ("auto", "cpu", "cuda", "npu")
WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
IO_BACKENDS = ("kernel", "direct", "kernel_ascend")
MEM_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head", "page_first_kv_split")
PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")
COLLECTIVE_BACKENDS = ("hicache", "gloo", "nccl")
KV_EVENT_ENCODINGS = ("array", "map")

EVICTION_POLICIES = ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru")
STORAGE_BACKENDS = ("ray", "file", "mooncake", "dynamic")


def eviction_policy_names() -> tuple[str, ...]:
    """Built-in eviction policies and those registered in this process."""
    return _with_registered(EVICTION_POLICIES, "hicache_ray.radix.eviction", "eviction_policies")


def storage_backend_names() -> tuple[str, ...]:
    """Built-in storage backends and those registered in this process."""
    return _with_registered(STORAGE_BACKENDS, "hicache_ray.storage.registry", "backend_names")


def _with_registered(built_in: tuple[str, ...], module: str, function: str) -> tuple[str, ...]:
    # Whoever registered a name has loaded the registry. Importing it here would turn the imports around.
    registry = sys.modules.get(module)
    registered = getattr(registry, function)() if registry is not None else ()
    return (*built_in, *(name for name in registered if name not in built_in))
