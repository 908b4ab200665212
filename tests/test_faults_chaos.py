"""hicache-ray chaos: what it measures, what it says, and that a service holds while its parts are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from hicache_ray.commands.chaos import chaos_command, figures, parse_kinds, timeline
from hicache_ray.faults.chaos import ChaosSettings, run_chaos
from hicache_ray.faults.client import Outcomes, endless_chat
from hicache_ray.faults.injector import Firing
from hicache_ray.faults.plan import FaultPlan, Identity
from hicache_ray.faults.report import Audit, ChaosReport, percentile
from hicache_ray.faults.watch import ChaosWatch, FaultRecord
from hicache_ray.replay.chat import ChatSpec
from hicache_ray.replay.driver import RequestSource
from tests.cluster import shared_cluster
from tests.conftest import REPOSITORY

RANK = Identity("rank", 1, "instance-0")
HEALED = FaultRecord(0, "kill", RANK, "", 105.0, 7, noticed=105.5, healed=108.0)


def report(**changes: object) -> ChaosReport:
    values: dict[str, object] = {
        "plan": FaultPlan.random([RANK], 10, seed=4),
        "records": [HEALED],
        "outcomes": [Outcomes(served=5, again=2, steps=9, verified=40)],
        "audit": Audit(served=3),
        "began": 100.0,
        "seconds": 10.0,
        "heal_limit": 15.0,
    }
    return ChaosReport(**{**values, **changes})  # type: ignore[arg-type]


def test_a_run_that_held_is_right_and_says_so() -> None:
    found = report().as_dict()
    assert found["ok"] and not found["wrong"] and found["seed"] == 4
    assert found["heal_s"] == {"max": 3.0, "p50": 3.0} and found["notice_s"]["max"] == 0.5
    assert found["faults"] == 1 and found["requests_ok"] == 5 and found["pages_verified"] == 40
    assert FaultPlan.parse(found["plan"]) == report().plan
    assert "healed after 3.0 s (median), 3.0 s at most" in figures(report())[0]
    assert timeline(report()).row_count == 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"outcomes": [Outcomes(wrong=2)]}, "2 pages with wrong bytes"),
        ({"outcomes": [Outcomes(hung=1)]}, "1 steps hung"),
        ({"outcomes": [Outcomes(unnamed=Counter({"KeyError: x": 3}))]}, "3 x an error without a name of ours: KeyErr"),
        ({"audit": Audit(leaked=4)}, "4 slots leaked"),
        ({"audit": Audit(divergences=1)}, "1 groups have ranks with different trees"),
        ({"audit": Audit(faults=("storage actor x is away",))}, "storage actor x is away"),
        ({"unended": 2}, "2 requests neither were served nor failed"),
        ({"heal_limit": 2.0}, "1 heals took more than 2 s, the longest 3.0 s"),
        (
            {"records": [FaultRecord(0, "kill", RANK, "", 105.0, 7)]},
            "kill of rank 1 of instance-0 at 5.0 s was never healed",
        ),
    ],
)
def test_each_thing_that_is_wrong_is_said(changes: dict[str, object], text: str) -> None:
    found = report(**changes).as_dict()
    assert not found["ok"] and any(text in sentence for sentence in found["wrong"]), found["wrong"]


def test_requests_that_failed_by_a_name_of_ours_are_counted_and_no_fault() -> None:
    found = report(
        outcomes=[Outcomes(served=1, failed=Counter(GroupRestarted=2)), Outcomes(failed=Counter(GroupError=1))]
    )
    assert found.as_dict()["requests_failed"] == {"GroupRestarted": 2, "GroupError": 1} and not found.wrongs


def test_percentiles() -> None:
    assert percentile([], 0.5) == 0.0 and percentile([3.0, 1.0, 2.0], 0.5) == 2.0 and percentile([1.0, 9.0], 1.0) == 9.0


def test_a_fault_that_is_heard_of_after_its_group_was_found_broken_was_noticed_then() -> None:
    watch = ChaosWatch()
    before = time.time()
    watch.noticed("instance-0")
    watch.happened(Firing(0, str(RANK), "kill", "rank.reduce", before, 7))
    watch.happened(Firing(1, str(RANK), "kill", "rank.reduce", time.time() + 1.0, 7))
    watch.happened(Firing(2, "rank 1 of instance-1", "kill", "rank.reduce", before, 7))
    noticed = [record.noticed for record in watch.records]
    assert noticed[0] is not None and noticed[0] >= before and noticed[1:] == [None, None]


def test_a_source_gives_a_turn_only_after_the_answer_it_builds_on() -> None:
    source, given = RequestSource(endless_chat(ChatSpec(sessions=3, turns=3), 1)), {}
    open_requests: list[str] = []
    while len(given) < 20:
        request = source.take()
        if request is None:
            source.end(open_requests.pop(0))
            continue
        assert request.after is None or given[request.after] == "ended"
        given[request.rid] = "open"
        open_requests.append(request.rid)
        if len(open_requests) > 2:
            given[open_requests[0]] = "ended"
            source.end(open_requests.pop(0))


def test_a_source_is_shared_by_threads() -> None:
    source, taken = RequestSource(endless_chat(ChatSpec(sessions=50, turns=1), 2)), []

    def take() -> None:
        for _ in range(100):
            request = source.take()
            assert request is not None
            taken.append(request.rid)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(taken)) == 400


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--kinds", "explode"], "--kinds has 'explode'; known are kill"),
        (["--kinds", "kill=x"], "'x' is no number"),
        (["--kinds", "kill=0"], "at least one kind"),
        (["--plan", "nowhere.yaml"], "nowhere.yaml"),
        (["--json", "/proc/nowhere/x"], "there is no folder"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(chaos_command, arguments)
    assert result.exit_code == 2 and text in result.output


def test_kinds() -> None:
    assert parse_kinds("kill=3, slow") == {"kill": 3.0, "slow": 1.0}


@pytest.mark.ray
def test_a_service_holds_what_it_promises_while_its_parts_are_killed() -> None:
    """One of each in a few seconds; `make chaos` goes on for minutes. How long heals take is not judged here."""
    plan = FaultPlan.parse(
        {
            "faults": [
                {"kind": "kill", "who": "rank 1", "time": 2},
                {"kind": "kill", "who": "storage 0", "time": 4},
                {"kind": "kill", "who": "supervisor", "time": 6},
                {"kind": "hang", "who": "storage 1", "time": 8, "seconds": 1},
                {"kind": "corrupt", "who": "storage *", "times": 0, "probability": 0.1},
            ]
        }
    )
    settings = ChaosSettings(minutes=0.2, seed=7, heal_limit=120.0)
    with shared_cluster():
        found = run_chaos(settings, plan)
    assert found.wrongs == [], found.wrongs
    document = found.as_dict()
    assert {(row["kind"], row["who"].split()[0]) for row in document["timeline"]} >= {
        ("kill", "rank"),
        ("kill", "storage"),
        ("kill", "supervisor"),
        ("hang", "storage"),
    }
    assert document["requests_ok"] > 0 and document["requests_ok_at_the_end"] > 0 and document["pages_verified"] > 0


@pytest.mark.chaos
@pytest.mark.ray
@pytest.mark.parametrize("attention", ["mha", "mla"])
def test_the_command_for_minutes(tmp_path: Path, attention: str) -> None:
    """As a user runs it, with everything that can be drawn; a second run of the plan it wrote is the same plan."""
    kinds = "kill=4,hang,slow,drop,corrupt,short_read,stale_exists,partition,alloc_fail,oom"
    arguments = ["chaos", "--minutes", "2", "--seed", "11", "--heal-limit", "120", "--kinds", kinds]
    arguments += ["--attention", attention, "--instances", "2", "--storage-actors", "2", "--replicas", "2"]
    paths = {name: tmp_path / name for name in ("report.json", "plan.yaml")}
    done = subprocess.run(
        [sys.executable, "-c", "from hicache_ray.cli import main; main()", *arguments]
        + ["--json", str(paths["report.json"]), "--write-plan", str(paths["plan.yaml"])],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(paths["report.json"].read_text())
    assert document["ok"] and document["faults"] > 10
    assert FaultPlan.load(paths["plan.yaml"]) == FaultPlan.parse(document["plan"])
