"""`hicache_storage_backend_extra_config`: a mapping, JSON text, or `@file` in JSON, TOML or YAML (case 61)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from hicache_ray.config.option import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFETCH_KEYS = (
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
)
"""Options that SGLang reads from the extra config; given there, they are the options of the same name here."""

_NAME = "hicache_storage_backend_extra_config"


def parse_extra_config(extra: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """The extra config as a new dict; empty for None and for blank text.

    Raises:
        ConfigError: the text or the file is no JSON, TOML or YAML mapping with text keys, or can't be read.
    """
    if extra is None:
        return {}
    parsed = _parse_text(extra.strip()) if isinstance(extra, str) else extra
    if not isinstance(parsed, Mapping):
        raise ConfigError(f"{_NAME} holds a {type(parsed).__name__}; give a mapping of option names to values")
    for key in parsed:
        if not isinstance(key, str):
            raise ConfigError(f"{_NAME} has the key {key!r}; keys must be text")
    return dict(parsed)


def _parse_text(text: str) -> Any:
    if not text:
        return {}
    if text.startswith("@"):
        return _parse_file(Path(text[1:]))
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{_NAME} is no JSON ({error}); give JSON text, or @ and the name of a file") from None


def _parse_file(path: Path) -> Any:
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        raise ConfigError(f"{_NAME} names the file {str(path)!r}; its name must end in {', '.join(_PARSERS)}")
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{_NAME}: the file {str(path)!r} can't be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{_NAME}: the file {str(path)!r} is no {path.suffix[1:].upper()}: {error}") from error


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    ".json": json.loads,
    ".toml": tomllib.loads,
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
}
