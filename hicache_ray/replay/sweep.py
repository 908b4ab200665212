"""Several runs in one command: every combination of some options' values, and the picture of their hit rates."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from hicache_ray.config import ConfigError
from hicache_ray.config.option import Option, find_option, nearest_name
from hicache_ray.replay.report import ReplayReport
from hicache_ray.replay.settings import OWN_OPTIONS, REPLAY_DEFAULTS, REPLAY_OPTIONS, ReplaySettings

Values = Mapping[str, Any]
"""Swept options by the names they were given under, each with one of its values."""


class SweepError(ValueError):
    """A sweep of an option that is none, or without values."""


def read_value(option: Option, text: str) -> Any:
    """A value as the option reads and takes it; raises ConfigError."""
    return option.check(option.read(text))


def parse_sweeps(texts: Sequence[str], read: Callable[[Option, str], Any] = read_value) -> dict[str, list[Any]]:
    """Reads "policy=lru,lfu" and "l1-tokens=1000,2000": options of a replay, by name or alias, to values.

    Args:
        texts: one a sweep.
        read: reads a value of an option, ValueError where it is none.

    Raises:
        SweepError: no such option, one that is swept twice, or a value that it does not take.
    """
    sweeps: dict[str, list[Any]] = {}
    swept: set[str] = set()
    for text in texts:
        name, equals, values = text.partition("=")
        option = _swept_option(text, name)
        if option.name in swept:
            raise SweepError(f"sweep {text!r}: {name} is swept twice")
        swept.add(option.name)
        parts = [part.strip() for part in values.split(",") if part.strip()]
        if not equals or not parts:
            raise SweepError(f"sweep {text!r}: give the values as {name}=VALUE,VALUE")
        try:
            sweeps[name.strip().replace("-", "_")] = [read(option, part) for part in parts]
        except ValueError as error:
            raise SweepError(f"sweep {text!r}: {error}") from None
    return sweeps


def combinations(
    settings: ReplaySettings, sweeps: Mapping[str, Sequence[Any]]
) -> Iterator[tuple[dict[str, Any], ReplaySettings]]:
    """Each combination of the swept values, and the settings with it; the last sweep runs fastest."""
    for values in product(*sweeps.values()):
        chosen = dict(zip(sweeps, values, strict=True))
        yield chosen, settings.with_values(chosen)


def _swept_option(text: str, name: str) -> Option:
    options = {known: option for known, option in REPLAY_OPTIONS.items() if known != "seed"}
    try:
        return find_option(options, name)
    except ConfigError:
        usual = sorted(options[known].alias or known for known in (*REPLAY_DEFAULTS, *OWN_OPTIONS) if known in options)
        listed = ", ".join(usual).replace("_", "-")
        raise SweepError(f"sweep {text!r}: {name!r} is none of {listed}{nearest_name(options, name)}") from None


PLOT_SUFFIXES = (".png", ".svg", ".pdf")

Runs = Sequence[tuple[Values, ReplayReport]]


class PlotError(ValueError):
    """A picture that can't be made here; the text says what is missing."""


def check_plot(path: Path) -> None:
    """Raises PlotError when no picture can be written to `path`, before anything is run."""
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise PlotError(f"plot {str(path)!r}: the name must end in {', '.join(PLOT_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError("plots need matplotlib; install it with: pip install 'hicache-ray[plots]'")


def plot_sweep(path: Path, runs: Runs, title: str) -> None:
    """Draws the block hit rates of a sweep: lines over a swept number, bars where only names were swept.

    Raises:
        OSError: the file can't be written.
    """
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
    names = {name for values, _ in runs for name, value in values.items() if type(value) in (int, float)}
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


def _label(values: Values) -> str:
    names = list(values.values()) if len(values) == 1 else [f"{name}={value}" for name, value in values.items()]
    return ", ".join(str(name).replace("_", " ") for name in names) or "all"
