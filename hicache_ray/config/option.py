"""What an option is: its meaning, its names, its valid values, and how a value for it is read and checked.

The fields of `CacheOptions` carry an `Option` each; the command line, the documentation and the checks all read it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_args, get_type_hints


class ConfigError(ValueError):
    """A configuration that can't work; the text names the offending value and what would work."""


@dataclass(frozen=True)
class Option:
    """Description of one configuration field.

    Attributes:
        help: one sentence: what it sets, in which unit.
        alias: a shorter name, taken wherever the full one is; "" for none.
        choices: the valid values, where they are few; a function where more of them may be registered.
        minimum, above: lower bound of a number, inclusive or exclusive.
        name, types, default: of the field; `type(None)` is among the types where it may be unset.
    """

    help: str
    alias: str = ""
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]] = ()
    minimum: float | None = None
    above: float | None = None
    name: str = ""
    types: tuple[type, ...] = ()
    default: Any = None

    @property
    def known(self) -> tuple[str, ...]:
        """The choices of this moment."""
        return self.choices() if callable(self.choices) else self.choices

    @property
    def values(self) -> str:
        """The valid values in words, for messages and documentation; "" where the type says it all."""
        if self.choices:
            return "one of " + ", ".join(self.known)
        if self.above is not None:
            return f"above {self.above:g}"
        return "" if self.minimum is None else f"at least {self.minimum:g}"

    @property
    def flags(self) -> list[str]:
        """Its names on a command line, the full one first."""
        return [f"--{name.replace('_', '-')}" for name in (self.name, self.alias) if name]

    def check(self, value: Any, given: str = "") -> Any:
        """The value as the option's type: an int becomes a float where one is wanted.

        Args:
            value: of any type; text is not read as a number.
            given: the name to speak of; default: the option's own.

        Raises:
            ConfigError: the wrong type, out of range or none of the choices.
        """
        name = given or self.name
        if value is None and type(None) in self.types:
            return None
        if float in self.types and type(value) is int:
            value = float(value)
        if not any(_is_a(value, wanted) for wanted in self.types):
            raise ConfigError(f"{name} is {value!r}; give {_type_names(self.types)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name} is {value!r}; give a finite number")
        if self.choices and value not in self.known:
            raise ConfigError(f"{name} is {value!r}; use {self.values}")
        if isinstance(value, int | float) and self._is_below(value):
            raise ConfigError(f"{name} is {value!r}; it must be {self.values}")
        return value

    def read(self, text: str) -> Any:
        """A value from a command line or a text file, not yet checked; ConfigError where it is not of the type."""
        if type(None) in self.types and text.lower() in ("", "none", "null"):
            return None
        if str in self.types:
            return text
        try:
            if bool in self.types:
                return parse_bool(text)
            return int(text) if int in self.types else float(text)
        except ValueError:
            raise ConfigError(f"{self.name} is {text!r}; give {_type_names(self.types)}") from None

    def _is_below(self, value: float) -> bool:
        return (self.above is not None and value <= self.above) or (self.minimum is not None and value < self.minimum)


def option(default: Any, help: str, **described: Any) -> Any:
    """A dataclass field with a default and an `Option` (its other attributes as keywords)."""
    return field(default=default, metadata={"option": Option(help, default=default, **described)})


def options_of(owner: type[Any]) -> dict[str, Option]:
    """The options among a dataclass's fields by full name, in the order of declaration."""
    found: dict[str, Option] = _options_of(owner)  # type: ignore[arg-type]  # classes are hashable
    return found


@functools.cache
def _options_of(owner: type[Any]) -> dict[str, Option]:
    hints = get_type_hints(owner)
    return {
        entry.name: dataclasses.replace(
            entry.metadata["option"], name=entry.name, types=get_args(hints[entry.name]) or (hints[entry.name],)
        )
        for entry in fields(owner)
        if "option" in entry.metadata
    }


def find_option(options: Mapping[str, Option], given: str) -> Option:
    """The option of that full name or alias (dashes allowed). ConfigError with the nearest name for any other."""
    known = _by_name(options)
    name = given.strip().replace("-", "_")
    if name not in known:
        hint = nearest_name(options, given) or "; `hicache-ray config explain` lists the options"
        raise ConfigError(f"unknown option {given!r}{hint}")
    return known[name]


def nearest_name(options: Mapping[str, Option], given: str) -> str:
    """A question for the option that was meant, to end a message with; "" where no name is near."""
    near = difflib.get_close_matches(given.strip().replace("-", "_"), _by_name(options), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _by_name(options: Mapping[str, Option]) -> dict[str, Option]:
    return {**{found.alias: found for found in options.values() if found.alias}, **options}


def read_options(options: Mapping[str, Option], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by full name, from a mapping of names or aliases to values; text is read as the option's type.

    Raises:
        ConfigError: an unknown name, text that is no value of the type, or an option under both of its names.
    """
    read: dict[str, Any] = {}
    for given, value in values.items():
        found = find_option(options, given)
        if found.name in read:
            raise ConfigError(f"{found.name} is given twice, the second time as {given!r}; give it only once")
        read[found.name] = found.read(value) if isinstance(value, str) else value
    return read


SIZE_FORMS = "give bytes as 1048576, 64MiB or 2GB"
"""What to say where `parse_size` raises."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?\s*", re.IGNORECASE)
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def parse_size(value: Any, *, kilo: int = 1000) -> int:
    """Bytes of a number, or of text with a unit in any case: KiB, MiB, GiB, TiB (or Ki, ...) are powers of 1024.

    Args:
        value: bytes, or text.
        kilo: what KB, MB, GB and TB (or K, ...) are powers of; 1024 where another program reads the same value so.

    Raises:
        ValueError: no size, or a negative one.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return int(value)
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is no size; {SIZE_FORMS}")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else kilo) ** (" kmgt".index(unit.lower()) if unit else 0))


def parse_bool(value: Any) -> bool:
    """A boolean, 0 or 1, or true, yes, on, false, no, off in any case; ValueError for anything else."""
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    word = str(value).strip().lower()
    if word not in _WORDS:
        raise ValueError(f"{value!r} is no boolean; give true or false")
    return _WORDS[word]


def value_text(value: Any) -> str:
    """A value as a user reads it, on one line and with nothing in it that could be taken for a comment."""
    if value is None or value == "":
        return "none" if value is None else "''"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return json.dumps(value, default=str, sort_keys=True)
    text = str(value)
    return text if text.isprintable() and "#" not in text and text == text.strip() else repr(text)


def _is_a(value: Any, wanted: Any) -> bool:
    if wanted is bool or isinstance(value, bool):
        return wanted is bool and isinstance(value, bool)
    return isinstance(value, getattr(wanted, "__origin__", wanted))


def _type_names(types: Iterable[Any]) -> str:
    words: Mapping[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return " or ".join(words.get(wanted, "a mapping") for wanted in types if wanted is not type(None))
