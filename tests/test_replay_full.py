"""A real trace through all tiers, every cached page compared in every layer: groups in this process, no Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_ray.replay.driver import DriveSettings
from hicache_ray.replay.report import ReplayReport
from hicache_ray.replay.requests import Workload
from hicache_ray.replay.run import local_groups, replay_workload
from hicache_ray.replay.settings import ReplaySettings, replay_config
from hicache_ray.replay.traces import load_workload
from hicache_ray.storage.memory import BACKEND

SMALL = {"layers": 2, "heads": 2, "head_dim": 4, "prefetch_policy": "wait_complete"}


def run(workload: Workload, **options: object) -> ReplayReport:
    """Replays on in-process groups; `options` are those of ReplaySettings."""
    settings = ReplaySettings.of(**{**SMALL, **options})
    config = replay_config(settings, workload, storage_backend=BACKEND)
    with local_groups(config, settings) as groups:
        return replay_workload(
            workload, groups, DriveSettings(config.page_size), mode="local", described=settings.described(config)
        )


def check(report: ReplayReport, workload: Workload, ranks: int) -> None:
    """No wrong page, no lost page, and numbers that fit each other."""
    counts = report.counts
    assert report.faults == ()
    assert counts.requests == workload.total
    assert counts.tokens == counts.tokens_l1 + counts.tokens_l2 + counts.tokens_l3 + counts.tokens_computed
    assert counts.tokens == sum(len(request.prompt) for request in workload)
    assert report.pages_verified == ranks * counts.hit_blocks
    assert (report.digest_checks > 0) == (ranks > 1)
    for ledger in report.ledger.values():
        assert ledger["in_flight"] == 0
        assert ledger["free"] + ledger["in_tree"] == ledger["total"]


@pytest.fixture(scope="module")
def scaled(shared: Path) -> Workload:
    """The first 200 requests of the conversation trace, each 512-token block as 32 tokens."""
    return load_workload(str(shared / "traces" / "conversation_trace.jsonl.gz"), limit=200, block_tokens=32)


CELLS = [
    ("mha", "layer_first", "direct"),
    ("mha", "page_first", "kernel"),
    ("mha", "page_first_direct", "direct"),
    ("mha", "page_head", "kernel"),
    ("mla", "layer_first", "direct"),
    ("mla", "page_first", "kernel"),
    ("mla", "page_first_direct", "direct"),
]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("attention", "layout", "io_backend"), CELLS)
def test_a_real_trace_moves_through_all_tiers(
    scaled: Workload, attention: str, layout: str, io_backend: str, tp: int
) -> None:
    report = run(
        scaled,
        tp=tp,
        attention=attention,
        layout=layout,
        io_backend=io_backend,
        l1_tokens=8192,
        l2_tokens=110_000,
    )
    check(report, scaled, tp)
    assert report.counts.tokens_l1 > 0 and report.counts.tokens_l2 > 0 and report.counts.tokens_l3 > 0
    assert min(report.bytes.values()) > 0


def test_the_first_200_requests_of_the_real_trace_at_full_length(shared: Path) -> None:
    workload = load_workload(str(shared / "traces" / "conversation_trace.jsonl.gz"), limit=200)
    assert sum(len(request.prompt) for request in workload) == 2_782_179
    report = run(workload, page_size=64, l1_tokens=131_072, l2_tokens=1_700_000)
    check(report, workload, 1)
    assert report.counts.tokens_l1 > 0 and report.counts.tokens_l2 > 0 and report.counts.tokens_l3 > 0


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
def test_write_policies_and_page_sizes(page_size: int, write_policy: str) -> None:
    workload = load_workload("chat:sessions=8,turns=4,system=128,turn=40,answer=20,tenants=2")
    report = run(workload, page_size=page_size, write_policy=write_policy, l1_tokens=1024, l2_tokens=2048)
    check(report, workload, 1)


@pytest.mark.parametrize("policy", ["best_effort", "timeout"])
def test_prefetch_policies_lose_nothing(policy: str) -> None:
    workload = load_workload("chat:sessions=8,turns=4,system=128,turn=40,answer=20")
    report = run(workload, prefetch_policy=policy, l1_tokens=1024, l2_tokens=2048, instances=2, tp=2)
    check(report, workload, 2)


def test_the_second_instance_finds_in_l3_what_the_first_computed() -> None:
    workload = load_workload("chat:sessions=6,turns=5,system=256,turn=64,answer=32")
    report = run(workload, instances=2, l1_tokens=16_384, l2_tokens=32_768)
    check(report, workload, 1)
    assert report.counts.tokens_l3 > 0
    without = run(workload, instances=2, l1_tokens=16_384, l2_tokens=32_768, l3_bytes=0)
    check(without, workload, 1)
    assert without.counts.tokens_l3 == 0
    assert without.counts.tokens_computed > report.counts.tokens_computed


def test_an_l3_smaller_than_the_workload_stays_right(scaled: Workload) -> None:
    report = run(scaled, l1_tokens=8192, l2_tokens=16_384, l3_bytes=1 << 20)
    check(report, scaled, 1)
