"""Metrics under one set of names: counted without Ray, exposed as text, and in Ray's own endpoint; accounting (64)."""

from __future__ import annotations

import re
import time
import urllib.request
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hicache_ray.metrics import METRICS, HealMetrics, RayExporter, Registry, ShardMetrics, exposition
from hicache_ray.metrics.rank import TIMED_PARTS, RankMetrics
from hicache_ray.rank.local_group import LocalGroup
from hicache_ray.rank.step import Finish, StepAnswer
from hicache_ray.replay.driver import ENGINE, settle
from hicache_ray.storage.memory import BACKEND, drop_store
from hicache_ray.storage.shard.grants import ShardStats
from tests.index_kit import evict
from tests.ray_service import config, prompts, serve, service
from tests.test_cache_random import STEPS, Driver
from tests.whole_cache import Lockstep, Shape, admit

DOCS = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
SOURCES = ("l1", "l2", "l3", "computed")


def value_of(registry: Registry, name: str, *labels: str) -> float:
    """A counter or gauge; 0 where there is none yet."""
    for sample in registry.snapshot().get(name, []):
        if tuple(sample["labels"][label] for label in METRICS[name].labels) == labels:
            return sample["value"]
    return 0


def test_names_follow_the_rule() -> None:
    for metric in METRICS.values():
        assert re.fullmatch(r"hicache_[a-z0-9_]+", metric.name), metric.name
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert bool(metric.boundaries) == (metric.kind == "histogram")
        assert list(metric.boundaries) == sorted(metric.boundaries) and metric.help.endswith(".")
    families = [name.removesuffix("_total") for name in METRICS]
    assert len(set(families)) == len(families), "a counter's name without _total is another metric's name"


