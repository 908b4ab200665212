"""What commands take: numbers, sizes, files to write, and the options of the configuration under their own names."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from hicache_ray.commands.failures import BadInput
from hicache_ray.config import HiCacheConfig
from hicache_ray.config.option import SIZE_FORMS, Option, options_of, parse_size

MOST = (1 << 62) - 1
"""Largest whole number taken where nothing else bounds it: it still fits what counts bytes and pages."""

CACHE_OPTIONS = options_of(HiCacheConfig)

F = TypeVar("F", bound=Callable[..., Any])


class Number(click.ParamType[float]):
    """A finite number above 0, or not below `least`. (`click.FloatRange` takes what is no number, "nan".)"""

    name = "number"

    def __init__(self, least: float = 0.0) -> None:
        self.least = least

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if number == 0 or not self.least <= number < math.inf:
            wanted = f"from {self.least:g}" if self.least else "above 0"
            self.fail(f"{_short(value)} is no finite number {wanted}", parameter, context)
        return number


class Whole(click.IntRange):
    """A whole number within bounds, at most `MOST`."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        digits = str(value).strip().lstrip("+-")
        # Python reads no number of thousands of digits.
        if digits.isdecimal() and (len(digits) > 20 or int(digits) > MOST):
            shown = value if len(digits) <= 20 else f"a number of {len(digits)} digits"
            self.fail(f"{shown} is not in the range {self.min}<=x<={self.max or MOST}", parameter, context)
        return super().convert(value, parameter, context)


COUNT = Whole(1)
PROCESSES = Whole(1, 1024)
"""Instances, ranks of one, or storage actors."""


class ByteSize(click.ParamType[int]):
    """A number of bytes: 4096, 64MiB, 1.5GB."""

    name = "size"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> int:
        try:
            nbytes = parse_size(value)
        except ValueError:
            self.fail(f"{_short(value)} is no size; {SIZE_FORMS}", parameter, context)
        except OverflowError:
            nbytes = MOST + 1
        if nbytes > MOST:
            self.fail(f"{_short(value)} is more than the {MOST} bytes that can be counted", parameter, context)
        return nbytes


class OutputPath(click.ParamType[Path]):
    """The name of a file that can be written, checked before any work is done for it; "-" is standard output."""

    name = "file"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Path:
        if not str(value) or "\0" in str(value):
            self.fail(f"{value!r} is no name of a file", parameter, context)
        path = Path(value)
        if str(path) != "-":
            _check_output(path, parameter.opts[0] if parameter is not None else "file")
        return path


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}... ({len(str(value))} characters)"


def _check_output(path: Path, what: str) -> None:
    if path.is_dir():
        raise BadInput(f"{what} {str(path)!r} is a folder; give the name of a file")
    if path.is_symlink() and not path.exists():
        _check_output(path.resolve(), what)
        return
    if not path.parent.is_dir():
        raise BadInput(f"{what} {str(path)!r}: there is no folder {str(path.parent)!r}")
    existed = path.exists()
    try:
        with path.open("ab"):  # only opening tells: root may write everywhere but on a read-only file system
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise BadInput(f"{what} {str(path)!r} can't be written: {error.strerror or error}") from error


def write_json(path: Path | None, document: Any) -> None:
    """Writes a JSON file, or to standard output for "-"; nothing for None. BadInput when it can't be written."""
    if path is None:
        return
    text = json.dumps(document, indent=2) + "\n"
    if str(path) == "-":
        click.echo(text, nl=False)
        return
    try:
        path.write_text(text)
    except OSError as error:
        raise BadInput(f"{str(path)!r} can't be written: {error.strerror or error}") from error


def command_option(option: Option, *, help: str = "", **settings: Any) -> Callable[[F], F]:
    """Gives a command an option under its full name and its alias, as a keyword argument of the full name.

    Args:
        option: as `options_of` describes it.
        help: in place of the option's own.
        settings: as of `click.option`; without a type the value arrives as text, to be read by the option.
    """
    if "type" not in settings:
        settings["metavar"] = "VALUE"
    values = f" Values: {option.values}." if option.values and "type" not in settings else ""
    return click.option(*option.flags, option.name, help=help or option.help + values, **settings)


def cache_options(names: Iterable[str] = CACHE_OPTIONS) -> Callable[[F], F]:
    """Gives a command options of HiCacheConfig: as text, or None where they are not given."""

    def decorate(function: F) -> F:
        for name in reversed([*names]):
            function = command_option(CACHE_OPTIONS[name])(function)
        return function

    return decorate


def given_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Of a command's keyword arguments, the options of HiCacheConfig that were given."""
    return {name: value for name, value in arguments.items() if name in CACHE_OPTIONS and value is not None}


def type_of(option: Option) -> click.ParamType[Any]:
    """The click type of an option with choices or of whole numbers, which reads what the option would take."""
    return click.Choice(option.known) if option.choices else Whole(int(option.minimum or 0))
