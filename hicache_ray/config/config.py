"""HiCacheConfig: the options of one model instance, and what they resolve to on a machine."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from hicache_ray.config.extra import PREFETCH_KEYS, parse_extra_config
from hicache_ray.config.option import ConfigError, options_of, read_options, value_text
from hicache_ray.config.options import CacheOptions
from hicache_ray.config.rules import Adjustment, Capabilities, adjust, check

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


def _reconciled(config: HiCacheConfig, capabilities: Capabilities | None) -> Resolution:
    found = Capabilities.detect() if capabilities is None else capabilities
    adjusted, adjustments = adjust(_spread_extra_config(config), found)
    check(adjusted, found)
    return Resolution(adjusted, adjustments)


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
