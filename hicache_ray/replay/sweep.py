"""Several runs in one command: every combination of some options' values.

A sweep as a picture: hit rates as lines over a swept number, or as bars where only names were swept.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, get_type_hints

from hicache_ray.replay.report import ReplayReport
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


SUFFIXES = (".png", ".svg", ".pdf")

Runs = Sequence[tuple[Mapping[str, "int | str"], ReplayReport]]


class PlotError(ValueError):
    """A picture that can't be made here; the text says what is missing."""


def check_plot(path: Path) -> None:
    """Raises PlotError when no picture can be written to `path`, before anything is run."""
    if path.suffix.lower() not in SUFFIXES:
        raise PlotError(f"plot {str(path)!r}: the name must end in {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError("plots need matplotlib; install it with: pip install 'hicache-ray[plots]'")


def plot_sweep(path: Path, runs: Runs, title: str) -> None:
    """Draws block hit rates of a sweep; OSError when the file can't be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    across = _numeric(runs)
    if across is None:
        _bars(axes, runs)
    else:
        _lines(axes, runs, across)
    axes.set_ylabel("block hit rate")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _numeric(runs: Runs) -> str | None:
    """The swept number with most values, for the horizontal axis."""
    names = {name for values, _ in runs for name, value in values.items() if isinstance(value, int)}
    several = {name: len({values[name] for values, _ in runs}) for name in sorted(names)}
    best = max(several, key=lambda name: several[name], default=None)
    return best if best is not None and several[best] > 1 else None


def _lines(axes: Any, runs: Runs, across: str) -> None:
    lines: dict[str, list[tuple[float, float]]] = {}
    for values, report in runs:
        label = _label({name: value for name, value in values.items() if name != across})
        lines.setdefault(label, []).append((float(values[across]), report.block_hit_rate))
    for label, points in lines.items():
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(xs, ys, marker="o", label=label)
    axes.set_xlabel(across.replace("_", " "))
    axes.set_xscale("log")
    if len(lines) > 1:
        axes.legend()


def _bars(axes: Any, runs: Runs) -> None:
    labels = [_label(values) for values, _ in runs]
    bars = axes.bar(labels, [report.block_hit_rate for _, report in runs])
    axes.bar_label(bars, fmt="%.4f", padding=2)
    if len(labels) > 6:
        axes.tick_params(axis="x", rotation=45)


def _label(values: Mapping[str, int | str]) -> str:
    names = list(values.values()) if len(values) == 1 else [f"{name}={value}" for name, value in values.items()]
    return ", ".join(str(name).replace("_", " ") for name in names) or "all"
