"""Replays on a real Ray cluster: the trace through all tiers, a rank that dies on the way, nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_ray.actors.group import TPGroup
from hicache_ray.replay.driver import DriveSettings
from hicache_ray.replay.report import ReplayReport
from hicache_ray.replay.requests import Workload
from hicache_ray.replay.run import ray_groups, replay_workload
from hicache_ray.replay.settings import ReplaySettings, replay_config
from hicache_ray.replay.traces import load_workload
from tests.cluster import shared_cluster
from tests.conftest import REPOSITORY
from tests.storage_ray import arena_files

pytestmark = [pytest.mark.ray]

SMALL = {"layers": 2, "heads": 2, "head_dim": 4, "prefetch_policy": "wait_complete", "l3_bytes": 64 << 20}
CHAT = "chat:sessions=12,turns=4,system=64,turn=32,answer=32"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with shared_cluster():
        yield


def run(workload: Workload, kill_at: int | None = None, **options: object) -> ReplayReport:
    """Replays on rank actors; the last rank of the first instance is killed once `kill_at` requests are done."""
    settings = ReplaySettings.of(**{**SMALL, **options})
    config = replay_config(settings, workload, storage_backend="ray")
    killed: list[int] = []
    with ray_groups(config, settings) as groups:

        def progress(done: int) -> None:
            if kill_at is not None and done >= kill_at and not killed:
                assert isinstance(groups[0], TPGroup)
                killed.append(groups[0].pids[-1])
                os.kill(killed[0], signal.SIGKILL)

        drive = DriveSettings(config.page_size, concurrency=settings.concurrency)
        return replay_workload(workload, groups, drive, mode="ray", described={}, progress=progress)


@pytest.mark.parametrize(("attention", "layout", "tp"), [("mha", "layer_first", 2), ("mla", "page_first", 1)])
def test_a_real_trace_moves_through_all_tiers(
    cluster: None, shared: Path, attention: str, layout: str, tp: int
) -> None:
    workload = load_workload(str(shared / "traces" / "conversation_trace.jsonl.gz"), limit=200, block_tokens=32)
    report = run(workload, attention=attention, layout=layout, tp=tp, l1_tokens=8192, l2_tokens=110_000)
    assert report.faults == ()
    assert report.counts.requests == 200
    assert report.pages_verified == tp * report.counts.hit_blocks
    assert min(report.counts.tokens_l1, report.counts.tokens_l2, report.counts.tokens_l3) > 0
    assert set(report.step_us) == {"total", "message", "reduction", "work", "engine"}
    assert (report.digest_checks > 0) == (tp > 1)


def test_the_second_instance_finds_in_l3_what_the_first_computed(cluster: None) -> None:
    report = run(load_workload(CHAT), instances=2, tp=2, storage_actors=2, l1_tokens=4096, concurrency=1)
    assert report.faults == ()
    assert report.counts.tokens_l3 > 0
    assert report.pages_verified == 2 * report.counts.hit_blocks


def test_a_rank_that_dies_on_the_way_costs_no_request_and_no_page(cluster: None) -> None:
    workload = load_workload(CHAT)
    report = run(workload, kill_at=20, tp=2, l1_tokens=1024, concurrency=2)
    assert report.faults == ()
    assert report.restarts >= 1
    assert report.counts.requests >= workload.total


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose name is short enough for the sockets of a Ray session."""
    folder = Path(tempfile.mkdtemp(prefix="hicache-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_nothing_behind(short_folder: Path, number: int, code: int) -> None:
    environment = {**os.environ, "RAY_TMPDIR": str(short_folder)}
    environment.pop("RAY_ADDRESS", None)
    script = (
        "import sys, hicache_ray.replay.driver as driver\n"
        "from hicache_ray import cli\n"
        "step = driver.Driver.advance\n"
        "def advance(self, *given):\n"
        "    print('running', self.group.name, *self.group.pids, flush=True)\n"
        "    return step(self, *given)\n"
        "driver.Driver.advance = advance\n"
        "sys.argv = ['hicache-ray', 'replay', 'chat:sessions=500', '--tp', '2', '--layers', '1']\n"
        "cli.main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    deadline = threading.Timer(240, process.kill)
    deadline.start()
    assert process.stdout is not None
    word, name, *pids = process.stdout.readline().split()
    assert word == "running"
    service = name.partition(":")[0]
    assert arena_files(service)
    # A terminal's Ctrl-C reaches the whole process group; who terminates a run ends its process.
    end = os.killpg if number == signal.SIGINT else os.kill
    for _ in range(2):  # an impatient user
        end(process.pid, number)
    _, errors = process.communicate()
    deadline.cancel()
    assert process.returncode == code
    assert "Traceback" not in errors
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not arena_files(service)


def test_the_first_program_of_the_readme_runs_and_prints_what_it_says(short_folder: Path) -> None:
    program = (REPOSITORY / "examples" / "first_program.py").read_text()
    readme = (REPOSITORY / "README.md").read_text()
    code = [line for line in program.split('"""')[2].splitlines() if line]
    assert len(code) == 15
    assert [line for line in readme.split("```python\n")[1].split("```")[0].splitlines() if line] == code
    environment = {**os.environ, "RAY_TMPDIR": str(short_folder)}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout in readme
