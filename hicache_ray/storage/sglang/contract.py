"""SGLang's side of its storage interface (0.5.9 and 0.5.23): what a class written for it is given."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hicache_ray.pages import pages_of
from hicache_ray.storage.base import PageContext, StorageConfig
from hicache_ray.storage.host_pages import HostPages, memory_span, page_addresses


@dataclass
class SGLangStorageConfig:
    """First argument of the class; the fields that only newer SGLang versions have carry their defaults."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    is_mla_model: bool
    is_page_first_layout: bool
    model_name: str | None
    extra_config: dict[str, Any]
    is_storage_writer: bool = True
    enable_storage_metrics: bool = False
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    dp_rank: int = 0
    tp_lcm_size: int | None = None
    should_split_heads: bool = False

    @classmethod
    def of(cls, config: StorageConfig) -> SGLangStorageConfig:
        """The same for our configuration."""
        identity = config.identity
        return cls(
            tp_rank=identity.tp_rank,
            tp_size=identity.tp_size,
            pp_rank=identity.pp_rank,
            pp_size=identity.pp_size,
            is_mla_model=identity.attention == "mla",
            is_page_first_layout=identity.layout != "layer_first",
            model_name=identity.model or None,
            extra_config=dict(config.extra),
            is_storage_writer=config.is_writer,
            dp_rank=identity.dp_rank,
        )


@dataclass
class SGLangExtraInfo:
    """What comes with a call: the hashes of the pages before its first one, where the cache passes them."""

    prefix_keys: list[str] | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, context: PageContext | None) -> SGLangExtraInfo:
        """The same for our call."""
        prefix = context.prefix_hashes if context is not None else ()
        return cls([page_hash.hex() for page_hash in prefix] or None)


class SGLangHostPool:
    """A host pool as such a class sees it: token indices as torch tensors, pages as flat uint8 tensors."""

    def __init__(self, pool: HostPages, layout: str) -> None:
        self._pool = pool
        self.layout = layout
        self.page_size = pool.page_size
        self.page_num = pool.pages
        self.size = pool.pages * pool.page_size
        self.dtype = torch.uint8
        self.device = "cpu"

    @property
    def kv_buffer(self) -> torch.Tensor:
        """The pool's memory [bytes], for registering it."""
        span = memory_span(self._pool.segments)
        memory = (ctypes.c_uint8 * span.nbytes).from_address(span.address)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """Addresses and sizes of the segments of whole pages, given by their token indices (case 54); ValueError for
        indices that are no whole pages."""
        segments = self._pool.segments
        addresses = page_addresses(segments, pages_of(indices, self.page_size)).reshape(-1).tolist()
        return addresses, [segments.shape[-1]] * len(addresses)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """A copy of the page that begins at token `index`: its segments one after the other [page_bytes]."""
        return torch.from_numpy(np.array(self._pool.segments[int(index) // self.page_size]).reshape(-1))

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Room for one page."""
        return torch.zeros(self._pool.page_bytes, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Fill the page that begins at token `index`."""
        page = self._pool.segments[int(index) // self.page_size]
        np.copyto(page, data_page.contiguous().view(torch.uint8).numpy().reshape(page.shape))
