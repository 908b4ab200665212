"""`hicache-ray demo`: the whole of it on one machine, in about a minute."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from hicache_ray.commands.failures import RunFailed, bad_input
from hicache_ray.commands.parameters import OutputPath, write_json
from hicache_ray.commands.replay import LOCAL, RAY, checked_config, run_replay
from hicache_ray.replay.report import report_tables, tier_sentences
from hicache_ray.replay.settings import ReplaySettings
from hicache_ray.replay.traces import load_workload

WORKLOAD = "chat:sessions=40,turns=6,system=512,turn=96,answer=96"
DEMO_SETTINGS = ReplaySettings.of(
    tp_size=2,
    page_size=16,
    layers=4,
    heads=4,
    head_dim=32,
    l1_tokens=8192,
    l2_tokens=16384,
    l3_bytes=128 << 20,
    storage_actors=2,
    instances=2,
    concurrency=2,
)

INTRODUCTION = (
    "Two model instances of two tensor-parallel ranks each serve one chat workload: 40 conversations that share a "
    "system prompt and grow by their own answers. Each rank has a small L1 and a larger L2; two storage actors are the "
    "L3 that all share. No model runs: the KV is made up from the tokens, so that every page can be checked when it "
    "comes back."
)


@click.command("demo")
@click.option("--local", is_flag=True, help="All ranks in this process, without Ray.")
@click.option("--json", "json_path", type=OutputPath(), help="Write the report there (- is stdout).")
def demo_command(local: bool, json_path: Path | None) -> int:
    """See it work on this machine: two instances of two ranks, two storage actors, a chat workload.

    Starts Ray if none runs, and stops what it started.
    """
    console, out = Console(stderr=True), Console(stderr=str(json_path) == "-")
    mode = LOCAL if local else RAY
    with bad_input():
        workload = load_workload(WORKLOAD)
    config = checked_config(workload, DEMO_SETTINGS, mode)
    out.print(INTRODUCTION + "\n", highlight=False)
    report = run_replay(workload, DEMO_SETTINGS, config, mode, console)
    for table in report_tables(report):
        out.print(table)
    out.print()
    for sentence in tier_sentences(report):
        out.print(sentence, highlight=False)
    write_json(json_path, report.as_dict())
    if report.faults:
        raise RunFailed("; ".join(report.faults))
    return 0
