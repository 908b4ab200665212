"""How options are reconciled with each other and with the machine: adjustments, then refusals.

The adjustments are those of SGLang 0.5.9 (cases 59 and 60).
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from hicache_ray.config.names import REPLACED_LAYOUTS, can_copy, layouts_of
from hicache_ray.config.option import ConfigError, value_text
from hicache_ray.config.options import CacheOptions

Options = TypeVar("Options", bound=CacheOptions)


class Capabilities(NamedTuple):
    """What the machine offers. Tests pass their own; `detect()` asks torch."""

    cuda: bool = False
    npu: bool = False
    flashinfer: bool = False
    sm100: bool = False
    """A GPU of compute capability 10.x."""

    @classmethod
    def detect(cls) -> Capabilities:
        """The capabilities of this process's machine."""
        import torch

        cuda = torch.cuda.is_available()
        npu = getattr(torch, "npu", None) if importlib.util.find_spec("torch_npu") else None
        return cls(
            cuda=cuda,
            npu=npu is not None and bool(npu.is_available()),
            flashinfer=cuda and importlib.util.find_spec("flashinfer") is not None,
            sm100=cuda and torch.cuda.get_device_capability()[0] == 10,
        )


class Adjustment(NamedTuple):
    """An option that was changed because its value can't work with the others."""

    name: str
    old: Any
    new: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.name} is {value_text(self.new)} instead of {value_text(self.old)}: {self.reason}"


def adjust(options: Options, capabilities: Capabilities) -> tuple[Options, list[Adjustment]]:
    """The options as they work together, and what was changed for it. Adjusting the result again changes nothing."""
    if options.device == "auto":
        options = dataclasses.replace(options, device=_found_device(capabilities))
    adjustments: list[Adjustment] = []
    for rule in _RULES:
        if changes := list(rule(options, capabilities)):
            options = dataclasses.replace(options, **{change.name: change.new for change in changes})
            adjustments += changes
    return options, adjustments


def _found_device(capabilities: Capabilities) -> str:
    if capabilities.cuda:
        return "cuda"
    return "npu" if capabilities.npu else "cpu"


Rule = Callable[[CacheOptions, Capabilities], Iterator[Adjustment]]


def _npu(config: CacheOptions, _: Capabilities) -> Iterator[Adjustment]:
    if config.device != "npu":
        return
    if config.hicache_io_backend != "kernel_ascend":
        reason = "an NPU moves pages with kernel_ascend only"
        yield Adjustment("hicache_io_backend", config.hicache_io_backend, "kernel_ascend", reason)
    layout = "page_first_kv_split" if config.attention == "mla" else "page_first_direct"
    if config.hicache_mem_layout != layout:
        reason = f"on an NPU the {config.attention} pools use {layout}"
        yield Adjustment("hicache_mem_layout", config.hicache_mem_layout, layout, reason)


def _page_first_direct_needs_direct(config: CacheOptions, _: Capabilities) -> Iterator[Adjustment]:
    if config.hicache_mem_layout == "page_first_direct" and config.hicache_io_backend == "kernel":
        reason = "the kernel backend can't move the page_first_direct layout"
        yield Adjustment("hicache_io_backend", "kernel", "direct", reason)


def _flash_attention_3(config: CacheOptions, capabilities: Capabilities) -> Iterator[Adjustment]:
    """Case 60: FA3 decoding reads the KV buffers in a way that the kernel backend does not provide for."""
    decode = config.decode_attention_backend or config.attention_backend
    if config.hicache_io_backend != "kernel" or decode != "fa3":
        return
    if config.decode_attention_backend == "fa3":
        reason = "fa3 decoding does not work with the kernel backend"
        yield Adjustment("hicache_io_backend", "kernel", "direct", reason)
        return
    preferred = capabilities.sm100 if config.attention == "mla" else capabilities.flashinfer
    reason = "fa3 decoding does not work with the kernel backend, which is kept"
    yield Adjustment("decode_attention_backend", None, "flashinfer" if preferred else "triton", reason)


def _mooncake_needs_whole_pages(config: CacheOptions, _: Capabilities) -> Iterator[Adjustment]:
    layout = {"kernel": "page_first", "direct": "page_first_direct"}.get(config.hicache_io_backend)
    if config.hicache_storage_backend == "mooncake" and config.hicache_mem_layout == "layer_first" and layout:
        reason = "mooncake stores a page as one run of bytes, which layer_first does not have"
        yield Adjustment("hicache_mem_layout", "layer_first", layout, reason)


def _layout_that_is_replaced(config: CacheOptions, _: Capabilities) -> Iterator[Adjustment]:
    backend, layout = config.hicache_io_backend, config.hicache_mem_layout
    if (backend, layout) in REPLACED_LAYOUTS:
        reason = f"the {backend} backend can't move the {layout} layout"
        yield Adjustment("hicache_mem_layout", layout, REPLACED_LAYOUTS[backend, layout], reason)


# In this order, as SGLang does: what a rule changes, the later ones see.
_RULES: tuple[Rule, ...] = (
    _npu,
    _page_first_direct_needs_direct,
    _flash_attention_3,
    _mooncake_needs_whole_pages,
    _layout_that_is_replaced,
)


def check(config: CacheOptions, capabilities: Capabilities) -> None:
    """Raises ConfigError when the options, already adjusted, can't work together or not on this machine."""
    _check_cache(config)
    _check_device(config, capabilities)
    _check_layout(config)
    _check_parallel_shape(config)
    _check_storage(config)
    _check_time_limits(config)


def _check_cache(config: CacheOptions) -> None:
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


def _check_device(config: CacheOptions, capabilities: Capabilities) -> None:
    if config.device == "cuda" and not capabilities.cuda:
        raise ConfigError("device is cuda, but torch sees no CUDA device here; use cpu or auto")
    if config.device == "npu" and not capabilities.npu:
        raise ConfigError("device is npu, but torch sees no NPU here; use cpu or auto")
    if config.collective_backend == "nccl" and not capabilities.cuda:
        raise ConfigError("collective_backend is nccl, but torch sees no CUDA device here; use hicache or gloo")


def _check_layout(config: CacheOptions) -> None:
    backend, layout = config.hicache_io_backend, config.hicache_mem_layout
    if layout not in layouts_of(backend):
        raise ConfigError(
            f"hicache_io_backend {backend} can't move hicache_mem_layout {layout}; "
            f"with {backend} use {' or '.join(layouts_of(backend))}"
        )
    if backend == "kernel_ascend" and config.device != "npu":
        raise ConfigError(f"hicache_io_backend kernel_ascend needs an NPU, device is {config.device}; use kernel")
    if not can_copy(backend, layout, config.attention):
        raise ConfigError("hicache_mem_layout page_head sorts a page by heads, and mla has none; use page_first")
    if layout == "page_first_kv_split" and config.attention == "mla" and config.hicache_storage_backend:
        raise ConfigError(
            "hicache_mem_layout page_first_kv_split keeps an mla page in two parts of different size, which no storage "
            "backend takes; use page_first_direct"
        )


def _check_parallel_shape(config: CacheOptions) -> None:
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


def _check_storage(config: CacheOptions) -> None:
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


def _check_time_limits(config: CacheOptions) -> None:
    if config.step_timeout <= config.collective_timeout:
        raise ConfigError(
            f"step_timeout is {config.step_timeout:g} s, collective_timeout {config.collective_timeout:g} s: a step "
            f"holds a reduction, so its limit must be the longer one"
        )
