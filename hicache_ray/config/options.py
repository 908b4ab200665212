"""What an option is: its meaning, its valid values, and how a value for it is read and checked.

`HiCacheConfig`'s fields carry an `Option` each; the command line, the documentation and the checks all read it.

`hicache_storage_backend_extra_config`: a mapping, JSON text, or `@file` in JSON, TOML or YAML (case 61).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml


class ConfigError(ValueError):
    """A configuration that can't work; the text names the offending value and what would work."""


@dataclass(frozen=True)
class Option:
    """Description of one configuration field.

    Attributes:
        help: one sentence: what it sets, in which unit.
        choices: the valid values, where they are few.
        minimum, maximum: inclusive bounds of a number.
        above: exclusive lower bound of a number.
    """

    help: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None

    @property
    def values(self) -> str:
        """The valid values in words, for messages and documentation."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        bounds = []
        if self.above is not None:
            bounds.append(f"above {self.above:g}")
        if self.minimum is not None:
            bounds.append(f"at least {self.minimum:g}")
        if self.maximum is not None:
            bounds.append(f"at most {self.maximum:g}")
        return " and ".join(bounds)


def option(default: Any, help: str, **limits: Any) -> Any:
    """A dataclass field with a default and an `Option` (its other attributes as keywords)."""
    return field(default=default, metadata={"option": Option(help, **limits)})


def options_of(config: type[Any]) -> dict[str, Option]:
    """The options of a configuration class by name, in the order of declaration."""
    return {entry.name: entry.metadata["option"] for entry in fields(config)}


def types_of(config: type[Any]) -> dict[str, tuple[type, ...]]:
    """The types each option takes, `type(None)` among them where it may be unset."""
    hints = get_type_hints(config)
    return {name: get_args(hints[name]) or (hints[name],) for name in options_of(config)}


def check_value(name: str, value: Any, spec: Option, types: tuple[type, ...]) -> Any:
    """The value as the option's type (an int becomes a float where one is wanted); raises ConfigError otherwise."""
    if value is None and type(None) in types:
        return None
    if float in types and type(value) is int:
        value = float(value)
    if not any(_is_a(value, wanted) for wanted in types):
        raise ConfigError(f"{name} is {value!r}; give {_type_names(types)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} is {value!r}; give a finite number")
    if spec.choices and value not in spec.choices:
        raise ConfigError(f"{name} is {value!r}; use {spec.values}")
    if isinstance(value, (int, float)) and not _is_within(value, spec):
        raise ConfigError(f"{name} is {value!r}; it must be {spec.values}")
    return value


def parse_text(name: str, text: str, types: tuple[type, ...]) -> Any:
    """A value from a command line or a text file, for an option whose types are no text."""
    if type(None) in types and text.lower() in ("", "none", "null"):
        return None
    if str in types:
        return text
    if bool in types:
        words = {
            "true": True,
            "yes": True,
            "on": True,
            "1": True,
            "false": False,
            "no": False,
            "off": False,
            "0": False,
        }
        if text.lower() not in words:
            raise ConfigError(f"{name} is {text!r}; give true or false")
        return words[text.lower()]
    try:
        return int(text) if int in types else float(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; give {_type_names(types)}") from None


def _is_a(value: Any, wanted: Any) -> bool:
    if wanted is bool or isinstance(value, bool):
        return wanted is bool and isinstance(value, bool)
    return isinstance(value, getattr(wanted, "__origin__", wanted))


def _is_within(value: float, spec: Option) -> bool:
    return not (
        (spec.above is not None and value <= spec.above)
        or (spec.minimum is not None and value < spec.minimum)
        or (spec.maximum is not None and value > spec.maximum)
    )


def _type_names(types: Iterable[Any]) -> str:
    words: Mapping[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return " or ".join(words.get(wanted, "a mapping") for wanted in types if wanted is not type(None))


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


STORAGE_BACKENDS = ("ray", "file", "mooncake", "dynamic")


def storage_backend_names() -> tuple[str, ...]:
    """Built-in storage backends and those registered in this process."""
    # Whoever registered a name has loaded the registry. Importing it here would turn the imports around.
    registry = sys.modules.get("hicache_ray.storage.registry")
    registered = registry.backend_names() if registry is not None else ()
    return (*STORAGE_BACKENDS, *(name for name in registered if name not in STORAGE_BACKENDS))
