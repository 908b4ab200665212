"""What a replay is told: sizes, shape and policies, and the configuration that follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hicache_ray.config import ConfigError, HiCacheConfig
from hicache_ray.config.names import layouts_of
from hicache_ray.config.option import option, options_of, read_options
from hicache_ray.config.options import GIGABYTE
from hicache_ray.replay.index_only import IndexSettings
from hicache_ray.replay.requests import Workload

HOST_MEMORY_RESERVE = 1.0
"""Gigabytes that the L2 of a replay leaves free unless told otherwise: its pools are small."""

L1_REQUESTS = 2
L2_TO_L1 = 4
"""Default sizes: L1 holds two of the longest requests, L2 four times as much."""


REPLAY_DEFAULTS: Mapping[str, Any] = {
    "tp_size": 1,
    "page_size": 16,
    "attention": "mha",
    "layers": 2,
    "heads": 4,
    "head_dim": 16,
    "l1_tokens": None,
    "storage_actors": 1,
    "radix_eviction_policy": "lru",
    "hicache_write_policy": "write_through",
    "hicache_storage_prefetch_policy": "timeout",
    "hicache_mem_layout": "layer_first",
    "hicache_io_backend": None,
}
"""The options of HiCacheConfig that every replay sets, with its defaults; None follows from other options.

`head_dim` is the width of the latent under MLA, a quarter of it rotary. On a block trace, the replay of the index alone
counts `l1_tokens` in blocks.
"""

NOT_OF_A_REPLAY = (
    *("kv_lora_rank", "qk_rope_head_dim", "hicache_ratio", "hicache_size", "storage_actor_size"),
    *("pp_size", "pp_rank", "dp_size", "enable_dp_attention"),
)
"""Options of HiCacheConfig that a replay has not: they follow from others, or it runs one stage and no such groups."""


@dataclass(frozen=True)
class ReplaySettings:
    """What a replay is told: options of the cache, and its own.

    Attributes:
        options: options of HiCacheConfig by full name; those of `REPLAY_DEFAULTS` are always among them.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    l2_tokens: int | None = option(None, "Capacity of L2 per rank, as for L1. Default: 4 x L1.", minimum=0)
    l3_bytes: int = option(1 << 28, "Capacity of L3 over all storage actors (64MiB, 1GB); 0: none.", minimum=0)
    instances: int = option(1, "Groups that share L3, served round robin.", minimum=1)
    concurrency: int = option(4, "Most requests of an instance in a step.", minimum=1)
    seed: int = option(0, "Of everything that is made up.", minimum=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", {**REPLAY_DEFAULTS, **self.options})
        for name, spec in OWN_OPTIONS.items():
            spec.check(getattr(self, name))

    @classmethod
    def of(cls, **values: Any) -> ReplaySettings:
        """Settings from options of both kinds, each under its full name or its alias; raises ConfigError."""
        return cls().with_values(values)

    def with_values(self, values: Mapping[str, Any]) -> ReplaySettings:
        """These settings with other values of some options, named as for `of`; raises ConfigError."""
        read = read_options({**OWN_OPTIONS, **options_of(HiCacheConfig)}, values)
        own = {name: read.pop(name) for name in OWN_OPTIONS if name in read}
        return replace(self, options={**self.options, **read}, **own)

    def described(self, config: HiCacheConfig) -> dict[str, Any]:
        """The options as they hold, by their short names, for the report."""
        l2_tokens = config.hicache_ratio * config.l1_tokens if self.l2_tokens is None else self.l2_tokens
        cache = options_of(HiCacheConfig)
        return {
            **{cache[name].alias or name: self.options[name] for name in REPLAY_DEFAULTS},
            **{name: getattr(self, name) for name in OWN_OPTIONS},
            "others": {name: value for name, value in self.options.items() if name not in REPLAY_DEFAULTS},
            "l1_tokens": config.l1_tokens,
            "l2_tokens": int(l2_tokens),
            "layout": config.hicache_mem_layout,
            "io_backend": config.hicache_io_backend,
        }


OWN_OPTIONS = options_of(ReplaySettings)
REPLAY_OPTIONS = {
    **{name: found for name, found in options_of(HiCacheConfig).items() if name not in NOT_OF_A_REPLAY},
    **OWN_OPTIONS,
}
"""All options of a replay by full name."""


def replay_config(settings: ReplaySettings, workload: Workload, *, storage_backend: str) -> HiCacheConfig:
    """The resolved configuration of an instance.

    Args:
        settings: what was asked for.
        workload: default sizes follow from its longest request.
        storage_backend: registered name of the L3 backend, used when there is an L3.

    Raises:
        ConfigError: the options can't work together, or the longest request does not fit L1.
    """
    page_size = settings.options["page_size"]
    l1_tokens = settings.options["l1_tokens"] or _whole_pages(L1_REQUESTS * workload.longest, page_size)
    l2_tokens = L2_TO_L1 * l1_tokens if settings.l2_tokens is None else settings.l2_tokens
    if _whole_pages(workload.longest, page_size) > l1_tokens // page_size * page_size:
        raise ConfigError(
            f"l1_tokens is {l1_tokens}, and the longest request has {workload.longest} tokens with its answer: "
            f"give at least {_whole_pages(workload.longest, page_size)}"
        )
    if l2_tokens < page_size:
        raise ConfigError(f"l2_tokens is {l2_tokens}: no page of {page_size} tokens fits; raise it")
    sizes = {"l1_tokens": l1_tokens, "hicache_ratio": l2_tokens / l1_tokens}
    given = {name: value for name, value in settings.options.items() if value is not None}
    return HiCacheConfig.from_mapping({**_derived(settings, storage_backend), **given, **sizes}).resolve().config


def index_settings(settings: ReplaySettings, workload: Workload) -> IndexSettings:
    """The settings of an index-only replay: capacities in blocks for a block trace, in tokens otherwise."""
    used = ("page_size", "radix_eviction_policy", "hicache_write_policy")
    HiCacheConfig(**{name: settings.options[name] for name in used})  # refuses what no index takes
    page_size, l1_tokens = settings.options["page_size"], settings.options["l1_tokens"]
    unit = 1 if workload.blocks else page_size
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
        page_size=page_size,
        policy=settings.options["radix_eviction_policy"],
        write_policy=settings.options["hicache_write_policy"],
        instances=settings.instances,
    )


