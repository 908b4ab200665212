"""What commands take: sizes, options of the configuration, files to write; and how bad input is said."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from hicache_ray.config import HiCacheConfig
from hicache_ray.config_options import Option, options_of

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

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
        raise BadInput(" ".join(str(error).split())) from error


class ByteSize(click.ParamType[int]):
    """A number of bytes: 4096, 64MiB, 1.5GB."""

    name = "size"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", value, re.IGNORECASE)
        if match is None:
            self.fail(f"{value!r} is no size; give bytes as 1048576, 64MiB or 2GB", parameter, context)
        number, unit = match.groups()
        return int(float(number) * UNITS[(unit or "").lower()])


def check_output(path: Path, what: str) -> None:
    """Raises BadInput when a file can't be written there, before any work is done for it."""
    if path.is_dir():
        raise BadInput(f"{what} {str(path)!r} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise BadInput(f"{what} {str(path)!r}: there is no folder {str(path.parent)!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadInput(f"{what} {str(path)!r} can't be written: permission denied")


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
