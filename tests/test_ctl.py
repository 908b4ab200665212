"""`hicache-ray ctl` on a running service, several drivers on one group, and the audit, on one Ray cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from hicache_ray.actors.directory import group_name
from hicache_ray.actors.errors import StepCollision
from hicache_ray.actors.group import TPGroup
from hicache_ray.cli import run
from hicache_ray.rank.control import ControlRefused
from hicache_ray.rank.group import GroupError
from hicache_ray.rank.step import NEXT_STEP, Admit, StepRequest
from hicache_ray.replay.driver import ENGINE, settle
from hicache_ray.service import Service
from hicache_ray.testing.serving import wait_for
from tests.ray_service import prompts, serve, serve_until_restarted, service

pytestmark = pytest.mark.ray

Ctl = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def running() -> Iterator[Service]:
    with service() as started:
        yield started


@pytest.fixture(scope="module")
def group(running: Service) -> TPGroup:
    return running.group("a", engine=ENGINE)


@pytest.fixture
def ctl(capsys: pytest.CaptureFixture[str], group: TPGroup) -> Ctl:
    """Runs `hicache-ray ctl` in this process: exit code, standard output, standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run(["ctl", "--name", "test", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def second_driver(running: Service) -> TPGroup:
    """The group as another driver has it."""
    return TPGroup.connect(group_name(running.name, "a"), running.config.tp_size, running.options)


def positions(group: TPGroup) -> set[int]:
    """The next step of each rank."""
    return {row["next_step"] for row in group.status()}


def test_steps_of_two_drivers_that_meet_are_applied_nowhere_and_may_be_sent_again(group: TPGroup) -> None:
    before = positions(group)
    mine = StepRequest(group.generation, NEXT_STEP, admits=(Admit("mine", b"\0" * 16),)).encode()
    other = StepRequest(group.generation, NEXT_STEP).encode()
    first, second = group.actors
    crossed = [first.step.remote(mine, 1), second.step.remote(other, 2)]
    crossed += [first.step.remote(other, 2), second.step.remote(mine, 1)]
    for reference in crossed:
        with pytest.raises(StepCollision, match="drivers 1 and 2 met"):
            ray.get(reference)
    assert positions(group) == before and len(before) == 1
    assert all(row["requests"]["waiting"] == 0 for row in group.status())
    ray.get([first.step.remote(mine, 1), second.step.remote(mine, 1)])
    group.step(aborts=["mine"])


def test_requests_of_a_driver_that_died_are_named_and_ended(running: Service, group: TPGroup, ctl: Ctl) -> None:
    """It was killed between schedule and finish: its pages of L1 are held until somebody ends its requests."""
    gone = second_driver(running)
    for rid in ("gone-0", "gone-1"):
        gone.step(admits=[Admit(rid, np.arange(16, dtype="<u4").tobytes())])
        wait_for(lambda rid=rid: gone.step(polls=[rid]).polled[0].ready, rid)  # type: ignore[misc]
    assert gone.step(schedules=["gone-0"]).scheduled[0].ok
    code, out, _ = ctl("status")
    assert code == 0 and "requests  gone-0, gone-1" in out and "1 running, 1 waiting" in out
    assert ctl("abort")[0] == ctl("abort", "--all", "gone-0")[0] == 2
    assert ctl("abort", "gone-0", "nobody")[1] == "a: aborted (1 requests)\n"
    assert ctl("abort", "--all")[1] == "a: aborted (1 requests)\n"
    settle(group)
    ledgers = [ledger for row in group.status() for ledger in row["pages"].values()]
    assert all(ledger["free"] + ledger["in_tree"] == ledger["total"] for ledger in ledgers)
    assert "requests" not in ctl("status")[1]


def test_a_supervisor_that_hangs_is_said_in_one_sentence(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_ray.actors.supervisor.STATUS_SECONDS", 0.0)
    code, _, err = ctl("heals")
    assert code == 1 and err == "hicache-ray: the supervisor of test gave no answer in 0 s\n"


def test_two_drivers_step_at_once_and_every_step_counts_once(running: Service, group: TPGroup) -> None:
    (before,) = positions(group)
    steps: list[int] = []
    errors: list[BaseException] = []

    def drive(driver: TPGroup) -> None:
        try:
            steps.extend(driver.step().step for _ in range(40))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=drive, args=(driver,)) for driver in (group, second_driver(running))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    assert sorted(steps) == list(range(before, before + 80))


def test_case_61_commands_take_effect_while_another_driver_serves(running: Service, group: TPGroup) -> None:
    """Another process detaches and attaches L3 and changes policies; this one serves right bytes all along."""
    address = ray.get_runtime_context().gcs_address
    stop = threading.Event()
    failed: list[BaseException] = []

    def go_on() -> None:
        try:
            for prompt in prompts(6, seed=1) * 1000:
                if stop.is_set():
                    return
                serve(group, prompt)
        except BaseException as error:
            failed.append(error)

    serving = threading.Thread(target=go_on)
    serving.start()
    commands = (
        ["detach"],
        ["policies", "--prefetch-policy", "timeout"],
        ["attach", "ray", "--prefetch-threshold", "8"],
    )
    try:
        for arguments in commands:
            line = [sys.executable, "-c", "from hicache_ray.cli import main; main()", "ctl", "--address", address]
            done = subprocess.run([*line, "--name", "test", *arguments], capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
    finally:
        stop.set()
        serving.join(60)
    assert not failed
    status = group.status()
    assert all(row["storage"]["backend"] == "ray" and row["storage"]["state"] == "attached" for row in status)
    assert all(row["policies"]["prefetch_policy"] == "timeout" for row in status)
    assert all(row["policies"]["prefetch_threshold"] == 8 for row in status)
    settle(group)
    assert all(row["faults"] == () for row in group.audit())


def test_status_shows_every_rank(ctl: Ctl, group: TPGroup) -> None:
    code, out, _ = ctl("status")
    assert code == 0
    assert (
        "group a: generation 0, 2 ranks" in out and f"pid {group.pids[1]}" in out and "L3        ray, attached" in out
    )
    code, out, _ = ctl("--json", "status", "--group", "a")
    rows = json.loads(out)["groups"]["a"]
    assert code == 0 and [row["rank"] for row in rows] == [0, 1]
    assert rows[0]["pages"]["device"]["total"] == 16 and rows[0]["digest"] == rows[1]["digest"]


def test_policies_are_shown_and_changed(ctl: Ctl) -> None:
    assert ctl("policies", "--write-policy", "write_through_selective", "--prefetch-timeout-base", "0.5")[0] == 0
    code, out, _ = ctl("policies")
    assert code == 0 and "a: write_policy = write_through_selective" in out and "a: prefetch_timeout_base = 0.5" in out
    code, _, err = ctl("policies", "--write-policy", "sometimes")
    assert code == 2 and "write_policy is 'sometimes'; use one of write_through" in err
    assert ctl("policies", "--prefetch-threshold", "many")[0] == 2
    assert ctl("policies", "--write-policy", "write_through")[0] == 0


def test_flush_is_refused_while_a_request_runs_and_works_after_it(ctl: Ctl, group: TPGroup) -> None:
    group.step(admits=[Admit("running", prompts(1)[0].tobytes())])
    group.step(schedules=["running"])
    code, out, err = ctl("flush")
    assert (code, out) == (1, "") and "a: 1 requests are running, 'running' among them" in err
    group.step(aborts=["running"])
    code, out, _ = ctl("flush")
    assert (code, out) == (0, "a: flushed\n")
    assert all(pool["free"] == pool["total"] for row in group.status() for pool in row["pages"].values())


def test_l3_is_cleared_detached_and_attached(ctl: Ctl, group: TPGroup, running: Service, tmp_path: Path) -> None:
    serve(group, prompts(1, seed=21)[0])
    settle(group)
    assert running.storage is not None
    assert sum(stat.pages for stat in running.storage.stats().values() if stat) > 0
    assert ctl("clear-l3")[:2] == (0, "a: L3 cleared\n")
    assert sum(stat.pages for stat in running.storage.stats().values() if stat) == 0
    code, _, err = ctl("attach", "file", "--options", json.dumps({"directory": str(tmp_path)}))
    assert code == 1 and "'ray' is attached: detach it before 'file' is" in err
    assert ctl("detach")[:2] == (0, "a: detached\n")
    assert ctl("detach")[:2] == (0, "a: detached (no storage backend was attached)\n")
    code, _, err = ctl("attach", "file", "--options", "{")
    assert code == 2 and "no JSON" in err
    code, _, err = ctl("attach", "floppy")
    assert code == 1 and "unknown storage backend 'floppy'" in err
    assert ctl("attach", "file", "--options", json.dumps({"directory": str(tmp_path)}))[:2] == (0, "a: uses file\n")
    serve(group, prompts(1, seed=22)[0])
    settle(group)
    assert list(tmp_path.rglob("*.page"))
    assert ctl("detach")[0] == 0 and ctl("attach", "ray")[0] == 0


def test_an_attach_that_one_rank_can_not_do_is_undone_on_all(group: TPGroup) -> None:
    group.detach()
    options = {"backend_name": "x", "module_path": "tests.test_runtime_control", "class_name": "OneRankFails"}
    with pytest.raises(ControlRefused, match="no route to the store"):
        group.attach("dynamic", options)
    assert {row["storage"]["state"] for row in group.status()} == {"detached"}
    group.attach("ray")


def test_the_audit_counts_everything_and_says_what_is_wrong(ctl: Ctl, group: TPGroup, running: Service) -> None:
    serve(group, prompts(1, seed=31)[0])
    settle(group)
    code, out, err = ctl("audit", "--read-pages")
    assert code == 0, err
    for text in ("group a, rank 1:", "L1: 16 pages", "storage actor test.storage-1:", "leased", "everything adds up"):
        assert text in out
    assert running.storage is not None
    arena = Path(next(info.path for info in running.storage.info().values() if info))
    left = arena.with_name(arena.name.replace("storage-", "storage-ghost"))
    left.touch()
    try:
        code, out, err = ctl("audit")
    finally:
        left.unlink()
    assert code == 1 and f"no storage actor has the arena {left}" in err and "everything adds up" not in out
    code, out, _ = ctl("--json", "audit")
    found = json.loads(out)
    assert code == 0 and found["faults"] == [] and len(found["groups"]["a"]) == 2 and len(found["storage"]) == 2


def test_metrics_are_printed_for_every_rank(ctl: Ctl, group: TPGroup) -> None:
    code, out, _ = ctl("metrics")
    assert code == 0 and out.count("# TYPE hicache_steps_total counter") == 1
    families = {family.name: family.samples for family in text_string_to_metric_families(out)}
    steps = {tuple(sorted(sample.labels.items())): sample.value for sample in families["hicache_steps"]}
    for rank in ("0", "1"):
        assert steps[("group", "a"), ("rank", rank), ("service", "test")] > 0
    labels = [sample.labels for sample in families["hicache_prompt_tokens"]]
    assert {"service": "test", "group": "a", "rank": "0", "source": "computed"} in labels
    code, out, _ = ctl("--json", "metrics")
    assert code == 0 and len(json.loads(out)["a"]) == 2


def test_what_is_not_there_is_bad_input(ctl: Ctl, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = ctl("status", "--group", "nobody")
    assert code == 2 and "service test has no group 'nobody'; it has a" in err
    assert run(["ctl", "--name", "nobody", "status"]) == 2
    assert "no service named 'nobody'" in capsys.readouterr().err
    assert run(["ctl", "explode"]) == 2


def test_heals_are_listed(ctl: Ctl, group: TPGroup) -> None:
    """Last but one: the group is another generation afterwards."""
    assert ctl("heals")[1] == "no group was rebuilt\n"
    os.kill(group.pids[1], signal.SIGKILL)
    serve_until_restarted(group, prompts(200, seed=41))
    code, out, _ = ctl("heals", "--group", "a")
    assert code == 0 and "a: generation 1 after" in out and "ranks that came back empty: 1" in out
    code, out, _ = ctl("--json", "heals")
    assert code == 0 and json.loads(out)[0]["generation"] == 1
    assert ctl("status")[1].startswith("group a: generation 1")


def test_a_command_outlives_a_rank_that_dies_meanwhile(ctl: Ctl, group: TPGroup) -> None:
    """Last: what finds the group broken has it rebuilt and goes on."""
    os.kill(group.pids[0], signal.SIGKILL)
    code, out, err = ctl("policies", "--prefetch-policy", "wait_complete")
    assert code == 0, err
    wait_for(lambda: all(row["policies"]["prefetch_policy"] == "wait_complete" for row in group.status()), "the policy")
    with pytest.raises(GroupError):
        group.step()
    group.step()
