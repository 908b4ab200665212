"""HiCacheConfig: the options of one model instance, and what they resolve to on a machine.

Resolving reconciles the options with each other and with the machine: adjustments, those of SGLang 0.5.9 (cases 59
and 60), then refusals.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from hicache_ray.config.extra import PREFETCH_KEYS, parse_extra_config
from hicache_ray.config.names import REPLACED_LAYOUTS, can_copy, layouts_of
from hicache_ray.config.option import ConfigError, options_of, read_options, value_text
from hicache_ray.config.options import CacheOptions

logger = logging.getLogger("hicache_ray.config")


@dataclasses.dataclass(frozen=True)
class HiCacheConfig(CacheOptions):
    """Options of one model instance; the same on each of its ranks. Times are seconds, sizes decimal gigabytes.

    Raises:
        ConfigError: an option of the wrong type, out of range or none of its choices. Combinations of options are
            checked by `resolve()`.
    """

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> HiCacheConfig:
        """A configuration from option names or aliases (dashes allowed) to values; text is read as the option's type.

        Raises:
            ConfigError: an unknown name (the text suggests a near one), an option given twice, or as the constructor.
        """
        return cls(**read_options(options_of(cls), values))

    def resolve(self, capabilities: Capabilities | None = None) -> Resolution:
        """The configuration that holds on this machine and the adjustments made, each logged as one warning.

        Resolving the result again changes nothing. In it `device` is never "auto", and
        `hicache_storage_backend_extra_config` is a dict without the prefetch options, which are in their own fields.

        Raises:
            ConfigError: the options can't work together, or not here; the text says why and what would.
        """
        resolution = _reconciled(self, capabilities)
        for adjustment in resolution.adjustments:
            logger.warning("%s", adjustment)
        return resolution


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


class Resolution(NamedTuple):
    """The configuration that holds, and what was changed to get there."""

    config: HiCacheConfig
    adjustments: list[Adjustment]


def explain(config: HiCacheConfig, capabilities: Capabilities | None = None) -> list[str]:
    """One line per option, `name = value  # why`: default, given, adjusted (with the reason) or found.

    Raises: as `HiCacheConfig.resolve`.
    """
    resolved, adjustments = _reconciled(config, capabilities)
    adjusted = {change.name: f"adjusted from {value_text(change.old)}: {change.reason}" for change in adjustments}
    lines = []
    for name, option in options_of(HiCacheConfig).items():
        given, value = getattr(config, name), getattr(resolved, name)
        why = adjusted.get(name) or ("default" if given == option.default else "given")
        lines.append(f"{name} = {value_text(value)}  # {why}{_note(name, config, resolved)}")
    return lines


def _note(name: str, given: HiCacheConfig, resolved: HiCacheConfig) -> str:
    """What the value of an option does not tell by itself."""
    if name == "device" and given.device == "auto":
        return ", auto"
    if name == "hicache_ratio" and resolved.hicache_size > 0:
        return ", unused: hicache_size is set"
    if name == "model_name" and resolved.hicache_storage_backend and not resolved.model_name:
        return ", empty: models of the same shape would find each other's pages in L3"
    if name == "prefetch_threshold" and resolved.prefetch_min_tokens != resolved.prefetch_threshold:
        return f", holds as {resolved.prefetch_min_tokens}: at least one page"
    return ""


def _reconciled(config: HiCacheConfig, capabilities: Capabilities | None) -> Resolution:
    found = Capabilities.detect() if capabilities is None else capabilities
    config = _spread_extra_config(config)
    if config.device == "auto":
        config = dataclasses.replace(config, device="cuda" if found.cuda else "npu" if found.npu else "cpu")
    adjustments: list[Adjustment] = []
    for rule in _RULES:
        wanted = [Adjustment(name, getattr(config, name), new, reason) for name, new, reason in rule(config, found)]
        if changes := [change for change in wanted if change.new != change.old]:
            config = dataclasses.replace(config, **{change.name: change.new for change in changes})
            adjustments += changes
    _check_cache(config)
    _check_device(config, found)
    _check_layout(config)
    _check_storage(config)
    _check_group(config)
    return Resolution(config, adjustments)


def _spread_extra_config(config: HiCacheConfig) -> HiCacheConfig:
    """Moves the prefetch options that SGLang takes from the extra config into their fields (case 61)."""
    extra = parse_extra_config(config.hicache_storage_backend_extra_config)
    moved = {name: extra.pop(name) for name in PREFETCH_KEYS if name in extra}
    for name, value in moved.items():
        own = getattr(config, name)
        if own not in (options_of(HiCacheConfig)[name].default, value):
            raise ConfigError(
                f"{name} is {own!r}, and {value!r} in hicache_storage_backend_extra_config; give it only once"
            )
    return dataclasses.replace(config, hicache_storage_backend_extra_config=extra, **moved)


# Each rule gives options, the values that they must have, and the reason.
Changes = Iterator[tuple[str, Any, str]]


def _npu(config: HiCacheConfig, _: Capabilities) -> Changes:
    if config.device == "npu":
        layout = "page_first_kv_split" if config.attention == "mla" else "page_first_direct"
        yield "hicache_io_backend", "kernel_ascend", "an NPU moves pages with kernel_ascend only"
        yield "hicache_mem_layout", layout, f"on an NPU the {config.attention} pools use {layout}"


def _page_first_direct_needs_direct(config: HiCacheConfig, _: Capabilities) -> Changes:
    if config.hicache_mem_layout == "page_first_direct" and config.hicache_io_backend == "kernel":
        yield "hicache_io_backend", "direct", "the kernel backend can't move the page_first_direct layout"


def _flash_attention_3(config: HiCacheConfig, capabilities: Capabilities) -> Changes:
    """Case 60: FA3 decoding reads the KV buffers in a way that the kernel backend does not provide for."""
    decode = config.decode_attention_backend or config.attention_backend
    if config.hicache_io_backend != "kernel" or decode != "fa3":
        return
    reason = "fa3 decoding does not work with the kernel backend"
    if config.decode_attention_backend == "fa3":
        yield "hicache_io_backend", "direct", reason
    else:
        preferred = capabilities.sm100 if config.attention == "mla" else capabilities.flashinfer
        yield "decode_attention_backend", "flashinfer" if preferred else "triton", f"{reason}, which is kept"


def _mooncake_needs_whole_pages(config: HiCacheConfig, _: Capabilities) -> Changes:
    layout = {"kernel": "page_first", "direct": "page_first_direct"}.get(config.hicache_io_backend)
    if config.hicache_storage_backend == "mooncake" and config.hicache_mem_layout == "layer_first" and layout:
        yield (
            "hicache_mem_layout",
            layout,
            "mooncake stores a page as one run of bytes, which layer_first does not have",
        )


def _layout_that_is_replaced(config: HiCacheConfig, _: Capabilities) -> Changes:
    backend, layout = config.hicache_io_backend, config.hicache_mem_layout
    if (backend, layout) in REPLACED_LAYOUTS:
        reason = f"the {backend} backend can't move the {layout} layout"
        yield "hicache_mem_layout", REPLACED_LAYOUTS[backend, layout], reason


# In this order, as SGLang does: what a rule changes, the later ones see.
_RULES: tuple[Callable[[HiCacheConfig, Capabilities], Changes], ...] = (
    _npu,
    _page_first_direct_needs_direct,
    _flash_attention_3,
    _mooncake_needs_whole_pages,
    _layout_that_is_replaced,
)


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


def _check_device(config: HiCacheConfig, capabilities: Capabilities) -> None:
    if config.device == "cuda" and not capabilities.cuda:
        raise ConfigError("device is cuda, but torch sees no CUDA device here; use cpu or auto")
    if config.device == "npu" and not capabilities.npu:
        raise ConfigError("device is npu, but torch sees no NPU here; use cpu or auto")
    if config.collective_backend == "nccl" and not capabilities.cuda:
        raise ConfigError("collective_backend is nccl, but torch sees no CUDA device here; use hicache or gloo")


def _check_layout(config: HiCacheConfig) -> None:
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


def _check_group(config: HiCacheConfig) -> None:
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
    if config.step_timeout <= config.collective_timeout:
        raise ConfigError(
            f"step_timeout is {config.step_timeout:g} s, collective_timeout {config.collective_timeout:g} s: a step "
            f"holds a reduction, so its limit must be the longer one"
        )
