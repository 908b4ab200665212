"""Reports: the stable names of the JSON, the tables, the sentences; sweeps and their plots."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from hicache_ray.replay.report import (
    ReplayReport,
    StepTimes,
    TokenCounts,
    add_up,
    report_tables,
    size,
    sweep_table,
    tier_sentences,
)
from hicache_ray.replay.settings import ReplaySettings
from hicache_ray.replay.sweep import PlotError, SweepError, check_plot, combinations, parse_sweeps, plot_sweep
from tests.conftest import REPOSITORY

NAMES = {
    *("requests", "blocks", "hit_blocks", "block_hit_rate", "tokens", "token_hit_rate", "tokens_l1", "tokens_l2"),
    *("tokens_l3", "tokens_computed", "pages_verified", "pages_mismatched", "bytes", "step_us", "ledger"),
    *("digest_checks", "evictions"),
}
"""Names that users of the JSON rely on."""

REPORT = ReplayReport(
    workload="traces/small.jsonl",
    mode="ray",
    settings={},
    counts=TokenCounts(10, 100, 40, 1600, 320, 160, 160, 960),
    seconds=1.5,
    pages_verified=80,
    bytes={"l1_to_l2": 3 << 20, "l2_to_l1": 1000, "l2_to_l3": 0, "l3_to_l2": 5},
    step_us={"total": {"p50": 1500.0, "p99": 9000.0}, "work": {"p50": 10.0, "p99": 20.0}},
    ledger={"l1": {"total": 10, "free": 4, "in_tree": 6, "in_flight": 0}},
    digest_checks=55,
    evictions={"l1_evicted": 7, "l2_evicted": 0, "l1_dropped": 1},
)


def test_the_json_has_the_stable_names() -> None:
    document = json.loads(json.dumps(REPORT.as_dict()))
    assert set(document) >= NAMES
    assert (document["block_hit_rate"], document["token_hit_rate"]) == (0.4, 0.4)
    assert set(document["ledger"]["l1"]) == {"total", "free", "in_tree", "in_flight"}


def test_nothing_at_all_has_a_rate_of_zero() -> None:
    empty = replace(REPORT, counts=TokenCounts())
    assert (empty.block_hit_rate, empty.token_hit_rate) == (0, 0)
    assert shown(empty)


def test_faults_are_said() -> None:
    assert REPORT.faults == ()
    faulty = replace(REPORT, pages_mismatched=3, unbalanced=("instance 0: lost (1,)",))
    assert faulty.faults == ("3 cached pages held other bytes than they must", "instance 0: lost (1,)")
    assert "lost (1,)" in shown(faulty)


def shown(report: ReplayReport) -> str:
    console = Console(file=StringIO(), width=120)
    for table in report_tables(report):
        console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_tables_show_what_was_measured() -> None:
    text = shown(REPORT)
    for part in ("small.jsonl: 10 requests in 1.50 s", "320", "20.0 %", "3.0 MiB", "1.50 ms", "9.00 ms", "7 from L1"):
        assert part in text
    assert "wrong: 0" in text and "compared and equal: 55" in text
    assert "reduction" not in text


def test_each_tier_has_its_sentence() -> None:
    first, second, third = tier_sentences(REPORT)
    assert first.startswith("L1") and "320 of 1,600 prompt tokens (20.0 %)" in first
    assert second.startswith("L2") and "160 of 1,600" in second
    assert third.startswith("L3") and "1000 B" in third


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5120.0 GiB")])
def test_sizes_have_their_unit(count: int, text: str) -> None:
    assert size(count) == text


def test_percentiles_are_those_of_all_steps() -> None:
    times = StepTimes()
    for value in range(101):
        times.add({"work": float(value), "unknown": 1.0})
    assert times.percentiles() == {"work": {"p50": 50.0, "p99": 99.0}}
    assert add_up([{"a": 1}, {"a": 2, "b": 3}]) == {"a": 3, "b": 3}


def test_a_sweep_is_every_combination() -> None:
    sweeps = parse_sweeps(["policy=lru, lfu", "l1-tokens=10,20"])
    assert sweeps == {"policy": ["lru", "lfu"], "l1_tokens": [10, 20]}
    runs = list(combinations(ReplaySettings(seed=7), sweeps))
    assert [tuple(values.values()) for values, _ in runs] == [("lru", 10), ("lru", 20), ("lfu", 10), ("lfu", 20)]
    assert [(s.options["radix_eviction_policy"], s.options["l1_tokens"], s.seed) for _, s in runs][2] == ("lfu", 10, 7)
    assert [values for values, _ in combinations(ReplaySettings(), {})] == [{}]


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["speed=1"], "'speed' is none of attention, concurrency"),
        (["policy"], "give the values as policy=VALUE,VALUE"),
        (["policy="], "give the values as policy=VALUE,VALUE"),
        (["l1-tokens=many"], "l1_tokens is 'many'; give a whole number"),
        (["l1-tokens=0"], "l1_tokens is 0; it must be at least 1"),
        (["policy=lru", "policy=lfu"], "policy is swept twice"),
        (["others=1"], "'others' is none of"),
    ],
)
def test_a_bad_sweep_is_named(texts: list[str], reason: str) -> None:
    with pytest.raises(SweepError) as caught:
        parse_sweeps(texts)
    assert reason in str(caught.value)


@pytest.mark.parametrize("sweeps", [{"policy": ["lru", "lfu"]}, {"policy": ["lru", "lfu"], "l1_tokens": [10, 20]}])
def test_a_sweep_is_drawn_and_tabled(tmp_path: Path, sweeps: dict[str, list[int | str]]) -> None:
    pytest.importorskip("matplotlib")
    runs = [(values, REPORT) for values, _ in combinations(ReplaySettings(), sweeps)]
    path = tmp_path / "sweep.png"
    check_plot(path)
    plot_sweep(path, runs, "small")
    assert path.read_bytes().startswith(b"\x89PNG")
    console = Console(file=StringIO(), width=120)
    console.print(sweep_table(list(sweeps), runs))
    assert console.file.getvalue().count("0.4000") == 2 * len(runs)  # type: ignore[attr-defined]


def test_a_plot_needs_a_known_kind_of_file() -> None:
    with pytest.raises(PlotError, match=r"must end in .png, .svg, .pdf"):
        check_plot(Path("sweep.txt"))


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PlotError, match=r"pip install 'hicache-ray\[plots\]'"):
        check_plot(Path("sweep.png"))


def test_every_name_of_the_json_is_documented() -> None:
    text = (REPOSITORY / "docs" / "replay.md").read_text()
    assert [name for name in REPORT.as_dict() if f"`{name}`" not in text] == []
