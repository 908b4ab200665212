"""A sweep as a picture: hit rates as lines over a swept number, or as bars where only names were swept."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hicache_ray.replay.report import ReplayReport

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
