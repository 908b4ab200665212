"""Several runs in one command: every combination of some options' values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import get_type_hints

from hicache_ray.replay.settings import ReplaySettings

UNSWEPT = ("others", "seed")


class SweepError(ValueError):
    """A sweep of an option that is none, or without values."""


def parse_sweeps(texts: Sequence[str]) -> dict[str, list[int | str]]:
    """Reads "policy=lru,lfu" and "l1-tokens=1000,2000": names of `ReplaySettings` (dashes allowed) to values.

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
        sweeps[option] = [_value(text, part, types[option]) for part in parts]
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


def _value(text: str, value: str, kind: type) -> int | str:
    if kind is str:
        return value
    try:
        number = int(value)
    except ValueError:
        raise SweepError(f"sweep {text!r}: {value!r} is no whole number") from None
    if number < 1:
        raise SweepError(f"sweep {text!r}: {number} is too small, give 1 or more")
    return number
