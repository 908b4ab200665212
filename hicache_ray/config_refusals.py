"""Combinations of options that can't work, each refused with its reason (ruling on cases 59 and 60)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hicache_ray.config_options import ConfigError

if TYPE_CHECKING:
    from hicache_ray.config import HiCacheConfig

LAYOUTS_OF: Mapping[str, tuple[str, ...]] = {
    "kernel": ("layer_first", "page_first", "page_head"),
    "direct": ("layer_first", "page_first_direct"),
    "kernel_ascend": ("page_first_direct", "page_first_kv_split"),
}
"""Layouts each I/O backend can move (article 5.4)."""


def check(config: HiCacheConfig, *, cuda: bool, npu: bool) -> None:
    """Raises ConfigError when the options, already adjusted, can't work together or not on this machine."""
    _check_cache(config)
    _check_device(config, cuda, npu)
    _check_layout(config)
    _check_parallel_shape(config)
    _check_storage(config)
    _check_time_limits(config)


def _check_cache(config: HiCacheConfig) -> None:
    if not config.enable_hierarchical_cache:
        raise ConfigError(
            "enable_hierarchical_cache is false: hicache_ray is the hierarchical cache; leave it true, or use the "
            "engine's own prefix cache"
        )
    if config.disable_radix_cache:
        raise ConfigError(
            "disable_radix_cache is true: the hierarchical cache is a radix cache over three tiers and can't work "
            "without it; leave it false"
        )
    if config.l1_tokens < config.page_size:
        raise ConfigError(f"l1_tokens is {config.l1_tokens}: no page of page_size {config.page_size} fits; raise it")


def _check_device(config: HiCacheConfig, cuda: bool, npu: bool) -> None:
    if config.device == "cuda" and not cuda:
        raise ConfigError("device is cuda, but torch sees no CUDA device here; use cpu or auto")
    if config.device == "npu" and not npu:
        raise ConfigError("device is npu, but torch sees no NPU here; use cpu or auto")
    if config.collective_backend == "nccl" and not cuda:
        raise ConfigError("collective_backend is nccl, but torch sees no CUDA device here; use hicache or gloo")


def _check_layout(config: HiCacheConfig) -> None:
    backend, layout = config.hicache_io_backend, config.hicache_mem_layout
    if layout not in LAYOUTS_OF[backend]:
        raise ConfigError(
            f"hicache_io_backend {backend} can't move hicache_mem_layout {layout}; "
            f"with {backend} use {' or '.join(LAYOUTS_OF[backend])}"
        )
    if backend == "kernel_ascend" and config.device != "npu":
        raise ConfigError(f"hicache_io_backend kernel_ascend needs an NPU, device is {config.device}; use kernel")
    if layout == "page_head" and config.attention == "mla":
        raise ConfigError("hicache_mem_layout page_head sorts a page by heads, and mla has none; use page_first")
    if layout == "page_first_kv_split" and config.attention == "mla" and config.hicache_storage_backend:
        raise ConfigError(
            "hicache_mem_layout page_first_kv_split keeps an mla page in two parts of different size, which no storage "
            "backend takes; use page_first_direct"
        )


def _check_parallel_shape(config: HiCacheConfig) -> None:
    if config.pp_rank >= config.pp_size:
        raise ConfigError(f"pp_rank is {config.pp_rank} of pp_size {config.pp_size}; ranks run from 0 to size - 1")
    if config.pp_size > config.layers:
        raise ConfigError(f"pp_size is {config.pp_size} for {config.layers} layers; each stage needs a layer")
    if config.enable_dp_attention and config.tp_size % config.dp_size:
        raise ConfigError(
            f"enable_dp_attention splits tp_size {config.tp_size} into dp_size {config.dp_size} groups, which does not "
            f"divide; use a tp_size that is a multiple"
        )
    ranks = config.attention_tp_size
    if config.attention == "mha" and config.heads % ranks and ranks % config.heads:
        raise ConfigError(f"heads is {config.heads} for {ranks} tensor-parallel ranks; one must divide the other")


def _check_storage(config: HiCacheConfig) -> None:
    extra = config.hicache_storage_backend_extra_config
    options = extra if isinstance(extra, Mapping) else {}
    if config.storage_replicas > config.storage_actors:
        raise ConfigError(
            f"storage_replicas is {config.storage_replicas}, but storage_actors is {config.storage_actors}: "
            f"each copy needs its own actor"
        )
    if config.hicache_storage_backend == "file" and options.get("key_style") == "sglang" and config.pp_size > 1:
        raise ConfigError(
            f"key_style sglang of the file backend has no pipeline stage in its keys, so the {config.pp_size} stages "
            f"of pp_size would overwrite each other; use the default key_style"
        )
    if config.hicache_storage_backend == "dynamic":
        missing = [name for name in ("backend_name", "module_path", "class_name") if name not in options]
        if missing:
            raise ConfigError(
                f"hicache_storage_backend dynamic needs {', '.join(missing)} in hicache_storage_backend_extra_config"
            )


def _check_time_limits(config: HiCacheConfig) -> None:
    if config.step_timeout <= config.collective_timeout:
        raise ConfigError(
            f"step_timeout is {config.step_timeout:g} s, collective_timeout {config.collective_timeout:g} s: a step "
            f"holds a reduction, so its limit must be the longer one"
        )
