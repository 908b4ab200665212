"""What commands take: sizes, options of the configuration, files to write; and how bad input is said."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from hicache_ray.config import HiCacheConfig
from hicache_ray.config.options import Option, options_of

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

MOST = (1 << 62) - 1
"""Largest whole number taken where nothing else bounds it: it still fits what counts bytes and pages."""

MOST_PROCESSES = 1024
"""Most instances, ranks of one and storage actors that a command takes."""

F = TypeVar("F", bound=Callable[..., Any])


class BadInput(click.ClickException):
    """Something the user gave can't be used: one message, exit code 2."""

    exit_code = 2


@contextmanager
def bad_input() -> Iterator[None]:
    """Says what is wrong with the input where the code within finds it wrong (ValueError, OSError)."""
    try:
        yield
    except (ValueError, OSError, OverflowError) as error:
        raise BadInput(reason_of(error)) from error


def reason_of(error: Exception) -> str:
    """What an error says, in one line; of an error of the operating system the file and the reason."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


class Number(click.ParamType[float]):
    """A finite number above 0, or not below `least`."""

    name = "number"

    def __init__(self, least: float | None = None) -> None:
        self.least = least

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        wanted = "above 0" if self.least is None else f"from {self.least:g}"
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number) or number <= 0 or (self.least is not None and number < self.least):
            self.fail(f"{_short(value)} is no finite number {wanted}", parameter, context)
        return number


class Whole(click.ParamType[int]):
    """A whole number within bounds."""

    name = "integer"

    def __init__(self, least: int, most: int = MOST) -> None:
        self.least, self.most = least, most

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> int:
        text = str(value).strip()
        if re.fullmatch(r"[+-]?[0-9]+", text) is None:
            self.fail(f"{_short(value)} is not a valid integer", parameter, context)
        # Python reads no number of thousands of digits.
        digits = len(text.lstrip("+-"))
        number = int(text) if digits <= 20 else None
        if number is None or not self.least <= number <= self.most:
            shown = text if number is not None else f"a number of {digits} digits"
            bounds = f"x>={self.least}" if self.most == MOST and digits < 19 else f"{self.least}<=x<={self.most}"
            self.fail(f"{shown} is not in the range {bounds}", parameter, context)
        return number


class OutputPath(click.ParamType[Path]):
    """The name of a file to write; "-" is standard output, where a command says so."""

    name = "file"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Path:
        if isinstance(value, Path):
            return value
        if not value or "\0" in value:
            self.fail(f"{value!r} is no name of a file", parameter, context)
        return Path(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}... ({len(str(value))} characters)"


class ByteSize(click.ParamType[int]):
    """A number of bytes: 4096, 64MiB, 1.5GB."""

    name = "size"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", value, re.IGNORECASE)
        if match is None:
            self.fail(f"{_short(value)} is no size; give bytes as 1048576, 64MiB or 2GB", parameter, context)
        number, unit = match.groups()
        nbytes = float(number) * UNITS[(unit or "").lower()]
        if nbytes > MOST:
            self.fail(f"{_short(value)} is more than the {MOST} bytes that can be counted", parameter, context)
        return int(nbytes)


def check_output(path: Path, what: str) -> None:
    """Raises BadInput when a file can't be written there, before any work is done for it."""
    if path.is_dir():
        raise BadInput(f"{what} {str(path)!r} is a folder; give the name of a file")
    if path.is_symlink() and not path.exists():
        check_output(path.resolve(), what)
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


def config_options(leave_out: Sequence[str] = ()) -> Callable[[F], F]:
    """Gives a command every option of HiCacheConfig under its own name with dashes, but for some.

    They arrive as keyword arguments, as text or None; `HiCacheConfig.from_mapping` reads and checks them.
    """

    def decorate(function: F) -> F:
        for name, option in reversed(options_of(HiCacheConfig).items()):
            if name not in leave_out:
                function = click.option(f"--{name.replace('_', '-')}", name, help=_help(option), metavar="VALUE")(
                    function
                )
        return function

    return decorate


def given_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Of a command's keyword arguments, the options of HiCacheConfig that were given."""
    names = options_of(HiCacheConfig)
    return {name: value for name, value in arguments.items() if name in names and value is not None}


def _help(option: Option) -> str:
    return f"{option.help} Values: {option.values}." if option.values else option.help
