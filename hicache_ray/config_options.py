"""What an option is: its meaning, its valid values, and how a value for it is read and checked.

`HiCacheConfig`'s fields carry an `Option` each; the command line, the documentation and the checks all read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_args, get_type_hints


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
