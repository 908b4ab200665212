"""Plain counters, gauges and histograms of one process, readable as they are or as Prometheus text."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hicache_ray.metrics.names import METRICS, Kind, Metric

LabelValues = tuple[str, ...]
"""Values of a metric's labels, in the order in which it declares them."""


class Sample(NamedTuple):
    """One value of a metric.

    Attributes:
        labels: by name, the registry's own among them.
        value: of a counter or gauge, or a histogram's number of observations.
        sum: of a histogram's observations.
        buckets: observations at or below each of a histogram's boundaries.
    """

    labels: dict[str, str]
    value: float
    sum: float = 0.0
    buckets: tuple[int, ...] = ()


class Histogram:
    """Observations of one label set. `pending` keeps the single ones while somebody takes them (`keep`)."""

    __slots__ = ("boundaries", "count", "counts", "keep", "pending", "sum")

    def __init__(self, boundaries: Sequence[float], keep: bool) -> None:
        self.boundaries = boundaries
        self.counts = [0] * (len(boundaries) + 1)
        self.count = 0
        self.sum = 0.0
        self.keep = keep
        self.pending: deque[float] = deque()

    def observe(self, value: float) -> None:
        """Counts one observation."""
        self.counts[bisect_left(self.boundaries, value)] += 1
        self.count += 1
        self.sum += value
        if self.keep:
            self.pending.append(value)

    def cumulative(self) -> tuple[int, ...]:
        """Observations at or below each boundary."""
        below, total = [], 0
        for count in self.counts[:-1]:
            total += count
            below.append(total)
        return tuple(below)


class Registry:
    """Values of declared metrics. One thread may write each label set; any thread may read.

    Args:
        labels: given to every sample of this registry.
    """

    def __init__(self, **labels: str) -> None:
        self.labels = labels
        self.keep_observations = False
        self.values: dict[tuple[str, LabelValues], float] = {}
        self.histograms: dict[tuple[str, LabelValues], Histogram] = {}
        self._seen: dict[tuple[str, LabelValues], float] = {}

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Raises a counter."""
        key = (name, labels)
        self.values[key] = self.values.get(key, 0) + amount

    def advance(self, name: str, total: float, *labels: str) -> None:
        """Raises a counter by what a cumulative number elsewhere grew since the last call, or since `restart`."""
        key = (name, labels)
        grown = max(0, total - self._seen.get(key, 0))
        self._seen[key] = total
        self.values[key] = self.values.get(key, 0) + grown

    def restart(self, names: Iterable[str]) -> None:
        """The cumulative numbers behind these counters have begun again at zero."""
        gone = set(names)
        self._seen = {key: total for key, total in self._seen.items() if key[0] not in gone}

    def set(self, name: str, value: float, *labels: str) -> None:
        """Sets a gauge."""
        self.values[name, labels] = value

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Counts one observation of a histogram."""
        key = (name, labels)
        histogram = self.histograms.get(key)
        if histogram is None:
            histogram = self.histograms[key] = Histogram(METRICS[name].boundaries, self.keep_observations)
        histogram.observe(value)

    def value(self, name: str, *labels: str) -> float:
        """A counter or gauge; 0 where there is none yet."""
        return self.values.get((name, labels), 0)

    def samples(self) -> dict[str, list[Sample]]:
        """Everything by metric name, in the order of declaration."""
        found: dict[str, list[Sample]] = {name: [] for name in METRICS}
        for (name, labels), value in list(self.values.items()):
            found[name].append(Sample(self._labelled(METRICS[name], labels), value))
        for (name, labels), histogram in list(self.histograms.items()):
            found[name].append(
                Sample(self._labelled(METRICS[name], labels), histogram.count, histogram.sum, histogram.cumulative())
            )
        return {name: samples for name, samples in found.items() if samples}

    def snapshot(self) -> dict[str, list[dict[str, Any]]]:
        """As `samples`, as plain values."""
        return {name: [sample._asdict() for sample in samples] for name, samples in self.samples().items()}

    def _labelled(self, metric: Metric, labels: LabelValues) -> dict[str, str]:
        return {**self.labels, **dict(zip(metric.labels, labels, strict=True))}


def exposition(snapshots: Iterable[Mapping[str, Sequence[Mapping[str, Any]]]]) -> str:
    """Snapshots of several registries as one text in Prometheus' exposition format."""
    together: dict[str, list[Mapping[str, Any]]] = {}
    for snapshot in snapshots:
        for name, samples in snapshot.items():
            together.setdefault(name, []).extend(samples)
    lines: list[str] = []
    for name, metric in METRICS.items():
        if name in together:
            lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind.value}"]
            for sample in together[name]:
                lines += _lines(metric, sample)
    return "".join(f"{line}\n" for line in lines)


def _lines(metric: Metric, sample: Mapping[str, Any]) -> list[str]:
    name, labels, value = metric.name, sample["labels"], sample["value"]
    if metric.kind is not Kind.HISTOGRAM:
        return [f"{name}{_braced(labels)} {value:.17g}"]
    bounds = [*(f"{bound:g}" for bound in metric.boundaries), "+Inf"]
    counts = (*sample["buckets"], value)
    lines = [
        f"{name}_bucket{_braced({**labels, 'le': bound})} {count}" for bound, count in zip(bounds, counts, strict=True)
    ]
    return [*lines, f"{name}_sum{_braced(labels)} {sample['sum']:.17g}", f"{name}_count{_braced(labels)} {value}"]


def _braced(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
