"""Every option of the cache with its meaning, default and valid values, and what follows from the options' values.

Names, values and defaults are SGLang 0.5.9's where SGLang has the option. Imports neither torch nor ray.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from hicache_ray.config.names import (
    COLLECTIVE_BACKENDS,
    DEVICES,
    IO_BACKENDS,
    KV_DTYPES,
    KV_EVENT_ENCODINGS,
    MEM_LAYOUTS,
    PREFETCH_POLICIES,
    UNSUPPORTED_ATTENTION,
    WRITE_POLICIES,
    storage_backends,
)
from hicache_ray.config.option import ConfigError, option, options_of
from hicache_ray.hashing import ATTENTION_KINDS, ModelIdentity
from hicache_ray.radix.eviction import eviction_policies

GIGABYTE = 10**9
"""Bytes of the gigabyte that options of sizes count in, as SGLang does (case 58)."""


def prefetch_timeout_per_page(page_size: int, per_ki_token: float) -> float:
    """Seconds that the `timeout` policy grants for each page found in L3 (case 46)."""
    return page_size / 1024 * per_ki_token


class LayerRange(NamedTuple):
    """Layers of one pipeline stage, half open."""

    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class CacheOptions:
    """The options by themselves, each checked when it is set; `HiCacheConfig` reconciles them."""

    # Model
    model_name: str = option("", "Name of the model; part of every storage key.")
    revision: str = option("", "Revision of the weights; part of every storage key.")
    kv_cache_dtype: str = option("bfloat16", "Element type of the KV cache.", choices=tuple(KV_DTYPES))
    attention: str = option("mha", "Shape of the KV cache: K and V by head, or one latent.", choices=ATTENTION_KINDS)
    layers: int = option(32, "Layers of the whole model.", minimum=1)
    heads: int = option(8, "KV heads of the whole model (MHA).", minimum=1)
    head_dim: int = option(128, "Elements of a head's K, and of its V (MHA).", minimum=1)
    kv_lora_rank: int = option(512, "Elements of the compressed latent (MLA).", minimum=1)
    qk_rope_head_dim: int = option(64, "Elements of the rotary part beside the latent (MLA).", minimum=0)
    enable_eagle: bool = option(False, "Key the cache by token pairs, for EAGLE speculative decoding.")

    # Parallel shape
    tp_size: int = option(1, "Tensor-parallel ranks; one rank actor each.", alias="tp", minimum=1)
    pp_size: int = option(1, "Pipeline stages of the model.", alias="pp", minimum=1)
    pp_rank: int = option(0, "Pipeline stage this instance of the cache serves.", minimum=0)
    dp_size: int = option(1, "Data-parallel ranks.", alias="dp", minimum=1)
    enable_dp_attention: bool = option(False, "Split the tensor-parallel ranks into dp_size attention groups.")

    # L1
    page_size: int = option(1, "Tokens a page: the unit of matching, hashing, copying and storing.", minimum=1)
    device: str = option("auto", "Where L1 lives; auto takes an accelerator where there is one.", choices=DEVICES)
    l1_tokens: int = option(4096, "Capacity of L1 in tokens, per rank.", minimum=1)
    attention_backend: str | None = option(None, "Attention backend of the engine.")
    decode_attention_backend: str | None = option(None, "Attention backend for decoding; unset: attention_backend.")
    enable_hierarchical_cache: bool = option(True, "SGLang's main switch; must stay true.")
    disable_radix_cache: bool = option(False, "SGLang's switch against prefix caching; must stay false.")
    radix_eviction_policy: str = option(
        "lru", "Order of eviction from L1 and L2.", alias="policy", choices=eviction_policies
    )

    # L2
    hicache_ratio: float = option(2.0, "Capacity of L2 as a multiple of L1.", above=0)
    hicache_size: float = option(
        0.0, "Capacity of L2 in gigabytes, per rank; above 0 it replaces the ratio.", minimum=0
    )
    host_memory_reserve: float = option(10.0, "Host memory in gigabytes that L2 must leave free.", minimum=0)
    hicache_write_policy: str = option(
        "write_through", "When L1 is copied to L2.", alias="write_policy", choices=WRITE_POLICIES
    )
    hicache_io_backend: str = option(
        "kernel", "How pages move between L1 and L2.", alias="io_backend", choices=IO_BACKENDS
    )
    hicache_mem_layout: str = option(
        "layer_first", "Order of bytes in L2 and in L3.", alias="layout", choices=MEM_LAYOUTS
    )
    load_back_threshold: int = option(10, "Fewest tokens worth loading from L2 to L1.", minimum=0)

    # L3
    hicache_storage_backend: str | None = option(None, "L3 backend; unset: two tiers only.", choices=storage_backends)
    hicache_storage_backend_extra_config: str | Mapping[str, Any] | None = option(
        None, "Options of the L3 backend: a mapping, JSON text, or @ and a JSON, TOML or YAML file."
    )
    hicache_storage_prefetch_policy: str = option(
        "best_effort", "When a request stops waiting for L3.", alias="prefetch_policy", choices=PREFETCH_POLICIES
    )
    prefetch_threshold: int = option(256, "Fewest tokens worth fetching from L3; at least one page.", minimum=0)
    prefetch_timeout_base: float = option(1.0, "Prefetch time limit before any page (timeout policy).", minimum=0)
    prefetch_timeout_per_ki_token: float = option(
        0.25, "Prefetch time limit added per 1024 tokens found in L3 (timeout policy).", minimum=0
    )
    hicache_storage_pass_prefix_keys: bool = option(
        False, "Tell the backend the hashes before the pages of a call, for path-like stores.", alias="pass_prefix_keys"
    )
    storage_actors: int = option(1, "Storage actors of the `ray` backend.", minimum=1)
    storage_actor_size: float = option(1.0, "Capacity of a storage actor in gigabytes.", above=0)
    storage_replicas: int = option(1, "Storage actors that hold each page.", alias="replicas", minimum=1)

    # Time limits and group
    storage_timeout: float = option(5.0, "Limit of one call to L3, in seconds.", above=0)
    step_timeout: float = option(
        10.0, "Limit of one step of the group, and of any process's silence, in seconds.", above=0
    )
    collective_timeout: float = option(5.0, "Limit of one reduction over the group, in seconds.", above=0)
    collective_backend: str = option(
        "hicache", "Ray collective backend of the group's reductions.", choices=COLLECTIVE_BACKENDS
    )

    # What others are told
    enable_kv_events: bool = option(False, "Publish which pages come to and leave L1 and L2.")
    kv_events_endpoint: str = option("tcp://*:5557", "ZMQ endpoint of the KV events; port * is any free one.")
    kv_events_replay_endpoint: str | None = option(
        None, "ZMQ endpoint that repeats events a subscriber missed; unset: none."
    )
    kv_events_topic: str = option("", "Topic of the KV events' messages.")
    kv_events_encoding: str = option(
        "array", "How an event is encoded: as vLLM's up to 0.23, or its maps.", choices=KV_EVENT_ENCODINGS
    )
    enable_metrics: bool = option(True, "Export counters through Ray's metrics.")

    def __post_init__(self) -> None:
        if self.attention in UNSUPPORTED_ATTENTION:
            raise ConfigError(
                f"attention is {self.attention!r}: its pools ({UNSUPPORTED_ATTENTION[self.attention]}) have no host "
                f"tier; the hierarchical cache serves mha and mla"
            )
        for name, spec in options_of(type(self)).items():
            object.__setattr__(self, name, spec.check(getattr(self, name)))

    @property
    def attention_tp_size(self) -> int:
        """Ranks over which one token's heads are split: the ranks of one group."""
        return self.tp_size // self.dp_size if self.enable_dp_attention else self.tp_size

    @property
    def local_heads(self) -> int:
        """KV heads on one rank; heads fewer than ranks are replicated. 1 for MLA."""
        return 1 if self.attention == "mla" else max(1, self.heads // self.attention_tp_size)

    @property
    def latent_dim(self) -> int:
        """Elements of a token's latent in one layer (MLA)."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def layer_range(self) -> LayerRange:
        """The layers of this pipeline stage; the first stages take one more where the layers do not divide."""
        base, extra = divmod(self.layers, self.pp_size)
        start = self.pp_rank * base + min(self.pp_rank, extra)
        return LayerRange(start, start + base + (self.pp_rank < extra))

    @property
    def torch_dtype_name(self) -> str:
        """Name of the KV cache's dtype in torch."""
        return KV_DTYPES[self.kv_cache_dtype]

    @property
    def host_memory_reserve_bytes(self) -> int:
        """Bytes of host memory that L2 must leave free."""
        return int(self.host_memory_reserve * GIGABYTE)

    @property
    def storage_actor_bytes(self) -> int:
        """Byte budget of one storage actor."""
        return int(self.storage_actor_size * GIGABYTE)

    @property
    def prefetch_min_tokens(self) -> int:
        """The prefetch threshold that holds: at least one page (case 43)."""
        return max(self.prefetch_threshold, self.page_size)

    @property
    def prefetch_timeout_per_page(self) -> float:
        """Seconds the `timeout` policy grants per page found in L3 (case 46)."""
        return prefetch_timeout_per_page(self.page_size, self.prefetch_timeout_per_ki_token)

    def identity(self, tp_rank: int = 0) -> ModelIdentity:
        """What the pages of one of the `tp_size` ranks belong to in L3.

        Under data-parallel attention the rank counts within its attention group.
        """
        if not 0 <= tp_rank < self.tp_size:
            raise ConfigError(f"tp_rank is {tp_rank} of tp_size {self.tp_size}; ranks run from 0 to size - 1")
        attention_group, attention_rank = divmod(tp_rank, self.attention_tp_size)
        mla = self.attention == "mla"
        return ModelIdentity(
            model=self.model_name,
            revision=self.revision,
            kv_dtype=self.torch_dtype_name,
            page_size=self.page_size,
            layout=self.hicache_mem_layout,
            key_mode="bigram" if self.enable_eagle else "plain",
            attention=self.attention,
            heads=self.local_heads,
            head_dim=self.latent_dim if mla else self.head_dim,
            tp_rank=attention_rank,
            tp_size=self.attention_tp_size,
            pp_rank=self.pp_rank,
            pp_size=self.pp_size,
            dp_rank=attention_group,
            dp_size=self.dp_size if self.enable_dp_attention else 1,
            layer_start=self.layer_range.start,
            layer_end=self.layer_range.end,
        )
