"""What a replay is told: sizes, shape and policies, and the configuration that follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hicache_ray.config import ConfigError, HiCacheConfig
from hicache_ray.config.names import layouts_of
from hicache_ray.replay.index_only import IndexSettings
from hicache_ray.replay.workload import Workload

HOST_MEMORY_RESERVE = 1.0
"""Gigabytes that the L2 of a replay leaves free unless told otherwise: its pools are small."""

L1_REQUESTS = 2
L2_TO_L1 = 4
"""Default sizes: L1 holds two of the longest requests, L2 four times as much."""


@dataclass(frozen=True)
class ReplaySettings:
    """Options of a replay; names as on the command line, None where the default follows from others.

    Attributes:
        tp: tensor-parallel ranks of an instance.
        page_size: tokens a page.
        attention: "mha" or "mla".
        layers, heads, head_dim: shape of the KV cache; MLA: head_dim is the width of the latent, a quarter rotary.
        l1_tokens, l2_tokens: capacity of L1 and L2 per rank. Index only on a block trace: in blocks.
        l3_bytes: capacity of L3 over all storage actors; 0: no L3.
        storage_actors: storage actors of L3.
        policy, write_policy, prefetch_policy: of eviction, of copies to L2, of waiting for L3.
        layout, io_backend: byte order of L2, and how pages move between L1 and L2.
        instances: groups that share L3; requests go round robin.
        concurrency: most requests of an instance that run in one step.
        seed: of everything that is made up.
        others: further options of HiCacheConfig by name.
    """

    tp: int = 1
    page_size: int = 16
    attention: str = "mha"
    layers: int = 2
    heads: int = 4
    head_dim: int = 16
    l1_tokens: int | None = None
    l2_tokens: int | None = None
    l3_bytes: int = 1 << 28
    storage_actors: int = 1
    policy: str = "lru"
    write_policy: str = "write_through"
    prefetch_policy: str = "timeout"
    layout: str = "layer_first"
    io_backend: str | None = None
    instances: int = 1
    concurrency: int = 4
    seed: int = 0
    others: Mapping[str, Any] = field(default_factory=dict)

    def described(self, config: HiCacheConfig) -> dict[str, Any]:
        """The options as they hold, for the report."""
        l2_tokens = config.hicache_ratio * config.l1_tokens if self.l2_tokens is None else self.l2_tokens
        holds = {
            "l1_tokens": config.l1_tokens,
            "l2_tokens": int(l2_tokens),
            "layout": config.hicache_mem_layout,
            "io_backend": config.hicache_io_backend,
        }
        return {**asdict(self), **holds}


def replay_config(settings: ReplaySettings, workload: Workload, *, storage_backend: str) -> HiCacheConfig:
    """The resolved configuration of an instance.

    Args:
        settings: what was asked for.
        workload: default sizes follow from its longest request.
        storage_backend: registered name of the L3 backend, used when there is an L3.

    Raises:
        ConfigError: the options can't work together, or the longest request does not fit L1.
    """
    l1_tokens = settings.l1_tokens or _whole_pages(L1_REQUESTS * workload.longest, settings.page_size)
    l2_tokens = L2_TO_L1 * l1_tokens if settings.l2_tokens is None else settings.l2_tokens
    if _whole_pages(workload.longest, settings.page_size) > l1_tokens // settings.page_size * settings.page_size:
        raise ConfigError(
            f"l1_tokens is {l1_tokens}, and the longest request has {workload.longest} tokens with its answer: "
            f"give at least {_whole_pages(workload.longest, settings.page_size)}"
        )
    if l2_tokens < settings.page_size:
        raise ConfigError(f"l2_tokens is {l2_tokens}: no page of {settings.page_size} tokens fits; raise it")
    options = {**_options(settings, storage_backend), "l1_tokens": l1_tokens, "hicache_ratio": l2_tokens / l1_tokens}
    return HiCacheConfig.from_mapping({**options, **settings.others}).resolve().config


def index_settings(settings: ReplaySettings, workload: Workload) -> IndexSettings:
    """The settings of an index-only replay: capacities in blocks for a block trace, in tokens otherwise."""
    HiCacheConfig(  # refuses what no index takes
        page_size=settings.page_size,
        radix_eviction_policy=settings.policy,
        hicache_write_policy=settings.write_policy,
    )
    unit = 1 if workload.blocks else settings.page_size
    l1_tokens = settings.l1_tokens
    if l1_tokens is not None and l1_tokens < unit:
        raise ConfigError(f"l1_tokens is {l1_tokens}: no page of {unit} tokens fits; raise it")
    needed = _largest_request(workload, unit)
    if l1_tokens is not None and l1_tokens // unit < needed:
        raise ConfigError(
            f"l1_tokens is {l1_tokens}, and the largest request needs {needed * unit}: give at least that"
        )
    return IndexSettings(
        l1_pages=None if l1_tokens is None else l1_tokens // unit,
        l2_pages=(settings.l2_tokens or 0) // unit,
        page_size=settings.page_size,
        policy=settings.policy,
        write_policy=settings.write_policy,
        instances=settings.instances,
    )


def check_unused(settings: ReplaySettings, workload: Workload) -> None:
    """Raises ConfigError for options that a replay of the index does not use, where they could not work in any."""
    given = replace(settings, l1_tokens=None, l2_tokens=None)  # for a block trace they are in blocks
    replay_config(given, workload, storage_backend="ray")


def _largest_request(workload: Workload, page_size: int) -> int:
    """Pages of the largest prompt."""
    if workload.blocks is not None:
        return max(len(request.blocks) for request in workload.blocks.requests)
    return workload.longest // page_size


def _options(settings: ReplaySettings, storage_backend: str) -> dict[str, Any]:
    io_backend = settings.io_backend or ("direct" if settings.layout in layouts_of("direct") else "kernel")
    rotary = settings.head_dim // 4
    options: dict[str, Any] = {
        "model_name": "synthetic",
        "attention": settings.attention,
        "layers": settings.layers,
        "heads": settings.heads,
        "head_dim": settings.head_dim,
        "kv_lora_rank": settings.head_dim - rotary,
        "qk_rope_head_dim": rotary,
        "tp_size": settings.tp,
        "page_size": settings.page_size,
        "radix_eviction_policy": settings.policy,
        "hicache_write_policy": settings.write_policy,
        "hicache_storage_prefetch_policy": settings.prefetch_policy,
        "hicache_mem_layout": settings.layout,
        "hicache_io_backend": io_backend,
        "host_memory_reserve": HOST_MEMORY_RESERVE,
        "prefetch_threshold": settings.page_size,
        "storage_actors": settings.storage_actors,
    }
    if settings.l3_bytes:
        options["hicache_storage_backend"] = storage_backend
        options["storage_actor_size"] = settings.l3_bytes / settings.storage_actors / 1e9
    return options


def _whole_pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size) * page_size
