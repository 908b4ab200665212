"""The metrics of one object as prometheus_client counts them, readable as plain values or as Prometheus text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from hicache_ray.metrics.names import METRICS, Metric


class Sample(TypedDict):
    """One value of a metric.

    Attributes:
        labels: by name, the registry's own among them.
        value: of a counter or gauge, or a histogram's number of observations.
        sum: of a histogram's observations.
        buckets: observations at or below each of a histogram's boundaries.
    """

    labels: dict[str, str]
    value: float
    sum: float
    buckets: tuple[int, ...]


Snapshot: TypeAlias = "dict[str, list[Sample]]"
"""Samples by metric name: plain values, which travel between actors."""


class Registry:
    """Values of declared metrics, each made when it is first used. One thread may write each label set; any may read.

    Args:
        labels: given to every sample of this registry.
    """

    def __init__(self, **labels: str) -> None:
        self.labels = labels
        self._registry = CollectorRegistry()
        self._metrics: dict[str, Any] = {}
        self._children: dict[tuple[str, ...], Any] = {}
        self._seen: dict[tuple[str, ...], float] = {}

    def child(self, name: str, *labels: str) -> Any:
        """The prometheus_client counter, gauge or histogram of a metric and the values of its labels."""
        key = (name, *labels)
        child = self._children.get(key)
        if child is None:
            metric = self._metrics.get(name)
            if metric is None:
                metric = self._metrics[name] = _made(METRICS[name], self._registry)
            child = self._children[key] = metric.labels(*labels) if labels else metric
        return child

    def advance(self, name: str, total: float, *labels: str) -> None:
        """Raises a counter by what a cumulative number elsewhere grew since the last call, or since `restart`."""
        key = (name, *labels)
        self.child(*key).inc(max(0, total - self._seen.get(key, 0)))
        self._seen[key] = total

    def restart(self, names: Iterable[str]) -> None:
        """The cumulative numbers behind these counters have begun again at zero."""
        gone = set(names)
        self._seen = {key: total for key, total in self._seen.items() if key[0] not in gone}

    def total(self, name: str, *labels: str) -> float:
        """The sum of a histogram's observations; 0 where there is none yet."""
        child = self._children.get((name, *labels))
        families = child.collect() if child is not None else ()
        return sum(part.value for family in families for part in family.samples if part.name == f"{name}_sum")

    def snapshot(self) -> Snapshot:
        """Everything that was counted, in the order of declaration."""
        found = {_name(family): self._samples(family) for family in self._registry.collect()}
        return {name: found[name] for name in METRICS if found.get(name)}

    def _samples(self, family: Family) -> list[Sample]:
        samples: dict[tuple[str, ...], Sample] = {}
        for part in family.samples:
            own = {name: value for name, value in part.labels.items() if name != "le"}
            sample = samples.setdefault(
                tuple(own.values()), Sample(labels={**self.labels, **own}, value=0, sum=0.0, buckets=())
            )
            what = part.name.removeprefix(family.name)
            if what == "_bucket" and part.labels["le"] != "+Inf":
                sample["buckets"] += (int(part.value),)
            elif what == "_sum":
                sample["sum"] = part.value
            elif what in ("", "_total", "_count"):
                sample["value"] = part.value
        return list(samples.values())


def exposition(snapshots: Iterable[Mapping[str, Sequence[Mapping[str, Any]]]]) -> str:
    """Snapshots of several registries as one text in Prometheus' exposition format."""
    together: dict[str, list[Mapping[str, Any]]] = {}
    for snapshot in snapshots:
        for name, samples in snapshot.items():
            together.setdefault(name, []).extend(samples)
    return generate_latest(
        _Families(_family(METRICS[name], together[name]) for name in METRICS if name in together)
    ).decode()


class _Families(Collector):
    """Families that are known already, in the form in which `generate_latest` takes them."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = tuple(families)

    def collect(self) -> Iterator[Family]:
        """Them."""
        return iter(self._families)


def _made(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    if metric.kind == "histogram":
        return Histogram(metric.name, metric.help, metric.labels, registry=registry, buckets=metric.boundaries)
    kind = Counter if metric.kind == "counter" else Gauge
    return kind(metric.name, metric.help, metric.labels, registry=registry)


def _name(family: Family) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def _family(metric: Metric, samples: Iterable[Mapping[str, Any]]) -> Family:
    name = metric.name
    family = Family(name.removesuffix("_total"), metric.help, metric.kind)
    for sample in samples:
        labels, value = sample["labels"], sample["value"]
        if metric.kind != "histogram":
            family.add_sample(name, labels, value)
            continue
        bounds = [*(f"{bound:g}" for bound in metric.boundaries), "+Inf"]
        for bound, count in zip(bounds, (*sample["buckets"], value), strict=True):
            family.add_sample(f"{name}_bucket", {**labels, "le": bound}, count)
        family.add_sample(f"{name}_sum", labels, sample["sum"])
        family.add_sample(f"{name}_count", labels, value)
    return family
