"""A replay through every store: the same hits, no page with wrong bytes, also while a store dies and comes back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_ray.config import HiCacheConfig
from hicache_ray.rank.local_group import LocalGroup
from hicache_ray.replay.driver import ENGINE, DriveSettings, Tally, drive, settle
from hicache_ray.replay.requests import Workload
from hicache_ray.replay.settings import ReplaySettings, replay_config
from hicache_ray.replay.traces import load_workload
from hicache_ray.testing.subject import StorageSubject, Unsupported
from tests.mooncake_cluster import MooncakeCluster, unavailable
from tests.mooncake_subject import MooncakeSubject
from tests.test_backend_dynamic import SqliteSubject
from tests.test_backend_file import FileSubject
from tests.test_backend_ray import RaySubject

SETTINGS = DriveSettings(page_size=16)
WORKLOAD = "chat:sessions=6,turns=3,system=64,turn=32,answer=32"


@pytest.fixture(scope="module")
def workload() -> Workload:
    return load_workload(WORKLOAD)


def config_of(workload: Workload, attention: str, backend: str, extra: dict[str, Any], **others: Any) -> HiCacheConfig:
    """tp 2; L1 and L2 hold everything, so that what L3 gives does not hang on the order of transfers."""
    options = {"hicache_storage_backend_extra_config": json.dumps(extra), **others}
    settings = ReplaySettings.of(
        tp=2, attention=attention, l1_tokens=8192, l2_tokens=16384, prefetch_policy="wait_complete", **options
    )
    return replay_config(settings, workload, storage_backend=backend)


def served(group: LocalGroup, workload: Workload, progress: Callable[[int], None] | None = None) -> Tally:
    """All requests through one instance, all its writes ended, its books in balance, no page wrong."""
    measured = drive([group], iter(workload), SETTINGS, progress)
    settle(group)
    group.check_integrity()
    assert measured.wrong == 0
    return measured


def in_new_group(config: HiCacheConfig, workload: Workload, progress: Callable[[int], None] | None = None) -> Tally:
    """All requests through an instance that starts empty."""
    group = LocalGroup.create(config, engine=ENGINE)
    try:
        return served(group, workload, progress)
    finally:
        group.stop()


SUBJECTS: dict[str, StorageSubject] = {
    "file": FileSubject(),
    "mooncake": MooncakeSubject(),
    "dynamic": SqliteSubject(),
    "ray": RaySubject("auto"),
}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.ray if name == "ray" else ()) for name in SUBJECTS]
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StorageSubject]:
    subject = SUBJECTS[request.param]
    try:
        subject.start(tmp_path_factory.mktemp("store"))
    except Unsupported as reason:
        pytest.skip(str(reason))
    yield subject
    subject.stop()


@pytest.mark.parametrize("attention", ["mha", "mla"])
def test_the_second_instance_finds_what_the_first_stored(
    subject: StorageSubject, tmp_path: Path, workload: Workload, attention: str
) -> None:
    """One instance after the other: the first finds in L3 what nobody stored, the second every whole page of every
    prompt; so every store gives the same numbers."""
    subject.empty(tmp_path)
    assert isinstance(subject.backend, str)
    config = config_of(workload, attention, subject.backend, subject.extra(tmp_path))
    one, two = (in_new_group(config, workload) for _ in range(2))
    prompts = [len(request.prompt) for request in workload]
    assert one.counts.tokens == two.counts.tokens == sum(prompts)
    assert one.counts.tokens_l3 == 0
    assert two.counts.tokens_computed == sum(length - (length - 1) // 16 * 16 for length in prompts)
    assert two.counts.tokens_l3 > 0


def test_a_master_killed_in_mid_run_is_misses_then_it_is_used_again(tmp_path: Path, workload: Workload) -> None:
    """Killed after a third of the requests, back after two thirds: all requests are served, and what is stored from
    then on is found."""
    if unavailable():
        pytest.skip(unavailable())
    cluster = MooncakeCluster(tmp_path)
    cluster.start()
    try:
        run_with_outage(cluster, workload)
    finally:
        cluster.stop()


def run_with_outage(cluster: MooncakeCluster, workload: Workload) -> None:
    total = len(list(workload))
    config = config_of(workload, "mha", "mooncake", dict(cluster.options()), storage_timeout=1.0)
    events = [(total // 3, cluster.kill_master), (2 * total // 3, cluster.start_master)]

    def watch(done: int) -> None:
        while events and done >= events[0][0]:
            events.pop(0)[1]()

    assert in_new_group(config, workload, watch).counts.requests == total
    assert not events
    in_new_group(config, workload)
    assert in_new_group(config, workload).counts.tokens_l3 > 0