def check_unused(settings: ReplaySettings, workload: Workload) -> None:
    """Raises ConfigError for options that a replay of the index does not use, where they could not work in any."""
    sizeless = settings.with_values({"l1_tokens": None, "l2_tokens": None})  # for a block trace they are in blocks
    replay_config(sizeless, workload, storage_backend="ray")


def _largest_request(workload: Workload, page_size: int) -> int:
    """Pages of the largest prompt."""
    if workload.blocks is not None:
        return max(len(request.blocks) for request in workload.blocks.requests)
    return workload.longest // page_size


def _derived(settings: ReplaySettings, storage_backend: str) -> dict[str, Any]:
    """The options that follow from others unless they are given."""
    chosen = settings.options
    rotary = chosen["head_dim"] // 4
    derived: dict[str, Any] = {
        "model_name": "synthetic",
        "kv_lora_rank": chosen["head_dim"] - rotary,
        "qk_rope_head_dim": rotary,
        "hicache_io_backend": "direct" if chosen["hicache_mem_layout"] in layouts_of("direct") else "kernel",
        "host_memory_reserve": HOST_MEMORY_RESERVE,
        "prefetch_threshold": chosen["page_size"],
    }
    if settings.l3_bytes:
        derived["hicache_storage_backend"] = storage_backend
        derived["storage_actor_size"] = settings.l3_bytes / chosen["storage_actors"] / GIGABYTE
    return derived


def _whole_pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size) * page_size
