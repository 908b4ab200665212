"""`hicache-ray chaos`: a service of its own serves verified requests while a plan breaks its parts."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from hicache_ray.commands.failures import BadInput, RunFailed, bad_input, in_one_line, start_failures
from hicache_ray.commands.parameters import (
    CACHE_OPTIONS,
    COUNT,
    PROCESSES,
    Number,
    OutputPath,
    Whole,
    command_option,
    type_of,
    write_json,
)
from hicache_ray.faults.kinds import KINDS
from hicache_ray.faults.plan import FaultPlan, FaultPlanError

if TYPE_CHECKING:
    from hicache_ray.faults.report import ChaosReport

RANDOM = "random"
EXPECTED_DEATHS = "^A worker died or was killed"
"""What Ray prints on standard output, where a report may go, each time that one of our kills has succeeded."""
KINDS_HELP = f"Kinds of drawn faults with weights, as kill=3,slow=1. Known: {', '.join(KINDS)}."


@click.command("chaos")
@click.option("--plan", "plan_name", default=RANDOM, show_default=True, help="A plan's file, or random: drawn.")
@click.option("--minutes", type=Number(), default=1.0, help="How long things break.")
@click.option("--seed", type=Whole(0), default=0, help="Of the workload and of a drawn plan.")
@click.option("--period", type=Number(0.1), default=5.0, help="Seconds between two drawn faults.")
@click.option("--kinds", default="kill", show_default=True, help=KINDS_HELP)
@command_option(CACHE_OPTIONS["tp_size"], type=PROCESSES, default=2)
@click.option("--instances", type=PROCESSES, default=1, help="Groups that share L3.")
@command_option(CACHE_OPTIONS["storage_actors"], type=PROCESSES, default=2)
@command_option(CACHE_OPTIONS["storage_replicas"], type=PROCESSES, default=1)
@command_option(CACHE_OPTIONS["attention"], type=type_of(CACHE_OPTIONS["attention"]), default="mha")
@click.option("--concurrency", type=COUNT, default=4, help="Most requests of an instance in flight.")
@click.option("--heal-limit", type=Number(1), default=15.0, help="Seconds a heal may take.")
@click.option("--json", "json_path", type=OutputPath(), help="Write the report there (- is stdout).")
@click.option("--write-plan", "plan_path", type=OutputPath(), help="Write the plan there, to run it again.")
def chaos_command(
    plan_name: str,
    json_path: Path | None,
    plan_path: Path | None,
    kinds: str,
    tp_size: int,
    storage_replicas: int,
    **options: Any,
) -> int:
    """Break a running service, and check that it holds what it promises.

    A chat is served whose every cached page is verified, while ranks, storage actors and the supervisor are killed
    (or what else the plan says). At the end every slot has to have one owner, replicas have to be equal, every request
    has to have ended, every heal in time, and the service has to serve.

    Exit code 1 when anything was wrong, with the seed and the plan that repeat it; 2 for bad input.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", EXPECTED_DEATHS)
    from hicache_ray.faults.chaos import ChaosSettings

    console, out = Console(stderr=True), Console(stderr=str(json_path) == "-")
    with bad_input():
        settings = ChaosSettings(tp=tp_size, replicas=storage_replicas, kinds=parse_kinds(kinds), **options)
        plan = None if plan_name == RANDOM else FaultPlan.load(plan_name)
    report = _run(settings, plan, console)
    out.print(timeline(report))
    for line in figures(report):
        out.print(line, highlight=False)
    write_json(json_path, report.as_dict())
    if plan_path is not None:
        with bad_input():
            plan_path.write_text(report.plan.to_yaml())
    if report.wrongs:
        again = f"\nThe same again: the same options with --seed {settings.seed} and this plan in a file:\n"
        click.echo(f"{again}\n{report.plan.to_yaml()}", err=str(json_path) == "-")
        raise RunFailed("; ".join(report.wrongs))
    return 0


def parse_kinds(text: str) -> dict[str, float]:
    """Weights by kind from "kill=3,slow"; ValueError for an unknown kind or a bad weight."""
    weights: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, weight = part.partition("=")
        if name not in KINDS:
            raise ValueError(f"--kinds has {name!r}; known are {', '.join(KINDS)}")
        try:
            weights[name] = float(weight or 1)
        except ValueError:
            raise ValueError(f"--kinds has {part!r}: {weight!r} is no number") from None
    if not all(map(math.isfinite, weights.values())):
        raise ValueError(f"--kinds is {text!r}: give finite numbers as weights")
    if not weights or min(weights.values()) < 0 or not any(weights.values()):
        raise ValueError(f"--kinds is {text!r}: give at least one kind with a weight above 0")
    return weights


def timeline(report: ChaosReport) -> Table:
    """Each fault, when it was noticed, when healed."""
    table = Table(title="Faults", title_justify="left")
    for heading in ("at", "fault", "point", "noticed after", "healed after"):
        table.add_column(heading, justify="left" if heading in ("fault", "point") else "right")
    for row in report.as_dict()["timeline"]:
        table.add_row(
            _seconds(row["at"]),
            f"{row['kind']} {row['who']}",
            row["point"] or "from outside",
            _seconds(row["noticed_after"]),
            _seconds(row["healed_after"]) if row["healed_after"] is not None else "never",
        )
    return table


def figures(report: ChaosReport) -> list[str]:
    """The run in sentences."""
    found = report.as_dict()
    failed = ", ".join(f"{count} {name}" for name, count in found["requests_failed"].items()) or "none"
    return [
        f"{found['faults']} faults in {found['seconds']:g} s; healed after {found['heal_s']['p50']:.1f} s (median), "
        f"{found['heal_s']['max']:.1f} s at most.",
        f"Requests: {found['requests_ok']} served, {found['requests_again']} sent a second time, failed: {failed}; "
        f"{found['requests_ok_at_the_end']} more served after the last fault.",
        f"{found['pages_verified']} cached pages compared with what they must hold, {found['wrong_pages']} wrong; "
        f"{found['leaked_slots']} slots leaked, {found['hung_steps']} of {found['steps']} steps hung, "
        f"{found['unnoticed_divergences']} divergences went unnoticed.",
    ]


def _run(settings: Any, plan: FaultPlan | None, console: Console) -> ChaosReport:
    from hicache_ray.faults.chaos import run_chaos
    from hicache_ray.rank.group import GroupError

    try:
        with start_failures():
            return run_chaos(settings, plan, progress=lambda text: console.print(text, highlight=False))
    except (FaultPlanError, ValueError) as error:
        raise BadInput(str(error)) from error
    except GroupError as error:
        raise RunFailed(in_one_line(error)) from error


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
