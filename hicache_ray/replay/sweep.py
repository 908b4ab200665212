"""Several runs in one command: every combination of some options' values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import get_type_hints

from hicache_ray.replay.settings import ReplaySettings

UNSWEPT = ("others", "seed")


class SweepError(ValueError):
    """A sweep of an option that is none, or without values."""


def parse_sweeps(
    texts: Sequence[str], read: Callable[[str, str], int | str] | None = None
) -> dict[str, list[int | str]]:
    """Reads "policy=lru,lfu" and "l1-tokens=1000,2000": names of `ReplaySettings` (dashes allowed) to values.

    Args:
        texts: one a sweep.
        read: reads a value of an option by name, ValueError where it is none; None: whole numbers from 1, and names.

    Raises:
        SweepError: no such option, one that is named twice, or a value that is no number where one is wanted.
    """
    sweeps: dict[str, list[int | str]] = {}
    types = _types()
    for text in texts:
        name, equals, values = text.partition("=")
        option = name.strip().replace("-", "_")
        if option not in types:
            known = ", ".join(sorted(name.replace("_", "-") for name in types))
            raise SweepError(f"sweep {text!r}: {name!r} is none of {known}")
        if option in sweeps:
            raise SweepError(f"sweep {text!r}: {name} is swept twice")
        parts = [part.strip() for part in values.split(",") if part.strip()]
        if not equals or not parts:
            raise SweepError(f"sweep {text!r}: give the values as {name}=VALUE,VALUE")
        sweeps[option] = [_value(text, part, option, types[option], read) for part in parts]
    return sweeps


def combinations(
    settings: ReplaySettings, sweeps: Mapping[str, Sequence[int | str]]
) -> Iterator[tuple[dict[str, int | str], ReplaySettings]]:
    """Each combination of the swept values, and the settings with it; the last sweep runs fastest."""
    for values in product(*sweeps.values()):
        chosen = dict(zip(sweeps, values, strict=True))
        yield chosen, dataclasses.replace(settings, **chosen)  # type: ignore[arg-type]


def _types() -> dict[str, type]:
    hints = get_type_hints(ReplaySettings)
    return {name: int if "int" in str(hint) else str for name, hint in hints.items() if name not in UNSWEPT}


def _value(text: str, value: str, name: str, kind: type, read: Callable[[str, str], int | str] | None) -> int | str:
    try:
        if read is not None:
            return read(name, value)
        number = value if kind is str else int(value)
    except ValueError as error:
        reason = str(error) if read is not None else f"{value!r} is no whole number"
        raise SweepError(f"sweep {text!r}: {reason}") from None
    if isinstance(number, int) and number < 1:
        raise SweepError(f"sweep {text!r}: {number} is too small, give 1 or more")
    return number