def test_every_metric_is_in_the_documentation_and_no_other() -> None:
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `hicache_")]
    expected = {
        f"| `{m.name}` | {m.kind} | {', '.join(f'`{label}`' for label in m.labels) or 'none'} | {m.help} |"
        for m in METRICS.values()
    }
    assert set(rows) == expected


def test_a_registry_counts_sets_and_observes() -> None:
    registry = Registry(group="a")
    registry.child("hicache_prompt_tokens_total", "l1").inc(3)
    registry.child("hicache_prompt_tokens_total", "l1").inc(4)
    registry.child("hicache_current_requests", "running").set(2)
    registry.child("hicache_current_requests", "running").set(1)
    for value in (0.0001, 0.003, 100.0):
        registry.child("hicache_step_seconds", "work").observe(value)
    assert value_of(registry, "hicache_prompt_tokens_total", "l1") == 7
    assert value_of(registry, "hicache_prompt_tokens_total", "l2") == 0
    assert registry.total("hicache_step_seconds", "work") == pytest.approx(100.0031)
    assert registry.total("hicache_step_seconds", "engine") == 0
    snapshot = registry.snapshot()
    assert list(snapshot) == ["hicache_prompt_tokens_total", "hicache_step_seconds", "hicache_current_requests"]
    assert snapshot["hicache_current_requests"] == [
        {"labels": {"group": "a", "state": "running"}, "value": 1, "sum": 0.0, "buckets": ()}
    ]
    (histogram,) = snapshot["hicache_step_seconds"]
    assert histogram["value"] == 3 and histogram["sum"] == pytest.approx(100.0031)
    assert histogram["buckets"][0] == 1 and histogram["buckets"][-1] == 2


def test_a_counter_follows_a_cumulative_number_also_when_that_begins_again() -> None:
    registry = Registry()
    for total, expected in ((5, 5), (9, 9), (9, 9)):
        registry.advance("hicache_storage_calls_total", total, "get")
        assert value_of(registry, "hicache_storage_calls_total", "get") == expected
    registry.advance("hicache_steps_total", 1)
    registry.restart(["hicache_storage_calls_total"])
    registry.advance("hicache_storage_calls_total", 9, "get")
    registry.advance("hicache_steps_total", 1)
    assert (
        value_of(registry, "hicache_storage_calls_total", "get") == 18
        and value_of(registry, "hicache_steps_total") == 1
    )


def test_the_text_is_what_prometheus_reads() -> None:
    first, second = Registry(group='a"b\\c', rank="0"), Registry(group="a", rank="1")
    for registry in (first, second):
        registry.child("hicache_steps_total").inc(2)
        registry.child("hicache_step_seconds", "work").observe(0.0015)
    text = exposition([first.snapshot(), second.snapshot()])
    assert text.splitlines().count("# TYPE hicache_steps_total counter") == 1 and text.endswith("\n")
    assert "_created" not in text
    steps, seconds = text_string_to_metric_families(text)
    assert (steps.type, seconds.type) == ("counter", "histogram")
    assert seconds.documentation == METRICS["hicache_step_seconds"].help
    assert [(sample.labels, sample.value) for sample in steps.samples] == [
        ({"group": 'a"b\\c', "rank": "0"}, 2),
        ({"group": "a", "rank": "1"}, 2),
    ]
    read = {(sample.name, *sorted(sample.labels.items())): sample.value for sample in seconds.samples}

    def value(part: str, **bound: str) -> float:
        labels = {"group": "a", "part": "work", "rank": "1", **bound}
        return read[(f"hicache_step_seconds_{part}", *sorted(labels.items()))]

    assert [value("bucket", le=bound) for bound in ("0.001", "0.002", "+Inf")] == [0, 1, 1]
    assert value("count") == 1 and value("sum") == 0.0015
    assert exposition([]) == ""


@pytest.fixture
def group() -> Iterator[LocalGroup]:
    drop_store("default")
    started = LocalGroup.create(
        config(hicache_storage_backend=None, load_back_threshold=1).resolve().config, engine=ENGINE
    )
    started.attach(BACKEND, prefetch_policy="wait_complete", prefetch_threshold=4)
    yield started
    started.stop()


class Counted:
    """A group whose ranks' metrics are observed at every step."""

    def __init__(self, group: LocalGroup) -> None:
        self.group = group
        self.metrics = [RankMetrics(cache, group="local") for cache in group.caches]
        self.steps = 0

    def step(self, **wanted: object) -> StepAnswer:
        answer = self.group.step(**wanted)
        for rank, metrics in enumerate(self.metrics):
            metrics.observe(
                StepAnswer(
                    answer.step,
                    answer.digest,
                    rank=rank,
                    scheduled=answer.scheduled,
                    timings_us=answer.timings_us,
                )
            )
        self.steps += 1
        return answer

    def stats(self) -> list[dict[str, object]]:
        return self.group.stats()


def test_case_64_a_ranks_metrics_are_what_it_did(group: LocalGroup) -> None:
    """Tokens by source add up to the prompts; bytes, pages and calls are those of the rank's own counters."""
    counted = Counted(group)
    for prompt in [*prompts(12), *reversed(prompts(12))]:
        serve(counted, prompt)
    settle(counted)
    metrics = counted.metrics[0]
    metrics.collect()
    value = partial(value_of, metrics.registry)
    tokens = {source: value("hicache_prompt_tokens_total", source) for source in SOURCES}
    assert sum(tokens.values()) == 24 * 24 and all(tokens[source] > 0 for source in ("l2", "l3", "computed")), tokens
    assert value("hicache_requests_total") == 24
    stats = group.stats()[0]
    for path, count in stats["bytes"].items():
        assert value("hicache_transfer_bytes_total", path) == count
    assert value("hicache_evicted_pages_total", "l1") == stats["index"]["evicted_device_pages"] > 0
    assert value("hicache_prefetches_total", "started") == stats["prefetch"]["started"] > 0
    assert value("hicache_prefetched_pages_total") == stats["prefetch"]["loaded_pages"] > 0
    assert value("hicache_storage_calls_total", "get") == stats["storage"]["get_calls"] > 0
    assert value("hicache_storage_pages_total", "set", "stored") == stats["storage"]["set_stored"] > 0
    assert value("hicache_backup_pages_total", "stored") == stats["storage_pages"]["l2_to_l3"]
    for tier, pool in (("l1", "device"), ("l2", "host")):
        states = {state: value("hicache_pool_pages", tier, state) for state in ("free", "in_tree", "in_flight")}
        assert states == {state: stats["ledger"][pool][state] for state in states}
    assert value("hicache_storage_attached") == 1
    assert value("hicache_steps_total") == counted.steps
    assert all(value("hicache_step_time_seconds_total", part) > 0 for part in TIMED_PARTS)


def test_agreed_numbers_are_counted_on_rank_0_only(group: LocalGroup) -> None:
    counted = Counted(group)
    serve(counted, prompts(1)[0])
    for metrics in counted.metrics:
        metrics.collect()
    first, second = (metrics.registry for metrics in counted.metrics)
    assert value_of(first, "hicache_requests_total") == 1 and value_of(second, "hicache_requests_total") == 0
    assert value_of(second, "hicache_steps_total") == value_of(first, "hicache_steps_total") > 0


def test_counters_go_on_over_a_detach_and_an_attach(group: LocalGroup) -> None:
    metrics = RankMetrics(group.caches[0], group="local")
    serve(group, prompts(1, seed=1)[0])
    settle(group)
    metrics.collect()
    stored = value_of(metrics.registry, "hicache_storage_pages_total", "set", "stored")
    group.detach()
    metrics.collect()
    assert value_of(metrics.registry, "hicache_storage_attached") == 0
    group.attach(BACKEND)
    serve(group, prompts(1, seed=2)[0])
    settle(group)
    metrics.collect()
    assert value_of(metrics.registry, "hicache_storage_pages_total", "set", "stored") > stored > 0


def test_case_64_storage_and_host_are_told_apart() -> None:
    """Of 8 tokens from below L1, the 4 that the prefetch brought count as L3, the 4 that L2 had as L2."""
    group = Lockstep(Shape(ranks=2, page_size=2, device_pages=24, host_pages=40, prefetch_policy="wait_complete"))
    tokens = list(range(9))
    group.step(admits=[admit("first", tokens[:5])])
    group.step(schedules=["first"])
    group.step(finishes=[Finish("first")])
    group.settle()
    other = Lockstep(group.shape, store=group.store)
    other.step(admits=[admit("long", tokens)])
    other.step(schedules=["long"])
    other.step(finishes=[Finish("long")])
    other.settle()
    for cache in group.caches:
        evict(cache.index, 1000)
    group.step(admits=[admit("again", tokens)])
    for _ in range(6):
        for worker in group.workers:
            worker.advance(worker.pending)
        group.step(polls=["again"])
    (row,) = group.step(schedules=["again"]).scheduled
    assert (row.device_tokens, row.host_tokens, row.storage_tokens, row.computed_tokens) == (0, 4, 4, 1)


def test_case_64_a_load_back_that_is_skipped_is_not_counted() -> None:
    """SGLang counts the host hit although it was not loaded: over-reported. Here those tokens are computed."""
    group = Lockstep(Shape(ranks=2, page_size=2, device_pages=24, host_pages=40, storage=False))
    tokens = list(range(9))
    group.step(admits=[admit("first", tokens)])
    group.step(schedules=["first"])
    group.step(finishes=[Finish("first")])
    group.settle()
    for cache in group.caches:
        evict(cache.index, 1000)
        cache.index.options = replace(cache.index.options, load_back_threshold=100)
    admitted = group.step(admits=[admit("again", tokens)]).admitted[0]
    assert (admitted.device_tokens, admitted.host_tokens) == (0, 8)
    (row,) = group.step(schedules=["again"]).scheduled
    assert (row.device_tokens, row.host_tokens, row.storage_tokens, row.computed_tokens) == (0, 0, 0, 9)
    assert all(cache.mover.bytes_moved()["l2_to_l1"] == 0 for cache in group.caches)


def test_case_64_l2_and_l3_tokens_are_exactly_the_pages_that_were_loaded() -> None:
    """Random runs: what is reported to have come from below L1 is what was copied to L1, page by page."""
    for seed in range(12):
        driver = Driver(seed)
        cache = driver.group.caches[0]
        metrics = RankMetrics(cache)
        step = driver.group.step

        def observed(step=step, metrics=metrics, **wanted: object) -> StepAnswer:
            answer = step(**wanted)
            metrics.observe(answer)
            return answer

        driver.group.step = observed
        for _ in range(STEPS):
            driver.step()
        metrics.collect()
        value = partial(value_of, metrics.registry)
        tokens = sum(value("hicache_prompt_tokens_total", source) for source in ("l2", "l3"))
        refused = value("hicache_schedule_refusals_total")
        loaded = cache.index.stats.loaded_pages * driver.group.shape.page_size
        assert tokens <= loaded and (refused or tokens == loaded), f"seed {seed}: {tokens} reported, {loaded} loaded"


def test_supervisors_and_storage_actors_have_their_own() -> None:
    heals = HealMetrics("chat")
    heals.observe("a", 3.0, healed=True)
    heals.observe("a", 90.0, healed=False)
    assert value_of(heals.registry, "hicache_heals_total", "a", "healed") == 1
    assert heals.registry.snapshot()["hicache_heal_seconds"][0]["sum"] == 93.0
    stats = [ShardStats(5, 500, 1000, 1, 2, 0, stored=7, hits=3)]
    shard = ShardMetrics(lambda: stats[-1], pool="p", member="p-0")
    shard.collect()
    stats.append(ShardStats(6, 600, 1000, 0, 0, 0, stored=9, hits=3))
    shard.collect()
    value = partial(value_of, shard.registry)
    assert value("hicache_storage_actor_bytes", "used") == 600 and value("hicache_storage_actor_pages", "stored") == 6
    assert value("hicache_storage_actor_page_results_total", "stored") == 9
    assert value("hicache_storage_actor_page_results_total", "hits") == 3
    assert shard.registry.snapshot()["hicache_storage_actor_bytes"][0]["labels"]["member"] == "p-0"


class Exported:
    """Stands in for `ray.util.metrics`: what it was told, by metric name."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.observed: dict[str, list[float]] = {}
        told = self

        class Recorded:
            def __init__(self, name: str, **_: object) -> None:
                self.name = name

            def inc(self, value: float, tags: dict[str, str]) -> None:
                told.values[self.name] = told.values.get(self.name, 0) + value

            def set(self, value: float, tags: dict[str, str]) -> None:
                told.values[self.name] = value

            def observe(self, value: float, tags: dict[str, str]) -> None:
                told.observed.setdefault(self.name, []).append(value)

        self.kind = Recorded


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Exported:
    from ray.util import metrics as ray_metrics

    told = Exported()
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(ray_metrics, kind, told.kind)
    return told


def test_an_exporter_goes_on_after_a_failure_and_exports_a_last_time(exported: Exported) -> None:
    registry, calls = Registry(rank="0"), []

    def collect() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("the backend's counters broke")

    exporter = RayExporter(registry, collect, period=0.01)
    deadline = time.monotonic() + 20
    while len(calls) < 3 and time.monotonic() < deadline:
        registry.child("hicache_steps_total").inc()
        registry.child("hicache_generation").set(4)
        registry.child("hicache_request_tokens", "l1").observe(5)
    exporter.close()
    exporter.close()
    assert exporter.failures == 1
    steps = value_of(registry, "hicache_steps_total")
    assert exported.values["hicache_steps_total"] == steps and exported.values["hicache_generation"] == 4
    observations = registry.snapshot()["hicache_request_tokens"][0]["value"]
    assert len(exported.observed["hicache_request_tokens"]) == observations == steps


def test_an_exported_observation_falls_into_its_own_bucket(exported: Exported) -> None:
    registry = Registry(rank="0")
    exporter = RayExporter(registry, period=60.0)
    boundaries = METRICS["hicache_request_tokens"].boundaries
    values = [0.0, 1.0, 5.0, 16.0, 17.0, 262144.0, 262145.0, 1e9]
    for value in values:
        registry.child("hicache_request_tokens", "l1").observe(value)
        exporter.export()
    exporter.close()
    told = exported.observed["hicache_request_tokens"]
    assert [bisect_left(boundaries, value) for value in told] == [bisect_left(boundaries, value) for value in values]
    assert not set(told) & set(boundaries)


@pytest.mark.ray
def test_ray_exports_the_same_numbers_at_its_own_endpoint() -> None:
    pytest.importorskip("prometheus_client", reason="Ray's metrics agent needs pip install 'ray[default]'")
    import ray

    with service("metrics") as running:
        group = running.group("a", engine=ENGINE)
        for prompt in prompts(6):
            serve(group, prompt)
        settle(group)
        node = ray.nodes()[0]
        if node["MetricsExportPort"] <= 0:
            pytest.skip("this Ray has no metrics agent: it needs pip install 'ray[default]'")
        text = scraped(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics")
        own = exposition(group.metrics())
        for name in ("hicache_requests_total", "hicache_pool_pages", "hicache_transfer_bytes_total"):
            assert f"# TYPE ray_{name}" in text and f"# TYPE {name}" in own


EXPECTED = (
    r'^ray_hicache_requests_total{[^}]*group="a"[^}]*rank="0"[^}]*service="metrics"[^}]*} 6',
    r'^ray_hicache_prompt_tokens_total{[^}]*source="computed"[^}]*} 144',
    r'^ray_hicache_pool_pages{[^}]*rank="1"[^}]*state="in_tree"[^}]*tier="l2"[^}]*} 36',
    r'^ray_hicache_transfer_bytes_total{[^}]*path="l1_to_l2"[^}]*rank="1"[^}]*} [1-9]',
    r"^ray_hicache_step_seconds_bucket{",
    r'^ray_hicache_storage_actor_pages{[^}]*state="stored"[^}]*} [1-9]',
)


def scraped(url: str) -> str:
    """The text at Ray's endpoint, once everything expected is in it; Ray reports about every 10 s."""
    deadline = time.monotonic() + 60
    missing: list[str] = []
    while time.monotonic() < deadline:
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        missing = [pattern for pattern in EXPECTED if not re.search(pattern, text, re.MULTILINE)]
        if not missing:
            return text
    raise AssertionError(f"the endpoint never showed {missing}")
